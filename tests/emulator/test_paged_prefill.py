"""Tall tiles of the prefill attention in the emulator: the bits of the other kernel, races, shared memory."""

from __future__ import annotations

from dataclasses import replace

import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import paged_case

from labkit.errors import InputError
from labkit.kernels import paged_attention as paged
from labkit.kernels import paged_prefill
from labkit.kernels.launch import Launch

FP16, BF16 = cases.DTYPES


FORMATS = ((FP16, False), (BF16, True), (BF16, False), (FP16, True))
"""Dtype and INT8. Shapes take turns with them: a set of constants takes seconds to compile."""


@pytest.mark.parametrize(
    ("shape", "dtype", "int8"), [(shape, *FORMATS[i % 4]) for i, shape in enumerate(cases.SHAPES)]
)
def test_bits_are_those_of_the_other_kernel(
    shape: tuple[int, int, int], dtype: torch.dtype, int8: bool
) -> None:
    # Decode rows and chunks; a tile of one row alone, several, one that is not whole; a step that is not.
    case = paged_case(shape, ((5, 9), (140, 70), (0, 1), (0, 131)), dtype=dtype, int8=int8)
    y = cases.check_tall(case)
    wide = case.append().view(len(y), case.heads, -1)
    cases.near(y, cases.reference(case, wide, dtype), cases.reference(case, wide), dtype)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 1900, 2047, 2048, 2100, 2559, 2560, 4000])
@pytest.mark.parametrize("int8", [False, True])
def test_every_place_in_the_order_of_the_sums(length: int, int8: bool) -> None:
    """Splits of one turn, of four, the first that is not whole: their last tokens, one more, one less."""
    cases.check_tall(paged_case((64, 7, 1), ((length, 30), (length, 1)), int8=int8))


@pytest.mark.parametrize("group", [2, 5, 6, 10, 13])
def test_groups_that_the_shapes_do_not_have(group: int) -> None:
    cases.check_tall(paged_case((64, group, 2), ((20, 77), (150, 3)), int8=group % 2 == 0))


@pytest.mark.parametrize(("block_size", "int8"), [(8, False), (8, True), (32, True), (64, False)])
def test_every_block_size(block_size: int, int8: bool) -> None:
    cases.check_tall(paged_case((64, 4, 2), ((170, 40), (63, 1), (64, 3)), int8=int8, block_size=block_size))


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(64, 3, 1), (80, 5, 1)]),
    int8=st.booleans(),
    rows=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 90)), min_size=1, max_size=6),
)
def test_any_rows(shape: tuple[int, int, int], int8: bool, rows: list[tuple[int, int]]) -> None:
    cases.check_tall(paged_case(shape, tuple(rows), int8=int8))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("shape", "dtype"), [((64, 3, 2), BF16), ((128, 8, 1), FP16)])
def test_a_value_that_is_no_number_shows_from_its_token_on_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, odd: float
) -> None:
    cases.check_odd_value(paged_case(shape, ((130, 20), (7, 12)), dtype=dtype), odd, tall=True)


@pytest.mark.parametrize(
    ("shape", "rows", "int8"),
    [
        ((128, 8, 2), ((126, 21),), False),
        ((80, 12, 1), ((0, 3), (300, 8)), True),
        ((96, 5, 1), ((2040, 30), (0, 1)), True),
        ((64, 3, 1), ((2200, 25),), False),
    ],
)
def test_no_race_and_nothing_out_of_bounds(
    shape: tuple[int, int, int], rows: tuple[tuple[int, int], ...], int8: bool
) -> None:
    case = paged_case(shape, rows, int8=int8)
    q = case.append()
    expected, out = case.attend(q), torch.full_like(q, cases.NAN)
    launch = case.chunks(q, out).tall_launch()
    trace = launch.trace()
    assert trace.ok, trace.faults
    assert torch.equal(out, expected)
    # The bytes of shared memory that Python states are all that the kernel has, and it needs all of them.
    less = replace(launch, shared_bytes=launch.shared_bytes - 4).trace()
    assert not less.ok


def test_idle_rows_and_tiles_beyond_the_context_are_left_alone() -> None:
    case = paged_case((64, 4, 1), ((20, 30), (40, 5), (0, 3)))
    q = case.append()
    expected = case.attend(q)
    out = torch.full_like(q, cases.NAN)
    lengths = case.int32((20, -1, 0))
    paged.paged_attention(
        q, case.layer, case.tables, lengths, case.int32(case.starts), case.tiles(), max_context=50,
        out=out, tall_from=1,
    )  # fmt: skip
    assert torch.equal(out[:30], expected[:30]) and torch.equal(out[35:], expected[35:])
    assert out[30:35].isnan().all()


def test_a_key_serves_as_many_queries_as_it_should() -> None:
    """What the tall tile is for: sectors of keys and values, counted; each tile reads them once."""
    case = paged_case((128, 8, 1), ((0, 128),))
    q = case.append()
    sectors = {}
    step = case.chunks(q, torch.empty_like(q))
    for tall, launch in ((False, step.launch()), (True, step.tall_launch())):
        sectors[tall] = launch.trace().sectors(buffer="keys")
    tokens = {
        tall: sum(min(i + step, 128) for i in range(0, 128, step)) for tall, step in ((False, 2), (True, 8))
    }
    assert sectors[True] == tokens[True] * 8, "256 bytes a token: eight sectors"
    assert sectors[False] >= tokens[False] * 8 > 3.8 * sectors[True]


@pytest.mark.parametrize("int8", [False, True])
def test_no_bank_is_met_twice_on_the_way(int8: bool) -> None:
    """Keys and values into the ring, and out of it into fragments; whole steps alone."""
    case = paged_case((128, 8, 1), ((248, 8),), int8=int8)
    q = case.append()
    trace = case.chunks(q, torch.empty_like(q)).tall_launch().trace()
    for kind in ("cp.async write", "read", "ldmatrix"):
        passes = [
            trace.total(metric, space="shared", kind=kind) for metric in ("wavefronts", "ideal_wavefronts")
        ]
        assert passes[0] == passes[1], kind
        assert passes[0] > 0 or (int8 and kind == "ldmatrix")


@pytest.mark.parametrize("known", [False, True])
def test_each_row_is_taken_by_one_of_the_two(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few new tokens by the other kernel, the rest in tall tiles; no launch where there are none."""
    case = paged_case((64, 4, 1), ((200, 1), (20, 30), (0, 7), (40, 8)))
    q = case.append()
    expected = case.attend(q)
    ran: list[str] = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (ran.append(self.source.name), run(self))[1])
    short, tall = "paged_attention", "paged_prefill"
    for tall_from, wanted in (
        (0, [short]),
        (1, [tall]),
        (8, [short, tall]),
        (30, [short, tall]),
        (31, [short]),
    ):
        ran.clear()
        out = torch.full_like(q, cases.NAN)
        case.attend(q, out=out, tall_from=tall_from, counts=case.counts if known else None)
        assert torch.equal(out, expected), tall_from
        assert ran == (wanted if known or tall_from < 2 else [short, tall])
    with pytest.raises(InputError, match="tall_from"):
        case.attend(q, tall_from=-1)


def test_queries_of_a_tile() -> None:
    assert [paged_prefill.queries(group) for group in (1, 3, 7, 8, 16)] == [64, 21, 9, 8, 4]


@pytest.mark.parametrize(
    ("counts", "facts", "int8", "expected"),
    [
        ([784], (132, 233_472), False, 0),  # 196 blocks: 1.48 a multiprocessor
        ([793], (132, 233_472), False, 8),
        ([512, 256, 25], (132, 233_472), True, 8),
        ([1088], (16, 102_400), False, 0),  # one block fits a multiprocessor
        ([7] * 1000, (132, 233_472), False, 0),  # no row that fills a tile
        ([], (132, 233_472), False, 0),
    ],
)
def test_tall_tiles_are_taken_where_two_blocks_share_a_multiprocessor(
    counts: list[int], facts: tuple[int, int], int8: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_prefill, "_facts", lambda device: facts)
    found = paged_prefill.tall_from(counts, 2, 128, 8, torch.device("cuda"), int8=int8)
    assert found == expected
    assert paged_prefill.tall_from(counts, 2, 128, 8, torch.device("cpu"), int8=int8) == 0
