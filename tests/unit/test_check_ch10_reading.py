"""Checks of chapter 10 that read a cache: the colliding hash and the tail; and its rows of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import check
from labkit.cache.blocks import BlockAllocator
from labkit.cache.prefix import PrefixCache
from labkit.check import ch10
from labkit.solutions import ch10 as reference

# --- 10.4


def match(*, tokens: bool = True, parent: bool = True, left: int = 1, stop: bool = True) -> Any:
    """A look-up that leaves something out."""

    def answer(prompt: Any, cache: Any, block_size: int, make_key: Any) -> list[int]:
        found: list[int] = []
        key, before = None, None
        for start in range(0, (len(prompt) - left) // block_size * block_size, block_size):
            part = tuple(prompt[start : start + block_size])
            key = make_key(key, part)
            entry = cache.get(key)
            good = entry is not None
            good = good and (not tokens or entry.tokens == part)
            good = good and (not parent or entry.parent == before)
            if not good and stop:
                break
            if good:
                found.append(entry.block)
                before = entry.block
        return found

    return answer


def test_an_own_look_up_passes() -> None:
    assert check.find("match_prefix")(match()).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (match(tokens=False), "compare entry.tokens"),
        (match(parent=False), "entry.parent"),
        (match(left=0), "one token must be left"),
        (lambda p, c, s, k: [], "whole blocks"),
        (lambda p, c, s, k: 3, "whole blocks"),
    ],
)
def test_look_ups_that_trust_too_much(answer: Any, words: str) -> None:
    verdict = check.find("match_prefix")(answer)
    assert verdict.state == "not yet" and words in verdict.hint, verdict


def test_a_block_behind_one_that_does_not_match_is_no_match() -> None:
    def answer(prompt, cache, block_size, make_key):
        entries = {entry.tokens: entry.block for entry in cache.values()}
        parts = [tuple(prompt[i : i + 2]) for i in range(0, (len(prompt) - 1) // 2 * 2, 2)]
        return [entries[part] for part in parts if part in entries]

    verdict = check.find("match_prefix")(answer)
    assert verdict.state == "not yet" and "nothing can" in verdict.hint, verdict


@given(
    cached=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), max_size=4),
    prompt=st.lists(st.integers(1, 3), min_size=1, max_size=8),
)
def test_the_reference_finds_what_the_library_finds(cached: list[list[int]], prompt: list[int]) -> None:
    def weak(salt: str, parent: bytes, tokens: tuple[int, ...]) -> bytes:
        return bytes([sum(tokens)])

    prefix = PrefixCache(BlockAllocator(64, 2), hasher=weak)
    for tokens in cached:
        table, _ = prefix.allocate(tokens)
        prefix.publish(table, tokens, len(tokens))
    entries = {
        key: ch10.Entry(one.block, one.tokens, None if one.parent is None else one.parent.block)
        for key, one in prefix._by_key.items()
    }
    got = reference.match_prefix(prompt, entries, 2, lambda before, ids: weak("", b"", ids))
    assert tuple(got) == prefix.match(prompt).blocks


# --- 10.5


def attend(*, scores: bool = True, values: bool = True, add: bool = False) -> Any:
    """Attention that masks too little."""

    def answer(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        tail = torch.arange(k.shape[1]) >= lengths[:, None]
        found = torch.einsum("bd,bsd->bs", q, k) / q.shape[1] ** 0.5
        if add:
            found = found + tail * -1e9
        elif scores:
            found = found.masked_fill(tail, -torch.inf)
        weights = found.softmax(-1)
        if values:
            v = v.masked_fill(tail[..., None], 0)
        return torch.einsum("bs,bsd->bd", weights, v)

    return answer


def test_masks_and_loops_pass() -> None:
    assert check.find("attend_tail")(attend()).state == "passed"

    def loop(q, k, v, lengths):
        rows = []
        for b, n in enumerate(lengths):
            rows.append((k[b, :n] @ q[b] / q.shape[1] ** 0.5).softmax(0) @ v[b, :n])
        return torch.stack(rows)

    assert check.find("attend_tail")(loop).state == "passed"


def in_place(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    tail = torch.arange(k.shape[1]) >= lengths[:, None]
    v.masked_fill_(tail[..., None], 0)
    return attend()(q, k, v, lengths)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (attend(values=False), "0 × NaN"),
        (attend(scores=False), "before the softmax"),
        (attend(add=True), "replace them"),
        (in_place, "not yours"),
        (lambda q, k, v, n: v[0], ""),
        (lambda q, k, v, n: 1.0, ""),
    ],
)
def test_tails_that_come_through(answer: Any, words: str) -> None:
    verdict = check.find("attend_tail")(answer)
    assert verdict.state == "not yet" and words in verdict.hint, verdict


def test_nan_to_num_alone_is_not_enough() -> None:
    def answer(q, k, v, lengths):
        return attend(scores=False, values=False)(q, k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0), lengths)

    assert check.find("attend_tail")(answer).state == "not yet"


# --- times


def test_rows_of_the_gpu_name_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.bench import attention
    from labkit.bench.record import Entry, Record

    def run(options: attention.Options, command: str, report: Any) -> Record:
        assert options.device == "cuda" and options.formats == ("fp16", "int8")
        made = Record("attention", "measured", command, "now", {}, {}, {}, ceilings={"copy_gb_s": 4000.0})
        for name, kind, us in (
            (attention.OURS, "fp16", [10.0, 12.0]),
            (attention.OURS, "int8", [6.0]),
            (attention.FUSED, "fp16", [11.0]),
            (attention.SDPA, "fp16", [20.0]),
            (attention.OURS, "fp16", []),
        ):
            entry = Entry("attention", name, kind, 16, 1, 8192, 8, "timed", weight_bytes=33_000_000)
            entry.samples_us = us
            made.entries.append(entry)
        return made

    monkeypatch.setattr(attention, "run", run)
    rows = ch10.gpu_rows()
    assert [row["what"] for row in rows] == [
        "paged kernel, FP16",
        "paged kernel, INT8",
        "torch, gathered first, FP16",
    ]
    assert [row["µs"] for row in rows] == [11.0, 6.0, 20.0]
    assert rows[0]["of copy"] == pytest.approx(33_000_000 / 11.0 / 1e3 / 4000)
    assert all(row["origin"] == "measured" for row in rows)
