"""Attention over paged keys and values on a GPU: against float64, and bits that depend on nothing else."""

from __future__ import annotations

from dataclasses import replace

import paged_cases as cases
import pytest
import torch
from paged_cases import paged_case

from labkit.kernels import paged_attention as paged
from labkit.kernels import paged_prefill
from labkit.kernels.capture import capturing
from labkit.kernels.launch import Launch
from labkit.kernels.paged_layer import PagedLayer

pytestmark = pytest.mark.gpu

KV = ((torch.float16, False), (torch.bfloat16, False), (torch.float16, True), (torch.bfloat16, True))


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize(("dtype", "int8"), KV)
def test_error_is_at_most_twice_that_of_plain_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, int8: bool
) -> None:
    rows = ((4096, 1), (0, 1), (5, 40), (300, 17), (2500, 70), (0, 130))
    cases.check_accurate(paged_case(shape, rows, dtype=dtype, int8=int8, device="cuda"))
    decode = tuple((total - 1, 1) for total in (*cases.TOTALS, 4097))
    cases.check_fused(paged_case(shape, decode, dtype=dtype, int8=int8, device="cuda", qk_norm=True))


@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize("odd", [cases.NAN, float("inf")])
def test_a_value_that_is_no_number_shows_from_its_token_on_alone(
    shape: tuple[int, int, int], odd: float
) -> None:
    if paged.query_tile(shape[1]) == 1:
        pytest.skip("one query a block")
    for dtype in cases.DTYPES:
        for history in (0, 25, 700):
            case = paged_case(shape, ((history, 50), (40, 3)), dtype=dtype, device="cuda")
            cases.check_odd_value(case, odd)


@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize(("dtype", "int8"), KV)
def test_tall_tiles_have_the_same_bits(shape: tuple[int, int, int], dtype: torch.dtype, int8: bool) -> None:
    rows = ((5, 9), (140, 70), (0, 1), (0, 600), (1900, 300), (5000, 64))
    for block_size in (8, 16, 64):
        options = {"dtype": dtype, "int8": int8, "block_size": block_size, "device": "cuda"}
        cases.check_tall(paged_case(shape, rows, **options))
    cases.check_tall(
        paged_case(shape, tuple((40 * i, 1 + 3 * i) for i in range(70)), dtype=dtype, device="cuda")
    )


@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize("odd", [cases.NAN, float("inf")])
def test_tall_tiles_show_a_value_that_is_no_number_from_its_token_on(
    shape: tuple[int, int, int], odd: float
) -> None:
    for dtype in cases.DTYPES:
        for history in (0, 127, 2500):
            case = paged_case(shape, ((history, 50), (40, 13)), dtype=dtype, device="cuda")
            cases.check_odd_value(case, odd, tall=True)


def test_queries_of_any_size_and_such_that_are_no_number() -> None:
    for dtype in cases.DTYPES:
        for size, outlier in cases.QUERY_SIZES:
            cases.check_query_sizes(dtype, size, outlier, "cuda")
    for int8 in (False, True):
        for odd in (cases.NAN, float("inf")):
            cases.check_odd_query(odd, int8=int8, device="cuda")


def test_the_launch_that_is_chosen_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks of many heads fill this GPU with tall tiles, one row of a few tokens does not."""
    ran: list[str] = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (ran.append(self.source.name), run(self))[1])
    facts = paged_prefill._facts(torch.device("cuda", torch.cuda.current_device()))
    long = paged_case((128, 4, 8), ((700, 1500), (3, 1), (0, 1800)), device="cuda")
    for case, enough in (
        (long, 2 * facts[0] <= 207 * 8),
        (paged_case((128, 8, 2), ((9, 64),), device="cuda"), False),
    ):
        q = case.append()
        expected = case.attend(q, tall_from=0)
        ran.clear()
        assert torch.equal(case.attend(q, counts=case.counts), expected)
        resident = facts[1] // paged_prefill.shared_bytes(128)
        assert ("paged_prefill" in ran) == (enough and resident >= 2)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_every_block_size(block_size: int) -> None:
    for int8 in (False, True):
        case = paged_case((128, 8, 2), ((700, 1), (64, 1)), int8=int8, block_size=block_size, device="cuda")
        cases.check_fused(case)


@pytest.mark.parametrize("shape", [(128, 8, 2), (96, 12, 1), (64, 3, 3)])
@pytest.mark.parametrize(("dtype", "int8"), KV)
def test_bits_depend_on_a_token_and_its_past_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, int8: bool
) -> None:
    cases.check_invariant(shape, dtype, int8=int8, device="cuda", long=5000)


def test_repeats_its_bits_on_two_streams() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    rows = ((4000, 1), (33, 1), (1500, 1), (6000, 1))
    inputs = [paged_case((128, 8, 2), rows, device="cuda", seed=i) for i in range(2)]
    queries = [case.append() for case in inputs]
    scratches = [
        paged.Scratch.new(4, 2, 8, 128, case.max_context, "cuda", planned=paged.Plan(1, 4)) for case in inputs
    ]
    given = [(case.int32(case.lengths), case.int32(case.starts), case.tiles()) for case in inputs]

    def attend(i: int) -> torch.Tensor:
        case = inputs[i]
        return paged.paged_attention(
            queries[i], case.layer, case.tables, *given[i], max_context=case.max_context, scratch=scratches[i]
        )

    expected = [attend(i) for i in range(2)]
    torch.cuda.synchronize()
    wrong = torch.zeros(2, device="cuda")
    for _ in range(500):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                wrong[i : i + 1] += (attend(i) != expected[i]).any()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]
    assert not any(scratch.tickets.any() for scratch in scratches)


def test_slots_beyond_two_to_the_31_elements() -> None:
    heads, size, head_dim = 8, 64, 128
    blocks = 2**31 // (heads * size * head_dim) + 200
    case = paged_case((head_dim, 4, heads), ((150, 1), (90, 1)), block_size=size, device="cuda")
    expected = case.fresh().fused()
    shape = (blocks, heads, size, head_dim)
    far = PagedLayer(*(torch.empty(shape, dtype=torch.float16, device="cuda") for _ in range(2)))
    away = blocks - case.layer.num_blocks
    for mine, theirs in zip(cases.held(far), cases.held(case.layer), strict=True):
        mine[away:] = theirs
    moved = replace(case, layer=far, tables=case.tables + away)
    assert torch.equal(moved.fresh().fused(), expected)
    assert torch.equal(moved.attend(moved.append()), expected)


def test_a_captured_step_follows_lengths_and_tables() -> None:
    case = paged_case((128, 8, 2), ((900, 1), (63, 1), (17, 1)), device="cuda")
    expected = case.fresh().fused()
    lengths, tables = torch.full_like(case.int32(case.lengths), -1), torch.zeros_like(case.tables)
    scratch, out = case.scratch(), torch.zeros_like(expected)

    def step() -> None:
        paged.decode_attention(
            case.qkv, case.layer, tables, lengths, case.cos, case.sin, scratch, capacity=case.capacity,
            out=out, overlap=True,
        )  # fmt: skip

    step()  # every row is idle: nothing is written
    assert not out.any()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        step()
    lengths.copy_(case.int32(case.lengths))
    tables.copy_(case.tables)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
    assert not scratch.tickets.any()


def test_registers_are_those_of_the_compiled_code_and_nothing_spills() -> None:
    from labkit.kernels import runner
    from labkit.kernels.resources import stated_registers

    for int8 in (False, True):
        sources = [paged.source(torch.float16, 128, group, 16, int8=int8, fused=True) for group in (7, 8, 16)]
        sources += [paged.source(torch.float16, 128, 8, 16, int8=int8, queries=2)]
        sources += [paged.rope_source(torch.float16, 128, 16, int8=int8)]
        sources += [paged_prefill.source(torch.float16, 128, group, 16, int8=int8) for group in (1, 7, 8)]
        for source in sources:
            kernel = runner.load(source, "cuda")
            assert kernel.local_bytes == 0 and kernel.registers <= stated_registers(source)
