"""Views, storage and ragged steps of the decoder on a GPU: no synchronise, right under load, right values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import decode_cases as cases
import pytest
import torch
from step_cases import MODELS, Runner, off, rows_of, run_schedule

from labkit.bench.decode_check import Errors
from labkit.cache.blocks import BlockTable
from labkit.cache.paged import PagedKV
from labkit.cache.views import KVView, ViewBuilder
from labkit.models.graph_decoder import GraphDecoder

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


def steps(count: int) -> list[tuple[list[BlockTable], list[int], list[int]]]:
    """Tables, counts and starts of so many different steps."""
    found = []
    for seed in range(count):
        source = torch.Generator().manual_seed(seed)
        tables, counts, starts = [], [], []
        for _ in range(1 + seed % 5):
            start, new = (int(n) for n in torch.randint(1, 200, (2,), generator=source))
            blocks = torch.randint(0, 1000, (-(-(start + new) // 16),), generator=source).tolist()
            tables.append(BlockTable(blocks, start + new))
            counts.append(new)
            starts.append(start)
        found.append((tables, counts, starts))
    return found


def check_equal(view: KVView, right: KVView) -> None:
    for field in fields(view):
        mine, wanted = getattr(view, field.name), getattr(right, field.name)
        if isinstance(mine, torch.Tensor):
            assert mine.is_cuda and torch.equal(mine.cpu(), wanted), field.name
        else:
            assert mine == wanted, field.name


def test_views_are_built_without_a_synchronise_while_the_device_is_busy() -> None:
    here, there = ViewBuilder("cpu", 16, 4), ViewBuilder("cuda", 16, 4)
    there.build(*steps(1)[0][:2], starts=steps(1)[0][2])
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # no copy can run before all views are built
        views = [there.build(tables, counts, starts=starts) for tables, counts, starts in steps(20)]
        assert there.ring is not None and there.ring.made >= 20
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for view, (tables, counts, starts) in zip(views, steps(20), strict=True):
        check_equal(view, here.build(tables, counts, starts=starts))
    torch.cuda.synchronize()
    made = there.ring.made
    for tables, counts, starts in steps(20):
        view = there.build(tables, counts, starts=starts)
        torch.cuda.synchronize()
        check_equal(view, here.build(tables, counts, starts=starts))
    assert there.ring.made == made


def test_a_view_may_be_dropped_while_a_kernel_reads_it() -> None:
    """Its memory goes back to the stream that it came from, so what follows waits for the reader."""
    builder = ViewBuilder("cuda", 16, 4)
    kept = []
    for tables, counts, starts in steps(20):
        torch.cuda._sleep(1_000_000)
        view = builder.build(tables, counts, starts=starts)
        kept.append(view.slots.clone())
        del view
    here = ViewBuilder("cpu", 16, 4)
    for slots, (tables, counts, starts) in zip(kept, steps(20), strict=True):
        assert torch.equal(slots.cpu(), here.build(tables, counts, starts=starts).slots)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_steps_on_the_gpu(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """As near to float32 on the CPU as the CPU's own path in the same dtype, times two."""
    of = cases.config(**MODELS[name])
    rows = rows_of(of)
    options: dict[str, Any] = {"kv_dtype": kv_dtype}
    exact = run_schedule(Runner(cases.decoder(of, torch.float32), **options), rows)
    plain = run_schedule(Runner(cases.decoder(of, dtype), **options), rows)
    there = [ids.to("cuda") for ids in rows]
    mine = run_schedule(Runner(cases.decoder(of, dtype, "cuda"), **options), there)
    scale = float(torch.cat(exact).square().mean().sqrt())
    slack = 1e-5 if kv_dtype is None else 2e-3  # a code that falls the other way is a step of its scale
    assert off(mine, exact) <= 2 * off(plain, exact) + slack * scale


def test_growth_keeps_every_bit() -> None:
    of = cases.config()
    for kv_dtype in (torch.float16, torch.int8):
        kv = PagedKV(of, num_blocks=50, dtype=torch.float16, kv_dtype=kv_dtype, device="cuda")
        k, v = (torch.randn(800, 1, 64, device="cuda").half() for _ in range(2))
        for layer in range(of.num_layers):
            kv.write(layer, k + layer, v - layer, torch.arange(800, device="cuda"))
        before = [kv.gather(layer, list(range(50)), 800) for layer in range(of.num_layers)]
        kv.grow(500)
        for layer, pair in enumerate(before):
            assert all(map(torch.equal, kv.gather(layer, list(range(50)), 800), pair))


@pytest.mark.parametrize("block_size", [8, 64])
def test_the_graph_decoder_on_int8(block_size: int) -> None:
    of = cases.config(hidden_size=256, intermediate_size=384, num_heads=8, num_kv_heads=2)
    decoder = cases.decoder(of, torch.float16, "cuda", group=128)
    exact = cases.decoder(of, torch.float32, "cuda", group=128)
    options: dict[str, Any] = {"block_size": block_size, "kv_dtype": torch.int8}
    ours = GraphDecoder.from_decoder(decoder, capacity=64, batch=2, **options)
    assert ours.captured
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(3))
    caches = decoder.new_cache(64, 2, **options), exact.new_cache(64, 2, **options)
    ours.prefill(tokens[:, :33])
    decoder.hidden(tokens[:, :33], caches[0])
    exact.hidden(tokens[:, :33], caches[1])
    found: list[list[torch.Tensor]] = [[], [], []]
    for t in range(33, 40):
        column = tokens[:, t]
        found[0].append(exact(column[:, None], caches[1])[:, -1])
        found[1].append(decoder(column[:, None], caches[0])[:, -1])
        found[2].append(ours.forward(column).clone())
    right, plain, mine = (torch.stack(one, 1).float() for one in found)
    assert Errors.of(mine, right).within(Errors.of(plain, right))
