"""``labkit plan``: what three people see, what programs get, and the plan against a running model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from labkit.cache import plan_command
from labkit.cache.plan_command import Options, Planned, make, record
from labkit.cache.plan_report import show
from labkit.cli import app
from labkit.errors import InputError

RTX = "rtx3050-laptop"


def labkit(*arguments: str) -> Any:
    """The command in this process: starting Python and torch anew takes seconds."""
    return CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1"}).invoke(app, ["plan", *arguments])


def text_of(planned: Planned) -> str:
    out = StringIO()
    show(planned, Console(file=out, width=140))
    return out.getvalue()


# --- three people ----------------------------------------------------------------------------------


def test_a_student_with_a_4_gb_card_and_a_3b_model() -> None:
    done = labkit("qwen2.5-3b", "--memory", "4GB", "--batch", "4", "--device", RTX)
    assert done.exit_code == 0, done.output
    assert "Fits: " in done.stdout
    assert "w4 group 32" in done.stdout
    assert "KV pool: 512 blocks at first" in done.stdout
    assert "dropped once they are tiles" in " ".join(done.stdout.split())


def test_a_teacher_with_the_default_model_on_a_cpu(smollm2_path: Path) -> None:
    text = text_of(make(Options(memory="2GiB", device="cpu")))
    assert "as stored, float32 activations, on the CPU" in text
    assert "Fits: " in text
    assert "dense copies" in text
    assert "Longest context of one row: 8,192 tokens (the model's own limit)." in text


def test_somebody_with_a_7b_model_on_4_gb() -> None:
    done = labkit("qwen2.5-7b", "--memory", "4GB", "--device", RTX)
    assert done.exit_code == 1, done.output
    assert "Does not fit: it needs 5.4" in done.stdout
    suggested = re.findall(r"^  (--.*?)  +saves", done.stdout, re.MULTILINE)
    assert suggested
    # What is suggested is typed as it stands there, and fits.
    again = labkit("qwen2.5-7b", "--memory", "4GB", "--device", RTX, *suggested[0].split())
    assert again.exit_code == 0, again.output
    more = re.search(r"more memory: ([\d.]+ GiB) would do", done.stdout)
    assert more is not None
    enough = float(more.group(1).split()[0]) + 0.01
    assert labkit("qwen2.5-7b", "--memory", f"{enough}GiB", "--device", RTX).exit_code == 0


def test_changes_that_only_fit_together_do_fit_together() -> None:
    options = Options("qwen2.5-7b", "4GB", context=8192, batch=2, device=RTX)
    found = make(options)
    assert not found.plan.fits
    assert found.plan.together
    assert "Together these make it fit" in text_of(found)
    words = " ".join(found.plan.together).split()
    base = {"--context": "8192", "--batch": "2"}
    typed = [*words, *(w for k, v in base.items() if k not in words for w in (k, v))]
    assert labkit("qwen2.5-7b", "--memory", "4GB", "--device", RTX, *typed).exit_code == 0


def test_what_cannot_fit_says_so() -> None:
    text = text_of(make(Options("qwen2.5-7b", "1GB", device=RTX)))
    assert "No combination of these fits" in text


# --- programs --------------------------------------------------------------------------------------


def test_json_is_the_plan() -> None:
    done = labkit("qwen2.5-3b", "--memory", "8GB", "--device", "cuda", "--kv", "int8", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["fits"] is True
    assert found["graphs"] is True
    assert found["memory"] == 8_000_000_000
    assert found["kv"]["dtype"] == "int8"
    assert found["kv"]["first_blocks"] <= found["kv"]["last_blocks"]
    kv = found["kv"]["first_blocks"] * found["kv"]["block_bytes"]
    assert found["total"] == kv + sum(item["bytes"] for item in found["items"])
    assert found["weight_bytes"]["stored"] == found["items"][0]["bytes"]


def test_json_of_a_plan_that_does_not_fit() -> None:
    done = labkit("qwen2.5-7b", "--memory", "4GB", "--device", RTX, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["fits"] is False
    assert any(change["fits"] for change in found["changes"])


def test_a_card_brings_its_own_memory() -> None:
    assert make(Options("qwen2.5-3b", device=RTX)).plan.case.memory == 4 << 30


def test_a_share_of_free_memory_pays_no_interpreter(smollm2_path: Path) -> None:
    shared = make(Options(memory="50%", device="cpu")).plan
    given = make(Options(memory=str(shared.case.memory), device="cpu")).plan
    names = {item.name for item in given.items} - {item.name for item in shared.items}
    assert names == {"reserve: Python"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "qwen2.5-9b"}, "qwen2.5-7b"),
        ({"model": "/nowhere/m.gguf"}, "/nowhere/m.gguf"),
        ({"memory": "four"}, "four"),
        ({"memory": "4"}, "4GB"),
        ({"bits": "w5"}, "w5"),
        ({"group": "48"}, "48"),
        ({"layers": ("mlp",)}, "PATTERN=FORMAT"),
        ({"layers": ("nothing=w4",)}, "nothing"),
        ({"kv": "int4"}, "int4"),
        ({"block_size": 12}, "block_size"),
        ({"chunk": 0}, "chunk"),
        ({"batch": 0}, "batch"),
        ({"context": 40_000}, "32768"),
        ({"device": "tpu"}, RTX),
        ({"dtype": "int8"}, "dtype"),
        ({"graphs": True, "dtype": "float32"}, "graphs"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": "qwen2.5-3b", "memory": "4GB", "device": RTX, **options}
    with pytest.raises(InputError, match=re.escape(words)):
        make(Options(**given))


def test_a_bad_option_is_one_message_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "labkit.cli", "plan", "qwen2.5-3b", "--memory", "4"],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 2
    assert 'did you mean "4GB"?' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_that_is_not_there_must_be_given_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--memory 4GB"):
        make(Options("qwen2.5-3b", device="cuda"))
    assert make(Options("qwen2.5-3b", memory="4GB", device="cuda")).where == (
        "a GPU, which this machine does not have"
    )
    assert "no GPU answers" in make(Options("qwen2.5-0.5b", memory="4GB")).where


def test_run_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.run(Options("qwen2.5-0.5b", "4GB", device=RTX), as_records=True)
    assert json.loads(capsys.readouterr().out) == record(make(Options("qwen2.5-0.5b", "4GB", device=RTX)))
    assert not plan_command.run(Options("qwen2.5-7b", "4GB", device=RTX))
    assert "Does not fit" in capsys.readouterr().out


# --- against a running model -----------------------------------------------------------------------

_CHILD = """
import gc, json, re, sys
import torch
torch.set_num_threads(1)
from labkit.models.zoo import load_model
bits, dtype, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = load_model(bits=None if bits == "None" else bits, dtype=getattr(torch, dtype))
cache = model.decoder.new_cache(tokens)
chunk = torch.arange(tokens - 1)[None] % model.config.vocab_size
hidden = model.decoder.hidden(chunk, cache)
logits = model.decoder.head(hidden[:, -1:])
model.decoder.hidden(logits.argmax(-1), cache)

def kib(text, key):
    return int(re.search(rf"^{key}:\\s+(\\d+) kB", text, re.MULTILINE).group(1))

# Pages of the model's own file are the system's to take back; everything else is ours.
resident = file = 0
for part in re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
    clean = kib(part, "Private_Clean") + kib(part, "Shared_Clean")
    resident += kib(part, "Rss")
    file += clean if ".gguf" in part.split("\\n", 1)[0] else 0
print(json.dumps([1024 * (resident - file), 1024 * (kib(open("/proc/self/status").read(), "VmHWM"))]))
"""

TOLERANCE = 0.15
"""Of the plan: the interpreter's own size differs between systems by tens of megabytes."""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
@pytest.mark.parametrize(("bits", "dtype"), [(None, "float32"), (None, "bfloat16"), ("w3", "float32")])
def test_the_plan_of_the_default_model_is_what_a_process_takes(
    bits: str | None, dtype: str, smollm2_path: Path
) -> None:
    tokens = 512
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(bits), dtype, str(tokens)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    resident, peak = json.loads(done.stdout)
    found = make(
        Options(memory="8GiB", context=tokens, chunk=tokens, bits=bits, dtype=dtype, device="cpu")
    ).plan
    assert found.total == pytest.approx(resident, rel=TOLERANCE)
    # The file was read through: at the peak its pages were there as well.
    assert peak <= (max(found.total, found.case.loading) + smollm2_path.stat().st_size) * (1 + TOLERANCE)
