"""How the z-split GEMM is launched: how many slices K is cut into, and which grid computes them.

Pure arithmetic, no torch. The numbers of blocks, slices and bytes are in one place, here.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import refuse, require

GROUP = 32
"""Codes a scale; a slice holds whole groups."""

THREADS_N, THREADS_M, COLUMNS = 64, 4, 4
"""Threads of a block along n and along m, and columns a thread (seed, article 04, section 3.2)."""

REDUCE_THREADS = 256

TARGET_BLOCKS = 512
"""Blocks that a launch should have at least (seed, article 04, section 3.3)."""

PART_CAP_BYTES = 64 << 20
"""Most bytes of slice sums, ``nsplit * M * N * 4`` (seed, article 04, section 3.3)."""

MIN_SLICE_GROUPS = 4
"""Least groups of a slice under the rule of (N, K). A slice sum is 4 bytes, written and read back, for
128 products: by arithmetic (2.5 instructions a product, nothing overlapped, nothing left in the L2) it adds
at most a fifth to the time on an H200 and two fifths on an RTX 3050 Laptop, while the grid is under 512
blocks; nothing above. The seed's rule goes down to one group, four times that."""

MAX_GRID_YZ = 65_535
MAX_GRID_X = 2**31 - 1

MAX_COLUMNS = 2**31 - 4096
"""N and K are C ints in the kernel, and a block may begin up to 1023 columns before N."""

MAX_BAND_ROWS = MAX_GRID_YZ * THREADS_M
"""Rows of x that one launch takes; more are computed in bands."""

RULES = ("invariant", "seed")


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch of the GEMM, and its reduce if it has one.

    Attributes:
        nsplit: slices of K. It alone decides the order of the sums, hence the bits.
        grid: blocks in x, y, z.
        split: a block computes one slice and a second kernel adds them; otherwise a block computes
            every slice in turn. The bits are the same.
        part_bytes: float32 slice sums, 0 without a split.
    """

    nsplit: int
    grid: tuple[int, int, int]
    split: bool
    part_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks of the GEMM launch."""
        x, y, z = self.grid
        return x * y * z

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block in x, y."""
        return THREADS_N, THREADS_M


def groups_of(k: int) -> int:
    """Groups of K columns, the last one padded."""
    return -(-_whole("k", k) // GROUP)


def blocks_xy(m: int, n: int) -> tuple[int, int]:
    """Blocks along n and along m. At M = 1 all threads of a block lie along n."""
    _whole("m", m)
    _whole("n", n)
    if m == 1:
        return -(-n // (THREADS_N * THREADS_M * COLUMNS)), 1
    return -(-n // (THREADS_N * COLUMNS)), -(-m // THREADS_M)


def slice_of(z: int, ngroups: int, nsplit: int) -> range:
    """Groups of slice ``z``: ``ngroups // nsplit`` of them, one more in the first ``ngroups % nsplit``."""
    base, remainder = divmod(ngroups, nsplit)
    first = z * base + min(z, remainder)
    return range(first, first + base + (z < remainder))


def seed_nsplit(m: int, n: int, k: int) -> int:
    """Slices by the seed's rule (article 04, section 3.3): they depend on M, and so do a row's bits.

    Enough for 512 blocks, at most one a group, fewer while the slice sums pass 64 MiB.
    """
    x, y = blocks_xy(m, n)
    ngroups = groups_of(k)
    if x * y >= TARGET_BLOCKS or ngroups == 1:
        return 1
    wanted = min(-(-TARGET_BLOCKS // (x * y)), ngroups)
    return max(1, min(wanted, PART_CAP_BYTES // (m * n * 4)))


def invariant_nsplit(n: int, k: int) -> int:
    """Slices by (N, K) only: a row's bits do not depend on who shares its batch.

    Enough for 512 blocks at M = 1, and at least :data:`MIN_SLICE_GROUPS` groups each.
    """
    x, _ = blocks_xy(1, n)
    return max(1, min(-(-TARGET_BLOCKS // x), groups_of(k) // MIN_SLICE_GROUPS))


def plan(m: int, n: int, k: int, *, rule: str = "invariant", nsplit: int | None = None) -> Plan:
    """How to launch x [M, K] by W [N, K].

    The rule of (N, K) is the default: labkit promises bits that do not depend on the batch. It costs
    little, because only the number of slices must not depend on M: where the grid is full without
    them, or the slice sums would pass the cap, each block computes all slices itself and writes none.

    Args:
        m, n, k: sizes, each >= 1; m at most :data:`MAX_BAND_ROWS`.
        rule: "invariant", or "seed" for the article's.
        nsplit: so many slices instead of the rule's, 1 to the number of groups.

    Raises:
        InputError: a size, rule or nsplit out of range.
    """
    require(rule in RULES, "rule", repr(rule), '"invariant" or "seed"')
    x, y = blocks_xy(m, n)
    ngroups = groups_of(k)
    require(m <= MAX_BAND_ROWS, "m", m, f"at most {MAX_BAND_ROWS} rows a launch", "launch bands of rows")
    for name, value in (("n", n), ("k", k)):
        require(value <= MAX_COLUMNS, name, value, f"at most {MAX_COLUMNS}")
    if nsplit is not None:
        in_range = isinstance(nsplit, int) and not isinstance(nsplit, bool) and 1 <= nsplit <= ngroups
        require(in_range, "nsplit", repr(nsplit), f"1 to {ngroups}, the groups of K = {k}")
        slices, split = nsplit, nsplit <= MAX_GRID_YZ and _fits(nsplit, m, n)
    elif rule == "seed":
        slices = seed_nsplit(m, n, k)
        split = True
    else:
        slices = invariant_nsplit(n, k)
        split = x * y < TARGET_BLOCKS and _fits(slices, m, n)
    split = split and slices > 1
    return Plan(slices, (x, y, slices if split else 1), split, slices * m * n * 4 if split else 0)


def _fits(nsplit: int, m: int, n: int) -> bool:
    return nsplit * m * n * 4 <= PART_CAP_BYTES


def _whole(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(name, repr(value), "a whole number >= 1")
    return value
