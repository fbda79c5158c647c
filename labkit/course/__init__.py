"""The course frame: what the notebooks call (`start` and the rules) and what runs them.

In a chapter, the cell after the tagged ``parameters`` cell is one validating call::

    from labkit import course

    lab = course.start("02", device=device, solve=solve, batch=(batch, course.whole(1, 64)))

Rules: :func:`whole`, :func:`number`, :func:`one_of`, :func:`truth`, :func:`text`.
The runner reads the same call, so a bad value is refused before any cell runs.
"""

from __future__ import annotations

from labkit.course.lab import Lab, pick_device, start
from labkit.course.rules import Rule, number, one_of, text, truth, whole

__all__ = ["Lab", "Rule", "number", "one_of", "pick_device", "start", "text", "truth", "whole"]
