"""nsplit → waves: grids by hand, dealing out, the cap, cards that hold nothing, the pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plots
from labkit.device import get_device
from labkit.errors import InputError
from labkit.kernels.occupancy import Occupancy
from labkit.widgets import waves
from labkit.widgets.base import View
from labkit.widgets.waves import SplitWaves

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Launch:
    nsplit: int
    blocks: int
    planes: int
    part_bytes: int


def simple_plan(m: int, n: int, k: int, *, nsplit: int | None = None, rule: str = "") -> Launch:
    """100 columns a block, a cap of 1 MB. The rule: 4 slices, in 2 runs from 32 rows, in a block from 99."""
    slices = 4 if nsplit is None else nsplit
    planes = slices if slices * m * n * 4 <= 1_000_000 else 1
    if nsplit is None:
        planes = 4 if m < 32 else 2 if m < 99 else 1
    return Launch(slices, -(-n // 100) * planes, planes, planes * m * n * 4 if planes > 1 else 0)


def holds(blocks: int, sms: int = 0) -> Callable[[str], Occupancy]:
    def occupancy(card: str) -> Occupancy:
        facts = get_device(card)
        return Occupancy(replace(facts, sms=sms or facts.sms), 256, blocks, {"warps": blocks}, ("warps",))

    return occupancy


def state(**changes: Any) -> SplitWaves:
    given = {"n": 600, "k": 640, "plan": simple_plan, "occupancy": holds(2), **changes}
    return SplitWaves(**given)


def test_a_small_grid_leaves_sms_idle() -> None:
    shown = state()  # 6 blocks on 16 SMs of 2
    assert (shown.launch.blocks, shown.waves.slots, shown.waves.rounds) == (6, 32, 1)
    assert shown.per_sm(0) == [1] * 6 + [0] * 10
    assert shown.idle_sms == 10
    assert (
        "6 blocks on 16 SMs × 2 resident: one wave, 6 of 32 slots taken, 10 of 16 SMs idle; 19 % filled"
        in (shown.text())
    )
    assert "no slice sums, no second launch" in shown.part_words()


def test_the_last_wave_is_what_is_left() -> None:
    shown = state(nsplit=13)  # 78 = 32 + 32 + 14
    assert (shown.waves.rounds, shown.waves.tail_blocks) == (3, 14)
    assert shown.per_sm(0) == shown.per_sm(1) == [2] * 16
    assert shown.per_sm(2) == [1] * 14 + [0, 0]
    assert shown.idle_sms == 2
    assert shown.waves.utilisation == pytest.approx(78 / 96)
    assert "3 waves, the last with 14 of 32 slots taken, 2 of 16 SMs idle in it; 81 % filled" in shown.text()


def test_a_full_last_wave_has_no_idle_sm() -> None:
    shown = state(n=1600, nsplit=2)  # 32 blocks in 32 slots
    assert (shown.waves.tail_blocks, shown.idle_sms) == (0, 0)
    assert "no SM idle; 100 % filled" in shown.text()


@given(n=st.integers(1, 40_000), nsplit=st.integers(1, 20), blocks=st.integers(1, 16))
def test_every_block_is_dealt_once(n: int, nsplit: int, blocks: int) -> None:
    shown = state(n=n, nsplit=nsplit, occupancy=holds(blocks))
    dealt = [shown.per_sm(wave) for wave in range(shown.waves.rounds)]
    assert sum(map(sum, dealt)) == shown.launch.blocks
    assert all(max(wave) <= blocks and max(wave) - min(wave) <= 1 for wave in dealt)
    assert sum(dealt[-1]) > 0


def test_part_traffic_against_the_weight() -> None:
    shown = state(nsplit=5)
    # 5 × 600 sums of 4 bytes, written and read; codes of 1 byte (N padded to 608), scales of 4 for each 32
    assert shown.launch.part_bytes == 12_000
    assert shown.weight_bytes == 640 * 608 + 20 * 608 * 4
    assert shown.extra_percent(shown.launch) == pytest.approx(100 * 24_000 / 437_760)
    assert "add 5.48 %" in shown.part_words()


def test_past_the_cap_a_block_computes_all_slices() -> None:
    shown = state(m=64, nsplit=8)  # 8 × 64 × 600 × 4 = 1.2 MB
    assert shown.launch.planes == 1 and shown.launch.blocks == 6
    assert "pass the cap" in shown.part_words()
    assert shown.extra_percent(shown.launch) == 0


def test_with_the_rules_nsplit_a_block_takes_what_the_rule_gives_it() -> None:
    alone = state(nsplit=4)
    assert alone.launch.blocks == 24 and alone.headline() == "nsplit 4: 24 blocks"
    rows = state(m=32, nsplit=4)
    assert rows.headline() == "nsplit 4, folded to 2 runs: 12 blocks"
    assert "A block folds neighbouring slices into 2 runs." in rows.part_words()
    assert rows.sweep()[3][1] == pytest.approx(100 * 24 / 32)  # the curve: a block a slice
    full = state(m=128, nsplit=4)
    assert full.headline() == "nsplit 4, all in one block: 6 blocks"
    assert full.part_words().startswith("The grid is full without slices: every block")
    assert "takes nsplit 4, all in one block: 6 blocks, 0.00 % extra" in full.text()
    other = state(m=32, nsplit=5)  # 5 × 32 × 600 × 4 = 384 kB
    assert other.launch.blocks == 30 and "Slice sums take" in other.part_words()


def test_nsplit_ends_at_the_groups() -> None:
    shown = state(k=70)
    assert shown.groups == 3
    with pytest.raises(InputError, match="nsplit"):
        shown.update(nsplit=4)
    one = state(k=20)  # one group: one stop
    assert one.groups == 1 and len(one.sweep()) == 1
    ElementTree.fromstring(one.picture())


def test_one_sm() -> None:
    class OneSm(SplitWaves):
        @property
        def sms(self) -> int:
            return 1

    shown = OneSm(n=600, k=640, plan=simple_plan, occupancy=holds(2, sms=1))
    assert [shown.per_sm(wave) for wave in range(3)] == [[2], [2], [2]]
    assert (shown.waves.slots, shown.waves.rounds, shown.idle_sms) == (2, 3, 0)
    ElementTree.fromstring(shown.picture())


def test_a_kernel_that_does_not_fit_says_so() -> None:
    shown = state(occupancy=holds(0))
    assert "the kernel does not fit this card (warps)" in shown.text()
    assert "does not fit" in shown.picture()
    _, ax = plots.figure()
    with pytest.raises(InputError, match="does not fit"):
        waves.draw(ax, shown)


@pytest.mark.parametrize(
    "wrong",
    [{"n": 0}, {"k": 1.5}, {"m": 0}, {"nsplit": 99}, {"rule": "x"}, {"card": "abacus"}, {"format": "w4"}],
)
def test_a_wrong_state_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        state(**wrong)
    assert caught.value.argument == next(iter(wrong))


def test_many_waves_are_three_rows() -> None:
    shown = state(n=40_000)  # 400 blocks in 32 slots: 12 full waves and 16
    rows = shown.rows()
    assert [name for name, _ in rows] == ["wave 1", "waves 2–12: full", "wave 13"]
    assert rows[1][1] is None and rows[2][1] == [1] * 16


@pytest.mark.parametrize("card", ["rtx3050-laptop", "h200", "rtx5090"])
@pytest.mark.parametrize("changes", [{}, {"nsplit": 13}, {"n": 40_000}, {"m": 64, "nsplit": 20}])
def test_the_picture_is_valid_and_stays_inside(card: str, changes: dict[str, int]) -> None:
    shown = state(card=card, **changes)
    root = ElementTree.fromstring(shown.picture())
    assert root.attrib["aria-label"] == shown.text()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = list(root.iter(f"{SVG}rect"))
    for box in boxes:
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    tips = [box.findtext(f"{SVG}title") or "" for box in boxes if box.attrib["fill"] == plots.PALE]
    drawn = sum(blocks is not None for _, blocks in shown.rows())
    assert len([tip for tip in tips if "SM " in tip]) == shown.sms * drawn
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["font-size"]) >= 11 and float(text.attrib["y"]) <= height


def test_the_static_figures() -> None:
    fig, axes = plots.figure(rows=1, cols=2)
    shown = state(nsplit=13)
    waves.draw(axes[0], shown)
    waves.draw_sweep(axes[1], shown)
    assert len(axes[0].patches) == 2 * 16 * 3
    assert [text.get_text() for text in axes[0].texts] == ["32 of 32", "32 of 32", "14 of 32"]
    filled, extra, _ = axes[1].lines
    assert list(filled.get_xdata()) == list(range(1, 21))
    assert filled.get_ydata()[12] == pytest.approx(100 * 78 / 96)
    assert extra.get_ydata()[0] == 0 and extra.get_ydata()[4] == pytest.approx(5.48, abs=0.01)
    assert plots.render(fig, "Waves and fill against nsplit").png


def test_the_view_moves_and_takes_the_rule() -> None:
    view = View(state())
    view.inputs["nsplit"].value = 13
    assert "78 blocks" in view.output.value
    view.inputs["take"].click()
    assert view.inputs["nsplit"].value == 4
    view.inputs["card"].value = "h200"
    assert "24 blocks on 132 SMs" in view.output.value


def test_the_real_rule_and_kernel() -> None:
    shown = SplitWaves(nsplit=0)
    assert shown.nsplit == shown.by_rule.nsplit > 1
    alone = SplitWaves()
    assert alone.launch.blocks == 6 and alone.idle_sms == 10  # 5632 / 1024 blocks along n
    assert 1 <= alone.resident.blocks <= 6  # 8 warps a block, 48 warps an SM
    for m, planes in ((1, 64), (8, 16), (128, 1)):
        rows = SplitWaves(m=m, nsplit=0)
        assert rows.nsplit == shown.nsplit  # by N and K only
        assert rows.launch.planes == planes and rows.launch == rows.by_rule
    assert SplitWaves(m=64, rule="seed").by_rule.nsplit != SplitWaves(rule="seed").by_rule.nsplit
