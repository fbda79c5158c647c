"""Syllabi from the notebooks' own minutes and prerequisites; the planner that shows them."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plots
from labkit.classroom import syllabus
from labkit.classroom.syllabus import Lesson, plan
from labkit.course.index import ready_chapters
from labkit.errors import InputError
from labkit.widgets.base import View
from labkit.widgets.syllabus_planner import SyllabusPlanner, draw

KNOWN = {
    "00": Lesson("00", "a", 30, ()),
    "01": Lesson("01", "b", 60, ("00",)),
    "02": Lesson("02", "c", 60, ("01",)),
    "03": Lesson("03", "d", 90, ()),
}


def test_the_notebooks_say_what_the_list_says() -> None:
    found = syllabus.lessons()
    for chapter in ready_chapters():
        lesson = found[chapter.number]
        assert lesson.minutes == chapter.minutes, chapter.number
        assert all(need in found and need < chapter.number for need in lesson.needs)
        assert lesson.needs or chapter.number == "00", f"{chapter.number} names no chapter it needs"
    assert found["03"].needs == ("01", "02") and found["11"].needs == ("01", "10")


def test_by_hand() -> None:
    two = plan(2, track=("02", "03"), known=KNOWN)  # 120 - 20 - 10 = 90
    # 02 done takes 00 and 01 as shown: 60 + 10 + 20
    assert two.numbers("do") == ["02"] and two.numbers("show") == ["00", "01"] and two.left == 0
    assert [row.start for row in two.rows] == [10, 20, 40]
    assert two.text() == "2 h: do 02; show 00, 01; 0 minutes left"
    assert plan(1, track=("03",), known=KNOWN).text() == "1 h: show 03; 10 minutes left"
    pairs = plan(2, track=("03",), students=3, machines=2, known=KNOWN)
    assert pairs.numbers("show") == ["03"] and pairs.rows[0].minutes == 40  # 90 / 3 * 1.2, in fives


@given(
    hours=st.sampled_from([0.5, 1, 2, 3.5, 8, 40]),
    track=st.permutations(list(KNOWN)),
    students=st.integers(1, 60),
    machines=st.integers(30, 60),
)
def test_a_plan_fits_and_is_complete(hours: float, track: list[str], students: int, machines: int) -> None:
    made = plan(hours, track=track, students=students, machines=machines, known=KNOWN)
    used = sum(row.minutes for row in made.rows)
    assert used + made.left + made.breaks + syllabus.SETUP_MINUTES == int(60 * hours)
    assert made.left >= 0
    numbers = made.numbers()
    assert numbers == sorted(set(numbers))
    for row in made.rows:
        assert set(row.lesson.needs) <= set(numbers)


@pytest.mark.parametrize(
    "wrong",
    [{"hours": 0}, {"hours": 41}, {"students": 0}, {"students": 31, "machines": 15}, {"track": ("99",)}],
)
def test_wrong_values_are_named(wrong: dict) -> None:
    with pytest.raises(InputError) as caught:
        plan(**{"hours": 2, "known": KNOWN, **wrong})
    assert caught.value.argument in (next(iter(wrong)), list(wrong)[-1])


@pytest.mark.parametrize("track", list(syllabus.TRACKS))
@pytest.mark.parametrize("hours", [1.0, 2.0, 4.0, 8.0, 16.0])
def test_the_planner_draws_every_track(track: str, hours: float) -> None:
    shown = SyllabusPlanner(hours=hours, track=track)
    root = ElementTree.fromstring(shown.html())
    assert root.attrib["aria-label"] == shown.text()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width + 0.5
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert float(text.attrib["y"]) <= height
    assert all(row.lesson.title in shown.html() for row in shown.plan().rows)


def test_too_few_machines_are_said_and_not_raised() -> None:
    view = View(SyllabusPlanner(students=30, machines=30))
    before = view.output.value
    view.inputs["machines"].value = 15
    assert "in pairs" in view.output.value and view.output.value != before
    view.inputs["machines"].value = 14
    assert "two at a machine still work" in view.output.value
    view.inputs["students"].value = 14
    assert "minutes left" in view.output.value


def test_the_static_figure() -> None:
    fig, ax = plots.figure()
    draw(ax, [plan(2, known=KNOWN, track=("00", "01")), plan(8, known=KNOWN, track=("00", "01"))])
    assert [text.get_text() for text in ax.texts][:2] == ["00", "01"] or ax.texts
    assert plots.render(fig, "Two plans as bars").png
    with pytest.raises(InputError):
        draw(ax, [])
