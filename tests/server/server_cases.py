"""Servers to test: real processes, and servers in a thread over an engine whose answers are written down."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from labkit.engine.cost_model import CostModel
from labkit.engine.engine import Engine
from labkit.engine.executor import Row
from labkit.engine.sim import SimulatedExecutor, SimulatedOutput
from labkit.models.gguf_header import read_header
from labkit.models.tokenizer import Tokenizer
from labkit.models.zoo import default_model_path
from labkit.server.process import Server, listen, make_server
from labkit.server.settings import Settings

COST = CostModel(
    name="plain",
    origin="simulated",
    source="made up",
    points=((1, 0.010), (8, 0.010), (64, 0.066)),
    share=0.8,
    num_layers=8,
)
NAME = "tiny"
PATIENCE = 60
"""Seconds after which a wait that should end counts as one that never does."""


def load_tokenizer() -> Tokenizer:
    """SmolLM2's, without its weights."""
    return Tokenizer.from_gguf(read_header(default_model_path()).metadata)


class Scripted(SimulatedExecutor):
    """Answers written down for some prompts, a hash of the prompt for the others; can be held.

    Attributes:
        script: prompt ids to the ids of the answer; the end token follows.
        open: cleared, every work waits in its launch.
        left: launches after which it is cleared; None for never.
        broken: prompt ids whose works raise from the third token on.
    """

    def __init__(self, **options: Any) -> None:
        sizes = {"vocab_size": 49152, "num_blocks": 4096, "max_context": 2048, "eos_ids": [2], **options}
        super().__init__(COST, **sizes)
        self.script: dict[tuple[int, ...], Sequence[int]] = {}
        self.broken: set[tuple[int, ...]] = set()
        self.open = threading.Event()
        self.open.set()
        self.left: int | None = None

    def launch_slice(self, batch, first, last):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.open.clear()
        self.open.wait()
        for row in batch.rows:
            if row.request.prompt_ids in self.broken and len(row.request.output_ids) == 2:
                raise MemoryError("a made-up fault")
        return super().launch_slice(batch, first, last)

    def _outputs(self, rows: Sequence[Row]) -> list[SimulatedOutput]:
        outputs = super()._outputs(rows)
        for index, row in enumerate(row for row in rows if row.samples):
            answer = self.script.get(row.request.prompt_ids)
            if answer is not None:
                at = len(row.request.output_ids)
                token = answer[at] if at < len(answer) else 2
                outputs[index] = SimulatedOutput(token, outputs[index].state, self.vocab_size)
        return outputs


class Client:
    """What tests ask of any server."""

    url = ""
    key = "none"

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, **options)

    def get(self, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=PATIENCE, **options)

    def status(self) -> dict[str, Any]:
        return self.get("/status").json()

    def wait(self, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Look at /status until something is so."""
        end = time.monotonic() + PATIENCE
        while not until(status := self.status()):
            assert time.monotonic() < end, f"it never came to that: {status}"
            time.sleep(0.02)
        return status

    def wait_until_free(self) -> dict[str, Any]:
        """Until nothing is under way; then no block may be in use."""
        status = self.wait(lambda now: not now["queue"]["under_way"])
        assert status["blocks"]["used"] == 0
        assert status["queue"]["decoding"] == status["queue"]["waiting"] == 0
        return status

    def metrics(self) -> dict[tuple[str, frozenset], float]:
        """Every sample, by name and labels."""
        answer = self.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }


class ThreadServer(Client):
    """A server in a thread, over an engine that the test holds.

    Args:
        tokenizer: shared by tests, as it takes a second to read.
        executor: of the engine. policy: its policy.
        settings: of the server, other than where it listens.
    """

    def __init__(
        self, tokenizer: Any, *, executor: Scripted | None = None, policy: str = "mixed", **settings: Any
    ) -> None:
        self.tokenizer, self.executor = tokenizer, executor or Scripted()
        self.engine = Engine(self.executor, tokenizer=tokenizer, policy=policy, remembered=0)
        self.key = settings.get("api_key") or "none"
        socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self.server: Server = make_server(
            self.engine, Settings(model=NAME, **settings), say=lambda words: None
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [socket]})
        self.thread.start()

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The server's; it is there once a request was answered."""
        assert self.server._loop is not None
        return self.server._loop

    def write(self, prompt: str, answer: str, *, chat: bool = False) -> None:
        """What to say to a prompt."""
        if chat:
            ids = self.tokenizer.apply_chat([{"role": "user", "content": prompt}])
        else:
            ids = self.tokenizer.encode(prompt)
        self.executor.script[tuple(ids)] = self.tokenizer.encode(answer)

    def __enter__(self) -> ThreadServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.open.set()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


class ProcessServer(Client):
    """A process that serves, on a free port unless one is named; ``lines`` is what it says on stderr."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.key = environment.get("LABKIT_API_KEY", "none")
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self.lines: list[str] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.wait_for("http://"))
        assert found is not None
        self.port = int(found[1])
        self.url = found[0]

    def wait_for(self, words: str) -> str:
        """The next line with these words in it."""
        while (line := self._said.get(timeout=PATIENCE)) is not None:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError("it ended: " + "".join(self.lines))

    def end(self, signal: int) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(signal)
        return self.process.wait(PATIENCE)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.put(line)
        self._said.put(None)

    def __enter__(self) -> ProcessServer:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def tiny_process(*arguments: str) -> ProcessServer:
    """A process with a made-up model: see server_child.py."""
    return ProcessServer(str(Path(__file__).with_name("server_child.py")), *arguments)
