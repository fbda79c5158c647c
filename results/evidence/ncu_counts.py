"""Emulated accesses of every seed kernel against Nsight Compute's counters, launch by launch.

    python results/evidence/ncu_counts.py --emulate FILE     counts of the emulator, no GPU needed
    python results/evidence/ncu_counts.py --emulated FILE    on a GPU machine: counters, and the comparison

Run from the root of the checkout with PYTHONPATH=. Without --emulated the emulator runs on the GPU machine
too. A Markdown table goes to standard output, ncu_counts.json and ncu_counts.md to $OUT or results/. The exit
code is 0 when everything ran, whatever the differences: the emulator counts source-level accesses, and the
compiler may merge some. ncu runs with --clock-control none: nothing of the GPU is changed.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
GLOBAL = "pipe_lsu_mem_global_op"
METRICS = {
    "load requests": f"l1tex__t_requests_{GLOBAL}_ld.sum",
    "load sectors": f"l1tex__t_sectors_{GLOBAL}_ld.sum",
    "store requests": f"l1tex__t_requests_{GLOBAL}_st.sum",
    "store sectors": f"l1tex__t_sectors_{GLOBAL}_st.sum",
    "shared load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared store wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "instructions": "smsp__inst_executed.sum",
}
# cp.async has counters of its own; which of these a chip has is asked, as their names changed over time.
COPY_METRICS = {
    "cp.async requests": (f"l1tex__t_requests_{GLOBAL}_ldgsts.sum",),
    "cp.async sectors": (f"l1tex__t_sectors_{GLOBAL}_ldgsts.sum",),
    "cp.async sectors, L1 passed by": (f"l1tex__t_sectors_{GLOBAL}_ldgsts_cache_bypass.sum",),
    "cp.async shared wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
        "smsp__l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
    ),
    "cp.async instructions": (
        "smsp__inst_executed_op_ldgsts.sum",
        "sm__sass_inst_executed_op_ldgsts_cache_bypass.sum",
    ),
}


# --- the emulator's side --------------------------------------------------------------------------------


def emulate() -> list[dict[str, Any]]:
    """Counts of every launch of every case, all blocks traced."""
    import seed_launches

    from labkit.bench import counts

    found = []
    for case in seed_launches.counted():
        try:
            call, _ = case.ready("cpu")
            with counts.recorded() as launches:
                call()
            traces = [launch.trace(None) for launch in launches]
        except Exception as error:  # one case must not take the others with it
            print(f"{case.label}: not emulated: {error}", file=sys.stderr)
            continue
        for launch, trace in zip(launches, traces, strict=True):
            found.append(
                {
                    "case": case.label,
                    "kernel": launch.kernel.name,
                    "grid": list(launch.grid),
                    "counts": from_trace(trace),
                }
            )
    return found


def from_trace(trace: Any) -> dict[str, int]:
    """A trace's counts under the names of the counters: those of global loads count cp.async as well."""

    def total(metric: str, space: str, *kinds: str) -> int:
        return sum(int(trace.total(metric, space=space, kind=kind)) for kind in kinds)

    return {
        "load requests": total("requests", "global", "read", "cp.async read"),
        "load sectors": total("sectors", "global", "read", "cp.async read"),
        "store requests": total("requests", "global", "write"),
        "store sectors": total("sectors", "global", "write"),
        "shared load wavefronts": total("wavefronts", "shared", "read", "ldmatrix"),
        "shared store wavefronts": total("wavefronts", "shared", "write"),
        "cp.async requests": total("requests", "global", "cp.async read"),
        "cp.async sectors": total("sectors", "global", "cp.async read"),
        "cp.async shared wavefronts": total("wavefronts", "shared", "cp.async write"),
    }


# --- the GPU's side --------------------------------------------------------------------------------------


def run_child() -> None:
    """Launch every case once; this is what runs under ncu."""
    import seed_launches
    import torch

    for case in seed_launches.counted():
        try:
            call, _ = case.ready("cuda")
            call()
            torch.cuda.synchronize()
        except Exception as error:  # the other cases are still worth counting
            print(f"not launched {case.label}: {error}", flush=True)


def known_metrics(ncu: str) -> set[str]:
    """Base names of the metrics that ncu offers on this GPU; empty when it does not say."""
    done = _run([ncu, "--query-metrics"], 120)
    return set(re.findall(r"^([a-z0-9]+__\w+)", done.stdout, re.MULTILINE))


def choose_metrics(known: set[str]) -> dict[str, str]:
    """Column → metric: the fixed ones, those of cp.async that exist, and any other that names ldgsts."""
    chosen = {column: name for column, name in METRICS.items() if not known or _base(name) in known}
    for column, names in COPY_METRICS.items():
        for name in names:
            if _base(name) in known:
                chosen[column] = name
                break
    taken = set(chosen.values())
    for base in sorted(known):
        ours = "ldgsts" in base and base.startswith(("l1tex__t_", "l1tex__data", "smsp__inst", "lts__t_"))
        if ours and f"{base}.sum" not in taken:
            chosen[base] = f"{base}.sum"
    return chosen


def _base(metric: str) -> str:
    return metric.partition(".")[0]


def count_on_gpu() -> tuple[list[dict[str, Any]], list[str]]:
    """Counters of every launch in order, and messages about what was missing."""
    ncu = shutil.which("ncu") or next(iter(sorted(Path("/opt/nvidia").glob("nsight-compute/*/ncu"))), None)
    if ncu is None:
        return [], ["ncu (Nsight Compute) was not found: emulated counts only"]
    import seed_launches

    metrics = choose_metrics(known_metrics(str(ncu)))
    pattern = "|".join(sorted(seed_launches.ENTRIES))
    command = [str(ncu), "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--target-processes", "all", "--kernel-name-base", "function"]
    command += ["--kernel-name", f"regex:^({pattern})$", "--metrics", ",".join(metrics.values())]
    done = _run([*command, sys.executable, str(HERE), "--child"], 300)
    launches = parse_csv(done.stdout)
    problems = []
    if done.returncode != 0 or not launches:
        text = (done.stdout + done.stderr).strip().splitlines()
        problems.append(f"ncu ended with code {done.returncode}; its last lines:")
        problems += text[-12:]
    columns = {name: column for column, name in metrics.items()}
    for launch in launches:
        launch["counts"] = {columns.get(name, name): v for name, v in launch.pop("metrics").items()}
    return launches, problems


def parse_csv(text: str) -> list[dict[str, Any]]:
    """Launches out of ncu's CSV, in order of ID; both of its forms (a row a launch, a row a metric).

    Lines that ncu and the program print around the table are skipped.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID",')]
    if not starts:
        return []
    body = [line for line in lines[starts[0] :] if line.startswith('"')]
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(body))):
        key = row.get("ID") or ""
        if not key.isdigit():
            continue  # the row of units below the header
        kernel, grid = _function(row["Kernel Name"]), _sizes(row.get("Grid Size"))
        launch = found.setdefault(key, {"kernel": kernel, "grid": grid, "metrics": {}})
        if "Metric Name" in row:
            launch["metrics"][row["Metric Name"]] = _number(row["Metric Value"])
        else:
            launch["metrics"] |= {name: _number(v) for name, v in row.items() if name and "__" in name}
    return [found[key] for key in sorted(found, key=int)]


def _function(name: str) -> str:
    return re.split(r"[(<]", name.strip())[0].split()[-1]


def _sizes(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(command, 125, "", f"{type(error).__name__}: {error}")


# --- side by side ----------------------------------------------------------------------------------------


def pair(emulated: list[dict[str, Any]], counted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Launches of both sides together: the n-th launch of a kernel on one is the n-th on the other."""
    queues: dict[str, list[dict[str, Any]]] = {}
    for launch in counted:
        queues.setdefault(launch["kernel"], []).append(launch)
    rows = []
    for launch in emulated:
        queue = queues.get(launch["kernel"], [])
        other = queue.pop(0) if queue else None
        same = other is None or _padded(other["grid"]) == _padded(launch["grid"])
        rows.append(
            {
                "case": launch["case"],
                "kernel": launch["kernel"],
                "grid": launch["grid"],
                "emulated": launch["counts"],
                "counted": other["counts"] if other and same else None,
                "note": "" if same else f"grid {other['grid'] if other else None} on the GPU: not paired",
            }
        )
    return rows


def _padded(grid: list[int]) -> list[int]:
    return [*grid, 1, 1, 1][:3]


def differences(row: dict[str, Any]) -> list[str]:
    """Counters of one launch that differ: "name emulated/counted"."""
    counted = row["counted"] or {}
    return [
        f"{name} {value:,}/{counted[name]:,}"
        for name, value in row["emulated"].items()
        if counted.get(name) is not None and counted[name] != value
    ]


def markdown(rows: list[dict[str, Any]], extra: tuple[str, ...] = ()) -> str:
    """The comparison: = where both agree, else "emulated / counted"."""
    names = list(rows[0]["emulated"]) if rows else []
    names = [n for n in names if any(row["emulated"][n] or (row["counted"] or {}).get(n) for row in rows)]
    lines = ["| case | kernel | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [_cell(row["emulated"].get(name), row["counted"], name) for name in names]
        lines.append(f"| {row['case']} | {row['kernel']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *extra])


def _cell(emulated: int | None, counted: dict[str, Any] | None, name: str) -> str:
    if counted is None or counted.get(name) is None:
        return f"{emulated:,} / ?" if emulated else "–"
    if emulated == counted[name]:
        return f"= {emulated:,}" if emulated else "–"
    return f"**{emulated:,} / {counted[name]:,}**"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--emulate", type=Path, help="write the emulator's counts here and stop")
    parser.add_argument("--emulated", type=Path, help="counts written by --emulate")
    arguments = parser.parse_args()
    if arguments.child:
        run_child()
        return 0
    if arguments.emulated:
        emulated = json.loads(arguments.emulated.read_text(encoding="utf-8"))["launches"]
    else:
        emulated = emulate()
    if arguments.emulate:
        from labkit.atomic import write_json

        write_json(arguments.emulate, {"origin": "emulated", "launches": emulated})
        print(f"{len(emulated)} launches counted: {arguments.emulate}")
        return 0
    counted, problems = count_on_gpu()
    rows = pair(emulated, counted)
    report(rows, problems)
    return 1 if problems and not counted else 0


def report(rows: list[dict[str, Any]], problems: list[str]) -> None:
    """Print, and write Markdown and JSON to $OUT or results/."""
    from labkit.atomic import write_json, write_text
    from labkit.bench import machine
    from labkit.paths import results_dir

    paired = [row for row in rows if row["counted"] is not None]
    equal = sum(not differences(row) for row in paired)
    summary = f"{len(paired)} of {len(rows)} launches paired, {equal} equal in every counter"
    text = markdown(rows, ("", "= equal; **emulated / counted** where they differ.", summary))
    folder = Path(os.environ.get("OUT") or results_dir())
    import torch

    device = machine.device_facts("cuda" if torch.cuda.is_available() else "cpu")
    content: dict[str, Any] = {
        "origin": "measured and emulated",
        "device": device,
        "software": machine.software_facts(),
    }
    content |= {"rows": rows, "problems": problems}
    write_text(folder / "ncu_counts.md", text + "\n")
    write_json(folder / "ncu_counts.json", content)
    print(text)
    # Counters with no emulated counterpart, for the kernel that copies asynchronously.
    for row in paired:
        more = {n: v for n, v in row["counted"].items() if n not in row["emulated"] and v}
        if row["kernel"] == "mma_w4":
            print(f"{row['case']}: " + ", ".join(f"{name} {value:,}" for name, value in more.items()))
    for row in rows:
        if row["note"]:
            print(f"{row['case']}: {row['note']}")
    print("\n".join(problems))


if __name__ == "__main__":
    sys.exit(main())
