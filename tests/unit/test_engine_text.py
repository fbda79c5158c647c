"""Streamed text: stop strings and held text against a reference that reads the whole text."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labkit.engine.text import TextStream
from labkit.errors import InputError
from labkit.models.gguf_header import read_header
from labkit.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Tokenizer:
    return Tokenizer.from_gguf(read_header(smollm2_path).metadata)


class Bytes:
    """A tokenizer whose tokens are given byte strings."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def stream(self, *, special: bool = False) -> Bytes:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return self

    def put(self, token: int) -> str:
        return self.decoder.decode(self.tokens[token])

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """Character by character: the longest stop string that ends where one first does, and that place."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return stop, end
    return None


def certain(text: str, stops: list[str]) -> str:
    """Without the longest end that is a proper prefix of a stop string."""
    for cut in range(len(text)):
        if any(len(text) - cut < len(stop) and stop.startswith(text[cut:]) for stop in stops):
            return text[:cut]
    return text


LETTERS = st.text("abé👍", max_size=12)
STOPS = st.lists(st.text("abé👍", min_size=1, max_size=4), max_size=3)


@settings(max_examples=600, deadline=None)
@given(LETTERS, STOPS, st.lists(st.integers(0, 40), max_size=10), st.booleans(), st.binary(max_size=2))
@example("abab", ["aba", "bab"], [1, 2, 3], False, b"")
@example("aab", ["ab"], [1, 2], True, b"")
@example("ab", ["ab", "b"], [], False, b"")
def test_against_the_whole_text(letters, stops, cuts, include, tail):
    data = letters.encode() + tail  # the tail may be no character
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    tokens = [data[a:b] for a, b in pairwise(edges)]
    stream = TextStream(Bytes(tokens), stops, include_stop=include)
    plain = Bytes(tokens).stream()
    decoded, out = "", ""
    for i in range(len(tokens)):
        if stream.stopped is not None:
            break
        before = len(decoded)
        decoded += plain.put(i)
        out += stream.put(i)
        assert stream.offsets[i] == before
        found = first_stop(decoded, stops)
        if found is None:
            assert stream.stopped is None
            assert out == certain(decoded, stops)  # all that is certain, and no more
        else:
            assert stream.stopped == found[0]
        assert stream.text == out
    out += stream.finish()
    assert stream.finish() == "" and stream.text == out
    if stream.stopped is None:
        decoded += plain.finish()
    whole = data.decode("utf-8", "replace")
    found = first_stop(whole, stops)
    if found is None:
        assert out == whole and stream.stopped is None
        assert stream.num_visible == len(tokens)
    else:
        stop, end = found
        assert stream.stopped == stop
        assert out == whole[: end if include else end - len(stop)]
        assert stream.put(0) == ""  # nothing after the end


def test_a_stop_string_across_tokens_of_a_real_tokenizer(tokenizer):
    ids = tokenizer.encode("One, two.\n\nUser: three")
    for include in (False, True):
        stream = TextStream(tokenizer, ["\n\nUser:"], include_stop=include)
        pieces = []
        for token in ids:
            pieces.append(stream.put(token))
            if stream.stopped:
                break
        assert "".join(pieces) + stream.finish() == "One, two." + "\n\nUser:" * include
        assert stream.stopped == "\n\nUser:" and len(pieces) < len(ids)
        assert "One" in pieces[0]  # nothing is held that cannot begin a stop string


def test_a_half_stop_string_is_given_out_at_the_end(tokenizer):
    stream = TextStream(tokenizer, ["STOP here"])
    pieces = [stream.put(token) for token in tokenizer.encode("go STOP")]
    assert "".join(pieces) == "go "
    assert stream.num_visible < len(pieces)
    assert stream.finish() == "STOP" and stream.stopped is None
    assert stream.num_visible == len(pieces)


def test_characters_of_several_tokens_share_an_offset(tokenizer):
    ids = tokenizer.encode("a👩‍👧b")
    stream = TextStream(tokenizer)
    pieces = [stream.put(token) for token in ids]
    assert "".join(pieces) == "a👩‍👧b" and "" in pieces
    assert stream.offsets[0] == 0 and stream.offsets[-1] == len("a👩‍👧")
    for piece, offset in zip(pieces, stream.offsets):
        assert "a👩‍👧b"[offset:].startswith(piece)
    cut = TextStream(tokenizer)
    assert [cut.put(token) for token in ids[:2]] == ["a", ""] and cut.finish() == "\ufffd"


def test_a_stop_string_may_be_the_mark_of_a_broken_character(tokenizer):
    ids = tokenizer.encode("a👩")
    stream = TextStream(tokenizer, ["\ufffd"])
    assert "".join(stream.put(token) for token in ids[:-1]) == "a"
    assert stream.finish() == "" and stream.stopped == "\ufffd"


def test_control_tokens(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b")
    hidden, shown = TextStream(tokenizer), TextStream(tokenizer, ["<|im_end|>"], special=True)
    assert "".join(hidden.put(token) for token in ids) == "ab"
    assert "".join(shown.put(token) for token in ids) == "a" and shown.stopped == "<|im_end|>"


def test_tokens_cut_off_by_the_stop_are_not_visible():
    stream = TextStream(Bytes([b"a", b"bX", b"Y", b"Zc"]), ["XYZ"])
    assert [stream.put(i) for i in range(4)] == ["a", "b", "", ""]
    assert stream.stopped == "XYZ" and stream.num_visible == 2
    kept = TextStream(Bytes([b"a", b"bX", b"Y", b"Zc"]), ["XYZ"], include_stop=True)
    assert "".join(kept.put(i) for i in range(4)) == "abXYZ" and kept.num_visible == 4


def test_bad_input(tokenizer):
    with pytest.raises(InputError, match="stop"):
        TextStream(tokenizer, [""])
    with pytest.raises(InputError, match="ids"):
        TextStream(tokenizer).put(-1)
