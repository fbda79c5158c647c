"""Views of a step against a plain loop, the ring of staging buffers with a slow device, static caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import decode_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cache.blocks import BlockAllocator, BlockTable
from labkit.cache.static import StaticCache
from labkit.cache.views import KVView, StagingRing, ViewBuilder
from labkit.errors import InputError

ROWS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=5)


def tables_of(rows: list[tuple[int, int, int]], block_size: int, seed: int) -> list[BlockTable]:
    """Tables with room for start + count + more tokens, of shuffled blocks."""
    needed = [-(-sum(row) // block_size) for row in rows]
    ids = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    return [BlockTable([ids.pop() for _ in range(n)], sum(row)) for n, row in zip(needed, rows, strict=True)]


def check(
    view: KVView, tables: list[BlockTable], rows: list[tuple[int, int, int]], size: int, tile: int
) -> None:
    """Every field, worked out token by token."""
    slots, positions, tiles, starts = [], [], [], [0]
    for index, (table, (start, count, _)) in enumerate(zip(tables, rows, strict=True)):
        for position in range(start, start + count):
            positions.append(position)
            slots.append(table.blocks[position // size] * size + position % size)
        tiles += [[index, first] for first in range(0, count, tile)]
        starts.append(starts[-1] + count)
        used = -(-(start + count) // size)
        padded = view.block_tables[index].tolist()
        assert padded[:used] == table.blocks[:used] and not any(padded[used:])
    assert view.slots.tolist() == slots and view.slots.dtype == torch.int64
    assert view.positions.tolist() == positions and view.tiles.tolist() == tiles
    assert view.query_starts.tolist() == starts and view.tokens == starts[-1]
    assert view.lengths.tolist() == [start for start, _, _ in rows]
    assert view.counts == tuple(count for _, count, _ in rows)
    assert view.contexts == tuple(start + count for start, count, _ in rows)
    assert view.max_context == max(view.contexts) and view.block_size == size
    assert view.block_tables.shape == (len(rows), -(-view.max_context // size))
    assert view.num_blocks == 1 + int(view.block_tables.max())
    for name in ("block_tables", "lengths", "query_starts", "positions", "tiles"):
        assert getattr(view, name).dtype == torch.int32
    for field in fields(view):
        if isinstance(one := getattr(view, field.name), torch.Tensor):
            assert one.is_contiguous() and one.data_ptr() % 16 == 0, field.name


@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from((8, 16, 32, 64)), st.integers(1, 16), st.integers(0, 99))
def test_a_view_is_what_a_loop_over_tokens_says(
    rows: list[tuple[int, int, int]], size: int, tile: int, seed: int
) -> None:
    tables = tables_of(rows, size, seed)
    builder = ViewBuilder("cpu", size, tile)
    view = builder.build(tables, [row[1] for row in rows], starts=[row[0] for row in rows])
    check(view, tables, rows, size, tile)


def test_without_starts_the_new_tokens_are_the_last_slots() -> None:
    allocator = BlockAllocator(8, 8)
    tables = [allocator.allocate(9), allocator.allocate(3)]
    allocator.append(tables[0])
    view = ViewBuilder("cpu", 8, 4).build(tables, [1, 3])
    check(view, tables, [(9, 1, 0), (0, 3, 0)], 8, 4)


def test_what_a_table_does_not_hold_is_refused_by_name() -> None:
    allocator = BlockAllocator(8, 8)
    table, gone = allocator.allocate(10), allocator.allocate(4)
    coarse = BlockAllocator(8, 16).allocate(10)
    allocator.free(gone)
    build = ViewBuilder("cpu", 8, 4).build
    for arguments, starts, message in (
        (([], []), None, "counts: got 0 for 0 tables"),
        (([table], [1, 1]), None, "counts: got 2 for 1 tables"),
        (([table], [1]), [1, 2], "starts: got 2 for 1 tables"),
        (([table], [0]), None, "counts: got 0 in row 0"),
        (([table], [-1]), None, "counts: got -1 in row 0"),
        (([table], [11]), None, "tables: got row 0: 10 slots for positions -1"),
        (([table, table], [1, 2]), [0, 9], "tables: got row 1: 10 slots for positions 9 to 11.*append"),
        (([table], [1]), [-1], "tables: got row 0"),
        (([table, gone], [1, 1]), None, "tables: got row 1: a table that was freed"),
        (
            ([table, coarse], [1, 1]),
            None,
            "tables: got row 1: 1 blocks for 10 tokens; expected 2 blocks of 8",
        ),
    ):
        with pytest.raises(InputError, match=message):
            build(*arguments, starts=starts)
    for size, tile, name in ((4, 1, "block_size"), (16, 0, "query_tile"), (16, True, "query_tile")):
        with pytest.raises(InputError, match=f"^{name}: "):
            ViewBuilder("cpu", size, tile)


def test_tensors_that_disagree_are_refused_by_name() -> None:
    allocator = BlockAllocator(8, 8)
    view = ViewBuilder("cpu", 8, 4).build([allocator.allocate(10)], [3])
    for name, wrong in (
        ("block_tables", view.block_tables[:, :1]),
        ("block_tables", view.block_tables.long()),
        ("lengths", torch.zeros(2, dtype=torch.int32)),
        ("query_starts", view.query_starts[:1]),
        ("positions", view.positions[:2]),
        ("slots", view.slots.int()),
        ("tiles", view.tiles[:, :1]),
        ("contexts", (3, 4)),
    ):
        with pytest.raises(InputError, match=f"^{name}: "):
            replace(view, **{name: wrong})


# --- staging ----------------------------------------------------------------------------------------------


class Device:
    """Streams whose copies run when they are told to: a buffer that was overwritten before shows."""

    def __init__(self) -> None:
        self.queues: dict[int, list[Callable[[], None]]] = {}
        self.stream = 0
        self.arrived: dict[int, bytes] = {}

    def queue(self, work: Callable[[], None]) -> None:
        self.queues.setdefault(self.stream, []).append(work)

    def run(self, stream: int, count: int) -> None:
        for _ in range(count):
            if self.queues.get(stream):
                self.queues[stream].pop(0)()


class Event:
    """A CUDA event: pending from the record until the stream has come to it."""

    def __init__(self, device: Device) -> None:
        self.device, self.recorded, self.done = device, 0, 0

    def query(self) -> bool:
        return self.done == self.recorded

    def record(self) -> None:
        self.recorded += 1
        mark = self.recorded

        def reach() -> None:
            self.done = max(self.done, mark)

        self.device.queue(reach)


def ring_of(device: Device) -> StagingRing:
    return StagingRing(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), lambda: Event(device))


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 5000), st.integers(0, 1), st.integers(0, 5)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_no_buffer_is_filled_before_its_copy_has_run(steps: list[tuple[int, int, int, int]]) -> None:
    device = Device()
    ring = ring_of(device)
    for number, (stream, nbytes, running, count) in enumerate(steps):
        device.stream = stream
        wanted = bytes([(number * 7 + 1) % 256]) * nbytes

        def send(buffer: torch.Tensor, number: int = number) -> int:
            def copy() -> None:
                device.arrived[number] = bytes(buffer.tolist())

            device.queue(copy)
            return number

        def fill(buffer: torch.Tensor, wanted: bytes = wanted) -> None:
            buffer.copy_(torch.frombuffer(bytearray(wanted), dtype=torch.uint8))

        assert ring.copy(nbytes, fill, send) == number
        device.run(running, count)
    for stream in (0, 1):
        device.run(stream, 1000)
    for number, (_, nbytes, _, _) in enumerate(steps):
        assert device.arrived[number] == bytes([(number * 7 + 1) % 256]) * nbytes


def test_buffers_are_used_again_where_the_device_keeps_up_and_made_where_it_does_not() -> None:
    device = Device()
    ring = ring_of(device)

    def step(nbytes: int = 100) -> None:
        ring.copy(nbytes, lambda buffer: None, lambda buffer: None)

    for _ in range(50):
        step()
        device.run(0, 1)
    assert ring.made == len(ring) == 1
    for _ in range(5):
        step()
    assert ring.made == len(ring) == 5, "the first was free, four more are pending behind it"
    device.run(0, 3)
    step()
    assert ring.made == 5
    device.run(0, 100)
    step(1 << 20)
    assert ring.made == 6 and len(ring) == 5, "a buffer that is too small makes room for a larger one"


def test_a_copy_that_fails_leaves_its_buffer_guarded() -> None:
    device = Device()
    ring = ring_of(device)

    def broken(buffer: torch.Tensor) -> None:
        raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        ring.copy(10, lambda buffer: None, broken)
    ring.copy(10, lambda buffer: None, lambda buffer: None)
    assert ring.made == 2


def test_a_view_through_a_ring_is_the_same_view_and_outlives_the_buffer() -> None:
    device = Device()
    rows = [(5, 3, 0), (20, 1, 4)]
    tables = tables_of(rows, 8, 1)
    builder = ViewBuilder("cpu", 8, 2, ring=ring_of(device))
    views = []
    for _ in range(3):
        views.append(builder.build(tables, [3, 1], starts=[5, 20]))
        device.run(0, 1)
        builder.build(tables[::-1], [1, 2], starts=[0, 0])
        device.run(0, 1)
    for view in views:
        check(view, tables, rows, 8, 2)
    assert builder.ring is not None and builder.ring.made == 1


# --- a static batch ---------------------------------------------------------------------------------------


def test_a_static_cache_hands_out_its_rows() -> None:
    of = cases.config()
    cache = StaticCache(of, 21, batch=3, block_size=8)
    assert cache.block_tables.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cache.kv.num_blocks == 9 and cache.nbytes == cache.kv.nbytes and cache.kv.head_major
    tables = [BlockTable(blocks, 21) for blocks in cache.block_tables.tolist()]
    check(cache.view(5), tables, [(0, 5, 0)] * 3, 8, 4)
    cache.advance(5)
    check(cache.view(16), tables, [(5, 16, 0)] * 3, 8, 4)
    assert cache.length == 5 and cache.can_append(16) and not cache.can_append(17)
    for call in (lambda: cache.view(17), lambda: cache.check_append(3, 17)):
        with pytest.raises(InputError, match=r"17 more after 5 positions; .*at most 16 .*capacity 21"):
            call()
    with pytest.raises(InputError, match="batch of 2"):
        cache.check_append(2, 1)
    for name, call in (
        ("tokens", lambda: cache.advance(17)),
        ("length", lambda: cache.truncate(6)),
        ("batch", lambda: StaticCache(of, 5, batch=0)),
        ("capacity", lambda: StaticCache(of, -1)),
        ("block_size", lambda: StaticCache(of, 5, block_size=12)),
    ):
        with pytest.raises(InputError, match=f"^{name}: "):
            call()
    cache.truncate(2)
    assert cache.length == 2
