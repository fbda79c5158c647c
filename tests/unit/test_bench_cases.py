"""The products that are timed, and the ways to name them."""

from __future__ import annotations

import pytest

from labkit import quoted
from labkit.bench import cases
from labkit.errors import InputError


def test_the_seed_table_has_the_articles_shapes() -> None:
    found = cases.cases("seed")
    for form in ("w4", "w3"):
        table = quoted.table(quoted.DEEPINFER, f"tiled_{form}")
        mine = [(c.m, c.n, c.k) for c in found if c.table == f"tiled_{form}"]
        assert mine == [(row["m"], row["n"], row["k"]) for row in table.rows]
    batch = [c for c in found if c.table == "w3_batch_tile"]
    assert [(c.format, c.m, c.n, c.k, c.group) for c in batch] == [
        ("w3", m, 5632, 2048, 128) for m in (2, 4, 8)
    ]
    assert all("gemv_small_batch" in c.contenders and "gemv_batch_w3" in c.contenders for c in batch)


def test_the_articles_tables_are_compared_with_the_fallback_and_with_dense_cublas() -> None:
    for case in cases.cases("tiled_w4") + cases.cases("tiled_w3"):
        assert case.contenders == ("gemm_tiled", "dequant_matmul", "dense_fp16")


def test_the_sweep_covers_every_m_for_both_formats_and_each_shape() -> None:
    found = cases.cases("sweep", shapes=[(64, 256), (96, 512)])
    assert len(found) == 15 * 2 * 2
    assert {c.m for c in found} == {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64}
    assert ("gemv_batch_w3" in found[0].contenders) == (found[0].format == "w3")


def test_bits_choose_formats() -> None:
    assert {c.format for c in cases.cases("seed", formats=["w3"])} == {"w3"}
    with pytest.raises(InputError, match="tiled_w4"):
        cases.cases("tiled_w4", formats=["w3"])
    with pytest.raises(InputError, match="w5"):
        cases.cases("seed", formats=["w5"])


def test_the_fast_table_has_the_models_shapes_and_everyone_who_competes() -> None:
    found = cases.cases("fast", m=cases.FAST_M)
    assert {(c.n, c.k) for c in found} == set(cases.parse_shapes("3b,7b")) and len(found) == 8 * 8 * 2
    assert "fast" not in {c.table for c in cases.cases("seed")}  # chapter 07's curves stay what they are
    for case in found:
        seed = ("seed_dispatch",) if case.m <= 64 else ()
        assert case.contenders == ("tensor_core", *seed, "dequant_matmul", "dense_fp16")
    peers = cases.cases("fast", peers=True, dtype="bfloat16", group=32)
    assert {c.group for c in peers} == {32} and {c.dtype for c in peers} == {"bfloat16"}
    for case in peers:
        assert "dense_bf16" in case.contenders and f"humming_{case.format}" in case.contenders
        assert ("tinygemm_w4" in case.contenders) == (case.format == "w4")


def test_neighbours_of_one_weight_are_grouped() -> None:
    found = cases.cases("fast", shapes=[(64, 256), (96, 512)], m=(1, 8, 16))
    together = cases.grouped(found)
    assert [len(one) for one in together] == [3] * 4 and [c for one in together for c in one] == found
    assert all(len({c.key for c in one}) == 1 for one in together)


def test_an_unknown_table_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match="w3_batch_tile"):
        cases.cases("nothing")


def test_shapes_are_pairs_or_models() -> None:
    assert cases.parse_shapes("5632x2048, 64×96,5632x2048") == [(5632, 2048), (64, 96)]
    assert cases.parse_shapes("7b") == [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)]
    assert (22016, 2048) in cases.parse_shapes("3b") and (2048, 11008) in cases.parse_shapes("3b")


@pytest.mark.parametrize("text", ["", "5632", "0x64", "axb", "9b", "5632x2048x3", "-1x4"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="shapes"):
        cases.parse_shapes(text)


def test_numbers_are_lists_and_ranges() -> None:
    assert cases.parse_numbers("1-4,8, 2", "m") == [1, 2, 3, 4, 8]
    for text in ("0", "4-1", "x", "1.5", "-3", ""):
        with pytest.raises(InputError, match="m"):
            cases.parse_numbers(text, "m")


def test_shrunk_cases_keep_m_and_are_small_and_ragged() -> None:
    for case in cases.cases("seed"):
        small = cases.shrunk(case)
        assert small.m == case.m and small.contenders == case.contenders
        assert small.n * small.k <= 1 << 20 and small.k % case.group == 0
        assert any(small.n % tile for tile in (8, 64))
