"""What goes over the wire when the event loop has fallen behind, and when a reader has."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from server_cases import NAME, PATIENCE, Scripted, ThreadServer

FULL = 65536
"""Bytes beyond which asyncio asks for no more to be written."""


def ask(server: ThreadServer, **more: Any) -> socket.socket:
    """A streamed request that was sent, on a connection that ends with its answer."""
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    asked = {"model": NAME, "temperature": 0, "ignore_eos": True, "stream": True, **more}
    raw = json.dumps(asked)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode())
    return connection


def read(connection: socket.socket) -> list[bytes]:
    """The chunks of HTTP that come until the end."""
    raw = bytearray()
    while part := connection.recv(1 << 16):
        raw += part
    connection.close()
    head, _, rest = bytes(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding: chunked" in head.lower()
    chunks, at = [], 0
    while at < len(rest):
        begin = rest.index(b"\r\n", at) + 2
        end = begin + int(rest[at:begin], 16)
        chunks.append(rest[begin:end])
        assert rest[end : end + 2] == b"\r\n"
        at = end + 2
    assert chunks.pop() == b""
    return chunks


def choices(raw: bytes) -> list[dict[str, Any]]:
    """Of the events; each is one, and [DONE] comes last."""
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
    return [json.loads(event[6:])["choices"][0] for event in events]


@contextmanager
def held_up(server: ThreadServer) -> Iterator[None]:
    """The event loop stands still meanwhile."""
    stands, go = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go.wait(PATIENCE)

    server.event_loop.call_soon_threadsafe(stand)
    assert stands.wait(PATIENCE)
    try:
        yield
    finally:
        go.set()


def wait_for_tokens(server: ThreadServer, count: int) -> None:
    """Until the engine has found so many and is idle; the event loop is not asked."""
    ended = threading.Event()
    for _ in range(PATIENCE * 200):
        if server.engine.counters.output_tokens >= count and server.engine.idle:
            return
        ended.wait(0.005)
    raise AssertionError("it never came to that")


def test_what_is_ready_together_goes_out_together_and_stays_an_event_each(tokenizer: Any) -> None:
    with ThreadServer(tokenizer) as server:
        tokens = 40
        expected = choices(b"".join(read(ask(server, prompt="a", max_tokens=tokens))))
        server.executor.open.clear()
        connection = ask(server, prompt="a", max_tokens=tokens)
        server.wait(lambda now: now["queue"]["under_way"] == 1)
        with held_up(server):
            server.executor.open.set()
            wait_for_tokens(server, 2 * tokens)
        chunks = read(connection)
        assert len(chunks) == 1
        assert choices(chunks[0]) == expected and len(expected) > tokens / 2
        assert [entry["finish_reason"] for entry in expected] == [None] * (len(expected) - 1) + ["length"]


def test_a_long_backlog_goes_out_in_parts_with_whole_events(tokenizer: Any) -> None:
    with ThreadServer(tokenizer) as server:
        tokens = 700
        server.executor.open.clear()
        connection = ask(server, prompt="a", max_tokens=tokens, n=2)
        server.wait(lambda now: now["queue"]["under_way"] == 2)
        with held_up(server):
            server.executor.open.set()
            wait_for_tokens(server, 2 * tokens)
        chunks = read(connection)
        assert 1 < len(chunks) < tokens / 10
        assert max(map(len, chunks)) < 2 * 16384
        assert all(chunk.endswith(b"\n\n") for chunk in chunks)
        found = choices(b"".join(chunks))
        alone = choices(b"".join(read(ask(server, prompt="a", max_tokens=tokens))))
        for index in range(2):
            own = [entry for entry in found if entry["index"] == index]
            assert [entry | {"index": 0} for entry in own] == alone


def test_what_goes_wrong_comes_after_what_went_well(tokenizer: Any) -> None:
    with ThreadServer(tokenizer) as server:
        server.executor.broken.add(tuple(tokenizer.encode("bad")))
        server.executor.open.clear()
        connection = ask(server, prompt="bad", max_tokens=9)
        server.wait(lambda now: now["queue"]["under_way"] == 1)
        with held_up(server):
            server.executor.open.set()
            wait_for_tokens(server, 2)
        (chunk,) = read(connection)
        *before, error, done, rest = chunk.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        assert before and all(json.loads(event[6:])["choices"] for event in before)
        assert json.loads(error[6:])["error"]["code"] == "generation_failed"


def test_who_does_not_read_holds_nobody_up_and_fills_no_memory(tokenizer: Any) -> None:
    executor = Scripted(max_context=4096)
    with ThreadServer(tokenizer, executor=executor) as server:
        slow = ask(server, prompt="slow", max_tokens=4000, n=16)
        expected = server.openai().completions.create(model=NAME, prompt="b", temperature=0, max_tokens=20)
        for _ in range(3):
            found = choices(b"".join(read(ask(server, prompt="b", max_tokens=20, ignore_eos=False))))
            assert "".join(entry["text"] for entry in found) == expected.choices[0].text
        server.wait(lambda now: now["queue"]["under_way"] == 0)  # the engine waits for no reader
        waiting = [one.transport.get_write_buffer_size() for one in server.server.server_state.connections]
        assert FULL < max(waiting) < 2 * FULL
        chunks = read(slow)
        assert max(map(len, chunks)) < 2 * 16384
        found = choices(b"".join(chunks))
        assert sum(entry["finish_reason"] == "length" for entry in found) == 16


def test_who_leaves_in_the_middle_of_a_backlog_counts_as_gone(tokenizer: Any) -> None:
    executor = Scripted(max_context=4096)
    with ThreadServer(tokenizer, executor=executor) as server:
        tokens = 4000
        executor.open.clear()
        connection = ask(server, prompt="a", max_tokens=tokens, n=16)
        server.wait(lambda now: now["queue"]["under_way"] == 16)
        with held_up(server):
            executor.open.set()
            wait_for_tokens(server, 16 * tokens)
        # All is in the server's hands, and most of it waits for the reader.
        server.wait(lambda now: now["queue"]["under_way"] == 0)
        connection.close()
        outcomes = (
            "labkit_requests_total",
            frozenset({"endpoint": "completions", "outcome": "cancelled"}.items()),
        )
        server.wait(lambda now: outcomes in server.metrics())
        assert sum(name == "labkit_requests_total" for name, _ in server.metrics()) == 1
