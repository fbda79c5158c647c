"""The benchmark notebooks: the CPU set headless, parameters refused by name, records read back, nbval."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_nbval import _nbval
from typer.testing import CliRunner

from labkit.bench import attention, concurrency, gemm, jitter, notebook, open_loop
from labkit.bench.cli import bench_app
from labkit.bench.notebook import WrongResults, verdict, write
from labkit.bench.notebook_plans import BUILDERS, Plan, make
from labkit.bench.record import Entry, Record, read
from labkit.course import gate, rules
from labkit.course.execute import run_notebook
from labkit.course.notebook import CHECK_MARK, dumps, joined, normalise
from labkit.course.notebook import read as read_book
from labkit.course.params import assign, read_parameters
from labkit.errors import InputError
from labkit.paths import notebooks_dir

FOLDER = notebooks_dir() / "bench"
NAMES = tuple(BUILDERS)
WORKS = {"gemm": gemm, "gemv": gemm, "attention": attention, "concurrency": concurrency}
WORKS |= {"jitter": jitter, "serving": open_loop}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.ipynb"


def test_these_are_all_of_them() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


# --- headless ----------------------------------------------------------------------------------------------


def outputs(book: dict[str, Any]) -> str:
    """All text and HTML that the cells put out."""
    found = []
    for cell in book["cells"]:
        for one in cell.get("outputs", []):
            found += [joined(one.get("text", "")), *map(joined, one.get("data", {}).values())]
    return "\n".join(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_with_no_gpu_writes_a_record_that_says_so(name: str, tmp_path: Path) -> None:
    values = assign({"device": "cpu"}, {name: read_parameters(path_of(name))})[name]
    run = run_notebook(read_book(path_of(name)), values, results=tmp_path)
    assert run.failure is None, f"{run.failure.where}: {run.failure.summary()}"
    assert run.done == run.total and run.log == [{"event": "start", "benchmark": name, "device": "cpu"}]
    (written,) = (tmp_path / "bench").iterdir()
    record = read(written)
    kind = "emulated" if name in ("gemm", "gemv", "attention") else "simulated"
    assert record.kind == kind and record.complete and record.command.startswith("labkit bench ")
    assert {entry.status for entry in record.entries} <= {"timed", "emulated", "unavailable"}
    shown = outputs(run.book)
    assert f"written: {written}" in shown and record.command in shown
    assert re.search(rf"{name}: 100%\|", shown)  # the bar, at its end
    assert "<table>" in shown and f">{kind}</td>" in shown
    assert re.search(r'<img alt="[^"]{30,}"', shown)


@pytest.mark.parametrize("name", NAMES)
def test_nbval_lax(name: str, tmp_path: Path, checkout: Path) -> None:
    assert CHECK_MARK in path_of(name).read_text(encoding="utf-8")
    done = _nbval(path_of(name), tmp_path, checkout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout


# --- parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_name_or_a_wrong_type_is_refused_by_name(name: str) -> None:
    known = {name: read_parameters(path_of(name))}
    assert all(parameter.rule and parameter.help for parameter in known[name])
    with pytest.raises(InputError, match="'sampels'"):
        assign({"sampels": "20"}, known)
    wrong = {"int": "many", "float": "much", "bool": "perhaps", "str": ["a list"]}
    for parameter in known[name]:
        with pytest.raises(InputError) as raised:
            assign({parameter.name: wrong[parameter.type]}, known)
        assert raised.value.argument == parameter.name


def defaults(name: str, **changes: Any) -> dict[str, Any]:
    """What the notebook hands to ``notebook.start``."""
    return {
        one.name: (changes.get(one.name, one.default), one.rule) for one in read_parameters(path_of(name))
    } | {key: pair for key, pair in changes.items() if isinstance(pair, tuple)}


def plan(name: str, **changes: Any) -> Plan:
    return notebook.start(name, **defaults(name, device="cpu", **changes))


@pytest.mark.parametrize(
    ("name", "changes", "argument"),
    [
        ("gemm", {"m": "8,x"}, "m"),
        ("gemm", {"bits": "5"}, "bits"),
        ("gemm", {"shapes": "12"}, "shapes"),
        ("gemm", {"table": "sweep", "dtype": "bfloat16"}, "dtype"),
        ("gemm", {"group": 100}, "group"),
        ("gemm", {"samples": 5}, "samples"),
        ("gemm", {"peers": "perhaps"}, "peers"),
        ("gemv", {"m": "1-64"}, "m"),
        ("attention", {"models": "gpt-9"}, "model"),
        ("attention", {"chunk": "600"}, "chunk"),
        ("attention", {"kv": "fp8"}, "formats"),
        ("attention", {"plans": "1-2"}, "plans"),
        ("concurrency", {"policies": "fast:128"}, "policy"),
        ("concurrency", {"clients": "0"}, "clients"),
        ("concurrency", {"overlap": "yes"}, "overlap"),
        ("jitter", {"parts": "cold,hot"}, "parts"),
        ("jitter", {"parts": ", "}, "parts"),
        ("jitter", {"load": float("nan")}, "load"),
        ("serving", {"loads": "0.5;0.9"}, "loads"),
        ("serving", {"rates": "-2"}, "rates"),
        ("serving", {"lengths": "64-8"}, "lengths"),
        ("serving", {"simulate": "h100"}, "simulate"),
        ("serving", {"device": "tpu"}, "device"),
    ],
)
def test_what_the_command_refuses_the_notebook_refuses(
    name: str, changes: dict[str, Any], argument: str
) -> None:
    with pytest.raises(InputError) as raised:
        notebook.start(name, **defaults(name, **({"device": "cpu"} | changes)))
    assert raised.value.argument.startswith(argument)


def test_a_start_call_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="'gem'"):
        notebook.start("gem")
    with pytest.raises(InputError, match="'rows'"):
        plan("gemm", rows=(1, rules.whole()))
    given = defaults("jitter")
    del given["seed"]
    with pytest.raises(InputError, match="'seed'"):
        notebook.start("jitter", **given)
    with pytest.raises(InputError, match="pair"):
        notebook.start("gemm", **(defaults("gemm") | {"m": "1"}))


def test_a_results_folder_that_is_none_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "file"))
    with pytest.raises(InputError, match="LABKIT_RESULTS") as raised:
        plan("gemm")
    assert raised.value.argument == "results folder"
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "not" / "yet"))
    plan("gemm")
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("name", ["concurrency", "jitter"])
def test_with_a_gpu_the_same_parameters_measure(name: str) -> None:
    """Whatever ``simulate`` says: it is for machines with no GPU."""
    values = {one.name: one.default for one in read_parameters(path_of(name)) if one.name != "device"}
    made = make(name, "cuda", values)
    assert made.options.where == "cuda" and made.options.repeats > 1
    assert made.command == f"labkit bench {name} --device cuda" + " --parts document,cold" * (
        name == "jitter"
    )
    assert made.origin.startswith("measured on this GPU")
    simulated = make(name, "cpu", values)
    assert simulated.options.where == "rtx3050" and simulated.origin.startswith("simulated")


# --- the same code path as the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {}) for name in NAMES]
    + [
        ("gemm", {"table": "sweep", "m": "1, 8 ,33", "bits": "3", "group": 64, "shapes": "5632x2048, 7b"}),
        ("gemm", {"dtype": "bfloat16", "peers": True, "samples": 30}),
        ("gemv", {"table": "w3_batch_tile"}),
        ("attention", {"chunk": "16", "kv": "int8", "plans": "walk, 1/4", "peers": False, "block_size": 32}),
        ("concurrency", {"policies": "serial:64, mixed:32", "overlap": "off", "clients": "1,3", "seed": 7}),
        ("concurrency", {"simulate": "cpu", "prompt": 9, "tokens": 3, "repeats": 2, "peers": True}),
        ("jitter", {"simulate": "h200", "parts": "cold", "load": 0.25, "streams": 3, "overlap": "on"}),
        ("jitter", {"simulate": "cpu", "document": 70}),
        ("serving", {"simulate": "cpu", "rates": "0.5, 2", "requests": 3, "lengths": "4-9", "tokens": 2}),
        ("serving", {"ttft_ms": 500.0, "tpot_ms": 80.0, "loads": "0.5", "policies": "sliced:512@50%"}),
    ],
)
def test_the_printed_command_means_the_same_run(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command line of a plan, given to ``labkit bench``, reaches the same function with equal options."""
    made = plan(name, **changes)
    assert made.work is WORKS[name].run
    seen: list[Any] = []

    def instead(options: Any, command: str, report: Any = None) -> Record:
        seen.append(options)
        return Record("x", "emulated", command, "2026-12-01T00:00:00+00:00", {}, {}, {})

    monkeypatch.setattr(WORKS[name], "run", instead)
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path))
    words = made.command.split()
    assert words[:2] == ["labkit", "bench"]
    done = CliRunner().invoke(bench_app, words[2:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert seen == [made.options]


# --- write, judge, bar -------------------------------------------------------------------------------------


def small(*entries: Entry, **changes: Any) -> Record:
    facts = {"name": "a CPU", "key": "cpu"}
    record = Record("gemm-x", "emulated", "labkit bench gemm", "2026-12-01T00:00:00+00:00", facts, {}, {})
    return replace(record, entries=list(entries), **changes)


def entry(status: str = "emulated", note: str = "") -> Entry:
    counts = dict.fromkeys(("requests", "sectors", "bytes", "wavefronts", "faults"), 1)
    return Entry("fast", "tensor_core", "w4", 1, 64, 128, 128, status, note, counts=counts)


def test_a_record_of_the_same_second_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path))
    first, second = write(small(entry())), write(small(entry(), entry()))
    assert first != second and first.parent == second.parent == tmp_path / "bench"
    assert [len(read(path).entries) for path in (first, second)] == [1, 2]


def test_a_record_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path))
    record = small(entry())
    record.parameters["bad"] = object()  # no JSON
    with pytest.raises(TypeError):
        write(record)
    assert list((tmp_path / "bench").iterdir()) == []


def test_the_verdict(tmp_path: Path) -> None:
    def judged(record: Record) -> str:
        return verdict(record, record.write(tmp_path / "r.json"))

    good = judged(small(entry(), entry("unavailable", "no such package")))
    assert good == "nothing wrong, nothing failed; the record reads back whole"
    for record, words in (
        (small(entry(), entry("wrong", "error 3")), "1 of 2 .* wrong, error 3"),
        (small(entry(), entry("failed", "no compiler")), "failed, no compiler"),
        (small(entry(), complete=False), "interrupted"),
        (small(entry("unavailable", "no GPU")), "no GPU"),
        (small(), "no entries"),
    ):
        with pytest.raises(WrongResults, match=words):
            judged(record)
    other = small(entry(), entry()).write(tmp_path / "other.json")
    with pytest.raises(InputError, match="another record"):
        verdict(small(entry()), other)
    other.write_text("{", encoding="utf-8")
    with pytest.raises(InputError):
        verdict(small(entry()), other)


@pytest.mark.parametrize("lines", [0, 2, 9])
def test_the_bar_ends_full_whatever_was_planned(lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work(options: Any, command: str, report: Any) -> Record:
        for number in range(5):
            report(f"line {number} " + "of many words " * 20)
        return small(entry())

    made = Plan("gemm", "cpu", "emulated", "labkit bench gemm", lines, None, work)
    assert notebook.run(made).entries
    said = capsys.readouterr()
    last = said.out.replace("\n", "\r").rstrip("\r").rsplit("\r", 1)[-1]
    assert "100%" in last and "5/5" in last and len(last) < 130 and said.err == ""


def test_a_run_that_raises_closes_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def work(options: Any, command: str, report: Any) -> Record:
        report("one")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        notebook.run(Plan("gemm", "cpu", "emulated", "labkit bench gemm", 3, None, work))
    assert "1/3" in capsys.readouterr().out


def test_tables_are_printed_outside_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    notebook.show_tables(small(entry(), notes=["no GPU here"]))
    said = capsys.readouterr().out
    assert "emulated" in said and "- no GPU here" in said


# --- the gate ----------------------------------------------------------------------------------------------


def changed(book: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The book with one text replaced, wherever it stands."""
    out = copy.deepcopy(book)
    assert any(old in joined(cell["source"]) for cell in out["cells"])
    for cell in out["cells"]:
        cell["source"] = joined(cell["source"]).replace(old, new)
    return normalise(out)


def test_the_gate_knows_a_benchmark_by_its_start(tmp_path: Path) -> None:
    book = read_book(path_of("gemm"))
    assert [str(problem) for problem in gate.check_format(book)] == []
    found = {
        "no device": changed(book, 'device = "auto"', 'other = "auto"'),
        "m is never checked": changed(book, "    m=(m, ", "    mm=(m, "),
        "device is never checked": changed(book, "    device=(device, ", "    dev=(device, "),
        "has no solve": changed(book, "notebook.start", "course.start"),
        "does not call course.start": changed(book, "notebook.start", "notebook.begin"),
    }
    for words, bad in found.items():
        assert any(words in str(problem) for problem in gate.check_format(bad)), words
    chapter = tmp_path / "05_gemm.ipynb"
    chapter.write_text(dumps(book), encoding="utf-8")
    assert any("starts as a benchmark" in str(problem) for problem in gate.gate(chapter))
