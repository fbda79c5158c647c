"""Chapters in real JupyterLab: all cells run, and their widgets answer to the keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import device
from labkit.widgets.base import Slider
from labkit.widgets.bit_viewer import BitViewer
from labkit.widgets.roofline import Roofline

# One server and one browser: keep these tests on one worker when pytest runs several.
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def test_chapter_00_machine_card(open_chapter: Any) -> None:
    chapter = open_chapter("00_start_here.ipynb")
    assert chapter.errors() == []
    before = chapter.widget_text()
    chapter.press("Context (tokens)", "ArrowRight")
    after = chapter.wait_for_change(before)
    chapter.press("Context (tokens)", "ArrowLeft")
    chapter.wait_for_text(before)
    assert after != before
    assert chapter.errors() == []


def test_chapter_01_roofline(open_chapter: Any) -> None:
    chapter = open_chapter("01_roofline.ipynb")
    assert chapter.errors() == []
    card = device.get_device("rtx3050-laptop")
    expected = Roofline(bandwidth_gb_s=card.bandwidth_gb_s, tflops=card.tensor_tflops)
    assert chapter.widget_text() == chapter.text_of(expected.html())
    slider = expected.controls()[0]
    assert isinstance(slider, Slider)
    stop = slider.values.index(expected.m)
    expected.update(m=slider.values[stop + 1])
    chapter.press(slider.label, "ArrowRight")
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert chapter.errors() == []


def test_chapter_02_bit_viewer(open_chapter: Any) -> None:
    chapter = open_chapter("02_packing_w4_w3.ipynb")
    assert chapter.errors() == []
    expected = BitViewer()
    assert chapter.widget_text() == chapter.text_of(expected.html())

    expected.update(byte_value=expected.byte_value + 1)
    chapter.press("byte value", "ArrowRight")
    chapter.wait_for_text(chapter.text_of(expected.html()))

    expected.update(selected=3)
    chapter.press("code number", "ArrowRight")
    chapter.wait_for_text(chapter.text_of(expected.html()))

    expected.update(format="w4")
    chapter.choose("format", "W4: 8 codes in 4 bytes")
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert "b3 = 0x" in chapter.widget_text()
    assert chapter.errors() == []


def test_chapter_07_dispatch_thresholds(open_chapter: Any) -> None:
    """A threshold that moves changes the kernel named at the cursor, and the parameters it stands for."""
    chapter = open_chapter("07_dispatch.ipynb")
    assert chapter.errors() == []
    before = chapter.widget_text()
    assert "gemv_small_batch" in before
    for _ in range(7):  # single row up to M = 1 … 8, where the cursor is
        now = chapter.widget_text()
        chapter.press("Single row up to M", "ArrowRight")
        chapter.wait_for_change(now)
    after = chapter.widget_text()
    assert "M = 8: gemv_single_row" in after and "M = 8: gemv_single_row" not in before
    assert chapter.errors() == []
