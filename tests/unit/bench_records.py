"""A small measured record, for the tests of benchmarks."""

from __future__ import annotations

from labkit.bench.record import Entry, Record


def entry(contender: str = "gemm_tiled", us: float = 10.0, **changes: object) -> Entry:
    """An entry whose samples lie around ``us``."""
    values: dict = {
        "table": "sweep",
        "contender": contender,
        "format": "w4",
        "m": 1,
        "n": 5632,
        "k": 2048,
        "group": 128,
        "status": "timed",
        "error": {"max_abs": 1e-3, "plain": 1e-3, "bound": 2e-3},
        "samples_us": [us * (1 + (i % 5 - 2) / 100) for i in range(20)],
        "weight_bytes": 5_947_392,
        "method": {"how": "CUDA graph", "calls": 46, "copies": 46},
    }
    return Entry(**(values | changes))


def record(entries: list[Entry] | None = None, **changes: object) -> Record:
    """A record "measured" on an H200 that the tests invent."""
    values: dict = {
        "name": "gemm-seed",
        "kind": "measured",
        "command": "labkit bench gemm --table seed",
        "started": "2026-12-01T10:11:12+00:00",
        "device": {"name": "NVIDIA H200", "key": "h200", "capability": "9.0", "driver": "580.1", "sms": 132},
        "software": {"versions": {"torch": "2.11.0"}, "commit": {"id": "0123456789abcdef", "dirty": True}},
        "parameters": {"samples": 20},
        "clocks": [{"when": "before", "unread": "nvidia-smi gave no answer"}],
        "ceilings": {"copy_gb_s": 4200.0},
        "entries": entries if entries is not None else [entry()],
        "notes": ["invented"],
    }
    return Record(**(values | changes))
