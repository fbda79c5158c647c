"""``labkit doctor``: what this machine has, what is missing, and the one line that mends it.

Standard library only, and every probe is guarded: it must work before torch can be imported,
on a machine with no GPU, no network and a half-finished installation. The shape follows
flashinfer's collect_env. Also runs as ``python -m labkit.doctor``.

A finding is ``ok``, ``note`` (works, worth knowing) or ``problem`` (something will not work).
Exit codes of the command: 0 no problem, 1 at least one problem. A missing GPU is a note.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from labkit import __version__

State = Literal["ok", "note", "problem"]
MARK = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: what was looked at, e.g. ``"torch"``.
        state: ``ok``, ``note`` or ``problem``.
        value: what was found, one line.
        fix: the one line that mends it; empty when there is nothing to mend.
        facts: the same in numbers and names, for ``--json``.
    """

    name: str
    state: State
    value: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All findings of one run, in a fixed order."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> int:
        """Number of findings in state ``problem``."""
        return sum(finding.state == "problem" for finding in self.findings)

    def get(self, name: str) -> Finding | None:
        """The first finding called ``name``."""
        return next((finding for finding in self.findings if finding.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, the content of ``labkit doctor --json``."""
        return {
            "labkit": __version__,
            "problems": self.problems,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_text(self) -> str:
        """The report as aligned lines, a fix indented under its finding."""
        width = max((len(finding.name) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(f"{MARK[finding.state]}  {finding.name:<{width}}  {finding.value}")
            if finding.fix:
                lines.append(f"{'':7}  {'':{width}}  → {finding.fix}")
        counts = {state: sum(f.state == state for f in self.findings) for state in MARK}
        lines.append(f"\n{counts['ok']} ok, {counts['note']} notes, {counts['problem']} problems")
        return "\n".join(lines)


Probe = Callable[[], Finding | list[Finding]]


def guarded(name: str, probe: Probe) -> list[Finding]:
    """Run ``probe``; an exception becomes a note that carries it, so that the others still run."""
    try:
        found = probe()
    except Exception as error:
        return [Finding(name, "note", f"could not be looked at: {type(error).__name__}: {error}")]
    return found if isinstance(found, list) else [found]


def all_probes() -> list[tuple[str, Probe]]:
    """The probes in the order of the report."""
    from labkit.probes import cuda, gpus, host, packages

    return [
        ("python", host.python),
        ("system", host.system),
        ("memory", host.memory),
        ("disk", host.disk),
        ("locale", host.locale_and_encoding),
        ("path", host.path),
        ("compiler", host.compiler),
        ("torch", packages.torch),
        ("cupy", packages.cupy),
        ("driver", gpus.driver),
        ("gpu", gpus.gpus),
        ("nvrtc", cuda.nvrtc),
        ("cuda headers", cuda.headers),
        ("nvdisasm", cuda.nvdisasm),
        ("jupyter server", packages.jupyter_server_side),
        ("jupyter kernel", packages.jupyter_kernel_side),
        ("course tools", packages.course_tools),
        ("model", packages.model),
    ]


def collect(probes: Sequence[tuple[str, Probe]] | None = None) -> Report:
    """Look at everything; takes a few seconds, most of it importing torch in a child process."""
    chosen = all_probes() if probes is None else probes
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = pool.map(lambda pair: guarded(*pair), chosen)
        return Report(tuple(finding for group in found for finding in group))


def main(arguments: list[str] | None = None) -> int:
    """Command line of the doctor; see the module's text for the exit codes."""
    parser = argparse.ArgumentParser(prog="labkit doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    report = collect()
    text = json.dumps(report.to_dict(), indent=2, ensure_ascii=True) if options.json else report.to_text()
    try:
        print(text)
    except UnicodeEncodeError:
        # A console in a codec without arrows: lose the arrows, not the report.
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
