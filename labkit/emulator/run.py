"""What a fast launch gives back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A launch that ended well; the results are in the arguments.

    Args:
        seconds: time the blocks took, without compiling and copying.
        output: what the kernel printed.
        blocks: blocks run.
        threads: threads a block.
    """

    seconds: float
    output: str
    blocks: int
    threads: int
