"""Set-up: done once, redone when an input changes, refused with a readable line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import bootstrap


@pytest.fixture
def ready_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished environment, as far as the stamp and the interpreter's place tell."""
    monkeypatch.setattr(bootstrap, "has_compiler", lambda: True)
    venv = tmp_path / "env"
    python = bootstrap.venv_python(venv)
    python.parent.mkdir(parents=True)
    python.touch()
    stamp = bootstrap.fingerprint({"dev"})
    (venv / bootstrap.STAMP).write_text(json.dumps(stamp), encoding="utf-8")
    return venv


def test_ready_environment_runs_no_step(ready_venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_step(*_: object) -> None:
        raise AssertionError("a step was run although nothing changed")

    monkeypatch.setattr(bootstrap, "run", no_step)
    assert bootstrap.main(["--venv", str(ready_venv)]) == 0
    assert bootstrap.main(["--venv", str(ready_venv), "--extras", "dev"]) == 0


def test_changed_input_or_new_extra_is_not_ready(ready_venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.is_ready(ready_venv, {"dev"})
    assert not bootstrap.is_ready(ready_venv, {"dev", "sweep"})
    monkeypatch.setattr(bootstrap, "INPUTS", ("constraints.txt",))
    assert not bootstrap.is_ready(ready_venv, {"dev"})


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"extras": 3}'])
def test_broken_stamp_means_set_up_again(ready_venv: Path, content: str) -> None:
    (ready_venv / bootstrap.STAMP).write_text(content, encoding="utf-8")
    assert not bootstrap.is_ready(ready_venv, set())


def test_failed_step_leaves_no_stamp_and_names_the_step(
    ready_venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(command: list[str], hint: str = "") -> None:
        raise bootstrap.SetupError(f"step failed: {command[0]}")

    monkeypatch.setattr(bootstrap, "run", failing)
    assert bootstrap.main(["--venv", str(ready_venv), "--force"]) == 1
    assert not (ready_venv / bootstrap.STAMP).exists()
    assert "Set-up stopped. step failed" in capsys.readouterr().err


def test_extras_of_the_last_set_up_are_kept(ready_venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "run", lambda command, hint="": commands.append(command))
    monkeypatch.setattr(bootstrap, "install_model", lambda python: None)
    assert bootstrap.main(["--venv", str(ready_venv), "--force", "--extras", "sweep"]) == 0
    assert commands[-1][-1] == ".[dev,sweep]"
    assert bootstrap.is_ready(ready_venv, {"dev", "sweep"})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ziglang is a plain dependency")
def test_a_linux_without_compiler_gets_the_wheel_that_has_one(
    ready_venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "has_compiler", lambda: False)
    monkeypatch.setattr(bootstrap, "run", lambda command, hint="": commands.append(command))
    monkeypatch.setattr(bootstrap, "install_model", lambda python: None)
    assert bootstrap.main(["--venv", str(ready_venv)]) == 0
    assert commands[-1][-1] == ".[compiler,dev]"


def test_compiler_is_found_by_name_or_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LABKIT_CXX", raising=False)
    assert not bootstrap.has_compiler()
    monkeypatch.setenv("LABKIT_CXX", "mycxx")
    assert bootstrap.has_compiler()


def test_wrong_model_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / bootstrap.MODEL_FILE
    wrong.write_bytes(b"not the model")
    monkeypatch.setattr(bootstrap, "find_model", lambda python: wrong)
    monkeypatch.setattr(bootstrap, "run", lambda command, hint="": None)
    with pytest.raises(bootstrap.SetupError, match=r"SHA-256 is [0-9a-f]{64}, expected b179c952"):
        bootstrap.install_model(Path(sys.executable))


def test_missing_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "find_model", lambda python: tmp_path / "none")
    monkeypatch.setattr(bootstrap, "run", lambda command, hint="": None)
    with pytest.raises(bootstrap.SetupError, match="SHA-256 is missing"):
        bootstrap.install_model(Path(sys.executable))


def test_the_installed_model_is_the_one_named(smollm2_path: Path) -> None:
    assert bootstrap.sha256(smollm2_path) == bootstrap.MODEL_SHA256
    assert bootstrap.find_model(Path(sys.executable)) == smollm2_path


def test_bootstrap_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, runpy\n"
        f"runpy.run_path({str(Path(bootstrap.__file__))!r}, run_name='loaded')\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('labkit', 'torch', 'numpy', 'rich', 'typer')])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == "[]"


def test_old_python_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 4))
    assert bootstrap.main([]) == 2
    assert "needs Python 3.11 or newer" in capsys.readouterr().err
