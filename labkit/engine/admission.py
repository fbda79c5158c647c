"""The exact future peak: whether a request can be started without one having to be taken back later.

Every started request has a most number of tokens, so its blocks at every future step are known, except for
two things: answers may end early (fewer blocks), and prompts that are still being computed begin to grow
later than the rest, nobody knows when. The peak here is the largest over all such delays. With no prompt
under way and no sharing it is LightLLM's: requests sorted by remaining length, the peak is the largest of
``remaining_i · i + Σ_{j ≤ i} current_j``; counted here in blocks, of which shared ones count once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one started request holds and may still come to hold.

    Attributes:
        blocks: ids of the blocks that it holds now.
        length: tokens that it holds slots for.
        growth: tokens that it may still append, one a decode step.
        settled: it decodes, so it grows in step with all others that do, and has left after ``growth``
            steps. If not, it may begin later (or leave later) than any other.
    """

    blocks: Sequence[int]
    length: int
    growth: int
    settled: bool


def future_peak(claims: Iterable[Claim], block_size: int, *, lag: int = 0) -> int:
    """Most blocks that are ever held at once.

    After t steps a settled claim holds length + min(t, growth) tokens, and nothing once t > growth + lag.
    One that is not settled holds at most length + min(t, growth), reached when it begins so late that it is
    still there. Between two moments at which a claim leaves, the sum only grows: so it is looked at just
    before these.

    Args:
        claims: of all that are started, or would be.
        block_size: tokens a block.
        lag: steps that a claim stays beyond its last.
    """
    claims = list(claims)
    moments = {claim.growth + lag for claim in claims if claim.settled}
    moments.add(max((claim.growth for claim in claims if not claim.settled), default=0))
    # How long each block that is held now stays held: as long as the last of those that hold it.
    until: dict[int, int] = {}
    endless = max(moments)
    for claim in claims:
        stays = claim.growth + lag if claim.settled else endless
        for block in claim.blocks:
            if until.get(block, -1) < stays:
                until[block] = stays
    ends = sorted(until.values())
    peak = 0
    for moment in moments:
        held = len(ends) - bisect_left(ends, moment)
        for claim in claims:
            if not claim.settled or moment <= claim.growth + lag:
                length = claim.length + min(moment, claim.growth)
                held += -(-length // block_size) - len(claim.blocks)
        peak = max(peak, held)
    return peak


def peak_fits(claims: Sequence[Claim], num_blocks: int, block_size: int, *, lag: int = 0) -> bool:
    """Whether the peak is at most ``num_blocks``."""
    # If nobody left and nothing were shared: mostly there is room for that, found in one pass.
    if sum(-(-(claim.length + claim.growth) // block_size) for claim in claims) <= num_blocks:
        return True
    return future_peak(claims, block_size, lag=lag) <= num_blocks
