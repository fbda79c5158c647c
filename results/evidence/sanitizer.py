"""compute-sanitizer (memcheck, racecheck, initcheck, synccheck) over every seed kernel on ragged shapes.

    python results/evidence/sanitizer.py [--tools memcheck,racecheck]

Run from the root of the checkout on a GPU machine with PYTHONPATH=. Prints one line a tool and kernel, and
writes sanitizer.json and the tools' logs to $OUT or results/. Exit code 0: every tool ran and found nothing
in our kernels; 1: something was found, or a tool could not run.

torch's caching allocator is switched off, so that every tensor is an allocation of its own and a step beyond
it is seen. The driver also compares each result with the CPU: a run that computed nothing would be "clean".
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 240
_FINDING = re.compile(
    r"^=+ (?:Error|Warning|Invalid|Uninitialized|Barrier|Race|Program hit|Misaligned|Host)", re.MULTILINE
)


def run_child() -> None:
    """Launch every case and compare with float64 on the CPU; this is what runs under the sanitizer."""
    import seed_launches

    for case in seed_launches.checked():
        call, exact = case.ready("cuda")
        y = call().cpu().double()
        error = float((y - exact).abs().max() / exact.abs().max())
        # NaN is not below any bound. Coarse: the tests hold the sharp one, this shows that all was computed.
        print(f"case {case.kernel} {'ok' if error < 0.03 else f'WRONG {error:.3g}'} {case.label}", flush=True)


def check(tool: str, folder: Path) -> dict[str, Any]:
    """Run one tool; what it found by kernel, and whether it ran at all."""
    import seed_launches

    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        places = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
        sanitizer = str(places[-1]) if places else None
    if sanitizer is None:
        return {"tool": tool, "ran": False, "problem": "compute-sanitizer was not found", "found": {}}
    log = folder / f"sanitizer_{tool}.log"
    command = [sanitizer, "--tool", tool, "--log-file", str(log), "--print-limit", "200"]
    # Libraries probe the driver with calls that are allowed to fail; those are no findings.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += ["--target-processes", "all", sys.executable, str(HERE), "--child"]
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", CUDA_LAUNCH_BLOCKING="1")
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
            env=environment,
        )
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, output = 124, f"no end within {SECONDS} s"
    except OSError as error:
        code, output = 125, str(error)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", text, re.MULTILINE)
    launched = Counter(re.findall(r"^case (\S+) ok", output, re.MULTILINE))
    wrong = re.findall(r"^case \S+ WRONG.*$", output, re.MULTILINE)
    wanted = Counter(case.kernel for case in seed_launches.checked())
    problem = ""
    if not summary or launched != wanted:
        problem = f"exit code {code}, {sum(launched.values())} of {sum(wanted.values())} cases ran; "
        problem += " | ".join((wrong or output.strip().splitlines())[-4:])
    return {
        "tool": tool,
        "ran": bool(summary) and launched == wanted,
        "problem": problem,
        "summary": summary[-1] if summary else "",
        "seconds": round(time.monotonic() - began, 1),
        "launched": dict(launched),
        "found": by_kernel(text, seed_launches.ENTRIES),
    }


def by_kernel(text: str, entries: tuple[str, ...]) -> dict[str, int]:
    """Findings of a log by our kernel; what names none of them counts as "other".

    A finding is a block of lines "========= …" that begins with an error or hazard and ends at a blank one.
    """
    found: Counter[str] = Counter()
    blocks = re.split(r"^=+\s*$", text, flags=re.MULTILINE)
    for block in blocks:
        if not _FINDING.search(block):
            continue
        named = [entry for entry in entries if re.search(rf"\b{entry}\b", block)]
        found[max(named, key=len, default="other")] += 1
    return dict(found)


def lines(result: dict[str, Any], entries: tuple[str, ...]) -> list[str]:
    """One line a kernel for a tool that ran, one line for one that did not."""
    tool, found = result["tool"], result["found"]
    if not result["ran"]:
        return [f"{tool:<10} DID NOT RUN: {result['problem']}"]
    out = [f"{tool:<10} {entry:<18} {found.get(entry, 0)} findings" for entry in entries]
    if found.get("other"):
        out.append(f"{tool:<10} {'(other kernels)':<18} {found['other']} findings")
    return [*out, f"{tool:<10} {result['summary']}, {result['seconds']} s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tools", default=",".join(TOOLS))
    arguments = parser.parse_args()
    if arguments.child:
        run_child()
        return 0
    import seed_launches
    import torch

    from labkit.atomic import write_json
    from labkit.bench import machine
    from labkit.paths import results_dir

    folder = Path(os.environ.get("OUT") or results_dir())
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for tool in arguments.tools.split(","):
        results.append(check(tool, folder))
        print("\n".join(lines(results[-1], seed_launches.ENTRIES)), flush=True)
    device = machine.device_facts("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"origin": "measured", "device": device, "software": machine.software_facts()}
    write_json(folder / "sanitizer.json", {**facts, "results": results})
    ours = sum(count for result in results for name, count in result["found"].items() if name != "other")
    clean = ours == 0 and all(result["ran"] for result in results)
    print("CLEAN" if clean else "NOT CLEAN")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
