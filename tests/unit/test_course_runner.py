from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from notebook_builder import PARAMETERS, chapter
from typer.testing import CliRunner

from labkit.check import progress
from labkit.cli import app
from labkit.course import runner
from labkit.course.console import Console
from labkit.course.execute import run_notebook
from labkit.course.notebook import read
from labkit.course.output import CELL_TEXT_LIMIT, cut_mark
from labkit.course.runner import prepare, run, run_course
from labkit.errors import InputError

CHECKS = """
from labkit import check
from labkit.check import exercise, not_yet, passed

@exercise("99.1", title="one")
def check_one(answer):
    return passed() if answer == 1 else not_yet(1, answer)

@exercise("99.2", title="two")
def check_two(answer):
    return passed()

check.check_one(2)
check.check_two(None)
check.check_one(1)
"""
SEES = """
import os
from labkit import paths
here = (batch, warm, note, device, lab.device)
(paths.results_dir() / "made.txt").write_text(repr(here), encoding="utf-8")
print(here)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "课程 {notes} a b"


def test_every_chapter_runs_and_a_failing_one_hides_nothing(folder: Path, tmp_path: Path) -> None:
    books = [
        chapter(folder, "00_good", CHECKS, SEES),
        chapter(folder, "01_bad", "x = 1", "x / 0  # <here>", "print('never')"),
        chapter(folder, "02_quiet_end", "import sys\nsys.exit(0)", "print('never')"),
    ]
    before = [path.read_bytes() for path in books]
    out = tmp_path / "出 {out} dir"
    shown = io.StringIO()
    request = prepare(
        folder=folder, out=out, pairs=["batch=8", "warm=off", "note=it's {x} \\n"], device="cpu"
    )
    result = run(request, Console(shown))

    assert result.exit_code == 1
    assert [r.status for r in result.results] == ["passed", "failed", "failed"]
    good, bad, quiet = result.results
    assert (good.cells_done, good.cells_total, good.device) == (5, 5, "cpu")
    assert good.checks == {"passed": 1, "not_yet": 0, "not_attempted": 1, "total": 2}
    seen = (out / "files" / "00" / "made.txt").read_text(encoding="utf-8")
    assert seen == repr((8, False, "it's {x} \\n", "cpu", "cpu"))
    assert bad.failure is not None and bad.failure.source == "x / 0  # <here>"
    assert bad.failure.summary() == "ZeroDivisionError: division by zero"
    assert quiet.failure is not None and "cells below did not run" in quiet.failure.evalue

    text = shown.getvalue()
    assert "x / 0  # <here>" in text and "ZeroDivisionError" in text and "1 of 3 chapters passed" in text
    assert re.search(r"00 Start here: passed \(5/5 cells, [\d.]+ s, exercises: 1 of 2 passed\)", text)

    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    entry = summary["chapters"]["00"]
    assert list(summary["chapters"]) == ["00", "01", "02"]
    assert entry["parameters"]["batch"] == 8 and entry["cells"] == {"done": 5, "total": 5}
    assert entry["versions"]["papermill"] and entry["seconds"] > 0 and entry["device"] == "cpu"
    assert summary["chapters"]["01"]["failure"]["source"] == "x / 0  # <here>"
    _pages_need_no_network(out)
    index = (out / "index.html").read_text(encoding="utf-8")
    assert "00_good.html" in index and "x / 0  # &lt;here&gt;" in index

    # nothing of the person's was touched
    assert [path.read_bytes() for path in books] == before
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in books)
    assert not progress.path().exists()

    # a second run replaces the chapters that it runs, and leaves the others' results
    chapter(folder, "01_bad", "print('mended')")
    again = run_course("01", "cpu", None, False, out, folder=folder)
    assert again.exit_code == 0
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert [e["status"] for e in summary["chapters"].values()] == ["passed", "passed", "failed"]
    assert "mended" in (out / "01_bad.html").read_text(encoding="utf-8")


def _pages_need_no_network(out: Path) -> None:
    pages = sorted(out.glob("*.html"))
    assert len(pages) == 4
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=[\"'](https?:)?//", text), page.name
        assert not re.search(r"import\s.*https?://|url\(\s*[\"']?https?:", text), page.name


@pytest.mark.parametrize(
    ("source", "ename", "words"),
    [
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGTERM if os.name == 'nt' else 9)",
            "DeadKernelError",
            "died",
        ),
        ("import time\ntime.sleep(60)", "CellTimeoutError", "longer than 4 seconds"),
    ],
)
def test_a_kernel_that_dies_or_hangs_fails_the_chapter(
    folder: Path, tmp_path: Path, source: str, ename: str, words: str
) -> None:
    chapter(folder, "00_x", source, "print('never')")
    result = run_course("00", "cpu", None, False, tmp_path / "out", 3.5, folder=folder)
    failure = result.results[0].failure
    assert result.exit_code == 1 and failure is not None
    assert (failure.ename, failure.number, failure.of) == (ename, 4, 5)
    assert words in failure.evalue


def test_solve_reaches_the_kernel_and_a_value_refused_by_the_cell_fails_there(
    folder: Path, tmp_path: Path
) -> None:
    chapter(folder, "00_x", "assert lab.solve is True and device == 'cpu'")
    assert run_course("00", "cpu", None, True, tmp_path / "out", folder=folder).exit_code == 0


@pytest.mark.parametrize(
    "options",
    [
        {"pairs": ["bacth=3"]},
        {"pairs": ["batch=3.5"]},
        {"pairs": ["batch=65"]},
        {"pairs": ["warm=perhaps"]},
        {"pairs": ["device=tpu"]},
        {"pairs": ["solve=perhaps"]},
        {"pairs": ["device=cpu"], "device": "cuda"},
        {"params": {"batch": "x"}},
        {"device": "tpu"},
        {"device": "cuda"},
        {"chapters": "16"},
        {"chapters": "99"},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"out": "inside"},
        {"out": "file"},
    ],
    ids=str,
)
def test_wrong_usage_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.course.lab.cuda_available", lambda: False)
    chapter(folder, "00_x", "open('ran', 'w')")
    chapter(folder, "01_y", "1", parameters=PARAMETERS + "\nrate = 0.5")
    out = tmp_path / "out"
    (tmp_path / "file").write_text("", encoding="utf-8")
    places = {"inside": folder / "results", "file": tmp_path / "file"}
    options = {**options, "out": places.get(options.get("out", ""), out)}
    with pytest.raises(InputError):
        prepare(folder=folder, **options)
    assert not out.exists() and len(list(folder.iterdir())) == 2


def test_a_parameter_of_one_chapter_is_accepted_and_given_to_it_alone(folder: Path, tmp_path: Path) -> None:
    chapter(folder, "00_x", "1")
    chapter(folder, "01_y", "1", parameters=PARAMETERS + "\nrate = 0.5")
    jobs = prepare(folder=folder, out=tmp_path, pairs=["rate=2", "device=cpu", "solve=on"]).jobs
    assert [job.values for job in jobs] == [
        {"device": "cpu", "solve": True},
        {"device": "cpu", "solve": True, "rate": 2.0},
    ]


def test_a_chapter_without_a_parameters_cell_is_refused(folder: Path, tmp_path: Path) -> None:
    path = chapter(folder, "00_x", "1")
    path.write_text(path.read_text(encoding="utf-8").replace('"parameters"', '"other"'), encoding="utf-8")
    with pytest.raises(InputError, match=r"00_x\.ipynb"):
        prepare(folder=folder, out=tmp_path)


def test_the_command_documents_its_exit_codes_and_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    run_cli = CliRunner()
    shown = run_cli.invoke(app, ["course", "--help"]).output
    assert all(
        word in shown for word in ("0 every chapter passed", "1 a chapter failed", "2 wrong usage", "130")
    )
    monkeypatch.setattr("labkit.paths.notebooks_dir", lambda: folder)
    chapter(folder, "00_x", "1")
    refused = run_cli.invoke(app, ["course", "-p", "bacth=3"])
    assert (
        refused.exit_code == 2
        and "did you mean batch" in refused.output
        and "Traceback" not in refused.output
    )
    listed = run_cli.invoke(app, ["course", "--list"])
    assert listed.exit_code == 0 and "batch = 4 (a whole number from 1 to 64)" in listed.output


_SCRIPT = """
import sys
from pathlib import Path
from labkit.course import runner
from labkit.course.console import Console
from labkit.course.cli import terminate_as_interrupt
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
with terminate_as_interrupt():
    sys.exit(runner.run(runner.prepare(folder=folder, out=out, device="cpu"), Console()).exit_code)
"""


def _start(folder: Path, out: Path, checkout: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SCRIPT, str(folder), str(out)]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to a whole console only")
def test_an_interrupt_ends_with_130_and_leaves_no_kernel(
    folder: Path, tmp_path: Path, checkout: Path
) -> None:
    mark = tmp_path / "pid"
    note = f"open({str(mark)!r}, 'w', encoding='utf-8').write(str(os.getpid()))"
    waiting = f"import os, time\n{note}\ntime.sleep(120)"
    chapter(folder, "00_x", waiting)
    chapter(folder, "01_y", "1")
    process = _start(folder, tmp_path / "out", checkout)
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.05)
    kernel = psutil.Process(int(mark.read_text(encoding="utf-8")))
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "Traceback" not in shown
    assert not kernel.is_running() or kernel.status() == psutil.STATUS_ZOMBIE
    chapters = runner.read_summary(tmp_path / "out")
    assert {number: entry["status"] for number, entry in chapters.items()} == {"00": "interrupted"}
    assert chapters["00"]["cells"] == {"done": 3, "total": 4} and "interrupted in 00 after 3/4 cells" in shown


def test_two_runs_side_by_side_do_not_clash(folder: Path, tmp_path: Path, checkout: Path) -> None:
    chapter(folder, "00_x", "import time\ntime.sleep(0.5)")
    outs = [tmp_path / "a", tmp_path / "b"]
    running = [_start(folder, out, checkout) for out in outs]
    for process in running:
        shown, _ = process.communicate(timeout=120)
        assert process.returncode == 0, shown
    assert [runner.read_summary(out)["00"]["status"] for out in outs] == ["passed", "passed"]


def test_a_run_may_start_inside_an_event_loop_as_in_a_notebook(folder: Path, tmp_path: Path) -> None:
    chapter(folder, "00_x", "1")

    async def inside() -> int:
        return run_course("00", "cpu", None, False, tmp_path / "out", folder=folder).exit_code

    assert asyncio.run(inside()) == 0


def test_a_terminal_gets_bars_and_the_same_lines(folder: Path, tmp_path: Path) -> None:
    chapter(folder, "00_x", "1/0")
    shown = io.StringIO()
    console = Console(shown, terminal=True)
    assert run(prepare(folder=folder, out=tmp_path / "out", device="cpu"), console).exit_code == 1
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert (
        "Course" in text and "1/1" in text and "00 Start here: failed" in text and "ZeroDivisionError" in text
    )


def test_a_damaged_summary_is_no_obstacle(tmp_path: Path) -> None:
    for content in ("", "[]", '{"version": 99}', '{"version": 1, "chapters": []}'):
        (tmp_path / "summary.json").write_text(content, encoding="utf-8")
        assert runner.read_summary(tmp_path) == {}


def test_the_kernel_is_this_interpreter_with_its_own_state(folder: Path, tmp_path: Path) -> None:
    path = chapter(folder, "00_x", "import os, sys\nprint(sys.executable, os.environ['LABKIT_STATE'])")
    done = run_notebook(read(path), {})
    assert done.failure is None and done.done == done.total == 3
    said = done.book["cells"][3]["outputs"][0]["text"]
    assert said.startswith(sys.executable) and os.environ["LABKIT_STATE"] not in said


def test_trouble_with_one_chapters_files_leaves_the_others_alone(folder: Path, tmp_path: Path) -> None:
    for name in ("00_x", "01_y", "02_z"):
        chapter(folder, name, "print('ran')")
    out = tmp_path / "out"
    (out / "files").mkdir(parents=True)
    (out / "files" / "01").write_text("a file", encoding="utf-8")
    (out / "02_z.ipynb").mkdir()
    shown = io.StringIO()
    result = run(prepare(folder=folder, out=out, device="cpu"), Console(shown))
    assert [r.status for r in result.results] == ["passed", "failed", "failed"] and result.exit_code == 1
    failure = result.results[1].failure
    assert failure is not None and failure.evalue.endswith(": files/01")
    assert "outside the cells FileExistsError" in shown.getvalue()
    chapters = runner.read_summary(out)
    assert [e["status"] for e in chapters.values()] == ["passed", "failed", "failed"]
    assert "files/01" in (out / "index.html").read_text(encoding="utf-8")


def test_a_summary_that_cannot_be_written_fails_its_chapter_and_is_made_up_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter(folder, "00_x", "1")
    chapter(folder, "01_y", "1")
    write, refusals = runner.write_json, [OSError(28, "No space left on device")]

    def full_once(path: Path, value: object) -> None:
        if refusals:
            raise refusals.pop()
        write(path, value)

    monkeypatch.setattr(runner, "write_json", full_once)
    result = run_course("00,01", "cpu", None, False, tmp_path / "out", folder=folder)
    assert [r.status for r in result.results] == ["failed", "passed"]
    failure = runner.read_summary(tmp_path / "out")["00"]["failure"]
    assert failure["message"] == "No space left on device"
    assert list(runner.read_summary(tmp_path / "out")) == ["00", "01"]


def test_an_output_folder_that_cannot_be_made_is_refused(folder: Path, tmp_path: Path) -> None:
    chapter(folder, "00_x", "1")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="--out"):
        run_course("00", "cpu", None, False, tmp_path / "file" / "out", folder=folder)


def test_a_skipped_cell_is_not_a_completed_one(folder: Path) -> None:
    path = chapter(folder, "00_x", "1/0", "print('after')")
    content = read(path)
    content["cells"][3]["metadata"] = {"tags": ["skip-execution"]}
    done = run_notebook(content, {})
    assert (done.done, done.total) == (3, 4) and done.failure is not None
    assert (done.failure.ename, done.failure.number) == ("Skipped", 3)


def test_a_very_long_line_is_cut_and_takes_no_time(folder: Path, tmp_path: Path) -> None:
    source = "print('a' * 5_000_000)\nprint('b', end='')\n'c' * 5_000_000"
    chapter(folder, "00_x", source, "raise ValueError('d' * 5_000_000)")
    # before: one regular expression over the line, for hours
    result = run_course("00", "cpu", None, False, tmp_path / "out", folder=folder)
    failure = result.results[0].failure
    assert failure is not None and failure.number == 5 and failure.ename == "ValueError"
    assert len(failure.evalue) < 30_000 and "labkit: cut here" in failure.evalue
    stream, value = read(tmp_path / "out" / "00_x.ipynb")["cells"][4]["outputs"]
    text = "".join(stream["text"])
    assert text == "a" * CELL_TEXT_LIMIT + cut_mark(CELL_TEXT_LIMIT)
    assert len("".join(value["data"]["text/plain"])) < 100
    assert (tmp_path / "out" / "00_x.html").is_file()


def test_streams_are_merged_and_later_displays_find_their_place(folder: Path) -> None:
    source = """
import sys
from IPython.display import display
for n in range(3):
    print("o", n, flush=True)
    print("e", n, file=sys.stderr, flush=True)
    sys.stdout.write(f"\\r{n} of 3")
    sys.stdout.flush()
shown = display("first", display_id=True)
print("tail", flush=True)
"""
    path = chapter(folder, "00_x", source, "shown.update('second')")
    done = run_notebook(read(path), {})
    assert done.failure is None
    out, err, display, tail = done.book["cells"][3]["outputs"]
    assert (out["name"], out["text"]) == ("stdout", "o 0\n0 of 3o 1\n1 of 3o 2\n2 of 3")
    assert (err["name"], err["text"]) == ("stderr", "e 0\ne 1\ne 2\n")
    assert display["data"]["text/plain"] == "'second'" and tail["text"] == "tail\n"
