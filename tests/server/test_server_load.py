"""Many clients, too many clients, clients that leave, and what the figures say of them."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from server_cases import NAME, PATIENCE, Scripted, ThreadServer, tiny_process

from labkit.engine.engine import Engine
from labkit.engine.sampling import SamplingParams

ASKED: dict[str, Any] = {"model": NAME, "temperature": 0}


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {**ASKED, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}


def start(work: Callable[[], Any]) -> Any:
    """In a thread of its own; its result comes from ``result()``."""
    with_pool = ThreadPoolExecutor(1)
    future = with_pool.submit(work)
    with_pool.shutdown(wait=False)
    return future


def opened(port: int, what: dict[str, Any]) -> socket.socket:
    """A request that was sent and not read."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    raw = json.dumps(what)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode())
    return connection


def test_two_hundred_clients_at_once_each_get_their_own_answer(tokenizer: Any) -> None:
    """A process of its own; streamed and whole answers; every fifth client leaves early."""
    prompts = [f"Question {number}: " + "word " * (number % 40) for number in range(200)]
    alone = Engine(Scripted(), tokenizer=tokenizer)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    expected = [request.text for request in alone.generate(prompts, params)]

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        asked = {**ASKED, "prompt": prompts[number], "max_tokens": 4, "extra_body": {"ignore_eos": True}}
        if number % 5 == 0:
            asked["max_tokens"] = 1900
            stream = await client.completions.create(**asked, stream=True)
            async for _ in stream:
                break
            await stream.close()
            return expected[number]
        if number % 2:
            return (await client.completions.create(**asked)).choices[0].text
        stream = await client.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everybody(url: str) -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(200)))

    with tiny_process("0", "200", "0.001", "5") as server:
        assert asyncio.run(everybody(server.url)) == expected
        status = server.wait_until_free()
        finished = status["counters"]["finished"]
        # One that leaves may come to its end all the same, before the server hears of it.
        assert finished["length"] + finished["abort"] == 200 and finished["length"] >= 160
        assert status["blocks"]["free"] + status["blocks"]["idle"] == status["blocks"]["total"]
        assert server.end(signal.SIGTERM) == 0


def test_more_than_the_queue_holds_is_sent_away(tokenizer: Any) -> None:
    executor = Scripted(max_rows=1)
    with ThreadServer(tokenizer, executor=executor, max_queue=1) as server:
        executor.open.clear()
        first, second = (start(lambda: server.post("/v1/completions", body("a", 3))) for _ in range(2))
        server.wait(lambda now: now["queue"]["under_way"] == 2)
        for _ in range(3):
            answer = server.post("/v1/completions", body("a", 3))
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(**ASKED, prompt="a", stream=True)
        executor.open.set()
        assert first.result(PATIENCE).status_code == second.result(PATIENCE).status_code == 200
        # There is room again, also for two at once.
        assert server.post("/v1/completions", body("a", 3, n=2)).status_code == 200
        assert outcomes(server) == {"ok": 3, "overloaded": 4}


def outcomes(server: ThreadServer) -> dict[str, float]:
    return {
        dict(labels)["outcome"]: value
        for (name, labels), value in server.metrics().items()
        if name == "labkit_requests_total"
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["running", "waiting", "sending"])
def test_who_leaves_at_any_stage_frees_everything(tokenizer: Any, stage: str, stream: bool) -> None:
    executor = Scripted(max_rows=2)
    with ThreadServer(tokenizer, executor=executor) as server:
        port = int(server.url.rpartition(":")[2])
        executor.open.clear()
        others = [start(lambda: server.post("/v1/completions", body("other", 5))) for _ in range(2)]
        server.wait(lambda now: now["queue"]["under_way"] == 2)
        what = body("mine", 900, n=3, stream=stream)
        if stage == "sending":  # half of a body
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n")
            connection.sendall(b"Content-Type: application/json\r\n\r\n{")
        else:
            connection = opened(port, what)
            server.wait(lambda now: now["queue"]["under_way"] == 5)
        if stage == "running":
            executor.left = 30
            executor.open.set()
            server.wait(lambda now: not executor.open.is_set())
        connection.close()
        server.wait(lambda now: outcomes(server).get("cancelled") == 1)
        executor.open.set()
        assert [other.result(PATIENCE).status_code for other in others] == [200, 200]
        status = server.wait_until_free()
        assert status["counters"]["finished"].get("abort", 0) == (0 if stage == "sending" else 3)
        server.wait(lambda now: outcomes(server) == {"ok": 2, "cancelled": 1})


def test_the_figures_agree_with_the_answers(tiny: ThreadServer) -> None:
    client = tiny.openai()
    usages, answers = [], 0
    for number in range(4):
        found = client.completions.create(
            **ASKED, prompt=["word " * 30, f"another {number}"], n=2, max_tokens=3 + number
        )
        answers += len(found.choices)
        usages.append(found.usage)
    chunks = client.chat.completions.create(
        **ASKED, messages=[{"role": "user", "content": "Hi"}], max_tokens=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usages.append([chunk.usage for chunk in chunks][-1])
    answers += 1
    assert tiny.post("/v1/completions", {}).status_code == 400
    figures = tiny.metrics()

    def of(name: str, **labels: str) -> float:
        return figures[f"labkit_{name}", frozenset(labels.items())]

    generated = sum(usage.completion_tokens for usage in usages)
    assert of("generated_tokens_total") == generated
    # The engine has each prompt once for each of its answers; the usage has it once.
    assert (
        of("prompt_tokens_total") == 2 * sum(u.prompt_tokens for u in usages[:-1]) + usages[-1].prompt_tokens
    )
    assert of("prefix_cache_queries_total") == of("prompt_tokens_total")
    assert of("prefix_cache_hits_total") + of("prefill_tokens_total") == of("prompt_tokens_total")
    assert of("prefix_cache_hits_total") >= sum(u.prompt_tokens_details.cached_tokens for u in usages) > 0
    assert of("requests_total", endpoint="completions", outcome="ok") == 4
    assert of("requests_total", endpoint="completions", outcome="refused") == 1
    assert of("requests_total", endpoint="chat", outcome="ok") == 1
    ended = {reason: of("answers_total", reason=reason) for reason in ("stop", "length", "abort", "error")}
    assert sum(ended.values()) == answers and ended["abort"] == ended["error"] == 0
    assert of("time_to_first_token_seconds_count") == of("answer_seconds_count") == answers
    assert of("inter_token_latency_seconds_count") == generated - answers
    assert of("time_per_output_token_seconds_count") == answers - 1  # one token has no gap
    assert of("kv_blocks", state="used") == of("answers_now", state="waiting") == 0
    counters = tiny.status()["counters"]
    for name in (
        "prefill_decode_overlap_steps",
        "prefill_decode_stream_overlap_steps",
        "steps",
        "preemptions",
    ):
        assert of(f"{name}_total") == counters[name]
    assert counters["prefill_decode_stream_overlap_steps"] == 0


def test_an_engine_that_breaks_down_tells_everybody(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadServer(tokenizer) as server:
        server.executor.open.clear()
        waiting = start(lambda: server.post("/v1/completions", body("a", 9)))
        stream = start(lambda: server.post("/v1/completions", body("b", 9, stream=True)))
        server.wait(lambda now: now["queue"]["under_way"] == 2)
        cycles = []

        def broken() -> None:
            cycles.append(threading.current_thread().name)
            raise RuntimeError("the books do not balance")

        monkeypatch.setattr(server.engine.runner, "cycle", broken)
        server.executor.open.set()
        answer = waiting.result(PATIENCE)
        assert answer.status_code == 500 and "the books do not balance" in answer.text
        assert "the books do not balance" in stream.result(PATIENCE).text
        later = server.post("/v1/completions", body("c", 9))
        assert later.status_code == 500 and later.json()["error"]["code"] == "engine_failed"
        health = server.get("/health")
        assert health.status_code == 503 and "the books do not balance" in health.text
        assert "the books do not balance" in server.status()["failure"]
        assert server.status()["queue"]["under_way"] == 0
        assert cycles == ["labkit-engine"]  # and it does not try again


# --- signals -------------------------------------------------------------------------------------------


def test_sigterm_lets_what_runs_finish(tokenizer: Any) -> None:
    with tiny_process("0", "10", "0.05", "60") as server:
        whole = start(lambda: server.post("/v1/completions", body("a", 30)))
        stream = start(lambda: server.post("/v1/completions", body("b", 30, stream=True)))
        server.wait(lambda now: now["queue"]["decoding"] == 2)
        # A connection that was there before goes on to be served: it learns of the end.
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            assert client.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("draining: 2 answers")
            refused = client.post("/v1/completions", json=body("c", 1))
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert client.get("/health").status_code == 503
        assert whole.result(PATIENCE).json()["usage"]["completion_tokens"] == 30
        assert stream.result(PATIENCE).text.endswith("data: [DONE]\n\n")
        assert server.process.wait(PATIENCE) == 0


def test_what_is_not_ready_in_time_is_told_so() -> None:
    with tiny_process("0", "10", "0.05", "0.2") as server:
        whole = start(lambda: server.post("/v1/completions", body("a", 1500)))
        stream = start(lambda: server.post("/v1/completions", body("b", 1500, stream=True)))
        server.wait(lambda now: now["queue"]["decoding"] == 2)
        assert server.end(signal.SIGTERM) == 0
        answer = whole.result(PATIENCE)
        assert answer.status_code == 503 and "stopping" in answer.json()["error"]["message"]
        assert '"code":"aborted"' in stream.result(PATIENCE).text


def test_a_second_signal_ends_it_now() -> None:
    with tiny_process("0", "10", "0.05", "600") as server:
        connection = opened(server.port, body("a", 1500))
        server.wait(lambda now: now["queue"]["decoding"] == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        time.sleep(0.3)
        assert server.end(signal.SIGTERM) == -signal.SIGTERM
        connection.close()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_that_comes_twice_is_one(second: signal.Signals) -> None:
    """A launcher hands on what the whole group has had from the terminal, or from `timeout`."""
    with tiny_process("0", "10", "0.02", "60") as server:
        whole = start(lambda: server.post("/v1/completions", body("a", 50)))
        server.wait(lambda now: now["queue"]["decoding"] == 1)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.02)  # two at the very same moment are one to the system as well
        server.process.send_signal(second)
        assert whole.result(PATIENCE).json()["usage"]["completion_tokens"] == 50
        assert server.process.wait(PATIENCE) == 0


def test_after_a_kill_another_takes_its_port() -> None:
    with tiny_process("0", "10", "0.05", "5") as first:
        connection = opened(first.port, body("a", 1500))
        first.wait(lambda now: now["queue"]["decoding"] == 1)
        first.process.kill()
        first.process.wait()
        with tiny_process(str(first.port), "10", "0", "5") as second:
            assert second.url == first.url
            assert second.post("/v1/completions", body("a", 2)).status_code == 200
            assert second.status()["counters"]["output_tokens"] == 2
        connection.close()
