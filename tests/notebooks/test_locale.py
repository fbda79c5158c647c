"""A Windows classroom, imitated: a GBK locale, a folder named in Chinese, files opened with a codec named."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.course.index import Chapter, ready_chapters

# Appends every EncodingWarning that labkit's files or a notebook's cells cause to a file. It is
# written down and not raised: a guarded probe would swallow the exception.
WATCH = """
import os, warnings
warnings.filterwarnings("always", category=EncodingWarning)
_shown = warnings.showwarning
def _write_down(message, category, filename, lineno, file=None, line=None):
    own = os.sep + "labkit" + os.sep in filename or "ipykernel_" in filename
    if category is EncodingWarning and own and "site-packages" not in filename:
        with open(os.environ["ENCODING_LOG"], "a", encoding="utf-8") as log:
            log.write(f"{filename}:{lineno}: {message}\\n")
    elif category is not EncodingWarning:
        _shown(message, category, filename, lineno, file, line)
warnings.showwarning = _write_down
"""
FOLDER = "量化 推理 课程"


def _copy(checkout: Path, where: Path, codec: str) -> Path:
    """What a student unpacks, in a folder whose name holds Chinese characters and spaces.

    File names are bytes on Linux: ``codec`` is the one of the locale that the copy runs under.
    """
    home = where / os.fsdecode(FOLDER.encode(codec))
    home.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("labkit", "notebooks", "data"):
        shutil.copytree(checkout / name, home / name, ignore=skipped)
    shutil.copy(checkout / "pyproject.toml", home)
    return home


@pytest.fixture(scope="module")
def gbk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a GBK locale, made here; skipped where the system cannot make one."""
    folder = tmp_path_factory.mktemp("locale")
    localedef = shutil.which("localedef")
    if localedef is None:
        pytest.skip("localedef is missing; it comes with the C library of Linux")
    subprocess.run(
        [localedef, "-i", "zh_CN", "-f", "GBK", str(folder / "zh_CN.GBK")], capture_output=True, check=False
    )
    env = {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ask = [sys.executable, "-c", "import locale; print(locale.getencoding())"]
    said = subprocess.run(
        ask, env={**os.environ, **env}, capture_output=True, text=True, encoding="ascii", check=False
    )
    if said.stdout.strip().upper() not in ("GBK", "CP936"):
        pytest.skip("localedef cannot build zh_CN.GBK; the Debian package 'locales' brings its charmap")
    return env


def _course(
    home: Path, scratch: Path, env: dict[str, str], *options: str
) -> subprocess.CompletedProcess[bytes]:
    (scratch / "site").mkdir()
    (scratch / "site" / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
    full = {**os.environ, **env, "PYTHONPATH": os.pathsep.join([str(home), str(scratch / "site")])}
    full |= {"PYTHONWARNDEFAULTENCODING": "1", "ENCODING_LOG": str(scratch / "encoding.log")}
    full.pop("PYTHONIOENCODING", None)
    command = [sys.executable, "-m", "labkit.cli", "course", "--device", "cpu", *options]
    return subprocess.run(command, env=full, cwd=home, capture_output=True, timeout=600, check=False)


def _check(done: subprocess.CompletedProcess[bytes], home: Path, scratch: Path, number: str) -> None:
    said = (done.stdout + done.stderr).decode("gbk", "replace")
    assert done.returncode == 0, said
    assert "Traceback" not in said
    # the default output folder: the copy ran, not the checkout that the tests come from
    summary = json.loads((home / "results" / "course" / "summary.json").read_text(encoding="utf-8"))
    assert summary["chapters"][number]["status"] == "passed"
    log = scratch / "encoding.log"
    assert not log.exists(), log.read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", ready_chapters(), ids=lambda chapter: chapter.number)
def test_every_chapter_runs_under_gbk_from_a_chinese_folder(
    chapter: Chapter, checkout: Path, gbk: dict[str, str], tmp_path: Path
) -> None:
    home = _copy(checkout, tmp_path, "gbk")
    done = _course(home, tmp_path, gbk, "--chapters", chapter.number)
    _check(done, home, tmp_path, chapter.number)
    assert FOLDER in done.stdout.decode("gbk")


def test_no_file_is_opened_in_the_locales_codec(checkout: Path, tmp_path: Path) -> None:
    home = _copy(checkout, tmp_path, "utf-8")
    done = _course(home, tmp_path, {}, "--chapters", "02", "--solve")
    _check(done, home, tmp_path, "02")


def test_the_watch_sees_a_file_opened_in_the_locales_codec(tmp_path: Path) -> None:
    """The guard of the guard, on a package named like ours."""
    (tmp_path / "labkit").mkdir()
    (tmp_path / "labkit" / "__init__.py").write_text("open(__file__).close()", encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
    log = tmp_path / "log"
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PYTHONWARNDEFAULTENCODING": "1",
        "ENCODING_LOG": str(log),
    }
    subprocess.run([sys.executable, "-c", "import labkit"], env=env, cwd=tmp_path, check=True)
    assert "labkit" in log.read_text(encoding="utf-8")


_TEXT_CALLS = {"open", "read_text", "write_text", "fdopen", "NamedTemporaryFile", "TemporaryFile"}


def test_every_call_that_opens_text_names_its_codec(checkout: Path) -> None:
    """Also on the paths that no chapter takes."""
    found = []
    for path in sorted((checkout / "labkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _opens_text(node):
                found.append(f"{path.relative_to(checkout)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


# these open no text, or are labkit.atomic's, which is always UTF-8
_OTHERS = ("os.open", "webbrowser.open", "atomic.write_text")


def _opens_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in named or "encoding" in named:  # **options are built elsewhere, with the codec
        return False
    if name in ("run", "Popen", "check_output") and isinstance(text := named.get("text"), ast.Constant):
        return bool(text.value)
    if name not in _TEXT_CALLS or ast.unparse(call.func) in _OTHERS:
        return False
    if isinstance(call.func, ast.Name) and name in ("read_text", "write_text"):  # a function of ours
        return False
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if owner[:1].isupper():  # TensorFile.open and its like: a class's own way to open
        return False
    # open(file, mode) and os.fdopen(number, mode), but path.open(mode)
    skips = name == "fdopen" or (name == "open" and isinstance(call.func, ast.Name))
    positional = call.args[1:] if skips else call.args
    modes = [*positional[:1], *([named["mode"]] if "mode" in named else [])]
    binary = any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
    temporary = name in ("NamedTemporaryFile", "TemporaryFile") and not modes
    return not binary and not temporary
