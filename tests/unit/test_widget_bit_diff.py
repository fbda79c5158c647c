"""Bit-diff: distances in ulps by hand, the edge cases of floating point, the picture, the widget."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from labkit import plots
from labkit.errors import InputError
from labkit.widgets import bit_diff
from labkit.widgets.base import View
from labkit.widgets.bit_diff import COLORS, BitDiff, compare

SVG = "{http://www.w3.org/2000/svg}"


def test_ulps_by_hand() -> None:
    one = np.float32(1)
    up = np.nextafter(one, np.float32(2))
    a = np.array([1, 1, 1, -1, 0.0, 1, 2], dtype=np.float32)
    b = np.array([1, up, 1 + 5 * 2**-23, -up, -0.0, 1 - 3 * 2**-24, 2 + 20 * 2**-22], dtype=np.float32)
    found = compare(a, b)
    assert found.ulps.tolist() == [0, 1, 5, 1, 0, 3, 20]
    assert found.counts() == {
        "same bits": 1,
        "+0 and −0": 1,
        "1 ulp": 2,
        "2–3 ulps": 1,
        "4–15 ulps": 1,
        "16 ulps or more": 1,
    }
    assert (found.differing, found.max_ulps, found.identical) == (6, 20, False)


def test_zero_is_crossed_one_number_at_a_time() -> None:
    tiny = np.float32(2**-149)
    assert compare(np.array([tiny]), np.array([-tiny])).max_ulps == 2


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_one_step_of_a_short_type(dtype: torch.dtype, step: float) -> None:
    a = torch.tensor([[1.0, -1.0], [1.0, 0.0]], dtype=dtype)
    b = torch.tensor([[1.0 + step, -1.0], [1.0, 0.0]], dtype=dtype)
    found = compare(a, b)
    assert found.ulps.tolist() == [1, 0, 0, 0] and found.shape == (2, 2)
    assert found.value(0) == 1.0 and found.value(0, "b") == 1.0 + step and found.value(1) == -1.0


def test_extremes_of_float64_do_not_overflow() -> None:
    big = np.array([1.7e308, 5.0])
    found = compare(big, -big)
    assert found.ulps[0] > 1.8e19 and (found.ulps > 0).all()


def test_nan_and_infinity() -> None:
    a = np.array([math.nan, math.nan, math.inf, math.inf, 1.0], dtype=np.float32)
    b = np.array([math.nan, 1.0, math.inf, -math.inf, 1.0], dtype=np.float32)
    found = compare(a, b)
    assert found.counts() == {"same bits": 3, "NaN or inf": 2}
    assert np.isnan(found.ulps[[1, 3]]).all() and found.max_ulps == 0


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 40))
def test_steps_of_nextafter_are_counted(start: float, steps: int) -> None:
    moved = np.float32(start)
    for _ in range(steps):
        moved = np.nextafter(moved, np.float32(-math.inf) if start > 0 else np.float32(math.inf))
    found = compare(np.array([start], dtype=np.float32), np.array([moved]))
    assert found.max_ulps == steps


def test_order_of_a_sum_is_seen_and_a_repeat_is_not() -> None:
    parts = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))

    def in_order(rows: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(256)
        for row in rows:
            total = total + row
        return total

    fixed = in_order(parts)
    assert compare(fixed, in_order(parts)).identical
    other = compare(fixed, in_order(parts.flip(0)))
    assert 128 < other.differing <= 256
    assert torch.allclose(fixed, in_order(parts.flip(0)), atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "argument"),
    [
        (np.zeros(3, np.float32), np.zeros(4, np.float32), "b"),
        (np.zeros(3, np.float32), np.zeros(3, np.float64), "b"),
        (np.zeros(3, np.int32), np.zeros(3, np.int32), "a"),
        ([1.0], [1.0], "a"),
        (np.zeros(0, np.float32), np.zeros(0, np.float32), "a"),
    ],
)
def test_what_cannot_be_compared_is_named(a: object, b: object, argument: str) -> None:
    with pytest.raises(InputError) as caught:
        compare(a, b)
    assert caught.value.argument == argument


def test_a_transposed_array_is_read_in_its_own_order() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = a.copy()
    b[1, 0] += 1
    assert np.flatnonzero(compare(a.T, b.T).kinds).tolist() == [1]
    assert np.flatnonzero(compare(torch.tensor(a).T, torch.tensor(b).T).kinds).tolist() == [1]


def test_cells_keep_a_matrix_wrap_a_vector_and_show_the_worst() -> None:
    matrix = bit_diff.cells(compare(np.zeros((4, 9), np.float32), np.zeros((4, 9), np.float32)))
    assert matrix.rows.shape == (4, 9) and matrix.matrix
    vector = bit_diff.cells(compare(np.zeros(100, np.float32), np.zeros(100, np.float32)))
    assert vector.rows.shape == (2, 64) and vector.rows[1, 36:].tolist() == [-1] * 28
    long = np.zeros(5632, np.float32)
    other = long.copy()
    other[4] = 1
    grid = bit_diff.cells(compare(long, other))
    assert grid.each == 3 and grid.holds(4) == (0, 1)
    assert grid.rows[0, 1] == bit_diff.FAR and np.count_nonzero(grid.rows > 0) == 1


def test_figures_have_a_cell_for_every_output_and_a_row_for_every_run() -> None:
    a = np.ones(70, np.float32)
    b = a.copy()
    b[[3, 69]] = np.nextafter(np.float32(1), np.float32(2))
    runs = {"fixed order": compare(a, a), "atomics": compare(a, b)}
    fig, axes = plots.figure(rows=1, cols=2)
    bit_diff.draw(axes[0], runs["atomics"])
    bit_diff.draw_strips(axes[1], runs)
    assert len(axes[0].patches) == 70 and len(axes[1].images) == 2
    strip = np.asarray(axes[1].images[1].get_array())[0]
    assert strip.shape[0] == 70
    changed = np.any(strip != np.array(to_rgb(COLORS[bit_diff.SAME])), axis=1)
    assert np.flatnonzero(changed).tolist() == [3, 69]
    assert [label.get_text() for label in axes[1].get_yticklabels()] == ["fixed order", "atomics"]
    assert [text.get_text() for text in axes[1].texts] == ["0", "2"]
    assert "2 of 70 differ" in axes[0].get_xlabel()
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["same bits", "1 ulp"]
    assert plots.render(fig, "Two strips of outputs").png[:4] == b"\x89PNG"


def test_runs_of_different_shapes_are_refused() -> None:
    zero = compare(np.zeros(2, np.float32), np.zeros(2, np.float32))
    longer = compare(np.zeros(3, np.float32), np.zeros(3, np.float32))
    with pytest.raises(InputError, match="one shape"):
        BitDiff({"a": zero, "b": longer})
    with pytest.raises(InputError, match="at least one run"):
        BitDiff({})


def widget() -> BitDiff:
    a = torch.ones(96)
    b = a.clone()
    b[10], b[50] = 1 + 2**-23, -1
    return BitDiff.of(a, fixed_order=a.clone(), atomics=b)


def test_the_button_finds_the_next_difference_and_comes_round() -> None:
    shown = widget()
    shown.press("next")
    assert shown.index == 0  # nothing differs in this run
    shown.update(run="atomics")
    stops = []
    for _ in range(3):
        shown.press("next")
        stops.append(shown.index)
    assert stops == [10, 50, 10]
    with pytest.raises(InputError):
        shown.press("previous")


def test_bits_of_the_chosen_output() -> None:
    shown = widget()
    shown.update(run="atomics", index=10)
    assert shown.bit_rows() == ("0" + "01111111" + 23 * "0", "0" + "01111111" + 22 * "0" + "1")
    assert "1 ulp, 1 bit changed" in shown.output_words()
    shown.update(index=50)
    assert shown.bit_rows()[1][0] == "1"
    with pytest.raises(InputError):
        shown.update(index=96)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (8, 40), (5632,)])
def test_the_picture_is_valid_and_stays_inside(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    a = torch.ones(shape, dtype=dtype)
    shown = BitDiff.of(a, other=-a)
    shown.update(index=a.numel() - 1)
    root = ElementTree.fromstring(shown.picture())
    assert root.attrib["aria-label"] == shown.text()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = list(root.iter(f"{SVG}rect"))
    for box in boxes:
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["font-size"]) >= 11 and float(text.attrib["x"]) <= width - 8
    fills = [box.attrib["fill"] for box in boxes]
    assert COLORS[bit_diff.FAR] in fills


def test_the_view_follows() -> None:
    view = View(widget())
    assert "All 96 outputs have the same bits" in view.output.value
    view.inputs["run"].value = "atomics"
    view.inputs["next"].click()
    assert view.inputs["index"].value == 10
    assert "2 of 96 outputs" in view.output.value
