"""README.md's pictures are those that the widgets draw now."""

from __future__ import annotations

from labkit.paths import data_dir
from labkit.widgets import pictures


def test_pictures_are_current_and_in_the_readme() -> None:
    readme = (data_dir().parent / "README.md").read_text(encoding="utf-8")
    for name, text in pictures.pictures().items():
        kept = (pictures.folder() / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: run python -m labkit.widgets.pictures"
        assert f"(data/pictures/{name})" in readme
