"""What a run was made with: versions, commit, machine; each question guarded, nothing personal."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import labkit

_PACKAGES = (
    "torch",
    "numpy",
    "cupy-cuda12x",
    "papermill",
    "nbclient",
    "ipykernel",
    "matplotlib",
    "ipywidgets",
)


def versions() -> dict[str, str]:
    """Versions of labkit, Python and the packages a chapter's result can depend on."""
    out = {"labkit": labkit.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def commit() -> dict[str, Any] | None:
    """``{"id": ..., "dirty": ...}`` of this checkout, None where there is no git or no commit."""
    root = Path(labkit.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        run = _git(root, "rev-parse", "HEAD")
        if run.returncode:
            return None
        state = _git(root, "status", "--porcelain", "--untracked-files=no")
        return {"id": run.stdout.strip(), "dirty": bool(state.stdout.strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(root), *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=10, check=False, encoding="utf-8", errors="replace"
    )


def facts() -> dict[str, Any]:
    """The fields that every chapter's entry of ``summary.json`` carries."""
    from labkit.probes.gpus import installed_driver

    driver = installed_driver()
    machine = {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "gpus": [gpu.name for gpu in driver.gpus],
        "driver": driver.version,
    }
    return {"versions": versions(), "commit": commit(), "machine": machine}
