"""``labkit serve`` before it serves: what it refuses, in one message, without loading a model."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_cases import COST

from labkit.engine.engine import Engine
from labkit.engine.sampling import SamplingParams
from labkit.engine.sim import SimulatedExecutor
from labkit.errors import InputError
from labkit.server import command
from labkit.server.command import served_name
from labkit.server.process import listen
from labkit.server.settings import Settings


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", "serve", *options],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        check=False,
    )


def test_help_names_every_option() -> None:
    done = serve("--help")
    assert done.returncode == 0
    for option in (
        "--model", "--bits", "--kv-dtype", "--policy", "--no-prefill-decode-overlap", "--max-queue",
        "--max-context", "--max-batch", "--host", "--port", "--api-key", "LABKIT_API_KEY", "--max-body-bytes",
        "--drain-seconds",
    ):  # fmt: skip
        assert option in done.stdout


def test_a_port_in_use_is_one_message_before_a_model_is_loaded() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = serve("--port", str(port))
    assert done.returncode == 2
    assert f"port: got {port}, which is in use" in done.stderr and "--port 0" in done.stderr
    assert "Traceback" not in done.stderr and "loading" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "fastest"), "fastest"),
        (("--model", "/nowhere/m.gguf"), "/nowhere/m.gguf"),
        (("--policy", "mixed:99999999", "--device", "cpu"), "policy: got a chunk of 99999999 tokens"),
    ],
)
def test_bad_options_of_a_command_line(options: tuple[str, ...], words: str) -> None:
    done = serve(*options, "--port", "0")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


OF_ENGINE: dict[str, Any] = {
    **dict.fromkeys(("model", "bits", "group", "dtype", "kv_dtype", "max_context", "num_blocks")),
    "offset": False,
    "device": "cpu",
    "policy": "mixed",
    "overlap": True,
    "admission": "peak",
    "prefix_cache": True,
    "max_batch": 4,
    "invariant": False,
}
SETTINGS: dict[str, Any] = {"name": None, "host": "127.0.0.1", "port": 0, "api_key": None}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"policy": "dynamic@25%"}, "policy"),
    ({"kv_dtype": "int4"}, "kv_dtype"),
    ({"admission": "later"}, "admission"),
    ({"max_batch": 0}, "max_batch"),
    ({"max_context": -1}, "max_context"),
    ({"num_blocks": 0}, "num_blocks"),
    ({"host": "no such host"}, "host"),
    ({"host": "203.0.113.1"}, "host"),
    ({"port": 70_000}, "port"),
    ({"max_queue": -1}, "max_queue"),
    ({"max_body_bytes": 0}, "max_body_bytes"),
    ({"drain_seconds": float("nan")}, "drain_seconds"),
    ({"api_key": ""}, "api_key"),
    ({"api_key": "schlüssel"}, "api_key"),
    ({"name": " "}, "name"),
]


@pytest.mark.parametrize(("option", "name"), BAD, ids=lambda value: str(value))
def test_bad_options(option: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "build", lambda *options: pytest.fail("a model would be loaded"))
    of_engine, settings = dict(OF_ENGINE), dict(SETTINGS)
    for key, value in option.items():
        (of_engine if key in of_engine else settings)[key] = value
    with pytest.raises(InputError) as caught:
        command.serve(command.EngineOptions(**of_engine), **settings)  # type: ignore[arg-type]
    assert caught.value.argument == name
    assert not settings["api_key"] or settings["api_key"] not in str(caught.value)


def test_what_is_loaded_is_not_gone_through_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    class Stub:
        def run(self, sockets: list[Any]) -> None:
            frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(command, "build", lambda *_: object())
    monkeypatch.setattr(command, "make_server", lambda *_, **__: Stub())
    gc.unfreeze()
    try:
        command.serve(command.EngineOptions(**OF_ENGINE | {"model": "tiny"}), **SETTINGS)
        assert frozen[0] > 100_000  # torch alone is more
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_are_told_to_sleep_early_before_torch_is_loaded(given: dict[str, str], found: str) -> None:
    """libgomp reads it once, when torch loads it: a busy machine takes six times as long to start without."""
    code = (
        "import os, sys, types\n"
        "stub = types.ModuleType('labkit.server.command')\n"
        "stub.EngineOptions = lambda *_: None\n"
        "stub.serve = lambda *_, **__: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "sys.modules['labkit.server.command'] = stub\n"
        "sys.argv = ['labkit', 'serve']\n"
        "from labkit.cli import main; main()"
    )
    clean = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        env={**clean, **given},
        check=False,
    )
    assert done.stdout.split() == [found, "False"], done.stderr


def test_without_the_servers_packages_it_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['fastapi'] = None\n"
        "sys.argv = ['labkit', 'serve']\n"
        "from labkit.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2 and "prometheus-client" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-3b-instruct-q4_k_m.gguf", "qwen2.5-3b-instruct"),
        ("Qwen2.5-3B", "Qwen2.5-3B"),
        ("x/llama-f16.gguf", "llama"),
    ],
)
def test_the_name_that_clients_ask_for(path: str, name: str) -> None:
    assert served_name(Path(path)) == name


def test_settings_do_not_show_the_key() -> None:
    assert "s3cret" not in repr(Settings(model="m", api_key="s3cret"))


def test_a_socket_of_another_family() -> None:
    try:
        found = listen("::1", 0)
    except InputError:
        pytest.skip("no IPv6 here")
    with found:
        assert found.family is socket.AF_INET6


def test_tokens_joined_are_the_text(tokenizer: Any) -> None:
    text = "naïve 你好 😀"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(1 << 20) == b""


def test_a_cheap_snapshot_has_everything_but_the_spreads() -> None:
    engine = Engine(SimulatedExecutor(COST, num_blocks=64))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    cheap, whole = engine.snapshot(latency=False), engine.snapshot()
    assert whole.latency.ttft.count == 1 and cheap.latency.ttft.count == 0
    assert cheap.counters == whole.counters and cheap.counters is not engine.counters
    assert cheap.counters.finished is not engine.counters.finished
