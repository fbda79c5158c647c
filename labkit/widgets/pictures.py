"""The pictures of README.md: widgets as they stand in the chapters. ``python -m labkit.widgets.pictures``."""

from __future__ import annotations

from pathlib import Path

from labkit.paths import data_dir
from labkit.widgets.overlap_lab import OverlapLab
from labkit.widgets.overlap_run import machine
from labkit.widgets.sla_pareto import SlaPareto, project_sources


def pictures() -> dict[str, str]:
    """File name → SVG: the overlap lab on the simulated laptop, and the newest records' service levels."""
    machine.cache_clear()  # a clock that begins at 0: the same last digits, whatever ran before
    sources = project_sources()
    pareto = SlaPareto(sources=sources)
    measured = [source.key for source in sources if not source.key.startswith("simulated")]
    if measured:
        pareto.update(source=measured[0], max_gap=5.0, p99_gap=5.0, share=50)
    return {
        "overlap_lab.svg": OverlapLab("overlap", True, 128, "rtx3050").picture(),
        "overlap_lab_ticks.svg": OverlapLab("ticks", True, 128, "rtx3050").picture(),
        "sla_pareto.svg": pareto.picture(),
    }


def folder() -> Path:
    """Where they are kept."""
    return data_dir() / "pictures"


if __name__ == "__main__":
    folder().mkdir(exist_ok=True)
    for name, text in pictures().items():
        (folder() / name).write_text(text, encoding="utf-8", newline="\n")
        print(folder() / name)
