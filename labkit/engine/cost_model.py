"""What a forward costs, as a few figures that can be explained: for the simulated executor.

Time of a forward = products(new tokens) + a fixed part + the context that its rows attend to. The first is a
line through recorded points; at small sizes it is flat, since the weights are read once for all rows, which
is what every policy lives on. Decode steps may have a line of their own.

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
from typing import Any

from labkit import quoted
from labkit.engine.executor import Row
from labkit.errors import require
from labkit.paths import data_dir

_H200_MODEL = "qwen2.5-3b"
_H200_SIZES = (32, *range(64, 641, 64))


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a forward on some device, for some model.

    Args:
        name: of device and model.
        origin: "simulated from measured" or "simulated from quoted"; shown wherever a result is.
        source: where the figures come from, and what was assumed.
        points: (new tokens, seconds) of all products of a forward, ascending; straight lines between
            them and beyond the last.
        sizes: tokens that forwards of ``points`` are padded to, ascending; larger ones, or all without any,
            are what they are.
        fixed: seconds of a forward that do not depend on its rows.
        decode: the same of forwards in which every row has one new token; empty: no difference.
        context: seconds for each position that a row with one new token attends to.
        chunk_context: the same of rows with more, by their number: (new tokens, seconds); empty: no
            difference.
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
    decode: tuple[tuple[int, float], ...] = ()
    sizes: tuple[int, ...] = ()
    fixed: float = 0.0
    context: float = 0.0
    chunk_context: tuple[tuple[int, float], ...] = ()
    share: float = 1.0
    host: float = 0.0
    num_layers: int = 1

    def __post_init__(self) -> None:
        require(tuple(sorted(set(self.sizes))) == self.sizes, "sizes", self.sizes, "sizes in rising order")
        for name in ("points", "decode", "chunk_context"):
            tokens = [at for at, _ in getattr(self, name)]
            ascend = len(tokens) >= 2 and all(a < b for a, b in pairwise(tokens))
            optional = name != "points" and not tokens
            require(ascend or optional, name, tokens, "two or more sizes in rising order")
        require(0 < self.share <= 1, "share", self.share, "above 0, at most 1")
        of_points = [seconds for _, seconds in (*self.points, *self.decode, *self.chunk_context)]
        least = min(self.fixed, self.context, self.host, *of_points)
        require(least >= 0, "seconds", least, "none below 0")

    def products(self, tokens: int) -> float:
        """Seconds of all products with so many rows."""
        return _on_the_line(self.points, _padded(self.sizes, tokens))

    def seconds(self, rows: Sequence[Row]) -> float:
        """Seconds of a whole forward, alone on the device."""
        tokens = sum(row.count for row in rows)
        decode = self.decode and tokens == len(rows)
        total = self.fixed + (_on_the_line(self.decode, tokens) if decode else self.products(tokens))
        for row in rows:
            of_many = row.count > 1 and self.chunk_context
            total += row.stop * (_on_the_line(self.chunk_context, row.count) if of_many else self.context)
        return total


def _padded(sizes: Sequence[int], tokens: int) -> int:
    return next((size for size in sizes if size >= tokens), tokens)


def _on_the_line(points: Sequence[tuple[int, float]], tokens: int) -> float:
    at = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(0.0, y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))


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
    """Qwen2.5-3B W4 on an H200, from this project's newest records of it in data/measured.

    Decode's attention: the record of paged attention, between contexts 2,048 and 4,096. Decode steps: the
    middle gap of 1 … 64 clients. Forwards with a prompt's chunk: the mean gap of ``mixed``, and the middle
    one of ``serial`` less a decode step, while a document was computed, and the 99th of 100 for its end: a
    line of the context between them. They are padded as the tiles of a product and the sizes of its graphs
    (labkit.engine.chunk_graphs) have it. The share is what makes the joined overlap save what it did.
    """
    calls = {
        (entry["m"], entry["k"]): 1e-6 * entry["summary"]["median_us"]
        for record in _records("attention", every=True)
        for entry in record["entries"]
        if entry["table"] == f"attention {_H200_MODEL}" and entry["status"] == "timed"
        if (entry["contender"], entry["format"]) == ("paged", "fp16") and entry["n"] <= 1
    }
    layers = quoted.model(_H200_MODEL).num_layers
    context = layers * (calls[16, 4096] - calls[16, 2048]) / (16 * (4096 - 2048))

    (clients,) = _records(f"concurrency-{_H200_MODEL}")
    steps = {
        entry["m"]: entry["figures"]["itl"]["p50"]
        for entry in clients["entries"]
        if entry["contender"] == "overlap:512" and entry["status"] == "timed"
    }
    (jitter,) = _records(f"jitter-{_H200_MODEL}")
    cells = {e["contender"]: e["figures"] for e in jitter["entries"] if e["table"] == "jitter document"}
    streams, document = jitter["parameters"]["streams"], jitter["parameters"]["document"]
    step = cells["serial:128"]["itl_steady"]["p50"]
    forwards, slopes = {}, {1: context}
    for label, cell in cells.items():
        name, _, size_text = label.partition(":")
        if name in ("serial", "mixed") and size_text.isdigit():
            tokens, gap, mixed = int(size_text), cell["itl_beside"], name == "mixed"
            middle = (document + tokens) / 2  # of the positions that a chunk attends to
            # Of serial's gaps one is that in which the document came: it is in the mean, not in the middle.
            usual = gap["mean" if mixed else "p50"]
            slope = (gap["p99"] - usual) / (document - middle)
            if mixed or tokens not in slopes:
                slopes[tokens] = slope
            size = _padded(_H200_SIZES, tokens + streams * mixed)
            if mixed or size not in forwards:
                forwards[size] = usual - slope * middle - (0 if mixed else step)
    saved = [
        cells[f"overlap:{size} no overlap"]["itl_beside"]["mean"]
        - cells[f"overlap:{size}"]["itl_beside"]["mean"]
        for size in (128, 512)
    ]
    small = {rows: seconds for rows, seconds in steps.items() if rows <= streams}
    return CostModel(
        name="H200, Qwen2.5-3B W4",
        origin="simulated from measured",
        source=f"data/measured: {jitter['name']} ({jitter['started'][:10]}), {clients['name']}, attention. "
        "Assumed, not measured: a launch takes 100 µs of the host",
        points=tuple(sorted((small | forwards).items())),
        decode=tuple(sorted(steps.items())),
        sizes=_H200_SIZES,
        context=context,
        chunk_context=tuple(sorted(slopes.items())),
        share=1 - sum(saved) / len(saved) / step / 2,
        host=100e-6,
        num_layers=layers,
    )


def _records(name: str, *, every: bool = False) -> list[dict[str, Any]]:
    """The newest record of an H200 whose file begins so; or all of them, as JSON."""
    files = sorted((data_dir() / "measured").glob(f"{name}-h200-*.json"))
    require(bool(files), "data/measured", f"no {name}-h200-*.json", "a record of labkit bench")
    return [json.loads(path.read_text(encoding="utf-8")) for path in (files if every else files[-1:])]
