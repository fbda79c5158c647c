"""Counts of one warp instruction, worked out by hand, and the picture of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plots
from labkit.errors import InputError
from labkit.widgets.base import View
from labkit.widgets.sector_map import WIDTH, SectorMap, draw
from labkit.widgets.warp_access import WarpAccess, from_offsets

SVG = "{http://www.w3.org/2000/svg}"

# element, stride, first, width, lanes → sectors, cache lines, useful bytes
GLOBAL = [
    ((4, 1, 0, 1, 32), (4, 1, 128)),  # neighbours: 128 bytes
    ((4, 2, 0, 1, 32), (8, 2, 128)),  # every other word of 256 bytes
    ((4, 8, 0, 1, 32), (32, 8, 128)),  # a sector a lane
    ((4, 32, 0, 1, 32), (32, 32, 128)),  # a cache line a lane
    ((4, 0, 0, 1, 32), (1, 1, 4)),  # broadcast
    ((4, 1, 1, 1, 32), (5, 2, 128)),  # bytes 4 … 131
    ((4, 1, 8, 1, 32), (4, 2, 128)),  # one sector on: still four sectors
    ((1, 1, 0, 1, 32), (1, 1, 32)),  # bytes
    ((1, 1, 16, 1, 32), (2, 1, 32)),  # bytes across a sector's edge
    ((1, 128, 0, 1, 32), (32, 32, 32)),  # a naive W4 GEMV with K = 256
    ((2, 1, 0, 1, 32), (2, 1, 64)),  # half
    ((4, 4, 0, 4, 32), (16, 4, 512)),  # uint4: 512 bytes
    ((2, 8, 0, 8, 32), (16, 4, 512)),  # eight halves a lane
    ((1, 4, 0, 4, 32), (4, 1, 128)),  # char4
    ((4, 1, 0, 1, 9), (2, 1, 36)),  # the tail
    ((4, 5, 0, 4, 32), (20, 5, 512)),  # 16 bytes every 20: 636 bytes in a row of sectors
]
# element, stride, first, width, lanes → wavefronts, without conflicts, degree
SHARED = [
    ((4, 1, 0, 1, 32), (1, 1, 1)),
    ((4, 2, 0, 1, 32), (2, 1, 2)),
    ((4, 3, 0, 1, 32), (1, 1, 1)),  # odd strides visit every bank
    ((4, 32, 0, 1, 32), (32, 1, 32)),
    ((4, 33, 0, 1, 32), (1, 1, 1)),  # padding of one word
    ((4, 0, 0, 1, 32), (1, 1, 1)),  # the same word for all
    ((4, 1, 7, 1, 32), (1, 1, 1)),  # a base does not matter
    ((1, 1, 0, 1, 32), (1, 1, 1)),  # four lanes share a word
    ((2, 1, 0, 1, 32), (1, 1, 1)),
    ((2, 64, 0, 1, 32), (32, 1, 32)),  # a column of half[..][64]
    ((2, 65, 0, 1, 32), (2, 1, 2)),  # 65 halves are 32.5 words: two lanes a bank
    ((2, 66, 0, 1, 32), (1, 1, 1)),
    ((8, 1, 0, 1, 32), (2, 2, 1)),  # half warps
    ((8, 2, 0, 1, 32), (4, 2, 2)),
    ((16, 1, 0, 1, 32), (4, 4, 1)),  # quarter warps
    ((16, 2, 0, 1, 32), (8, 4, 2)),
    ((16, 0, 0, 1, 32), (4, 4, 1)),
    ((16, 1, 0, 1, 8), (1, 1, 1)),  # one quarter has lanes
    ((4, 32, 0, 1, 5), (5, 1, 5)),
]


def _map(space: str, numbers: tuple[int, ...]) -> SectorMap:
    element, stride, first, width, lanes = numbers
    return SectorMap(space, element, stride, first, width, lanes)


@pytest.mark.parametrize(("numbers", "expected"), GLOBAL)
def test_global_counts_by_hand(numbers: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    state = _map("global", numbers)
    access = state.access
    assert (len(access.sectors), len(access.cache_lines), access.bytes_useful) == expected
    assert state.sectors_per_request == expected[0]
    assert access.efficiency == expected[2] / (32 * expected[0])
    assert f"{expected[0]} sector" in state.text()


@pytest.mark.parametrize(("numbers", "expected"), SHARED)
def test_shared_counts_by_hand(numbers: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    state = _map("shared", numbers)
    access = state.access
    assert (len(access.wavefronts), access.ideal_wavefronts, access.degree) == expected
    assert f"{expected[0]} wavefront" in state.text()
    assert ("no bank conflict" in state.text()) == (expected[2] == 1)


offsets = st.lists(st.one_of(st.none(), st.integers(0, 5000)), min_size=1, max_size=32)


@given(offsets=offsets, size=st.sampled_from((1, 2, 4, 8, 16)))
def test_every_byte_is_in_a_sector_and_every_word_is_served_once(
    offsets: list[int | None], size: int
) -> None:
    if all(offset is None for offset in offsets):
        return
    access = from_offsets(offsets, size)
    wanted = {byte for offset in offsets if offset is not None for byte in range(offset, offset + size)}
    assert {byte // 32 for byte in wanted} == set(access.sectors)
    covered = {
        32 * s + byte for s in access.sectors for _, low, high in access.used(s) for byte in range(low, high)
    }
    assert covered == wanted
    served = [(front.part, lane) for front in access.wavefronts for ls in front.words.values() for lane in ls]
    assert {lane for _, lane in served} == set(access.lanes)
    words = sum(
        len({byte // 4 for byte in range(offset, offset + size)}) for offset in offsets if offset is not None
    )
    assert len(served) == words
    assert access.ideal_wavefronts <= len(access.wavefronts) <= access.degree * access.ideal_wavefronts


def test_wavefronts_say_who_is_served() -> None:
    first, second = SectorMap("shared", stride=16, lanes=4).access.wavefronts
    assert first.words == {0: (0,), 16: (1,)} and second.words == {0: (2,), 16: (3,)}
    (all_at_once,) = SectorMap("shared", stride=0).access.wavefronts
    assert all_at_once.words == {0: tuple(range(32))}


def test_a_misaligned_lane_is_named() -> None:
    state = SectorMap(width=4, stride=5)
    assert state.access.misaligned == tuple(lane for lane in range(32) if lane % 4)
    assert "Lane 1 starts at byte 20, no multiple of 16: a GPU stops the kernel here." in state.text()
    assert not SectorMap(width=4, stride=4).access.misaligned


@pytest.mark.parametrize(
    "wrong",
    [
        {"element": 3},
        {"width": 3},
        {"width": 8},
        {"stride": -1},
        {"lanes": 0},
        {"lanes": 33},
        {"space": "local"},
        {"first": -1},
    ],
)
def test_a_wrong_state_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SectorMap(**wrong)


def test_wrong_offsets_are_refused_by_name() -> None:
    for bad in ((0,) * 31, (None,) * 32, (-4, *(None,) * 31)):
        with pytest.raises(InputError, match="offsets"):
            WarpAccess(bad, 4)
    with pytest.raises(InputError, match="size"):
        from_offsets([0], 3)


def test_a_wider_element_makes_the_access_narrower() -> None:
    state = SectorMap(element=1, width=16, stride=16)
    state.update(element=8)
    assert (state.element, state.width) == (8, 2)
    view = View(SectorMap(element=1, width=16, stride=16))
    view.inputs["element"].value = 16
    assert view.inputs["width"].value == 1
    view.inputs["width"].value = 8  # more than 16 bytes a lane: the slider goes back
    assert view.inputs["width"].value == 1 and 'role="alert"' not in view.output.value


def _lanes(**values: Any) -> SimpleNamespace:
    known: dict[str, Any] = {"kind": "read", "buffer": "packed", "size": 4, "space": "global", "banks": []}
    return SimpleNamespace(**(known | values))


def test_traced_instructions_are_shown_by_name() -> None:
    naive = _lanes(offsets=[128 * lane for lane in range(32)], size=1)
    tail = _lanes(offsets=[4 * lane for lane in range(20)] + [-1] * 12, buffer="x")
    state = SectorMap.from_lanes(naive, tail)
    assert [control.name for control in state.controls()] == ["shown"]
    assert state.text().startswith("Global memory: read of packed: 32 lanes, 1 byte each. 32 sectors")
    state.update(shown=1)
    assert state.access.lanes == tuple(range(20)) and state.sectors_per_request == 3
    assert "read of x" in state.text()
    assert SectorMap.from_lanes(naive, names=["naive"]).text().startswith("Global memory: naive: 32 lanes")
    for wrong in ({"names": ["a", "b"]}, {"shown": 1}):
        with pytest.raises(InputError):
            SectorMap.from_lanes(naive, **wrong)
    with pytest.raises(InputError):
        SectorMap.from_lanes()


def test_a_shared_array_may_begin_at_any_bank() -> None:
    offsets = [8 * lane for lane in range(32)]
    banks = [(at // 4 + 5) % 32 for at in offsets]
    state = SectorMap.from_lanes(_lanes(offsets=offsets, space="shared", banks=banks, buffer="tile"))
    assert state.memory == "shared" and len(state.access.wavefronts) == 2
    assert sorted(state.access.wavefronts[0].words) == sorted(set(banks))


STATES = [
    SectorMap(),
    SectorMap(stride=1024, element=1),
    SectorMap(width=4, stride=5),
    SectorMap(stride=0),
    SectorMap(lanes=1),
    SectorMap("shared", stride=32),
    SectorMap("shared", stride=0),
    SectorMap("shared", element=16),
    SectorMap.from_lanes(_lanes(offsets=[3 + 100_000 * lane for lane in range(32)], size=16)),
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.describe())
def test_the_drawing_is_valid_labelled_and_stays_inside(state: SectorMap) -> None:
    picture = re.search(r"<svg.*</svg>", state.html())
    assert picture is not None
    root = ElementTree.fromstring(picture.group())
    assert root.attrib["aria-label"] == state.alt() and root.attrib["role"] == "img"
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= WIDTH + 0.1 and y + h <= state.height
        assert w > 0 and h > 0
    for path in root.iter(f"{SVG}polyline"):
        for point in path.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= WIDTH and 0 <= y <= state.height
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert state.verdict() in texts and state.describe() in texts
    titles = [box.findtext(f"{SVG}title") or "" for box in root.iter(f"{SVG}rect")]
    assert sum(title.startswith("lane ") for title in titles) == 32


def test_lanes_of_one_sector_share_its_colour() -> None:
    colors = SectorMap().lane_colors()
    assert [len(set(colors[i : i + 8])) for i in range(0, 32, 8)] == [1] * 4 and len(set(colors)) == 4
    assert SectorMap(lanes=3).lane_colors()[3:] == [None] * 29
    shared = SectorMap("shared", stride=16).lane_colors()
    assert shared[0] == shared[1] != shared[2] == shared[3]


def test_every_control_has_a_label_and_the_view_redraws() -> None:
    state = SectorMap()
    assert all(control.label for control in state.controls())
    view = View(state)
    view.inputs["stride"].value = 32
    assert "32 sectors" in view.output.value
    view.inputs["space"].value = "shared"
    assert "32-way conflict" in view.output.value


@pytest.mark.parametrize("state", STATES[:2] + STATES[5:6], ids=lambda state: state.describe())
def test_the_printed_figure_is_the_same_picture(state: SectorMap) -> None:
    fig, ax = plots.figure(7.2, 7.2 * state.height / WIDTH)
    draw(ax, state)
    root = ElementTree.fromstring(state.picture())
    assert len(ax.patches) == len(root.findall(f"{SVG}rect"))
    assert {text.get_text() for text in ax.texts} == {text.text or "" for text in root.iter(f"{SVG}text")}
    picture = plots.render(fig, alt=state.alt())
    assert picture.png.startswith(b"\x89PNG") and not ax.axison


# --- the same numbers as the emulator's trace -----------------------------------------------------------

# Line 4 is the read of global memory, line 6 that of shared memory.
KERNEL = r"""extern "C" __global__ void touch(const TYPE* x, TYPE* out, int stride, int first, int lanes)
{
    extern __shared__ __align__(16) unsigned char raw[];
    if (threadIdx.x < lanes) out[threadIdx.x] = x[first + threadIdx.x * stride];
    const TYPE* tile = reinterpret_cast<const TYPE*>(raw);
    if (threadIdx.x < lanes) out[threadIdx.x + 32] = tile[first + threadIdx.x * stride];
}
"""
TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function of (element, stride, first, lanes) that gives the trace of both reads."""
    from labkit import emulator

    kernels: dict[int, Any] = {}

    def trace(element: int, stride: int, first: int, lanes: int) -> Any:
        if element not in kernels:
            kernels[element] = emulator.compile(KERNEL, defines={"TYPE": TYPES[element]})
        span = (first + 31 * stride + 1) * element
        kind = f"u{element}" if element <= 8 else "V16"
        x, out = np.zeros(span, np.uint8).view(kind), np.zeros(64 * element, np.uint8).view(kind)
        return kernels[element].trace((1,), (32,), [x, out, stride, first, lanes], shared_bytes=span)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
        yield trace


@pytest.mark.parametrize("numbers", sorted({numbers for numbers, _ in GLOBAL + SHARED if numbers[3] == 1}))
def test_the_counts_are_those_of_the_emulator(traced: Any, numbers: tuple[int, ...]) -> None:
    element, stride, first, _, lanes = numbers
    trace = traced(element, stride, first, lanes)
    access = WarpAccess.strided(element, stride, first, 1, lanes)
    (read,) = trace.select(line=4, kind="read", space="global")
    assert (read.sectors, read.cache_lines) == (len(access.sectors), len(access.cache_lines))
    assert (read.useful_bytes, read.lanes) == (access.bytes_useful, lanes)
    (shared,) = trace.select(line=6, kind="read", space="shared")
    counted = (shared.wavefronts, shared.ideal_wavefronts, shared.degree)
    assert counted == (len(access.wavefronts), access.ideal_wavefronts, access.degree)


@pytest.mark.parametrize("numbers", [(4, 8, 0, 1, 32), (2, 65, 0, 1, 32), (16, 2, 0, 1, 32), (4, 1, 1, 1, 9)])
def test_traced_lanes_give_the_same_map(traced: Any, numbers: tuple[int, ...]) -> None:
    element, stride, first, _, lanes = numbers
    trace = traced(element, stride, first, lanes)
    access = WarpAccess.strided(element, stride, first, 1, lanes)
    (shared,) = trace.select(line=6, kind="read", space="shared")
    shown = SectorMap.from_lanes(trace.lanes(4, "read"), trace.lanes(6, "read", shared.buffer))
    assert shown.access == access and shown.memory == "global"
    shown.update(shown=1)
    assert shown.memory == "shared" and len(shown.access.wavefronts) == shared.wavefronts
