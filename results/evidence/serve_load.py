"""Streaming clients against a real `labkit serve` process with random weights: tokens a second and gaps.

``tokens_s`` is over all, from the first request to the last token, prompts included;
``together_events_s`` over the time in which every client gets events. ``server_us_event`` is the processor
time of the server's process, all its threads, for each event.

python results/evidence/serve_load.py --shape tiny --clients 1,4            # anywhere
python results/evidence/serve_load.py --shape 0.5b --device cuda            # a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from labkit.course.cli import terminate_as_interrupt
from labkit.scratch import Scratch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))
from checkpoints import random_state, tiny_config, write_hf, write_tokenizer  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512},
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
    },
}
A_PROCESS = 8
"""Clients of one process: a client in Python reads some thousand events a second."""


async def _client(port: int, prompt: list[int], new: int) -> list[float]:
    """Times at which the events of one answer came, the first being the request's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"model": "load", "prompt": prompt, "max_tokens": new, "ignore_eos": True, "stream": True}
    raw = json.dumps(body | {"temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    times = [time.monotonic()]
    writer.write(head.encode() + raw)
    status = await reader.readline()
    assert b" 200 " in status, status
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return times


def _clients(seeds: list[int], port: int, length: int, new: int, vocab: int, start: Any, out: Any) -> None:
    """One process of clients, all at once, and at once with those of the other processes."""

    async def all_of_them() -> list[list[float]]:
        prompts = [torch.randint(3, vocab, (length,), generator=torch.manual_seed(s)).tolist() for s in seeds]
        start.wait()  # the processes take a second to begin, each a different one
        return await asyncio.gather(*(_client(port, prompt, new) for prompt in prompts))

    out.put(asyncio.run(all_of_them()))


def load(server: int, port: int, clients: int, length: int, new: int, vocab: int) -> dict[str, float | None]:
    """What ``clients`` that come at once see, and what they cost the process ``server``."""
    context = multiprocessing.get_context("spawn")
    out, parts = (
        context.Queue(),
        [list(range(i, min(i + A_PROCESS, clients))) for i in range(0, clients, A_PROCESS)],
    )
    start = context.Barrier(len(parts))
    shared = (port, length, new, vocab, start, out)
    running = [context.Process(target=_clients, args=(part, *shared)) for part in parts]
    before = psutil.Process(server).cpu_times()
    for one in running:
        one.start()
    answers = [times for _ in running for times in out.get(timeout=600)]
    after = psutil.Process(server).cpu_times()
    for one in running:
        one.join()
    begun, ended = min(times[0] for times in answers), max(times[-1] for times in answers)
    events = sum(len(times) - 1 for times in answers)
    all_from, all_to = max(times[1] for times in answers), min(times[-1] for times in answers)
    together = sum(all_from < time <= all_to for times in answers for time in times[1:])
    spent = after.user + after.system - before.user - before.system
    gaps = sorted(b - a for times in answers for a, b in itertools.pairwise(times[1:]))
    return {
        "clients": clients,
        "tokens_s": round(clients * new / (ended - begun), 1),
        "together_events_s": round(together / (all_to - all_from), 1) if together else None,
        "server_us_event": round(1e6 * spent / events, 1),
        "events": events,
        "ttft_median_ms": round(1e3 * statistics.median(times[1] - times[0] for times in answers), 2),
        "gap_median_ms": round(1e3 * statistics.median(gaps), 3),
        "gap_p99_ms": round(1e3 * gaps[int(0.99 * (len(gaps) - 1))], 3),
    }


def main() -> None:
    """Serve, load, print a line of JSON a number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bits", default="w4")
    parser.add_argument("--policy", default="mixed")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    chosen = parser.parse_args()
    numbers = [int(one) for one in chosen.clients.split(",")]
    with terminate_as_interrupt(), Scratch("labkit-serve-load-") as folder:
        config = tiny_config("qwen2", **SHAPES[chosen.shape])
        model = folder / "load"
        write_hf(model, config, random_state(config, dtype=torch.float16), tokenizer=False)
        write_tokenizer(model, config["vocab_size"])  # every token has text: each is an event
        command = [sys.executable, "-m", "labkit.cli", "serve", "--model", str(model)]
        command += [
            "--bits",
            chosen.bits,
            "--device",
            chosen.device,
            "--policy",
            chosen.policy,
            "--port",
            "0",
        ]
        command += ["--max-batch", str(max(numbers)), "--no-prefix-cache", "--name", "load"]
        began = time.monotonic()
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert server.stdout is not None
        try:
            for line in server.stdout:
                print(line, end="", flush=True)
                if found := re.search(r"at http://[^:]+:(\d+)/v1", line):
                    break
            else:
                raise SystemExit("the server did not start")
            print(json.dumps({"start_s": round(time.monotonic() - began, 1)}))
            for count in numbers:
                shared = (server.pid, int(found[1]), count, chosen.prompt)
                load(*shared, 4, config["vocab_size"])  # what is made at first use
                print(json.dumps(load(*shared, chosen.new, config["vocab_size"])), flush=True)
        finally:
            server.terminate()
            print(server.communicate(timeout=60)[0], end="")


if __name__ == "__main__":
    main()
