"""Figures that others published, with their source: ``data/quoted/*.json``.

A quoted number is never mixed with one of ours: it keeps ``origin`` = "quoted" and a source
(series, article, section) wherever it is shown.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from labkit.errors import require
from labkit.paths import data_dir

DEEPINFER = "deepinfer_sm86_07"
"""Tiled W4/W3 GEMM, two streams, RTX 3050 Laptop."""

KESTREL = "kestrel_cuda_04"
"""Grouped-quantised GEMM and z-split, RTX 5090."""


@dataclass(frozen=True)
class QuotedTable:
    """One table of an article.

    Attributes:
        id, title: its name here, and what it holds.
        source: series, article and section.
        columns: column name → unit or meaning.
        rows: one dict a row, with the columns' names as keys.
        notes: conditions of the measurement, or what was not measured.
    """

    id: str
    title: str
    source: str
    columns: dict[str, str]
    rows: tuple[dict[str, Any], ...]
    notes: str
    origin: str = "quoted"

    def labelled(self) -> list[dict[str, Any]]:
        """Rows with ``origin`` and ``source`` added, as :func:`labkit.tables.table` takes them."""
        return [{**row, "origin": self.origin, "source": self.source} for row in self.rows]

    def value(self, item: str) -> Any:
        """The value of one row of an item/value table.

        Raises:
            InputError: no such item.
        """
        found = {row["item"]: row["value"] for row in self.rows if "item" in row}
        require(
            item in found, "item", repr(item), "one of " + (", ".join(found) or "nothing: not an item table")
        )
        return found[item]


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder-only model of the Llama/Qwen family (counts, not bytes)."""

    key: str
    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    source: str

    @property
    def layer_weights(self) -> int:
        """Weights of the seven projections of one layer."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output head (vocabulary × hidden)."""
        return self.vocab_size * self.hidden_size

    @property
    def decode_weights(self) -> int:
        """Weights that one decode step reads: all layers and the head. Norms are left out (< 0.1 %)."""
        return self.num_layers * self.layer_weights + self.head_weights

    @property
    def resident_weights(self) -> int:
        """Weights held in memory: those of a decode step, and the embedding when it is not tied."""
        return self.decode_weights + (0 if self.tied_embeddings else self.head_weights)

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> float:
        """Bytes of K and V that one token adds, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


@functools.cache
def _file(name: str) -> dict[str, Any]:
    path = data_dir() / "quoted" / f"{name}.json"
    known = sorted(p.stem for p in path.parent.glob("*.json"))
    require(path.is_file(), "quoted file", repr(name), "one of " + ", ".join(known))
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def tables(article: str) -> dict[str, QuotedTable]:
    """All tables of an article by id; ``article`` is :data:`DEEPINFER` or :data:`KESTREL`."""
    entries = _file(article).get("tables", [])
    return {entry["id"]: QuotedTable(**{**entry, "rows": tuple(entry["rows"])}) for entry in entries}


def table(article: str, table_id: str) -> QuotedTable:
    """One table of an article.

    Raises:
        InputError: unknown article or table; the message lists the known ones.
    """
    found = tables(article)
    require(table_id in found, "table_id", repr(table_id), "one of " + ", ".join(found))
    return found[table_id]


@functools.cache
def models() -> dict[str, ModelShape]:
    """Shapes of the models that the course counts bytes for, by key, smallest first."""
    return {entry["key"]: ModelShape(**entry) for entry in _file("models")["models"]}


def model(key: str) -> ModelShape:
    """One model's shape.

    Raises:
        InputError: unknown key.
    """
    found = models()
    require(key in found, "model", repr(key), "one of " + ", ".join(found))
    return found[key]
