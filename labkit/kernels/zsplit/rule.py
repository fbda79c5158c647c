"""How the z-split GEMM is launched: how many slices K is cut into, and which grid computes them.

The order of a sum, hence its bits, is fixed by (N, K): K is cut into slices, neighbouring slices make a
run, and the result is the sum over the runs of the sum over the slices of each. The grid is free: a block
takes one slice, or one run, or everything, always in that order.

Pure arithmetic, no torch. The numbers of blocks, slices and bytes are in one place, here.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import refuse, require
from labkit.kernels.limits import MAX_GRID

GROUP = 32
"""Codes a scale; a slice holds whole groups."""

THREADS_N, THREADS_M, COLUMNS = 64, 4, 4
"""Threads of a block along n and along m, and columns a thread (seed, article 04, section 3.2)."""

REDUCE_THREADS = 256

TARGET_BLOCKS = 512
"""Blocks that a launch should have at least (seed, article 04, section 3.3)."""

PART_CAP_BYTES = 64 << 20
"""Most bytes of partial sums, ``planes * M * N * 4`` (seed, article 04, section 3.3)."""

LEAST_RUNS, MOST_RUNS = 16, 32
"""Runs of slices: one for each :data:`RUN_GROUPS` groups, within these; never more than slices. 16 runs
fill a grid that has 32 blocks along N and M; 32, where K is long enough, one that has 16 (2048 columns at
M = 8). More would add partial sums to every larger batch, and could pass the cap: 32 planes of what 511
blocks own are 63.9 MiB, so under this rule the cap never decides."""

RUN_GROUPS = 4
"""Groups of a run at least, when it has a choice: a partial sum is 4 bytes, written and read back, for 128
products."""

FREE_PART_BYTES = 1 << 20
"""Partial sums that a small L2 keeps (2 MiB on an RTX 3050 Laptop): they need not be weighed against the
weight."""

REDUCE_WORKERS, REDUCE_FEW_OUTPUTS = 16, 1 << 15
"""Threads of the reduce that share an output, and up to how many outputs they do: 128 blocks of 256 outputs
would not keep an H200's 132 SMs reading. One plane a slice never has more outputs (31 blocks of 1024)."""

MAX_GRID_X, MAX_GRID_YZ, _ = MAX_GRID

MAX_COLUMNS = 2**31 - 4096
"""N and K are C ints in the kernel, and a block may begin up to 1023 columns before N."""

MAX_BAND_ROWS = MAX_GRID_YZ * THREADS_M
"""Rows of x that one launch takes; more are computed in bands."""

RULES = ("invariant", "seed")


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch of the GEMM, and its reduce if it has one.

    Attributes:
        nsplit: slices of K.
        runs: runs that they form, 1 to nsplit; nsplit means the plain sum of all slices. These two alone
            decide the order of the sums, hence the bits.
        grid: blocks in x, y, z. z is ``nsplit`` (a block computes one slice), ``runs`` (a block folds the
            slices of one run) or 1 (a block folds everything). The bits are the same.
        part_bytes: float32 partial sums, one plane [M, N] for each z; 0 when z is 1.
    """

    nsplit: int
    runs: int
    grid: tuple[int, int, int]
    part_bytes: int

    @property
    def planes(self) -> int:
        """Planes of partial sums that a second kernel adds; 1: there is none, the GEMM writes the result."""
        return self.grid[2]

    @property
    def split(self) -> bool:
        """Whether K is spread over blocks, and a second kernel adds what they found."""
        return self.planes > 1

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


def run_of(index: int, nsplit: int, runs: int) -> range:
    """Slices of run ``index``: dealt out to the runs as groups are to the slices."""
    return slice_of(index, nsplit, runs)


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
    """Slices by (N, K) only, those of M = 1 for every M: a row's bits do not depend on who shares its batch.

    Enough for 512 blocks at M = 1, at most one a group. (The cap never decides at M = 1.)
    """
    return seed_nsplit(1, n, k)


def invariant_runs(n: int, k: int) -> int:
    """Runs that the slices of :func:`invariant_nsplit` form; see :data:`LEAST_RUNS`."""
    return min(invariant_nsplit(n, k), max(LEAST_RUNS, min(MOST_RUNS, groups_of(k) // RUN_GROUPS)))


def plan(m: int, n: int, k: int, *, rule: str = "invariant", nsplit: int | None = None) -> Plan:
    """How to launch x [M, K] by W [N, K].

    The rule of (N, K) is the default: labkit promises bits that do not depend on the batch. It costs
    little, because only slices and runs must not depend on M. The grid may: it has the smallest of
    z = 1, runs, nsplit that gives 512 blocks, or the largest of them when none does. A plane for each slice
    has to be worth it: written and read, the planes may cost no more traffic than the weight, or they fit
    :data:`FREE_PART_BYTES`.

    Args:
        m, n, k: sizes, each >= 1; m at most :data:`MAX_BAND_ROWS`.
        rule: "invariant", or "seed" for the article's: one level, no runs.
        nsplit: so many slices instead of the rule's, 1 to the number of groups; one level too. Past the
            cap of partial sums, z is 1.

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
        slices, runs, z = nsplit, nsplit, nsplit if _fits(nsplit, m, n) else 1
    elif rule == "seed":
        slices = runs = z = seed_nsplit(m, n, k)
    else:
        slices, runs = invariant_nsplit(n, k), invariant_runs(n, k)
        z = _planes(x * y, slices, runs, m, n, ngroups)
    return Plan(slices, runs, (x, y, z), z * m * n * 4 if z > 1 else 0)


def _planes(blocks: int, slices: int, runs: int, m: int, n: int, ngroups: int) -> int:
    """z of the grid, given its blocks in x and y: it changes the time, never the bits."""
    if blocks >= TARGET_BLOCKS or not _fits(runs, m, n):
        return 1
    # Bytes of the weight: a code each, and four for the scale of a group.
    affordable = max(ngroups * (GROUP + 4) * n, 2 * FREE_PART_BYTES)
    if blocks * runs >= TARGET_BLOCKS or 2 * slices * m * n * 4 > affordable:
        return runs
    return slices if _fits(slices, m, n) else runs


def _fits(planes: int, m: int, n: int) -> bool:
    return planes <= MAX_GRID_YZ and planes * m * n * 4 <= PART_CAP_BYTES


def _whole(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(name, repr(value), "a whole number >= 1")
    return value
