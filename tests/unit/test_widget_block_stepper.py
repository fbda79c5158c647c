"""The block stepper: the books of its story, what every event does, and the pictures of it."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from labkit import plots
from labkit.errors import InputError
from labkit.widgets import block_stepper
from labkit.widgets.base import View
from labkit.widgets.block_stepper import COLORS, BlockStepper
from labkit.widgets.block_story import BLOCK_SIZES, POOL_SLOTS, Frame, story

SVG = "{http://www.w3.org/2000/svg}"
FRAMES = [(size, step) for size in BLOCK_SIZES for step in range(len(story(size)))]


def at(size: int, words: str) -> Frame:
    """The one frame whose title holds ``words``."""
    (found,) = [frame for frame in story(size) if words in frame.title]
    return found


def before(frame: Frame) -> Frame:
    told = story(frame.block_size)
    return told[told.index(frame) - 1]


def readable(frame: Frame, name: str) -> list[str]:
    """What a request finds in its slots, position by position."""
    (blocks, length) = next((blocks, length) for who, blocks, length in frame.tables if who == name)
    size = frame.block_size
    return [frame.slots[blocks[p // size] * size + p % size] for p in range(length)]


@pytest.mark.parametrize(("size", "step"), FRAMES)
def test_books_and_contents_agree(size: int, step: int) -> None:
    frame = story(size)[step]
    assert frame.block_size == size and len(frame.slots) == POOL_SLOTS
    named = [block for _, blocks, _ in frame.tables for block in blocks]
    assert list(frame.refs) == [named.count(block) for block in range(len(frame.refs))]
    assert frame.used + frame.idle + frame.free == len(frame.refs)
    for name, blocks, length in frame.tables:
        assert len(blocks) == -(-length // size)
        assert all(slot.isupper() for slot in readable(frame, name))
    for block, (refs, kept) in enumerate(zip(frame.refs, frame.kept, strict=True)):
        part = frame.slots[block * size : (block + 1) * size]
        assert not kept or all(slot.isupper() for slot in part)  # only full blocks are published
        assert refs or kept or not any(slot.isupper() for slot in part)
    live = sum(
        slot.isupper() for block, refs in enumerate(frame.refs) if refs for slot in _part(frame, block)
    )
    assert frame.tokens - frame.saved == live == frame.used * size - frame.empty


def _part(frame: Frame, block: int) -> tuple[str, ...]:
    return frame.slots[block * frame.block_size : (block + 1) * frame.block_size]


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_all_stories_have_the_same_events(size: int) -> None:
    titles = [frame.title for frame in story(size)]
    assert titles == [frame.title for frame in story(4)]
    assert len(set(titles)) == len(titles)
    first = story(size)[0]
    assert (first.tokens, first.used, first.free) == (0, 0, POOL_SLOTS // size)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_sharing_a_prefix_needs_whole_blocks(size: int) -> None:
    frame = at(size, "B arrives")
    expected = 8 // size * size
    assert frame.cached == frame.saved == expected
    assert readable(frame, "B") == ["A"] * expected + ["B"] * (12 - expected)
    assert ("nothing shared" in frame.note) == (size == 16)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_a_fork_takes_no_block_and_the_next_write_copies_the_partial_one(size: int) -> None:
    fork = at(size, "A forks")
    assert fork.used == before(fork).used and fork.slots == before(fork).slots
    written = at(size, "C grows")
    assert written.used == fork.used + 1
    tables = {name: blocks for name, blocks, _ in written.tables}
    assert tables["A"][:-1] == tables["C"][:-1] and tables["A"][-1] != tables["C"][-1]
    assert readable(written, "A") == readable(fork, "A")
    assert readable(written, "C") == [*readable(fork, "A"), "C"]
    assert f"copy {11 % size} token" in written.note


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_last_holder_writes_in_place(size: int) -> None:
    frame = next(frame for frame in story(size) if frame.title == "A grows by 1")
    assert frame.used == before(frame).used and "no new block" in frame.note


@pytest.mark.parametrize("size", [2, 4, 8])
def test_kept_blocks_become_idle_come_back_and_are_evicted(size: int) -> None:
    ended = at(size, "B ends")
    assert ended.used == 0 and ended.idle > 0 and not ended.tables
    again = at(size, "D arrives")
    assert "now alive" in again.note and readable(again, "D")[:8] == ["A"] * 8
    last = at(size, "G arrives")
    assert "evicted" in last.note and last.idle < before(last).idle
    assert last.cached == before(last).cached


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_what_does_not_fit_changes_nothing(size: int) -> None:
    frame = at(size, "F arrives")
    old = before(frame)
    assert "refused" in frame.note
    assert (frame.tables, frame.refs, frame.slots) == (old.tables, old.refs, old.slots)


def test_a_block_taken_again_still_holds_stale_values() -> None:
    frame = at(8, "G arrives")
    size, (_, blocks, length) = 8, frame.tables[0]
    tail = _part(frame, blocks[-1])[length % size :]
    assert tail and all(slot.islower() for slot in tail)
    assert "stale, left by A" in BlockStepper(8, 17).picture()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"block_size": 3}, "block_size"),
        ({"step": -1}, "step"),
        ({"step": 99}, "step"),
        ({"step": "x"}, "step"),
    ],
)
def test_a_wrong_state_is_refused_by_name(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(InputError) as caught:
        BlockStepper(**change)
    assert caught.value.argument == argument
    with pytest.raises(InputError, match="block_size"):
        story(5)


def test_buttons_move_by_one_event_and_stop_at_the_ends() -> None:
    state = BlockStepper(4, 0)
    state.press("back")
    assert state.step == 0
    for _ in range(99):
        state.press("next")
    assert state.step == len(story(4)) - 1
    state.press("back")
    assert state.step == len(story(4)) - 2
    with pytest.raises(InputError, match="a button"):
        state.press("jump")


@pytest.mark.parametrize(("size", "step"), FRAMES)
def test_the_picture_is_valid_and_stays_inside(size: int, step: int) -> None:
    state = BlockStepper(size, step)
    root = ElementTree.fromstring(state.picture())
    assert root.attrib["aria-label"] == state.alt()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width + 0.1
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["font-size"]) >= 11 and float(text.attrib["y"]) <= height
    tips = [box.findtext(f"{SVG}title") or "" for box in root.iter(f"{SVG}rect")]
    assert sum(tip.startswith("slot ") for tip in tips) == POOL_SLOTS
    assert sum("written by" in tip for tip in tips) == sum(slot.isupper() for slot in state.frame.slots)
    assert sum(tip.startswith("positions") for tip in tips) == sum(len(b) for _, b, _ in state.frame.tables)


def test_every_request_has_a_colour_of_its_own() -> None:
    names = {name for size in BLOCK_SIZES for frame in story(size) for name, _, _ in frame.tables}
    assert names == set(COLORS) and len(set(COLORS.values())) == len(COLORS)


def test_words_say_what_the_picture_shows() -> None:
    text = BlockStepper(4, 7).text()
    assert "C: 12 tokens, blocks [0, 1, 4]" in text and "copy 3 tokens to block 4" in text
    assert BlockStepper(4, 7).shared_blocks == 2


def test_the_static_figure_and_the_view() -> None:
    states = [BlockStepper(4, step) for step in (6, 7)]
    height = 7.2 * block_stepper.draw_height(*states) / block_stepper.WIDTH
    fig, ax = plots.figure(7.2, height)
    block_stepper.draw(ax, *states)
    words: Any = [text.get_text() for text in ax.texts]
    assert "6. A forks to C" in words and any("copy 3 tokens" in each for each in words)
    assert plots.render(fig, "A fork, and the copy on write after it").png
    view = View(BlockStepper(4, 4))
    view.inputs["block_size"].value = 16
    assert "nothing shared" in view.output.value
    view.inputs["next"].click()
    assert view.inputs["step"].value == 5 and "5. the work of B" in view.output.value
