"""Where the project keeps its files: the one place that knows the folder layout.

A checkout has ``data/``, ``notebooks/`` and ``results/`` beside ``labkit/``; an installed
wheel carries the first two inside the package, and writes results under the working folder.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def _in_checkout() -> bool:
    return (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "notebooks").is_dir()


def data_dir() -> Path:
    """Folder of the read-only data files (device table, corpora, quoted figures)."""
    return _CHECKOUT / "data" if _in_checkout() else _PACKAGE / "_data"


def notebooks_dir() -> Path:
    """Folder of the chapters."""
    return _CHECKOUT / "notebooks" if _in_checkout() else _PACKAGE / "_notebooks"


def results_dir() -> Path:
    """Folder that runs write to; ``LABKIT_RESULTS`` overrides it. Not created here."""
    if override := os.environ.get("LABKIT_RESULTS"):
        return Path(override)
    return _CHECKOUT / "results" if _in_checkout() else Path.cwd() / "results"


def state_dir() -> Path:
    """Folder of this person's own state (exercise progress); ``LABKIT_STATE`` overrides it."""
    if override := os.environ.get("LABKIT_STATE"):
        return Path(override)
    return Path.home() / ".labkit"


def cache_dir() -> Path:
    """Folder of what can be made again (compiled kernels); ``LABKIT_CACHE`` overrides it."""
    if override := os.environ.get("LABKIT_CACHE"):
        return Path(override)
    return state_dir() / "cache"
