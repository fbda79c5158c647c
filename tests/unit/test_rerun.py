"""Suites: what is refused before anything runs, and rounds that resume, fail in part or are interrupted."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_builder import book, code
from typer.testing import CliRunner

from labkit.cli import app
from labkit.course.notebook import dumps
from labkit.errors import InputError
from labkit.paths import data_dir, notebooks_dir
from labkit.rerun import archive, local, spec
from labkit.rerun import round as rounds
from labkit.rerun.archive import pack, result_of, unpack
from labkit.rerun.suite import Job, load

PARAMETERS = 'device = "auto"\nbatch = 4\nrate = 0.5\nwarm = True\nnote = "a"\nsizes = [1, 2]'
START = (
    'from labkit import course\nlab = course.start("01", device=device, batch=(batch, course.whole(1, 64)))'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two notebooks; nobody runs them here."""
    home = tmp_path / "课程 a b"
    home.mkdir()
    (home / "one.ipynb").write_text(
        dumps(book(code(PARAMETERS, "parameters"), code(START))), encoding="utf-8"
    )
    (home / "bare.ipynb").write_text(dumps(book(code("print(1)"))), encoding="utf-8")
    return home


def write(folder: Path, text: str, name: str = "s.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def jobs_of(folder: Path, text: str) -> tuple[Job, ...]:
    return load(write(folder, f"version: 1\njobs:\n{text}")).jobs


# --- suite files


def test_jobs_are_notebooks_times_parameters(folder: Path) -> None:
    text = """
version: 1
device: cpu
timeout: 60
parameters: {rate: 2, warm: false}
jobs:
  - notebook: one.ipynb
    matrix: {batch: [1, 8], note: [x, "y z"]}
  - notebook: bare.ipynb
    name: other
    timeout: 5
    cell_timeout: 4
"""
    suite = load(write(folder, text, "快.yaml"))
    assert suite.name == "快"
    assert [job.id for job in suite.jobs] == [
        "one-batch=1,note=x",
        "one-batch=1,note=y-z",
        "one-batch=8,note=x",
        "one-batch=8,note=y-z",
        "other",
    ]
    first, last = suite.jobs[0], suite.jobs[-1]
    assert first.values == {"rate": 2.0, "warm": False, "batch": 1, "note": "x"}
    assert isinstance(first.values["rate"], float)
    assert (first.device, last.device, first.timeout, last.timeout, last.cell_timeout) == (
        "cpu",
        "",
        60,
        5,
        4,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameters: {bach: 3}", r"jobs\[0\]: parameters: got unknown parameter 'bach'.*did you mean batch"),
        (
            "parameters: {batch: '8'}",
            r"jobs\[0\]: batch: got '8' \(str\); expected a whole number from 1 to 64",
        ),
        ("parameters: {batch: 65}", "batch: got 65"),
        ("parameters: {batch: 1.5}", "batch"),
        ("parameters: {batch: true}", r"batch: got True \(bool\)"),
        ("parameters: {batch: null}", r"batch: got None"),
        ("parameters: {warm: 1}", r"warm: got 1 \(int\)"),
        ("parameters: {warm: 'yes'}", "warm: got 'yes'"),
        ("parameters: {rate: .nan}", "rate"),
        ("parameters: {note: 3}", r"note: got 3 \(int\); expected str"),
        ("parameters: {note: 2026-01-01}", "note"),
        ("parameters: {sizes: 3}", "sizes"),
        ("parameters: {sizes: [2026-01-01]}", "sizes: .*JSON"),
        ("parameters: {device: cpu}", "device as a field"),
        ("matrix: {batch: []}", "matrix: batch: got no value"),
        ("matrix: {bach: [1]}", "bach"),
        ("matrix: {batch: 3}", r"jobs\[0\]: matrix: batch"),
        ("matrix: {batch: [1, 1]}", "one-batch=1 twice"),
        ("matrix: {batch: [1], note: [a, A]}", "twice"),
        ("parameters: {batch: 1}\n    matrix: {batch: [2]}", "in parameters and in matrix"),
        ("timeout: 0", r"jobs\[0\]: timeout"),
        ("timeout: '60'", r"jobs\[0\]: timeout"),
        ("timeout: .inf", r"jobs\[0\]: timeout"),
        ("device: gpu", "device: got 'gpu'"),
        ("notbook: x", r"jobs\[0\]: notbook: got an unknown field"),
        ("name: con", "Windows"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_runs(folder: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        jobs_of(folder, f"  - notebook: one.ipynb\n    {text}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "s.yaml: got NoneType"),
        ("version: 2\njobs: [{notebook: one.ipynb}]", "version: got 2"),
        ("jobs: [{notebook: one.ipynb}]", "version: got nothing"),
        ("version: 1\njobs: []", "jobs"),
        ("version: 1\njobs: [{notebook: absent.ipynb}]", "absent.ipynb"),
        ("version: 1\njobs: [{notebook: s.yaml}]", "s.yaml"),
        ("version: 1\njobs: [{notebook: bare.ipynb, device: cpu}]", "no such parameter"),
        ("version: 1\nparameters: {lost: 1}\njobs: [{notebook: one.ipynb}]", "parameters: got 'lost'"),
        ("version: 1\nname: ../up\njobs: [{notebook: one.ipynb}]", "name"),
        ("version: 1\njobs: [{notebook: one.ipynb}, {notebook: one.ipynb}]", "one twice"),
        ("version: 1\njobs: [", "no YAML"),
        ("version: 1\njobs: !!python/object/apply:os.system ['true']", "no YAML"),
        ("- a", "got list"),
    ],
)
def test_a_suite_that_is_none_is_refused(folder: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load(write(folder, text))


def test_a_missing_or_binary_suite_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="SUITE"):
        load(folder / "absent.yaml")
    with pytest.raises(InputError, match="SUITE"):
        load(folder)
    (folder / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"b\.yaml"):
        load(folder / "b.yaml")


@given(
    st.dictionaries(
        st.sampled_from(["batch", "rate", "warm", "note", "sizes", "x"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=4)
        | st.lists(st.integers(), max_size=2),
    )
)
@settings(deadline=None, max_examples=80)
def test_values_are_of_the_notebooks_type_or_refused(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    home = tmp_path_factory.mktemp("any")
    (home / "one.ipynb").write_text(
        dumps(book(code(PARAMETERS, "parameters"), code(START))), encoding="utf-8"
    )
    # JSON is YAML, but for what json.dumps calls NaN and Infinity: those are plain words to it
    try:
        (job,) = jobs_of(home, f"  - {{notebook: one.ipynb, parameters: {json.dumps(values)}}}\n")
    except InputError:
        return
    kinds = {"batch": int, "rate": float, "warm": bool, "note": str, "sizes": list}
    assert all(type(value) is kinds[name] for name, value in job.values.items())
    assert set(job.values) == set(values)


def test_the_suites_that_come_with_labkit_name_notebooks_that_are_there() -> None:
    for path in sorted((data_dir() / "suites").glob("*.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "notebook:" in line and not line.startswith("#"):
                assert (notebooks_dir() / line.split("notebook:")[1].strip()).is_file(), line
        assert load(path).jobs


# --- archives


def test_a_job_travels_as_text(folder: Path) -> None:
    (job,) = jobs_of(folder, "  - notebook: one.ipynb\n    parameters: {note: '课程 {x} \\n'}\n")
    assert spec.loads(spec.dumps(job, source="abc")) == (job, "abc")


def test_the_fingerprint_changes_with_what_could_change_the_result(folder: Path, monkeypatch: Any) -> None:
    def one(values: str = "batch: 1", device: str = "cpu") -> str:
        (job,) = jobs_of(folder, f"  - {{notebook: one.ipynb, device: {device}, parameters: {{{values}}}}}\n")
        return spec.fingerprint(job)

    monkeypatch.setattr(spec, "source_hash", lambda: "a")
    first = one()
    assert first == one() and len({first, one("batch: 2"), one(device="auto")}) == 3
    (folder / "one.ipynb").write_text(
        dumps(book(code(PARAMETERS, "parameters"), code(START), code("x = 1"))), encoding="utf-8"
    )
    assert one() != first
    second = one()
    monkeypatch.setattr(spec, "source_hash", lambda: "b")
    assert one() != second


def test_an_archive_brings_files_back(tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "深").mkdir(parents=True)
    (files / "深" / "x.bin").write_bytes(b"\x00\xff")
    (files / "link").symlink_to("/etc/passwd")
    packed = pack({"status": "passed"}, "{}", files)
    assert result_of(packed)["status"] == "passed"
    target = tmp_path / "jobs" / "one"
    for _ in range(2):  # the second replaces the first
        unpack(packed, target)
        (target / "files" / "深" / "x.bin").read_bytes()
    assert sorted(p.name for p in target.rglob("*") if p.is_file()) == [
        "notebook.ipynb",
        "result.json",
        "x.bin",
    ]
    assert [p.name for p in target.parent.iterdir()] == ["one"]


def test_files_beyond_the_limit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 10)
    (tmp_path / "big").write_bytes(b"x" * 11)
    (tmp_path / "small").write_bytes(b"x" * 5)
    packed = pack({"status": "passed"}, "", tmp_path)
    assert result_of(packed)["files_left_out"] == ["big (11 bytes)"]


@pytest.mark.skipif(os.name != "posix", reason="names that only POSIX systems have")
def test_a_file_that_cannot_travel_costs_itself_alone(tmp_path: Path) -> None:
    """A log named by the time of day, a name that is no text, a file that may not be read."""
    files = tmp_path / "files"
    files.mkdir()
    for name in (b"12:00:00.log", b"a\\b", b"\xff.txt", b"good.txt"):
        (files / os.fsdecode(name)).write_text("x", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        read = Path.read_bytes
        (files / "locked").write_text("x", encoding="utf-8")

        def refuse(self: Path) -> bytes:
            if self.name == "locked":
                raise PermissionError(13, "Permission denied")
            return read(self)

        patch.setattr(Path, "read_bytes", refuse)
        packed = pack({"status": "passed"}, "{}", files)
    unpack(packed, tmp_path / "one")
    assert [path.name for path in (tmp_path / "one" / "files").iterdir()] == ["good.txt"]
    left = result_of(packed)["files_left_out"]
    assert len(left) == 4 and "locked (Permission denied)" in left
    assert "12:00:00.log (a name with : or \\)" in left


def hostile(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("result.json", '{"status": "passed"}')
        file.writestr(name, "x")
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["../up", "/abs", "files/../../up", "C:/x", "a\\..\\b", "files/"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    (tmp_path / "jobs" / "one" / "old").write_text("kept", encoding="utf-8")
    with pytest.raises(InputError, match="job"):
        unpack(hostile(name), tmp_path / "jobs" / "one")
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["old"]


@pytest.mark.parametrize("raw", [b"", b"PK", b"no zip at all", hostile("x")[:40]])
def test_bytes_that_are_no_archive_are_refused(raw: bytes) -> None:
    with pytest.raises(InputError, match="archive"):
        result_of(raw)


# --- rounds


class Machine:
    """Stands for the process of a job: what is in ``fate`` fails, dies or is interrupted."""

    def __init__(self, **fate: Any) -> None:
        self.fate, self.ran = fate, []

    def __call__(self, text: str, on_event: Any = None) -> bytes:
        job, _ = spec.loads(text)
        self.ran.append(job.id)
        fate = self.fate.get(job.id)
        if isinstance(fate, type) and issubclass(fate, BaseException):
            raise fate
        if isinstance(fate, bytes):
            return fate
        result = {"id": job.id, "notebook": job.notebook, "parameters": job.values, "seconds": 1.0}
        result["cells"] = {"done": 2, "total": 2}
        failure = {"error": "ZeroDivisionError", "message": fate} if fate else None
        return pack(result | {"status": "failed" if fate else "passed", "failure": failure}, "{}")


@pytest.fixture
def suite_path(folder: Path) -> Path:
    text = "version: 1\ndevice: cpu\njobs:\n"
    text += "".join(f"- {{notebook: one.ipynb, name: {name}}}\n" for name in ("a", "b", "c"))
    return write(folder, text)


def cli(monkeypatch: pytest.MonkeyPatch, machine: Machine, path: Path, *options: str) -> Any:
    monkeypatch.setattr(local, "perform", machine)
    monkeypatch.setattr(spec, "source_hash", lambda: "fixed")
    out = path.parent / "出 out"
    return CliRunner().invoke(app, ["rerun", str(path), "--out", str(out), *options])


def state(path: Path) -> dict[str, Any]:
    found = sorted((path.parent / "出 out").glob("*/summary.json"))
    return json.loads(found[-1].read_text(encoding="utf-8"))


def test_a_failure_does_not_stop_the_rest(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(b="division by zero")
    done = cli(monkeypatch, machine, suite_path)
    assert done.exit_code == 1 and machine.ran == ["a", "b", "c"]
    assert "ZeroDivisionError: division by zero" in done.output and "2 of 3 jobs passed" in done.output
    kept = state(suite_path)
    assert kept["counts"] == {"passed": 2, "failed": 1, "not run": 0} and kept["finished"]
    assert kept["jobs"]["b"]["failure"]["message"] == "division by zero"


def test_resume_runs_what_did_not_pass(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli(monkeypatch, Machine(b="once"), suite_path)
    machine = Machine()
    done = cli(monkeypatch, machine, suite_path, "--resume")
    assert done.exit_code == 0 and machine.ran == ["b"]
    assert "passed (kept)" in done.output and state(suite_path)["kept"] == ["a", "c"]
    again = Machine()
    assert cli(monkeypatch, again, suite_path, "--resume").exit_code == 0
    assert again.ran == [] and len(list((suite_path.parent / "出 out").glob("*/summary.json"))) == 1


def test_without_resume_a_new_round_begins(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):  # in the same second: the folders have to differ
        machine = Machine()
        cli(monkeypatch, machine, suite_path)
        assert machine.ran == ["a", "b", "c"]
    assert len(list((suite_path.parent / "出 out").glob("*/summary.json"))) == 3


def test_an_interrupt_keeps_what_was_done(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli(monkeypatch, Machine(b=KeyboardInterrupt), suite_path)
    assert done.exit_code == 130 and "--resume goes on" in done.output
    kept = state(suite_path)
    assert kept["counts"] == {"passed": 1, "failed": 0, "not run": 2} and kept["finished"] is None
    fresh = cli(monkeypatch, Machine(b=KeyboardInterrupt), suite_path)
    assert "did not end: 1 of 3 jobs passed" in fresh.output
    machine = Machine()
    assert cli(monkeypatch, machine, suite_path, "--resume").exit_code == 0
    assert machine.ran == ["b", "c"]


@pytest.mark.parametrize("change", ["values", "files", "notebook", "labkit"])
def test_resume_runs_again_what_changed(
    suite_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    cli(monkeypatch, Machine(), suite_path)
    expected = ["a", "b", "c"]
    if change == "values":
        text = suite_path.read_text(encoding="utf-8").replace("name: b}", "name: b, parameters: {batch: 9}}")
        suite_path.write_text(text, encoding="utf-8")
        expected = ["b"]
    elif change == "files":
        (gone,) = (suite_path.parent / "出 out").glob("*/jobs/c/result.json")
        gone.unlink()
        expected = ["c"]
    elif change == "notebook":
        cells = book(code(PARAMETERS, "parameters"), code(START), code("x = 1"))
        (suite_path.parent / "one.ipynb").write_text(dumps(cells), encoding="utf-8")
    machine = Machine()
    monkeypatch.setattr(local, "perform", machine)
    monkeypatch.setattr(spec, "source_hash", lambda: "other" if change == "labkit" else "fixed")
    out = str(suite_path.parent / "出 out")
    done = CliRunner().invoke(app, ["rerun", str(suite_path), "--out", out, "--resume"])
    assert machine.ran == expected and "passed before, and run again" in done.output


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "jobs": {"a": 3}}', '{"version": 9}']
)
def test_a_damaged_state_file_means_every_job_again(
    suite_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    cli(monkeypatch, Machine(), suite_path)
    (found,) = (suite_path.parent / "出 out").glob("*/summary.json")
    found.write_text(text, encoding="utf-8")
    machine = Machine()
    assert cli(monkeypatch, machine, suite_path, "--resume").exit_code == 0
    assert machine.ran == ["a", "b", "c"] and state(suite_path)["counts"]["passed"] == 3


def test_an_archive_that_cannot_be_kept_fails_its_job_only(
    suite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli(monkeypatch, Machine(a=hostile("../../up"), b=b"junk"), suite_path)
    assert done.exit_code == 1 and "1 of 3 jobs passed" in done.output
    assert not list(suite_path.parent.rglob("up"))


def test_a_full_disk_is_one_message_and_no_round(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that could not begin must not be the newest one, which --resume goes on with."""
    assert cli(monkeypatch, Machine(b="always"), suite_path).exit_code == 1
    real = rounds.write_json

    def full(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rounds, "write_json", full)
    machine = Machine()
    done = cli(monkeypatch, machine, suite_path)
    assert isinstance(done.exception, InputError) and "No space left" in str(done.exception)
    assert machine.ran == []
    monkeypatch.setattr(rounds, "write_json", real)
    machine = Machine()
    assert cli(monkeypatch, machine, suite_path, "--resume").exit_code == 0 and machine.ran == ["b"]


def test_what_was_not_kept_of_a_job_is_said(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"status": "passed", "files_left_out": ["a:b (a name)", *(f"x{i}" for i in range(5))]}
    done = cli(monkeypatch, Machine(a=pack(left)), suite_path)
    assert "not kept: a:b (a name), x0, x1 and 3 more" in done.output


def test_two_runs_of_a_suite_do_not_share_a_folder(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rounds.locked(suite_path.parent / "出 out"):
        done = cli(monkeypatch, Machine(), suite_path)
    assert isinstance(done.exception, InputError) and "another run is at work" in str(done.exception)


def test_every_runs_round_after_round(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(c="always")
    done = cli(monkeypatch, machine, suite_path, "--every", "1s", "--rounds", "2")
    assert done.exit_code == 1 and machine.ran == ["a", "b", "c"] * 2 and "next round" in done.output


def test_a_suite_that_breaks_between_rounds_skips_its_round(
    suite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Machine):
        def __call__(self, text: str, on_event: Any = None) -> bytes:
            suite_path.write_text("version: 1\njobs: [", encoding="utf-8")
            return super().__call__(text, on_event)

    machine = Breaks()
    done = cli(monkeypatch, machine, suite_path, "--every", "1s", "--rounds", "2")
    assert done.exit_code == 1 and machine.ran == ["a", "b", "c"] and "no YAML" in done.output


@pytest.mark.parametrize(
    "options",
    [["--rounds", "2"], ["--every", "1s", "--rounds", "0"], ["--every", "soon"], ["--dask", "nonsense:1"]],
)
def test_wrong_usage_runs_nothing(
    suite_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    machine = Machine()
    monkeypatch.setattr("labkit.rerun.cluster.CONNECT_SECONDS", 1)
    done = cli(monkeypatch, machine, suite_path, *options)
    assert isinstance(done.exception, InputError) and machine.ran == []


def test_list_runs_nothing(suite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    done = cli(monkeypatch, machine, suite_path, "--list")
    assert done.exit_code == 0 and machine.ran == [] and "a: one.ipynb" in done.output
    assert not (suite_path.parent / "出 out").exists()


def test_a_device_that_is_not_there_is_refused_before(
    suite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.course.lab.cuda_available", lambda: False)
    machine = Machine()
    done = cli(monkeypatch, machine, suite_path, "--device", "cuda")
    assert isinstance(done.exception, InputError) and "a: device" in str(done.exception) and machine.ran == []
