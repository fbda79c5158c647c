"""What is refused: by name, in OpenAI's form, before anything is computed."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_cases import NAME, ThreadServer

COMPLETION = {"model": NAME, "prompt": "Hi", "max_tokens": 1}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@pytest.fixture(scope="module")
def server(tokenizer: Any) -> Iterator[ThreadServer]:
    with ThreadServer(
        tokenizer, max_body_bytes=100_000, body_seconds=0.2, head_seconds=0.2, max_queue=10
    ) as found:
        yield found
        assert found.status()["counters"]["steps"] == 0, "something that is refused was computed"


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (name,) = answer.json()
    found = answer.json()[name]
    assert name == "error" and set(found) == {"message", "type", "param", "code"}
    assert found["message"] and answer.headers["x-request-id"].startswith("req_")
    return found


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": [1]}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 128}, "n"),  # more than 64 that run and 10 that wait
    ({"seed": 1 << 63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"logit_bias": {"50256": -100}}, "logit_bias"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"unheard_of": None}, "unheard_of"),
    ({"model": None}, "model"),
    ({"user": 3}, "user"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"] * 65}, "stop_token_ids"),
    ({f"strange{i}": 1 for i in range(2000)}, "strange0"),
    ({"ignore_eos": 1}, "ignore_eos"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"metadata": {}}, "metadata"),
    ({"messages": []}, "messages"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
]
OF_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "none"}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type"),
    ({"response_format": "text"}, "response_format"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 5}, "max_tokens"),
    ({"prompt": "Hi"}, "prompt"),
    ({"echo": True}, "echo"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    (message(role="tool"), "messages[0].role"),
    (message(role="nobody"), "messages[0].role"),
    (message(content=None), "messages[0].content"),
    (message(content=[]), "messages[0].content"),
    (message(content="\ud800"), "messages[0].content"),
    (message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    (message(content=[{"type": "text", "text": "a"}, {"type": "text"}]), "messages[0].content[1].text"),
    (message(content=[{"type": "text", "text": "a", "more": 1}]), "messages[0].content[0].more"),
    (message(name="Ann"), "messages[0].name"),
    (message(tool_calls=[{}]), "messages[0].tool_calls"),
    (message(annotations=[{"type": "url_citation"}]), "messages[0].annotations"),
    (message(weight=1), "messages[0].weight"),
    ({"messages": [{}] * 9000}, "messages"),
    ({"messages": [3] * 8000}, "messages[0]"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *(("/v1/completions", *case) for case in BOTH + OF_COMPLETIONS),
        *(("/v1/chat/completions", *case) for case in BOTH + OF_CHAT),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_a_field_is_refused_by_name(
    server: ThreadServer, path: str, fields: dict[str, Any], param: str
) -> None:
    raw = json.dumps({**PATHS[path], **fields})
    answer = httpx.post(server.url + path, content=raw, headers=JSON)
    found = error(answer, 400)
    assert found["param"] == param and found["type"] == "invalid_request_error"
    assert param in found["message"] or found["code"] == "context_length_exceeded" or param == "n"


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "raw",
    [
        b"{", b"", b"null", b"[]", b"3", b'"text"', b"\xff\xfe", b"{}", b'{"model": "tiny"', b"[" * 50_000,
        b'{"n": ' + b"9" * 5000 + b"}", b'{"temperature": NaN}', b'{"temperature": 1e999}', b"\x00",
    ],
    ids=lambda raw: repr(raw[:12]),
)  # fmt: skip
def test_a_malformed_body(server: ThreadServer, path: str, raw: bytes) -> None:
    error(httpx.post(server.url + path, content=raw, headers=JSON), 400)


def test_not_a_number_is_no_number(server: ThreadServer) -> None:
    for word in ("NaN", "Infinity", "-Infinity", "1e999"):
        raw = json.dumps(COMPLETION)[:-1] + f', "temperature": {word}}}'
        answer = httpx.post(server.url + "/v1/completions", content=raw, headers=JSON)
        assert error(answer, 400)["param"] == "temperature"


def test_a_prompt_that_is_too_long_names_both_lengths(server: ThreadServer) -> None:
    context = server.status()["context"]
    for path, fields, param in (
        ("/v1/completions", {"prompt": [5] * (context + 7)}, "prompt"),
        ("/v1/completions", {"prompt": [5] * (context - 7), "max_tokens": 8}, "max_tokens"),
        ("/v1/chat/completions", message(content="a " * context), "messages"),
    ):
        found = error(server.post(path, {**PATHS[path], **fields}), 400)
        assert found["code"] == "context_length_exceeded" and found["param"] == param
        assert str(context) in found["message"]
    assert (
        str(context + 7)
        in error(server.post("/v1/completions", {**COMPLETION, "prompt": [5] * (context + 7)}), 400)[
            "message"
        ]
    )


@pytest.mark.parametrize("announced", [True, False])
def test_a_huge_body_is_refused_whether_or_not_its_length_is_known(
    server: ThreadServer, announced: bool
) -> None:
    chunk = b" " * 60_000
    content = chunk * 5 if announced else (chunk for _ in range(5))
    answer = httpx.post(server.url + "/v1/completions", content=content, headers=JSON, timeout=60)
    assert "100000" in error(answer, 413)["message"]


def test_a_body_that_never_ends(server: ThreadServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.settimeout(60)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 10\r\n\r\n{{".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "said",
    [
        "",
        "GET /health HTTP/1.1\r\nHost: ",
        "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHo",
        # refused at once, and the body goes on for ever
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Content-Length: 999999999\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a second head", "a body that was refused"],
)
def test_who_never_says_what_he_wants_is_left(server: ThreadServer, said: str) -> None:
    """However slowly the bytes come: they do not lengthen the time."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.settimeout(0.05)
        connection.sendall(said.encode())
        for _ in range(400):
            try:
                if not connection.recv(10_000):
                    break
            except TimeoutError:
                if said:
                    connection.sendall(b"x")
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still there after 20 seconds")


def test_a_client_that_pauses_between_requests_is_kept(server: ThreadServer) -> None:
    """The time of a head begins with its first byte."""
    client = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=60)
    used = []
    for _ in range(2):
        client.request("GET", "/health")
        used.append(client.sock)
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
        time.sleep(0.6)
    assert used[0] is used[1], "the client had to connect again"
    client.close()


def test_other_kinds_of_bodies(server: ThreadServer) -> None:
    """A page of another site may post text without being asked: it is not taken for JSON."""
    raw = json.dumps(COMPLETION)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = httpx.post(server.url + "/v1/completions", content=raw, headers={"content-type": kind})
        assert "application/json" in error(answer, 415)["message"]


def test_other_paths_and_methods(server: ThreadServer) -> None:
    error(server.get("/v1/embeddings"), 404)
    error(server.post("/v1/embeddings", {}), 404)
    error(server.get("/docs"), 404)
    error(server.get("/health/"), 404)
    assert server.get("/v1/completions").headers["allow"] == "POST"
    error(server.get("/v1/completions"), 405)
    assert error(server.post("/v1/completions", {**COMPLETION, "model": "gpt-4"}), 404)["param"] == "model"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nowhere", "/v1/completions"])
def test_head_is_get_without_a_body(server: ThreadServer, path: str) -> None:
    """What monitors and load balancers ask first."""
    head, get = httpx.head(server.url + path), server.get(path)
    assert head.status_code == get.status_code and not head.content
    assert head.headers["content-type"] == get.headers["content-type"]


def test_many_prompts_count_as_many(server: ThreadServer) -> None:
    found = error(server.post("/v1/completions", {**COMPLETION, "prompt": ["Hi"] * 75}), 400)
    assert found["param"] == "prompt"
    assert "74" in found["message"] and "75" in found["message"]


def test_the_client_raises_what_its_users_expect(server: ThreadServer) -> None:
    client = server.openai()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert caught.value.param == "tools" and caught.value.code == "unsupported_parameter"


def test_a_key_is_asked_for(tokenizer: Any) -> None:
    with ThreadServer(tokenizer, api_key="s3cret") as server:
        assert server.openai().models.list().data[0].id == NAME
        for key in ("", "wrong", "s3cre", "s3cret2", "geheimniß"):
            headers = {"authorization": f"Bearer {key}".encode()} if key else {}
            for path in ("/v1/models", "/status", "/metrics", "/openapi.json", "/nowhere"):
                answer = httpx.get(server.url + path, headers=headers)
                assert error(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        # Before the body is looked at.
        assert httpx.post(server.url + "/v1/completions", content=b"{").status_code == 401
        assert httpx.get(server.url + "/health").status_code == 200
        basic = {"authorization": "Basic s3cret"}
        assert httpx.get(server.url + "/v1/models", headers=basic).status_code == 401
