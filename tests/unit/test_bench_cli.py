"""``labkit bench``: light to start, readable when it refuses, files where it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_records import entry, record

from labkit import cli
from labkit.bench.record import read


def labkit(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "LABKIT_RESULTS": str(results)}
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", "bench", *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        check=False,
    )


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from labkit.bench import gemm

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(gemm, "run", never)
    (tmp_path / "file").write_text("", encoding="utf-8")
    for out in (tmp_path, tmp_path / "file" / "r.json"):
        monkeypatch.setattr(sys, "argv", ["labkit", "bench", "gemm", "--device", "cpu", "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2 and "--out: got" in capsys.readouterr().err


def test_loading_the_commands_loads_nothing_heavy() -> None:
    code = (
        "import sys, labkit.bench.cli\n"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'labkit.bench.gemm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


def test_help_lists_the_commands(tmp_path: Path) -> None:
    done = labkit(tmp_path, "--help")
    assert done.returncode == 0
    for command in ("gemm", "offload", "show"):
        assert command in done.stdout


def test_without_a_gpu_kernels_are_checked_and_counted(tmp_path: Path) -> None:
    asked = (
        "gemm",
        "--table",
        "sweep",
        "--device",
        "cpu",
        "--shapes",
        "512x4096",
        "--m",
        "1,9",
        "--bits",
        "4",
    )
    done = labkit(tmp_path, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no time is measured" in done.stdout and "tiled GEMM" in done.stdout
    (path,) = (tmp_path / "bench").iterdir()
    assert f"written: {path}" in done.stdout
    found = read(path)
    assert found.kind == "emulated" and found.name == "gemm-sweep" and found.parameters["m"] == [1, 9]
    assert found.command == "labkit bench " + " ".join(asked)
    assert {e.status for e in found.entries} == {"emulated"} and not any(e.samples_us for e in found.entries)


def test_the_fast_table_keeps_its_options_in_the_record(tmp_path: Path) -> None:
    asked = ("gemm", "--table", "fast", "--device", "cpu", "--m", "1,9", "--bits", "3")
    asked += ("--group", "64", "--dtype", "bfloat16", "--peers")
    done = labkit(tmp_path, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "bench").iterdir()
    found = read(path)
    assert found.command == "labkit bench " + " ".join(asked)
    assert {e.group for e in found.entries} == {64} and found.parameters["activations"] == "bfloat16"
    assert {e.contender for e in found.entries if e.status == "emulated"} >= {"dequant_matmul", "dense_bf16"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gemm", "--table", "nothing"), "table"),
        (("gemm", "--shapes", "5632"), "shapes"),
        (("gemm", "--m", "0"), "m: got '0'"),
        (("gemm", "--bits", "5"), "'5'"),
        (("gemm", "--bits", "four"), "bits"),
        (("gemm", "--samples", "3"), "samples"),
        (("gemm", "--device", "tpu"), "device"),
        (("gemm", "--table", "tiled_w4", "--bits", "3"), "tiled_w4"),
        (("gemm", "--table", "fast", "--group", "48"), "group"),
        (("gemm", "--table", "fast", "--dtype", "float64"), "dtype"),
        (("gemm", "--table", "sweep", "--dtype", "bfloat16"), "--table fast"),
        (("offload", "--device", "cpu"), "device"),
        (("show",), "Missing argument"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["labkit", "bench", *arguments])
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_asking_for_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = labkit(tmp_path, "gemm", "--device", "cuda")
    assert done.returncode == 2 and "--device cpu" in done.stderr


def test_show_prints_good_records_and_names_bad_files(tmp_path: Path) -> None:
    good = record([entry("gemm_tiled", table="tiled_w4", m=30)]).write(tmp_path / "good.json")
    bad = tmp_path / "bad.json"
    bad.write_text(good.read_text(encoding="utf-8")[:200], encoding="utf-8")
    done = labkit(tmp_path, "show", str(good))
    assert done.returncode == 0 and "NVIDIA H200" in done.stdout and "quoted" in done.stdout
    done = labkit(tmp_path, "show", "--markdown", str(good))
    assert done.returncode == 0 and "|---:|" in done.stdout and "NVIDIA H200" in done.stdout
    both = labkit(tmp_path, "show", str(bad), str(good), str(tmp_path / "absent.json"))
    assert both.returncode == 1 and "NVIDIA H200" in both.stdout
    assert "bad.json" in both.stderr and "absent.json" in both.stderr and "Traceback" not in both.stderr


def test_a_wrong_kernel_is_exit_code_1_and_kept(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from labkit.kernels import registry\n"
        "from labkit.bench import contenders\n"
        "kernel = registry.get('gemm_tiled')\n"
        "registry.register('gemm_tiled', lambda x, w: kernel.run(x, w) * 2, available=kernel.available,\n"
        "    prepare=kernel.prepare, replace=True)\n"
        "options = ['--table', 'tiled_w4', '--device', 'cpu', '--out', sys.argv[1]]\n"
        "sys.argv = ['labkit', 'bench', 'gemm', *options]\n"
        "from labkit.cli import main; main()"
    )
    path = tmp_path / "r.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG" in done.stdout
    statuses = {e["contender"]: e["status"] for e in json.loads(path.read_text(encoding="utf-8"))["entries"]}
    assert statuses == {"gemm_tiled": "wrong", "dequant_matmul": "emulated", "dense_fp16": "emulated"}
