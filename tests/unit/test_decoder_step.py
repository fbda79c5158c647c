"""Ragged steps of the decoder over paged KV against its plain causal path, with torch and with the kernels.

A row's logits among mates and alone agree within rounding, not bit for bit: torch's products over weights
give a row other bits in another batch. Attention itself does not (test_paged_reference.py).
"""

from __future__ import annotations

import decode_cases as cases
import pytest
import torch
from step_cases import MODELS, SCHEDULE, Runner, off, rows_of, run_schedule

from labkit.cache.paged import PagedKV
from labkit.errors import InputError
from labkit.models.decoder import Decoder


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_steps_give_the_logits_of_the_causal_path(name: str, block_size: int, head_major: bool) -> None:
    of = cases.config(**MODELS[name])
    decoder = cases.decoder(of, torch.float32)
    rows = rows_of(of)
    found = run_schedule(Runner(decoder, block_size=block_size, head_major=head_major), rows)
    for row, (ids, mine) in enumerate(zip(rows, found, strict=True)):
        right = decoder(ids[None])[0]
        if name == "dynamic":  # its angles depend on how long the row was when a token was computed
            right = _by_steps(decoder, ids, row)
        assert (mine - right).abs().max() < 1e-4 * right.abs().max(), f"row {row}"


def _by_steps(decoder: Decoder, ids: torch.Tensor, row: int) -> torch.Tensor:
    """The row alone, in a static cache, with the chunks that the schedule gives it."""
    cache, found, done = decoder.new_cache(len(ids)), [], 0
    for count in [count for step in SCHEDULE for which, count in step if which == row]:
        found.append(decoder(ids[None, done : done + count], cache)[0])
        done += count
    return torch.cat(found)


def test_int8_changes_the_logits_by_little() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    rows = rows_of(of)
    found = run_schedule(Runner(decoder, kv_dtype=torch.int8), rows)
    for ids, mine in zip(rows, found, strict=True):
        right = decoder(ids[None])[0]
        error = (mine - right).abs().max()
        assert 0 < error < 0.05 * right.abs().max()
        cache = decoder.new_cache(len(ids), kv_dtype=torch.int8)
        static = torch.cat([decoder(ids[None, i : i + 1], cache)[0] for i in range(len(ids))])
        assert (static - mine).abs().max() < 1e-4 * right.abs().max()


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        ("qwen2", torch.float16, None),
        ("qwen3", torch.bfloat16, None),
        ("qwen2", torch.bfloat16, torch.int8),
        ("dynamic", torch.float16, None),
    ],
)
def test_the_kernels_serve_mixed_steps(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """In the emulator; as near to float32 as torch's path in the same dtype, times two."""
    of = cases.config(**MODELS[name])
    rows = rows_of(of)
    found = {
        kernels: run_schedule(Runner(cases.decoder(of, dtype), kv_dtype=kv_dtype, kernels=kernels), rows)
        for kernels in (True, False)
    }
    exact = run_schedule(Runner(cases.decoder(of, torch.float32), kv_dtype=kv_dtype), rows)
    assert off(found[True], exact) <= 2 * off(found[False], exact)
    assert not torch.equal(found[True][0], found[False][0])


def test_a_sequence_goes_on_after_the_pool_has_grown() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    ids = rows_of(of)[1]
    logits = {}
    for grows in (False, True):
        runner = Runner(decoder, num_blocks=3 if grows else 6, block_size=8)
        table = runner.allocator.allocate(20)
        parts = runner.step([(table, ids[:20], 0)])
        for at in range(20, 41):
            if not runner.allocator.can_append(table):
                assert grows and at == 24
                runner.kv.grow(6)
                runner.allocator.grow(6)
            runner.allocator.append(table)
            parts += runner.step([(table, ids[at : at + 1], at)])
        logits[grows] = torch.cat(parts)
    assert torch.equal(logits[True], logits[False]), "growth may not change a bit"


def test_a_fork_goes_its_own_way() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    ids, other = rows_of(of)[:2]
    runner = Runner(decoder, block_size=8)
    table = runner.allocator.allocate(11)
    runner.step([(table, ids[:11], 0)])
    twin = runner.allocator.fork(table)
    for one in (table, twin):
        runner.kv.copy_blocks(runner.allocator.append(one))
    assert table.blocks[0] == twin.blocks[0] and table.blocks[1] != twin.blocks[1]
    found = runner.step([(table, ids[11:12], 11), (twin, other[11:12], 11)])
    right = decoder(torch.stack((ids[:12], torch.cat((ids[:11], other[11:12])))))[:, -1:]
    for mine, wanted in zip(found, right, strict=True):
        assert (mine - wanted).abs().max() < 1e-4 * wanted.abs().max()
    runner.allocator.validate([table, twin])


def test_what_does_not_fit_is_refused_by_name() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    runner = Runner(decoder)
    table = runner.allocator.allocate(4)
    view = runner.builder.build([table], [4])
    before = [layer.keys.clone() for layer in runner.kv.layers]
    ids = torch.tensor([1, 2, 3, 4])
    for tokens in (ids[:3], ids.int(), ids[None], torch.tensor([1, 2, 3, 300]), torch.tensor([-1, 2, 3, 4])):
        with pytest.raises(InputError, match=r"^tokens: "):
            decoder.step(tokens, runner.kv, view)
    half = PagedKV(of, num_blocks=40, dtype=torch.float16)
    with pytest.raises(InputError, match=r"^kv: got torch.float16 on cpu; expected torch.float32"):
        decoder.step(ids, half, view)
    other = PagedKV(cases.config(num_layers=1), num_blocks=40)
    with pytest.raises(InputError, match=r"^kv: got 1 layers"):
        decoder.step(ids, other, view)
    with pytest.raises(InputError, match=r"^kernels: "):
        decoder.step(ids, runner.kv, view, kernels=True)
    assert all(
        torch.equal(layer.keys.nan_to_num(7.0), old.nan_to_num(7.0))
        for layer, old in zip(runner.kv.layers, before, strict=True)
    )
