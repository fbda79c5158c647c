"""The hint of a race: where the missing barrier belongs, from the text alone."""

from __future__ import annotations

import pytest

from labkit.emulator.barriers import barrier_between, missing_barrier

TILES = """__global__ void k(const float* a, float* o, int n) {
    for (int i = 0; i < n; i++) {
        s[t] = a[i];
        __syncthreads();
        sum += s[63 - t];
    }
    o[t] = sum;
}"""
NO_LOOP = "s[t] = a[t];\nif (t < 32) {\n__syncthreads();\n}\no[t] = s[63 - t];"
ONE_LINE = "for (;;) {\ns[t] = a[t]; __syncthreads();\nsum += s[1];\n}"
BARRIER_FIRST = "do {\ns[t] = a[t];\n__syncthreads(); sum += s[1];\n} while (n--);"
COMMENT = "s[t] = a[t];\n// __syncthreads();\no[t] = s[63 - t];"
REDUCTION = "for (int h = 32; h > 0; h >>= 1)\n    if (t < h) s[t] += s[t + h];\no[0] = s[0];"
SCAN = "for (int h = 1; h < n; h *= 2) {\ns[t] += s[t - h];\n__syncthreads();\n}"


@pytest.mark.parametrize(
    ("text", "line", "other", "words"),
    [
        (TILES, 5, 3, "put another __syncthreads() after line 5, before the loop comes back to line 3"),
        (TILES, 3, 5, "put another __syncthreads() after line 5, before the loop comes back to line 3"),
        (TILES.replace("__syncthreads();", ""), 5, 3, "put __syncthreads() between line 3 and line 5."),
        (TILES.replace("__syncthreads();", ""), 3, 5, "put __syncthreads() between line 3 and line 5."),
        (NO_LOOP, 5, 1, "not every thread passes the barrier between line 1 and line 5"),
        (ONE_LINE, 3, 2, "after line 3, before the loop comes back to line 2"),
        (BARRIER_FIRST, 3, 2, "after line 3, before the loop comes back to line 2"),
        (COMMENT, 3, 1, "put __syncthreads() between line 1 and line 3."),
        (REDUCTION, 2, 2, "put __syncthreads() after line 2, where every thread passes, before the loop"),
        (SCAN, 2, 2, "read into a variable, then __syncthreads(), then write."),
        ("", 2, 1, "between line 1 and line 2"),
        ("for", 1, 1, "after line 1"),
        ("while (", 1, 3, "between line 1 and line 3"),
    ],
)
def test_where_the_barrier_belongs(text: str, line: int, other: int, words: str) -> None:
    assert words in missing_barrier(text.splitlines(), line, other, one_warp=False)


def test_threads_of_one_warp_may_use_its_own_barrier() -> None:
    assert "(or __syncwarp(), if no other warp shares it)" in missing_barrier([], 1, 2, one_warp=True)


def test_barrier_between() -> None:
    assert barrier_between(TILES.splitlines(), 5, 3) and not barrier_between(TILES.splitlines(), 5, 7)
