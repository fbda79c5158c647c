from __future__ import annotations

import itertools
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from labkit.course.output import CellText, cut_mark, finish, overwritten

Outputs = list[dict[str, Any]]


def _stream(name: str, text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def _kept(arriving: Outputs, limit: int = 1000) -> Outputs:
    text = CellText(limit)
    outputs: Outputs = []
    for one in arriving:
        outputs.append(one)
        text.take(outputs)
    finish(outputs)
    return outputs


@given(st.text("ab\r\n", max_size=30))
def test_carriage_returns_act_as_in_nbclient(text: str) -> None:
    assert overwritten(text) == re.sub(r".*\r(?=[^\n])", "", text)


def test_a_long_line_full_of_carriage_returns() -> None:
    assert overwritten("ab\r" * 1_000_000 + "end\n") == "end\n"


@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr", "display"]), st.text("xy\n", min_size=1))))
def test_merging_keeps_all_text_in_order(parts: list[tuple[str, str]]) -> None:
    display = {"output_type": "display_data", "data": {"text/plain": "d"}}
    arriving = [dict(display) if name == "display" else _stream(name, text) for name, text in parts]
    kept = _kept(arriving, 10**6)
    for name in ("stdout", "stderr"):
        said = "".join(o["text"] for o in kept if o.get("name") == name)
        assert said == "".join(text for n, text in parts if n == name)
    neighbours = [tuple(o.get("name") for o in pair) for pair in itertools.pairwise(kept)]
    assert all(pair not in (("stdout",) * 2, ("stderr",) * 2, ("stderr", "stdout")) for pair in neighbours)


def test_text_over_the_limit_is_cut_once_and_says_so() -> None:
    arriving = [_stream("stdout", "a" * 900), _stream("stdout", "b" * 900), _stream("stdout", "c")]
    arriving += [_stream("stderr", "d")]
    assert _kept(arriving) == [_stream("stdout", "a" * 900 + "b" * 100 + cut_mark(1000))]


def test_text_that_fits_exactly_is_whole() -> None:
    assert _kept([_stream("stdout", "a" * 1000)]) == [_stream("stdout", "a" * 1000)]


def test_many_small_pieces_after_a_clear_start_with_the_whole_room() -> None:
    text = CellText(10)
    outputs: Outputs = []
    for piece in ("a" * 10, "b" * 10):
        outputs[:] = [_stream("stdout", piece)]  # as clear_output leaves it
        text.take(outputs)
    finish(outputs)
    assert outputs == [_stream("stdout", "b" * 10)]


def test_a_short_description_of_a_figure_survives_a_full_cell() -> None:
    figure = {"output_type": "display_data", "data": {"text/plain": "Figure: x", "text/html": "<img>"}}
    assert _kept([_stream("stdout", "a" * 2000), dict(figure)])[1] == figure
