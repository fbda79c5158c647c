"""Quoted figures: complete, sourced, and consistent with themselves."""

from __future__ import annotations

import pytest

from labkit import quoted
from labkit.errors import InputError


@pytest.mark.parametrize("article", [quoted.DEEPINFER, quoted.KESTREL])
def test_every_table_names_its_source_and_columns(article: str) -> None:
    for table_id, table in quoted.tables(article).items():
        assert table.id == table_id and table.origin == "quoted"
        assert "series, article" in table.source and "section" in table.source
        assert table.rows
        for row in table.rows:
            assert set(row) == set(table.columns), table_id
        assert all(row["origin"] == "quoted" and row["source"] for row in table.labelled())


@pytest.mark.parametrize("name", ["tiled_w4", "tiled_w3"])
def test_printed_speed_ups_follow_from_the_printed_times(name: str) -> None:
    for row in quoted.table(quoted.DEEPINFER, name).rows:
        assert row["fallback_ms"] / row["tiled_ms"] == pytest.approx(row["speedup"], abs=0.006)


def test_batch_tile_and_concurrency_ratios() -> None:
    for row in quoted.table(quoted.DEEPINFER, "w3_batch_tile").rows:
        assert row["grid_y_ms"] / row["batch_tile_ms"] == pytest.approx(row["ratio"], abs=0.006)
    for row in quoted.table(quoted.DEEPINFER, "concurrency_throughput").rows:
        assert row["new_tok_s"] / row["old_tok_s"] == pytest.approx(row["speedup"], abs=0.006)


def test_the_two_concurrency_tables_agree() -> None:
    new = quoted.table(quoted.DEEPINFER, "concurrency_throughput").rows
    overlap = quoted.table(quoted.DEEPINFER, "overlap").rows
    assert [row["new_tok_s"] for row in new] == [row["on_tok_s"] for row in overlap]


def test_item_tables_answer_by_item() -> None:
    split = quoted.table(quoted.KESTREL, "z_split")
    assert (split.value("target_blocks"), split.value("part_cap_mib")) == (512, 64)
    assert quoted.table(quoted.KESTREL, "offload").value("flop_threshold") == 10_000_000
    with pytest.raises(InputError, match="target_blocks"):
        split.value("nope")
    with pytest.raises(InputError, match="not an item table"):
        quoted.table(quoted.DEEPINFER, "tiled_w4").value("m")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError, match="tiled_w4"):
        quoted.table(quoted.DEEPINFER, "nope")
    with pytest.raises(InputError, match="kestrel_cuda_04"):
        quoted.tables("nope")
    with pytest.raises(InputError, match="smollm2-135m"):
        quoted.model("nope")


@pytest.mark.parametrize(
    ("key", "millions"),
    # total parameters as published, without norms and biases
    [("smollm2-135m", 134.5), ("qwen2.5-0.5b", 494.0), ("qwen2.5-1.5b", 1543.6), ("qwen2.5-7b", 7615.3)],
)
def test_weight_counts_of_the_models(key: str, millions: float) -> None:
    assert quoted.model(key).resident_weights / 1e6 == pytest.approx(millions, abs=0.1)


def test_kv_bytes_of_one_token() -> None:
    # 36 layers, 2 KV heads of 128, K and V, two bytes each
    assert quoted.model("qwen2.5-3b").kv_bytes_per_token() == 36 * 2 * 128 * 2 * 2
    assert quoted.model("qwen2.5-3b").kv_bytes_per_token(1) == 36 * 2 * 128 * 2
