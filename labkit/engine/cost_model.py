"""What a forward costs, as a few figures that can be explained: for the simulated executor.

Time of a forward = products(new tokens) + a fixed part + the context that its rows attend to. The first is a
line through recorded points; at small sizes it is flat, since the weights are read once for all rows, which
is what every policy lives on.

Two lanes share one device: a work that alone keeps ``share`` of it busy runs at full speed as long as the
shares of what runs add up to 1 or less, and is slowed in proportion beyond.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from labkit import quoted
from labkit.engine.executor import Row
from labkit.errors import require
from labkit.paths import data_dir


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a forward on some device, for some model.

    Args:
        name: of device and model.
        origin: "simulated from measured" or "simulated from quoted"; shown wherever a result is.
        source: where the figures come from, and what was assumed.
        points: (new tokens, seconds) of all products of a forward, ascending; straight lines between
            them and beyond the last.
        fixed: seconds of a forward that do not depend on its rows.
        context: seconds for each position that a row attends to.
        share: of the device that a forward keeps busy, 0 to 1.
        host: seconds of the host before each launch; what is in flight goes on meanwhile.
        num_layers: of the model; a slice costs its share of them.

    Raises:
        InputError: points that do not ascend, or a value out of range.
    """

    name: str
    origin: str
    source: str
    points: tuple[tuple[int, float], ...]
    fixed: float = 0.0
    context: float = 0.0
    share: float = 1.0
    host: float = 0.0
    num_layers: int = 1

    def __post_init__(self) -> None:
        tokens = [at for at, _ in self.points]
        ascend = len(tokens) >= 2 and all(a < b for a, b in pairwise(tokens))
        require(ascend, "points", tokens, "two or more sizes in rising order")
        require(0 < self.share <= 1, "share", self.share, "above 0, at most 1")
        least = min(self.fixed, self.context, self.host, *(seconds for _, seconds in self.points))
        require(least >= 0, "seconds", least, "none below 0")

    def products(self, tokens: int) -> float:
        """Seconds of all products with so many rows."""
        at = min(max(bisect_left(self.points, (tokens, 0.0)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        return max(0.0, y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))

    def seconds(self, rows: Sequence[Row]) -> float:
        """Seconds of a whole forward, alone on the device."""
        tokens = sum(row.stop - row.start for row in rows)
        positions = sum(row.stop for row in rows)
        return self.products(tokens) + self.fixed + self.context * positions


@cache
def rtx3050() -> CostModel:
    """Qwen2.5-3B W4 on the article's RTX 3050 Laptop (article 7 of the DeepInfer-SM86 series).

    From its long-document table (prompt of 189 tokens, chunk 128, serial): a chunk of 128 is p95 − p50 of
    the gaps, since every other gap is a decode step; the step is what the largest gap has beyond the chunk;
    the chunk of 61 is what is left of the long prompt's TTFT. Time is a line through the two chunks (their
    ratio also fits the kernel's tiles of 32 rows; the table cannot tell). The share is what makes the
    joined overlap as long as it was there.
    """
    tables = quoted.tables(quoted.DEEPINFER)
    document = {row["metric"]: row for row in tables["long_document_itl"].rows}
    gap, overlapped = document["max_itl_s"]["off"], document["max_itl_s"]["on"]
    chunk = document["p95_minus_p50_s"]["off"]
    step = gap - chunk
    rest = document["long_prompt_ttft_s"]["off"] - gap - step
    alone = next(row for row in tables["overlap"].rows if row["concurrency"] == 1)["off_tpot_p50_s"]
    slope = (chunk - rest) / (128 - 61)
    return CostModel(
        name="RTX 3050 Laptop, Qwen2.5-3B W4",
        origin="simulated from quoted",
        source="DeepInfer-SM86 series, article 7: tables on overlap and on the long document. Assumed: the "
        "long document's decode step had 4 rows; context costs nothing",
        points=((1, alone), (4, step), (32, rest - slope * (61 - 32)), (61, rest), (128, chunk)),
        share=(1 + (overlapped - chunk) / step) / 2,
        num_layers=36,
    )


@cache
def h200() -> CostModel:
    """Qwen2.5-3B W4 on an H200, from this project's records.

    Products: the four of a layer (``tensor_core`` kernels, data/measured), times 36 layers. Fixed: what a
    recorded decode step took beyond them. Context: the recorded slope between contexts 128 and 1,024.
    """
    files = sorted((data_dir() / "measured").glob("gemm-fast-h200-*.json"))
    require(bool(files), "data/measured", "no gemm-fast-h200-*.json", "a record of labkit bench gemm")
    record = json.loads(files[-1].read_text(encoding="utf-8"))
    shapes = {(2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)}
    sums: dict[int, float] = {}
    for entry in record["entries"]:
        ours = entry["contender"] == "tensor_core" and entry["format"] == "w4" and entry["status"] == "timed"
        if ours and (entry["n"], entry["k"]) in shapes:
            sums[entry["m"]] = sums.get(entry["m"], 0.0) + 36e-6 * entry["summary"]["median_us"]
    # results/evidence/decode-qwen2.5-3b-h200-*: a step of batch 1 at context 128, head W4, took 1,209 µs;
    # of batch 8 at contexts 128 and 1,024, head dense, 1,445 and 1,658 µs; 31 % of the byte floor.
    step, context = 1209e-6, (1658e-6 - 1445e-6) / (8 * (1024 - 128))
    return CostModel(
        name="H200, Qwen2.5-3B W4",
        origin="simulated from measured",
        source=f"{files[-1].name}, results/evidence/decode-qwen2.5-3b-h200. Assumed, not measured: a forward "
        "keeps 60 % of the device busy, a launch takes 100 µs of the host; chunks run as fast as graphs",
        points=tuple(sorted(sums.items())),
        fixed=max(0.0, step - sums[1] - 128 * context),
        context=context,
        share=0.6,
        host=100e-6,
        num_layers=36,
    )
