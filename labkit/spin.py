"""How long torch's threads on a CPU wait for each other before they sleep."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPINS = "10000"
"""About half a millisecond. Measured on two cores (SmolLM2, tokens/s of one answer): 10,000 spins decode as
fast as libgomp's own 300,000, 1,000 a third slower. Beside two busy programs, where a thread that spins keeps
the core from the one that it waits for, the model loads in 3 s instead of 18, and an answer of 64 tokens by
``labkit generate`` takes 12 s instead of 25."""

_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting threads sleep early, unless the user has chosen; before torch is imported, or never.

    Only libgomp (torch on Linux) reads it. It changes when a result comes, never the result.
    """
    if not any(name in environ for name in _CHOSEN):
        environ["GOMP_SPINCOUNT"] = SPINS
