"""One chapter's start: check its parameters, choose the device, tell the checks about solve."""

from __future__ import annotations

import ctypes
import html
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.check import session
from labkit.course.index import chapter_named
from labkit.course.rules import Rule, one_of, truth
from labkit.errors import refuse

DEVICE_RULE = one_of("auto", "cpu", "cuda")
NO_CUDA_FIX = "use device auto or cpu here; `labkit doctor` says what CUDA lacks"


@dataclass(frozen=True)
class Lab:
    """What a chapter knows about its own run.

    Attributes:
        chapter: two digits, such as ``"02"``.
        title: the chapter's title.
        device: ``"cpu"`` or ``"cuda"``, never ``"auto"``.
        solve: whether the checks test the reference solutions instead of the answers.
        params: the checked values of the chapter's own parameters, by name; ``lab["batch"]``
            is short for ``lab.params["batch"]``.
    """

    chapter: str
    title: str
    device: str
    solve: bool
    params: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        if name not in self.params:
            refuse("parameter", repr(name), f"one of {', '.join(self.params) or 'none in this chapter'}")
        return self.params[name]

    def __repr__(self) -> str:
        own = "".join(f" | {name} = {value!r}" for name, value in self.params.items())
        solve = " | checking the reference solutions" if self.solve else ""
        return f"Chapter {self.chapter}: {self.title} | device {self.device}{solve}{own}"

    def _repr_html_(self) -> str:
        return f"<p style='color:#5a6472'>{html.escape(repr(self))}</p>"


def _driver_sees_gpu() -> bool:
    """Ask the CUDA driver itself: importing torch takes seconds, and most machines have no GPU."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def cuda_available() -> bool:
    """True when a driver sees a GPU and torch can use it; never raises."""
    if not _driver_sees_gpu():
        return False
    try:
        import torch

        return bool(torch.cuda.is_available())
    except Exception:  # a broken torch is doctor's business; here it means "no"
        return False


def pick_device(device: str) -> str:
    """Resolve ``auto``/``cpu``/``cuda`` to ``cpu`` or ``cuda``; InputError for cuda without CUDA."""
    DEVICE_RULE.check("device", device)
    if device == "cpu":
        return "cpu"
    available = cuda_available()
    if device == "cuda" and not available:
        refuse("device", "'cuda', but no CUDA device answers", "a machine with a CUDA device", NO_CUDA_FIX)
    return "cuda" if available else "cpu"


def start(chapter: str, *, device: str = "auto", solve: bool = False, **params: Any) -> Lab:
    """Check a chapter's parameters and begin it; the one call after the parameters cell.

    Args:
        chapter: its number in two digits, e.g. ``"02"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        solve: with True, every ``check.<name>(...)`` tests the reference solution.
        params: ``name=(value, rule)`` with a rule of :mod:`labkit.course.rules`.

    Raises:
        InputError: naming the parameter, what came and what is accepted.
    """
    row = chapter_named(chapter)
    solve = truth().check("solve", solve)
    values = {}
    for name, pair in params.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Rule)):
            refuse(name, repr(pair), f"a pair (value, rule), such as {name}=({name}, course.whole(1, 64))")
        values[name] = pair[1].check(name, pair[0])
    chosen = pick_device(device)
    session.begin(row.number, solve=solve, device=chosen)
    return Lab(row.number, row.title, chosen, solve, MappingProxyType(values))
