"""Small notebooks for the tests of the course frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.course.notebook import dumps, normalise

PARAMETERS = 'device = "auto"\nsolve = False\nbatch = 4  # rows of activations\nwarm = True\nnote = "a"'
START = (
    "from labkit import course\n\n"
    'lab = course.start("{number}", device=device, solve=solve, batch=(batch, course.whole(1, 64)),\n'
    "                   warm=(warm, course.truth()))"
)


def code(source: str, *tags: str) -> dict[str, Any]:
    """A code cell."""
    metadata = {"tags": list(tags)} if tags else {}
    return {
        "cell_type": "code",
        "source": source,
        "metadata": metadata,
        "outputs": [],
        "execution_count": None,
    }


def text(source: str) -> dict[str, Any]:
    """A markdown cell."""
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def book(*cells: dict[str, Any]) -> dict[str, Any]:
    """A canonical notebook of these cells."""
    return normalise({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def chapter(folder: Path, name: str, *sources: str, parameters: str = PARAMETERS) -> Path:
    """Write ``NN_name.ipynb`` with a parameters cell, a start call and these code cells."""
    opening = [text(f"# {name}"), code(parameters, "parameters"), code(START.format(number=name[:2]))]
    path = folder / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(book(*opening, *map(code, sources))), encoding="utf-8")
    return path


def full_chapter() -> list[dict[str, Any]]:
    """The cells of a chapter that passes the whole gate."""
    prose = "plain words " * 110
    cells = [
        text(
            "# 00 A chapter\n\n**Question** why? **Minutes** 9. **Prerequisites** none. "
            f"**labkit gains** it. {prose}"
        ),
        code('device = "auto"\nsolve = False', "parameters"),
        code('from labkit import course\n\nlab = course.start("00", device=device, solve=solve)'),
        text(f"## One number that hurts\n\n{prose}"),
        code("print(1)\n# NBVAL_CHECK_OUTPUT"),
        text(f"## Predict first\n\n{prose}"),
        *[code("\n".join(f"value_{n}_{m} = {m}" for m in range(9))) for n in range(13)],
        code('plots.show(figure, alt="the first picture")'),
        code('plots.show(figure, "the second picture")'),
        code("def one(x):\n    ...\n\n\ncheck.one(one)"),
        code("two = None\ncheck.two(two)"),
        code("check.three(None)"),
        text(f"## Wrong turns\n\n{prose}"),
        code("base.show(controller)"),
        text("The table says measured and quoted."),
        text("## Five questions\n\n1. a\n2. b\n3. c\n4. d\n5. e"),
        text("## Further reading\n\n- a book\n\n## Next\n\nChapter 01."),
    ]
    cells[4]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1\n"}]
    cells[4]["execution_count"] = 3
    return cells
