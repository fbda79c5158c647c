"""The real thing: ``labkit serve`` with SmolLM2 on the CPU, asked by OpenAI's own client."""

from __future__ import annotations

import json
import socket

import openai
import pytest
from server_cases import ProcessServer

pytestmark = pytest.mark.xdist_group("smollm2-server")

MODEL = "SmolLM2-135M-Instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(smollm2_server: ProcessServer) -> openai.OpenAI:
    return smollm2_server.openai()


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.models.retrieve("no-such-model")


def test_a_conversation(client: openai.OpenAI) -> None:
    """The client's own message object goes back as it came."""
    first = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=12)
    (choice,) = first.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    usage = first.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert first.system_fingerprint.startswith("fp_")
    more = [*FRANCE, choice.message, {"role": "user", "content": "And of Italy?"}]
    second = client.chat.completions.create(model=MODEL, messages=more, temperature=0, max_tokens=12)
    assert "Rome" in second.choices[0].message.content
    # The first question is in the cache by now, in whole blocks of 16.
    assert second.usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens // 16 * 16 > 0


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 6}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *middle, last = chunks
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in middle) == whole.choices[0].message.content
    )
    assert middle[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in middle[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens == 6


def test_choices_are_drawn_from_seeds_of_their_own(client: openai.OpenAI) -> None:
    """Answer i of a seed is what seed + i gives alone, whoever shares the batch."""
    asked = {"model": MODEL, "prompt": "My favourite animal is", "max_tokens": 5}
    three = [choice.text for choice in client.completions.create(**asked, n=3, seed=7).choices]
    alone = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (7, 8, 9)]
    assert three == alone
    assert len(set(three)) > 1


def test_logprobs_are_the_models_own(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 3}
    found = client.completions.create(**asked, logprobs=5).choices[0]
    logprobs = found.logprobs
    assert "".join(logprobs.tokens) == found.text
    for token, logprob, top, offset in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset
    ):
        assert top[token] == logprob == max(top.values()) and len(top) == 5
        assert found.text[offset:].startswith(token)
    chat = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    ).choices[0]
    entries = chat.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == chat.message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob < 0 for entry in entries)


def test_prompts_in_every_form(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 2}
    text = client.completions.create(**asked, prompt="The sky is", echo=True)
    assert text.choices[0].text.startswith("The sky is") and len(text.choices[0].text) > 10
    ids = [504, 6962, 314]
    one = client.completions.create(**asked, prompt=ids)
    several = client.completions.create(**asked, prompt=[ids, ids[:2]])
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == one.choices[0].text
    assert several.usage.prompt_tokens == 5


def test_who_leaves_frees_everything(smollm2_server: ProcessServer, client: openai.OpenAI) -> None:
    """In mid-stream, and while waiting for a whole answer of three choices."""
    before = smollm2_server.status()["counters"]["finished"].get("abort", 0)
    endless = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**endless, stream=True) as stream:
        for _ in range(3):
            next(stream)
    smollm2_server.wait_until_free()
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "n": 3})
    with socket.create_connection(("127.0.0.1", smollm2_server.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {smollm2_server.key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        smollm2_server.wait(lambda now: now["queue"]["decoding"] == 3)
    status = smollm2_server.wait_until_free()
    assert status["counters"]["finished"]["abort"] == before + 4


def test_the_key_of_the_environment_is_asked_for(smollm2_server: ProcessServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="another", max_retries=0).models.list()


def test_status_and_health(smollm2_server: ProcessServer) -> None:
    assert smollm2_server.get("/health").json() == {"status": "ok"}
    status = smollm2_server.status()
    assert status["policy"] == "mixed" and status["context"] == 2048
    # A CPU has one lane: the overlap was asked for, is not on, and no stream is ever counted.
    assert status["overlap_asked_for"] and not status["overlap"] and not status["two_streams"]
    assert status["prefill_decode_stream_overlap_steps"] == 0
    assert status["failure"] is None and not status["draining"]
    assert {"labkit", "torch"} <= set(status["versions"])
