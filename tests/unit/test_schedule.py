"""Entries for the machine's scheduler: rhythms, quoting, and a cron line that really runs a suite."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_builder import book, code
from typer.testing import CliRunner

from labkit.cli import app
from labkit.course.notebook import dumps
from labkit.errors import InputError
from labkit.rerun import every, schedule
from labkit.rerun.every import calendars, parse, schtasks

NOW = datetime(2026, 12, 1, 12, 34, 56, tzinfo=UTC)  # a Tuesday


def suite(folder: Path, name: str = "suite") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    cells = book(code("n = 1", "parameters"), code("open('made.txt', 'w', encoding='utf-8').write(str(n))"))
    (folder / "one.ipynb").write_text(dumps(cells), encoding="utf-8")
    path = folder / f"{name}.yaml"
    path.write_text("version: 1\nexclusive: false\njobs:\n- notebook: one.ipynb\n", encoding="utf-8")
    return path


# --- rhythms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("daily", "2026-12-02T03:00:00"),
        ("Weekly", "2026-12-07T03:00:00"),
        ("hourly", "2026-12-01T13:00:00"),
        ("0 3 * * *", "2026-12-02T03:00:00"),
        ("*/15 9-17 * * mon-fri", "2026-12-01T12:45:00"),
        ("30m", "2026-12-01T13:04:56"),
        ("1d", "2026-12-02T12:34:56"),
    ],
)
def test_a_rhythm_says_when_it_is_next(text: str, expected: str) -> None:
    assert parse(text).after(NOW).replace(tzinfo=None).isoformat() == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "never",
        "0 3 * *",
        "60 3 * * *",
        "0 3 * * * *",
        "0 3 31 2 *",
        "0 3 L * *",
        "0 3 * * 5L",
        "0 3 * * 1#2",
    ]
    + ["0m", "-5m", "5", "400d", "@daily", "0 3 * * *; rm -rf /", "*/0 * * * *"],
)
def test_other_rhythms_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--every"):
        parse(text)


def test_a_scheduler_has_no_intervals() -> None:
    with pytest.raises(InputError, match="daily"):
        parse("30m", intervals=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("daily", ["*-*-* 03:00:00"]),
        ("weekly", ["Mon *-*-* 03:00:00"]),
        ("*/15 * * * *", ["*-*-* *:00,15,30,45:00"]),
        ("5 4 1,15 * *", ["*-*-01,15 04:05:00"]),
        ("5 4 1 1 mon", ["*-01-01 04:05:00", "Mon *-01-* 04:05:00"]),
    ],
)
def test_systemd_has_the_same_rhythm(text: str, expected: list[str]) -> None:
    assert calendars(parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("daily", "/SC DAILY /ST 03:00"),
        ("weekly", "/SC WEEKLY /D MON /ST 03:00"),
        ("30 22 * * 1-5", "/SC WEEKLY /D MON,TUE,WED,THU,FRI /ST 22:30"),
        ("0 3 1 * *", "/SC MONTHLY /D 1 /ST 03:00"),
        ("*/20 * * * *", "/SC MINUTE /MO 20 /ST 00:00"),
        ("7 * * * *", "/SC HOURLY /ST 00:07"),
    ],
)
def test_schtasks_has_the_same_rhythm(text: str, expected: str) -> None:
    assert " ".join(schtasks(parse(text))) == expected


@pytest.mark.parametrize("text", ["0 3,15 * * *", "0 3 1 1 *", "0 3 1 * mon", "5,7 * * * *", "0 3 1,2 * *"])
def test_schtasks_says_what_it_cannot(text: str) -> None:
    with pytest.raises(InputError, match="--every"):
        schtasks(parse(text))


FIELD = st.sampled_from(["*", "*/2", "1", "3-5", "1,4"])


@given(st.tuples(FIELD, FIELD, FIELD, FIELD, FIELD))
@settings(max_examples=40, deadline=None)
def test_systemd_and_cron_agree(fields: tuple[str, ...]) -> None:
    """Every time that cron gives is one of the calendar's, read back by hand."""
    rhythm = parse(" ".join(fields))
    moment = NOW
    for _ in range(5):
        moment = rhythm.after(moment)
        assert any(matches(calendar, moment) for calendar in calendars(rhythm))
    between = NOW + timedelta(minutes=1) - timedelta(seconds=NOW.second)
    for minute in range(300):
        at = between + timedelta(minutes=minute)
        due = next(CronSim(rhythm.cron, at - timedelta(minutes=1))) == at
        assert due == any(matches(calendar, at) for calendar in calendars(rhythm))


def matches(calendar: str, moment: datetime) -> bool:
    week, date, time = re.fullmatch(r"(?:([A-Z][\w,]+) )?(\S+) (\S+):00", calendar).groups()
    _, month, day = date.split("-")
    hour, minute = time.split(":")
    values = [(month, moment.month), (day, moment.day), (hour, moment.hour), (minute, moment.minute)]
    fits = all(part == "*" or value in map(int, part.split(",")) for part, value in values)
    return fits and (week is None or moment.strftime("%a") in week.split(","))


def test_systemd_itself_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where systemd is; elsewhere the text alone is checked."""
    text = task_text(tmp_path / '结果 a$b %h "q" it\'s', monkeypatch, "systemd", "*/15 9-17 * * mon-fri")
    assert "%%h" in text and "$$b" in text and '\\"q\\"' in text
    if (program := shutil.which("systemd-analyze")) is None:
        return
    units = re.split(r"^# ~/\S+/(\S+)\n", text, flags=re.MULTILINE)[1:]
    for name, body in zip(units[::2], units[1::2], strict=True):
        (tmp_path / name).write_text(body, encoding="utf-8")
        for line in re.findall(r"^OnCalendar=(.*)$", body, re.MULTILINE):
            done = subprocess.run([program, "calendar", line], capture_output=True, encoding="utf-8")
            assert done.returncode == 0, done.stderr
    service = next(tmp_path.glob("*.service"))
    done = subprocess.run([program, "verify", str(service)], capture_output=True, encoding="utf-8")
    assert service.name not in done.stderr, done.stderr


def task_text(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rhythm: str = "daily") -> str:
    path = suite(folder)
    monkeypatch.chdir(folder)
    task = schedule.task("suite", path, folder / "out", every.parse(rhythm), dask=None, device=None)
    return schedule.entry(kind, task)


# --- quoting


@pytest.mark.parametrize(
    "name", ["plain", "a b", "课程 x", "it's", 'q"q', "100%", "a$HOME`x`", "a;b&c|d", "-n", "#h"]
)
def test_the_shell_reads_the_cron_line_as_it_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name
    line = task_text(folder, monkeypatch, "cron")
    assert "\n" not in line and re.search(r"(?<!\\)%", line) is None
    fields, command = line.split(" cd ", 1)
    assert next(CronSim(fields, NOW)) == datetime(2026, 12, 2, 3, tzinfo=UTC)
    words = shlex.split("cd " + command.replace("\\%", "%"))
    assert words[1] == str(folder)
    run = words[words.index(sys.executable) :]
    assert run[:6] == [sys.executable, "-m", "labkit.cli", "rerun", str(folder / "suite.yaml"), "--out"]
    assert run[6] == str(folder / "out")


def test_a_line_break_in_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="path"):
        task_text(tmp_path / "a\nb", monkeypatch, "cron")


def test_a_console_that_cannot_show_a_path_is_refused() -> None:
    schedule.printable("课程", "gbk")
    with pytest.raises(InputError, match="PYTHONUTF8"):
        schedule.printable("课程", "ascii")


def windows(*command: str) -> schedule.Task:
    return schedule.Task("快 suite", every.parse("daily"), command, r"C:\x", r"C:\x\log")


def test_schtasks_quotes_what_windows_has_to_split() -> None:
    line = schedule.entry("schtasks", windows(r"C:\Py thon\python.exe", "-m", r"C:\课程\quick.yaml"))
    assert line.startswith('schtasks /Create /F /TN "labkit rerun 快 suite" /SC DAILY /ST 03:00 /TR "')
    # the C runtime's rules: \" inside of quotes is a quote
    inner = re.search(r'/TR "(.*)"$', line).group(1).replace('\\"', '"')
    assert inner == r'"C:\Py thon\python.exe" -m C:\课程\quick.yaml'


@pytest.mark.parametrize("bad", [r"C:\100%\x", 'C:\\a"b', "C:\\" + "long" * 80])
def test_schtasks_refuses_what_it_cannot_take(bad: str) -> None:
    with pytest.raises(InputError):
        schedule.entry("schtasks", windows(bad))


@pytest.mark.parametrize("arguments", [["--print", "launchd"], ["--print", "cron", "--every", "5m"]])
def test_the_command_refuses_other_schedulers_and_rhythms(tmp_path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["schedule", str(suite(tmp_path)), *arguments])
    assert isinstance(done.exception, InputError)


def test_a_broken_suite_is_not_scheduled(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 1\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["schedule", str(tmp_path / "bad.yaml"), "--print", "cron"])
    assert isinstance(done.exception, InputError)


@pytest.mark.skipif(os.name != "posix", reason="cron is a thing of POSIX systems")
def test_the_cron_line_runs_the_suite(tmp_path: Path) -> None:
    """What cron does: /bin/sh -c, in the home folder, with hardly an environment."""
    folder = tmp_path / "课程 a b 100%"
    path = suite(folder, "quick one")
    command = [
        sys.executable,
        "-m",
        "labkit.cli",
        "schedule",
        path.name,
        "--print",
        "cron",
        "--out",
        "the results",
    ]
    env = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    printed = subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", check=True)
    line = printed.stdout.strip()
    shell = line.split(" ", 5)[5].replace("\\%", "%")
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": env["PYTHONPATH"]}
    done = subprocess.run(["/bin/sh", "-c", shell], cwd=tmp_path, env=bare, timeout=120)
    log = (folder / "the results" / "rerun.log").read_text(encoding="utf-8")
    assert done.returncode == 0, log
    (summary,) = (folder / "the results").glob("*/summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["counts"]["passed"] == 1
    assert (summary.parent / "jobs" / "one" / "files" / "made.txt").read_text(encoding="utf-8") == "1"
    assert "1 of 1 jobs passed" in log
