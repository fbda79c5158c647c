"""Reference solutions of chapter 07."""

from __future__ import annotations


# Stop at the first M where the first kernel loses: a later win is a different row of the table.
def up_to(first, second):
    """The greatest M up to which ``first`` is never slower."""
    found = 0
    for m in sorted(first.keys() & second.keys()):
        if first[m] > second[m]:
            break
        found = m
    return found


# Two loops over the recorded M; a pair is as bad as the shape where it loses most.
def best_pair(records):
    """(single_row_up_to, small_batch_up_to) that lose least at the worse shape."""

    def lost(times, single, small):
        lines = [times[name] for name in ("gemv_single_row", "gemv_small_batch", "gemm_tiled")]
        taken = sum(lines[0 if m <= single else 1 if m <= small else 2][m] for m in lines[0])
        return taken / sum(min(line[m] for line in lines) for m in lines[0])

    stops = [0, *sorted(records[0]["gemm_tiled"])]
    pairs = [(single, small) for single in stops for small in stops if single <= small]
    return min(pairs, key=lambda pair: max(lost(times, *pair) for times in records))


# "passed over" names what came first; the first word in the brackets says how well the row is known.
reading = {
    "runs": "dequant_matmul",
    "wanted": "gemm_tiled",
    "stopped_by": "override",
    "a100_origin": "assumed",
}

# "w4." keeps the change to W4; disable (not force) lets the next row follow, here the fallback.
override = {"w4.small_batch_up_to": 64, "disable": "gemm_tiled"}

# Less than 16 or more than 24 for the first threshold loses more at one of the shapes.
add_card = [
    {
        "device": "cuda",
        "capability": "9.0",
        "format": "w4",
        "dtypes": ["float16"],
        "m_min": low,
        "m_max": high,
        "kernel": kernel,
        "provenance": provenance,
    }
    for low, high, kernel, provenance in (
        (1, 16, "gemv_single_row", "measured: H200, 5632x2048 and 3584x18944, labkit bench gemm"),
        (17, 64, "gemv_small_batch", "measured: H200, 5632x2048 and 3584x18944, labkit bench gemm"),
        (65, None, "gemm_tiled", "assumed: nothing was recorded above M = 64"),
    )
]
