"""Paged storage against a dictionary: writing, gathering, copy-on-write, growth, sizes, refusals."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import decode_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cache.blocks import BlockCopy
from labkit.cache.paged import PagedKV
from labkit.errors import InputError

CONFIG = cases.config(num_heads=6, num_kv_heads=3, head_dim=16, num_layers=3)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def poisoned(num_blocks: int = 6, **options: Any) -> PagedKV:
    """A pool in which whatever was not written is NaN."""
    kv = PagedKV(CONFIG, num_blocks=num_blocks, **options)
    for layer in kv.layers:
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
    return kv


def heads(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, 3, 16, generator=source) * 2 for _ in range(2))
    return k.to(dtype), v.to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.sampled_from((8, 16, 32, 64)),
    dtype=st.sampled_from(FLOATS),
    head_major=st.booleans(),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    ordered=st.booleans(),
)
def test_what_is_written_is_gathered(
    seed: int, block_size: int, dtype: torch.dtype, head_major: bool, lengths: list[int], ordered: bool
) -> None:
    used = [-(-length // block_size) for length in lengths]
    kv = poisoned(sum(used) + 2, block_size=block_size, dtype=dtype, head_major=head_major)
    source = torch.Generator().manual_seed(seed)
    ids = list(range(1, sum(used) + 1)) if ordered else torch.randperm(sum(used), generator=source).tolist()
    tables = [[ids.pop(0) for _ in range(n)] for n in used]
    slots = [
        [table[p // block_size] * block_size + p % block_size for p in range(length)]
        for table, length in zip(tables, lengths, strict=True)
    ]
    # Token by token, in chunks and all rows at once, to different layers.
    written = [heads(sum(lengths), seed + layer, dtype) for layer in range(3)]
    flat = torch.tensor([slot for row in slots for slot in row])
    kv.write(0, *written[0], flat)
    for at in range(len(flat)):
        kv.write(1, *(one[at : at + 1] for one in written[1]), flat[at : at + 1])
    for at in range(0, len(flat), 7):
        kv.write(2, *(one[at : at + 7] for one in written[2]), flat[at : at + 7])
    for layer, (k, v) in enumerate(written):
        first = 0
        for table, length in zip(tables, lengths, strict=True):
            for form in (table, torch.tensor(table), [*table, 999]):
                mine = kv.gather(layer, form, length)
                for found, right in zip(mine, (k, v), strict=True):
                    assert found.dtype == dtype
                    assert torch.equal(found, right[first : first + length].transpose(0, 1))
            first += length


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_is_within_half_a_step_of_its_scale(dtype: torch.dtype, head_major: bool) -> None:
    kv = poisoned(4, block_size=8, dtype=dtype, kv_dtype=torch.int8, head_major=head_major)
    k, v = heads(20, 3, dtype)
    k[4], v[5, 1] = 0, 0
    k[6, 0, 3] = 6e4
    slots = torch.tensor([*range(8, 16), *range(24, 32), 3, 2, 1, 0])
    kv.write(1, k, v, slots)
    table = [1, 3, 0]
    found = kv.gather(1, table, 16)
    ulp = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    for mine, right in zip(found, (k, v), strict=True):
        right = right[:16].transpose(0, 1).float()
        bound = right.abs().amax(-1, keepdim=True) * (0.5 / 127 + ulp)
        assert ((mine.float() - right).abs() <= bound).all()
    assert not found[0][:, 4].any() and not found[1][1, 5].any()
    # Something is lost, or nothing was quantised.
    assert not torch.equal(found[0], k[:16].transpose(0, 1))


def test_consecutive_blocks_of_head_major_storage_are_read_without_a_copy() -> None:
    kv = poisoned(6, block_size=8, head_major=True)
    k, _ = kv.gather(2, [2, 3, 4], 19)
    assert k.shape == (3, 19, 16) and k.data_ptr() == kv.layers[2].keys[2, 0].data_ptr()
    other, _ = kv.gather(2, [2, 4, 3], 19)
    assert other.data_ptr() != kv.layers[2].keys[2, 0].data_ptr()
    with pytest.raises(InputError, match="head-major"):
        kv.layer(0)


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("blocks", [range(1, 6, 2), range(4, 1, -1), range(2, 5)])
def test_a_range_with_steps_is_followed(head_major: bool, blocks: range) -> None:
    kv = poisoned(6, block_size=8, head_major=head_major)
    k, v = heads(24, 4)
    kv.write(0, k, v, torch.tensor([block * 8 + offset for block in blocks for offset in range(8)]))
    for length in (24, 19):
        found = kv.gather(0, blocks, length)
        assert torch.equal(found[0], k[:length].transpose(0, 1))
        assert torch.equal(found[1], v[:length].transpose(0, 1))


@pytest.mark.parametrize("head_major", [False, True])
def test_ends_that_fit_do_not_make_a_run(head_major: bool) -> None:
    """First and last of [1, 3, 2, 4] are as far apart as in a run."""
    kv = poisoned(6, block_size=8, head_major=head_major)
    k, v = heads(32, 2)
    order = [1, 3, 2, 4]
    slots = [block * 8 + offset for block in order for offset in range(8)]
    slots[9], slots[10] = slots[10], slots[9]
    kv.write(0, k, v, torch.tensor(slots))
    found, _ = kv.gather(0, order, 32)
    expected = k.clone()
    expected[9], expected[10] = k[10], k[9]
    assert torch.equal(found, expected.transpose(0, 1))
    swapped = torch.tensor([8, 10, 9, 11])
    kv.write(1, k[:4], v[:4], swapped)
    assert torch.equal(kv.gather(1, [1], 4)[1], v[[0, 2, 1, 3]].transpose(0, 1))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_copies_run_in_order_and_copy_no_more_than_they_say(kv_dtype: torch.dtype) -> None:
    kv = poisoned(5, block_size=8, kv_dtype=kv_dtype)
    k, v = heads(8, 5)
    kv.write(0, k, v, torch.arange(8))
    kv.copy_blocks([BlockCopy(0, 3, 6), BlockCopy(3, 1, 2)])
    whole = kv.gather(0, [0], 8)
    for block, tokens in ((3, 6), (1, 2)):
        for mine, right in zip(kv.gather(0, [block], tokens), whole, strict=True):
            assert torch.equal(mine, right[:, :tokens])
        behind, _ = kv.gather(0, [block], 8)
        assert behind[:, tokens:].isnan().all()
    with pytest.raises(InputError, match="copies: got block 5"):
        kv.copy_blocks([BlockCopy(0, 5, 1)])


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_growth_keeps_every_bit_and_says_so(kv_dtype: torch.dtype, head_major: bool) -> None:
    kv = poisoned(3, block_size=8, kv_dtype=kv_dtype, head_major=head_major)
    for layer in range(3):
        kv.write(layer, *heads(20, layer), torch.arange(20))
    before = [kv.gather(layer, [0, 1, 2], 20) for layer in range(3)]
    before = [tuple(one.clone() for one in pair) for pair in before]
    nbytes, address = kv.nbytes, kv.layers[1].keys.data_ptr()
    grown = kv.grow(5)
    assert (grown.old_blocks, grown.new_blocks, kv.num_blocks, kv.generation) == (3, 5, 5, 1)
    assert grown.nbytes == kv.nbytes - nbytes == 2 * PagedKV.block_bytes(CONFIG, 8, kv_dtype)
    assert "3 to 5 blocks" in str(grown) and kv.layers[1].keys.data_ptr() != address
    for layer, pair in enumerate(before):
        assert all(map(torch.equal, kv.gather(layer, [0, 1, 2], 20), pair))
    # The sequence goes on in a new block.
    k, v = heads(9, 9)
    slots = torch.tensor([20, 21, 22, 23, *range(32, 37)])
    kv.write(2, k, v, slots)
    found, _ = kv.gather(2, [0, 1, 2, 4], 29)
    assert torch.equal(found[:, :20], before[2][0])
    assert (found[:, 20:] - k.transpose(0, 1)).abs().max() <= k.abs().max() / 127


def test_growth_holds_one_old_layer_at_a_time_and_survives_running_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = poisoned(3, block_size=8)
    for layer in range(3):
        kv.write(layer, *heads(20, layer), torch.arange(20))
    before = [[one.clone() for one in kv.gather(layer, [0, 1, 2], 20)] for layer in range(3)]
    held = [weakref.ref(layer.keys) for layer in kv.layers]
    make, alive = PagedKV._storage, []

    def watched(self: PagedKV, num_blocks: int) -> Any:
        alive.append(sum(ref() is not None for ref in held))
        if len(alive) == 3:
            raise MemoryError("no room")
        return make(self, num_blocks)

    monkeypatch.setattr(PagedKV, "_storage", watched)
    with pytest.raises(MemoryError):
        kv.grow(7)
    assert alive == [3, 2, 1], "old layers go as soon as they are copied"
    assert kv.num_blocks == 3 and kv.generation == 1
    for layer, pair in enumerate(before):
        assert all(map(torch.equal, kv.gather(layer, [0, 1, 2], 20), pair))
    with pytest.raises(InputError, match="blocks"):
        kv.gather(0, [3], 1)
    monkeypatch.undo()
    assert kv.grow(7).new_blocks == 7 and [layer.num_blocks for layer in kv.layers] == [7, 7, 7]
    for layer, pair in enumerate(before):
        assert all(map(torch.equal, kv.gather(layer, [0, 1, 2], 20), pair))


@pytest.mark.parametrize("kv_dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("block_size", [8, 64])
def test_bytes_are_those_of_the_formula(kv_dtype: torch.dtype, block_size: int) -> None:
    kv = PagedKV(CONFIG, num_blocks=3, block_size=block_size, kv_dtype=kv_dtype)
    a_head = 16 * kv_dtype.itemsize + (4 if kv_dtype == torch.int8 else 0)
    assert kv.nbytes == 3 * PagedKV.block_bytes(CONFIG, block_size, kv_dtype)
    assert kv.nbytes == 3 * 3 * 2 * 3 * block_size * a_head


def test_a_pool_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        kv = PagedKV(CONFIG, num_blocks=2)
        kv.grow(3)
    kv.write(0, *heads(2, 1), torch.tensor([0, 40]))
    with torch.inference_mode():
        kv.write(1, *heads(2, 1), torch.tensor([0, 40]))


def test_what_does_not_fit_is_refused_by_name() -> None:
    for options, message in (
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": -3}, "num_blocks"),
        ({"num_blocks": 2.0}, "num_blocks"),
        ({"block_size": 24}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"dtype": torch.int8}, "dtype"),
        ({"kv_dtype": torch.uint8}, "kv_dtype"),
    ):
        with pytest.raises(InputError, match=f"^{message}: "):
            PagedKV(CONFIG, **({"num_blocks": 2} | options))
    kv = poisoned(2)
    k, v = heads(2, 0)
    two = torch.tensor([0, 31])
    for arguments, message in (
        ((k, v, torch.tensor([0, 32])), "slots: got 0 to 32"),
        ((k, v, torch.tensor([-1, 3])), "slots: got -1 to 3"),
        ((k, v, two.int()), "slots: got int32"),
        ((k, v, torch.tensor([1])), "keys"),
        ((k[:, :2], v, two), "keys"),
        ((k, v[..., :8], two), "values"),
        ((k, v.int(), two), "values: got int32"),
    ):
        with pytest.raises(InputError, match=message):
            kv.write(0, *arguments)
    assert all(layer.keys.isnan().all() and layer.values.isnan().all() for layer in kv.layers)
    kv.write(0, k[:0], v[:0], two[:0])
    for blocks, length, message in (
        ([0], 17, "blocks: got 1; expected 2 for 17"),
        ([0, 2], 17, "blocks: got 0 to 2"),
        ([-1], 4, "blocks: got -1"),
        ([0], -1, "blocks"),
    ):
        with pytest.raises(InputError, match=message):
            kv.gather(0, blocks, length)
    assert kv.gather(0, [], 0)[0].shape == (3, 0, 16)
    for count in (2, 1, 0, "3"):
        with pytest.raises(InputError, match="num_blocks"):
            kv.grow(count)  # type: ignore[arg-type]
    assert kv.generation == 0
    other = replace(CONFIG, num_layers=2)
    assert PagedKV.block_bytes(other, 16, torch.float16) * 3 == 2 * PagedKV.block_bytes(
        CONFIG, 16, torch.float16
    )
