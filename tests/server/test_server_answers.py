"""Answers that are written down: what exactly clients are told of them."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_cases import NAME, ThreadServer

WORDS = "你好，世界 😀👩‍👩‍👧 naïve café!"
USER = {"role": "user", "content": "Hi"}
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 200}


def chat(server: ThreadServer, text: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    asked = {name: value for name, value in {**GREEDY, **more}.items() if value is not None}
    return server.openai().chat.completions.create(messages=messages, **asked)


def complete(server: ThreadServer, prompt: Any, **more: Any) -> Any:
    return server.openai().completions.create(prompt=prompt, **{**GREEDY, **more})


def joined(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_characters_split_over_tokens_arrive_whole(tiny: ThreadServer) -> None:
    tiny.write("Say it", WORDS, chat=True)
    ids = tiny.tokenizer.encode(WORDS)
    assert len(ids) > len(WORDS)  # so that characters are split
    whole = chat(tiny, "Say it")
    assert whole.choices[0].message.content == WORDS
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(ids) + 1  # the end token counts, and has no text
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(tiny, "Say it", stream=True)]
    assert "".join(pieces) == WORDS and not any("\ufffd" in piece for piece in pieces)


def test_an_answer_cut_within_a_character_says_so(tiny: ThreadServer) -> None:
    tiny.write("Face", "😀", chat=True)
    cut = chat(tiny, "Face", max_tokens=1).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("\ufffd", "length")


def test_log_probabilities_of_parts_of_characters(tiny: ThreadServer) -> None:
    """Bytes joined are the text, whatever the tokens; the names of two parts differ."""
    tiny.write("Say it", WORDS, chat=True)
    tiny.write("Say it", WORDS)
    asked = {"logprobs": True, "top_logprobs": 1}
    entries = chat(tiny, "Say it", **asked).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == WORDS
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)
    streamed = [
        entry
        for chunk in chat(tiny, "Say it", stream=True, **asked)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == entries
    legacy = complete(tiny, "Say it", logprobs=0).choices[0].logprobs
    assert len(legacy.tokens) == len(entries) == len(legacy.text_offset)
    parts = [token for token in legacy.tokens if token.startswith("bytes:")]
    assert parts and r"bytes:\x" in parts[0]
    assert [list(top) for top in legacy.top_logprobs] == [[token] for token in legacy.tokens]
    for token, offset in zip(legacy.tokens, legacy.text_offset):
        assert token.startswith("bytes:") or WORDS[offset:].startswith(token)


@pytest.mark.parametrize("stop", ["world wide", "wide", "d w", ["x", "ld w"], "!", " "])
def test_an_answer_ends_before_a_stop_text(tiny: ThreadServer, stop: Any) -> None:
    text = "Hello world wide web! And more"
    tiny.write("Greet", text)
    stops = [stop] if isinstance(stop, str) else stop
    expected = text[: min(text.find(one) for one in stops if one in text)]
    whole = complete(tiny, "Greet", stop=stop, logprobs=1).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    # Tokens whose text is not in the answer are not reported.
    assert "".join(whole.logprobs.tokens).startswith(expected)
    assert "".join(whole.logprobs.tokens[:-1]) in expected
    assert joined(complete(tiny, "Greet", stop=stop, stream=True)) == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab 你😀é"), min_size=1, max_size=12), data=st.data())
def test_stops_in_any_text(shared_tiny: ThreadServer, text: str, data: st.DataObject) -> None:
    """However tokens cut it: the answer is the text before the first stop, streamed or not."""
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 3))]
    shared_tiny.write("Go", text)
    expected = text[: text.index(stop)]
    assert complete(shared_tiny, "Go", stop=stop).choices[0].text == expected
    assert joined(complete(shared_tiny, "Go", stop=stop, stream=True)) == expected


@pytest.fixture(scope="module")
def shared_tiny(tokenizer: Any) -> Any:
    with ThreadServer(tokenizer) as server:
        yield server


def test_stop_tokens_and_ignored_ends(tiny: ThreadServer) -> None:
    tiny.write("Count", "one two three")
    two = tiny.tokenizer.encode("one two")[-1]
    ended = complete(tiny, "Count", extra_body={"stop_token_ids": [two]})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("one", "stop")
    on = complete(tiny, "Count", max_tokens=7, extra_body={"ignore_eos": True})
    assert on.choices[0].finish_reason == "length" and on.usage.completion_tokens == 7


def test_echo(tiny: ThreadServer) -> None:
    tiny.write("Ask: ", "answer")
    ids = tiny.tokenizer.encode("Ask: ")
    found = complete(tiny, ["Ask: ", "Ask: "], echo=True, n=2)
    assert [choice.text for choice in found.choices] == ["Ask: answer"] * 4
    assert found.usage.prompt_tokens == 2 * len(ids)  # once for each prompt
    assert complete(tiny, ids, echo=True).choices[0].text == "Ask: answer"
    assert joined(complete(tiny, ids, echo=True, stream=True)) == "Ask: answer"


def test_the_default_lengths_are_openais(tiny: ThreadServer) -> None:
    client = tiny.openai()
    short = client.completions.create(model=NAME, prompt="Go", temperature=0)
    assert short.usage.completion_tokens == 16 and short.choices[0].finish_reason == "length"
    tiny.write("Long", "word " * 300, chat=True)
    assert chat(tiny, "Long", max_tokens=None).usage.completion_tokens == 301 + 1
    two = chat(tiny, "Long", max_tokens=None, max_completion_tokens=2)
    assert two.usage.completion_tokens == 2


def test_choices_of_a_stream_can_be_told_apart(tiny: ThreadServer) -> None:
    tiny.write("One", "first answer")
    tiny.write("Two", "second, longer answer")
    stream = complete(tiny, ["One", "Two"], n=2, stream=True, stream_options={"include_usage": True})
    texts, reasons = ["", "", "", ""], [0, 0, 0, 0]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason == "stop"
        usage = chunk.usage
    assert texts == ["first answer"] * 2 + ["second, longer answer"] * 2
    assert reasons == [1] * 4
    expected = sum(len(tiny.tokenizer.encode(text)) + 1 for text in texts)
    assert usage.completion_tokens == expected


def test_parts_of_text_and_what_means_nothing(tiny: ThreadServer) -> None:
    """A message in parts is their text; null is the default; user and metadata change nothing."""
    tiny.write("one two", "yes", chat=True)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    body = {
        **GREEDY,
        "messages": [{"role": "user", "content": parts, "name": None}],
        "user": "somebody",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        **dict.fromkeys(("stop", "n", "seed", "top_p", "logprobs", "tools", "logit_bias", "stream")),
    }
    answer = tiny.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}
    system = [{"role": role, "content": "Be brief"} for role in ("system", "developer")]
    texts = [
        tiny.post("/v1/chat/completions", {**GREEDY, "max_tokens": 4, "messages": [one]}).json()["choices"]
        for one in system
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"best_of": 1, "logit_bias": {}, "stream_options": {"include_obfuscation": False}}),
        ("chat/completions", {"store": False, "modalities": ["text"], "service_tier": "auto"}),
        ("chat/completions", {"logit_bias": {}, "service_tier": "default"}),
    ],
)
def test_a_field_that_names_what_is_done_anyway_is_taken(
    tiny: ThreadServer, path: str, fields: dict[str, Any]
) -> None:
    """Clients send their defaults along."""
    body = {**GREEDY, "max_tokens": 1, "stream": "stream_options" in fields}
    body |= {"prompt": "Go"} if path == "completions" else {"messages": [USER]}
    answer = tiny.post(f"/v1/{path}", {**body, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("how", ["object", "dump", "set fields", "json"])
def test_an_answer_can_be_sent_back_as_it_came(tiny: ThreadServer, how: str) -> None:
    """As a conversation is carried on: the message itself, or any of the dictionaries made of it."""
    tiny.write("One", "first answer", chat=True)
    message = chat(tiny, "One").choices[0].message
    sent = {
        "object": message,
        "dump": message.model_dump(),
        "set fields": message.model_dump(exclude_unset=True),
        "json": {**message.to_dict(), "annotations": [], "tool_calls": []},
    }[how]
    messages = [{"role": "user", "content": "One"}, sent, USER]
    found = tiny.openai().chat.completions.create(messages=messages, **{**GREEDY, "max_tokens": 2})
    assert found.usage.completion_tokens == 2


def test_a_failure_in_mid_stream_is_an_event(tiny: ThreadServer) -> None:
    """And ends that request alone: the neighbour's answer is whole."""
    tiny.write("Bad", "it will break")
    tiny.write("Good", "it will not break")
    tiny.executor.broken.add(tuple(tiny.tokenizer.encode("Bad")))
    good = complete(tiny, "Good", stream=True)
    told = []
    with pytest.raises(openai.APIError, match="a made-up fault"):
        for chunk in complete(tiny, "Bad", stream=True):
            told.append(chunk.choices[0].text)
    assert "".join(told) == "it will"
    assert joined(good) == "it will not break"
    with pytest.raises(openai.InternalServerError, match="a made-up fault"):
        complete(tiny, ["Good", "Bad"])
    status = tiny.wait_until_free()
    assert status["failure"] is None
    outcomes = {
        labels: value for (name, labels), value in tiny.metrics().items() if name == "labkit_requests_total"
    }
    assert {dict(labels)["outcome"]: value for labels, value in outcomes.items()} == {"ok": 1, "failed": 2}


def test_a_silent_stream_is_kept_alive(tokenizer: Any) -> None:
    with ThreadServer(tokenizer, ping_seconds=0.05) as server:
        server.write("Wait", "done")
        server.executor.open.clear()
        body = {**GREEDY, "prompt": "Wait", "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            assert next(lines) == ": waiting"
            server.executor.open.set()
            data = [line for line in lines if line.startswith("data: ")]
        assert data[-1] == "data: [DONE]"
        assert '"text":"done"' in data[0]
        # The client never sees the comments.
        server.executor.open.clear()
        stream = complete(server, "Wait", stream=True)
        server.executor.open.set()
        assert joined(stream) == "done"


def test_equal_prompts_are_computed_once(tiny: ThreadServer) -> None:
    prompt = "word " * 40
    length = len(tiny.tokenizer.encode(prompt))
    cached = [
        complete(tiny, prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens for _ in range(2)
    ]
    assert cached == [0, (length - 1) // 16 * 16]


def test_every_policy_gives_the_same_answers(tokenizer: Any) -> None:
    policies = ("serial", "overlap", "ticks", "dynamic", "mixed", "sliced", "adaptive")
    texts = []
    for policy in policies:
        with ThreadServer(tokenizer, policy=policy) as server:
            found = complete(server, ["a b c", "d " * 100], max_tokens=5)
            texts.append([choice.text for choice in found.choices])
            status = server.status()
            assert status["policy"] == policy
            if policy != "adaptive":  # it depends on the rung
                assert status["overlap"] is (policy in ("overlap", "ticks", "dynamic"))
    assert all(one == other for one, other in itertools.pairwise(texts))


def test_without_a_tokenizer_tokens_are_ids() -> None:
    with ThreadServer(None) as server:
        found = complete(server, [5, 6, 7], max_tokens=3, logprobs=1).choices[0]
        assert found.text == "" and found.finish_reason == "length"
        assert len(found.logprobs.tokens) == 3 and all(token.isdigit() for token in found.logprobs.tokens)
        for path, more in (("completions", {"prompt": "text"}), ("chat/completions", {"messages": [USER]})):
            answer = server.post(f"/v1/{path}", {**GREEDY, **more})
            assert answer.status_code == 400 and "no tokenizer" in answer.text
        server.wait_until_free()


def test_the_fingerprint_changes_when_answers_may(tokenizer: Any) -> None:
    found = []
    for options in ({"bits": None}, {"bits": None}, {"bits": "w4"}):
        with ThreadServer(tokenizer, options=options) as server:
            found.append(server.status()["system_fingerprint"])
    assert found[0] == found[1] != found[2]
