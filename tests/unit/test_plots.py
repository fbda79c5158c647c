"""Figures: alternative text, determinism, helpers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit import plots
from labkit.errors import InputError
from labkit.tables import ORIGINS

ALT = "A line that rises from zero to one."


def drawn(text: str = ALT) -> plots.Picture:
    fig, ax = plots.figure(3, 2)
    ax.plot([0, 1], [0, 1])
    return plots.render(fig, text)


@pytest.mark.parametrize("alt", ["", "   ", "short", None])
def test_a_figure_without_alternative_text_is_refused(alt: str) -> None:
    fig, _ = plots.figure(2, 2)
    with pytest.raises(InputError, match="alt"):
        plots.render(fig, alt)


def test_the_same_drawing_gives_the_same_bytes() -> None:
    assert drawn().png == drawn().png
    assert drawn().png.startswith(b"\x89PNG")


def test_html_escapes_the_alternative_text() -> None:
    picture = drawn('a < b & "c" > d, said twice')
    assert 'alt="a &lt; b &amp; &quot;c&quot; &gt; d, said twice"' in picture.html
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/plain"] == 'Figure: a < b & "c" > d, said twice'


def test_show_prints_the_text_outside_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    fig, _ = plots.figure(2, 2)
    plots.show(fig, alt=ALT)
    assert capsys.readouterr().out == f"Figure: {ALT}\n"


def test_pyplot_is_not_loaded_and_its_figures_are_closed() -> None:
    code = "import sys; from labkit import plots; f, a = plots.figure()"
    code += "; plots.show(f, alt='A figure with no line')"
    code += "; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fig = plt.figure()
    plots.render(fig, ALT)
    assert not plt.fignum_exists(fig.number)


def test_every_origin_has_its_own_style() -> None:
    styles = [plots.origin_style(origin) for origin in ORIGINS]
    assert len({style["facecolor"] for style in styles}) == len({style["hatch"] for style in styles}) == 4
    with pytest.raises(InputError, match="measured, emulated, simulated, quoted"):
        plots.origin_style("guessed")


def test_bars_write_values_and_name_the_origins() -> None:
    _fig, ax = plots.figure()
    plots.bars(ax, ["a", "b"], [1.0, 22.0], ["quoted", "measured"], unit="GB/s")
    assert [t.get_text() for t in ax.texts] == ["1.0", "22.0"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["measured", "quoted"]
    assert ax.get_xlabel() == "GB/s"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    with pytest.raises(InputError, match="equal lengths"):
        plots.bars(ax, ["a"], [1.0, 2.0], ["quoted"], unit="ms")


def test_no_text_is_smaller_than_nine_points() -> None:
    fig, ax = plots.figure()
    plots.bars(ax, ["a", "b"], [1.0, 1000.0], ["quoted", "measured"], unit="GB/s", log=True)
    fig.canvas.draw()
    texts = [*ax.get_xticklabels(), *ax.get_yticklabels(), *ax.texts, *ax.get_legend().get_texts()]
    assert min(text.get_fontsize() for text in texts if text.get_text()) >= 9
    assert not any("^" in label.get_text() for label in ax.get_xticklabels())


def test_cells_draw_one_square_for_each_colour() -> None:
    _fig, ax = plots.figure()
    colors: list[list[str | None]] = [[plots.BLUE, plots.YELLOW], [None, plots.RED]]
    plots.cells(ax, colors, [["x", "y"], ["", "z"]], row_labels=["r0", "r1"])
    assert len(ax.patches) == 3
    ink = {text.get_text(): text.get_color() for text in ax.texts}
    assert ink == {"x": "white", "y": plots.INK, "z": "white"}


def test_log_axes_show_plain_numbers() -> None:
    _fig, ax = plots.figure()
    ax.plot([0.1, 1000], [1, 10])
    plots.log_axes(ax, y=False)
    assert ax.get_xscale() == "log" and ax.get_yscale() == "linear"
    assert ax.xaxis.get_major_formatter()(1000, None) == "1,000"
