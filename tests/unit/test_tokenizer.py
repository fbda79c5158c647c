"""The tokenizer against a slow byte-level BPE written from its description, and its own promises."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import pairwise

import pytest
import regex
import tokenizers
from gguf_files import vocabulary, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from labkit.errors import InputError, MissingModelError, ModelFileError
from labkit.models.gguf import load_gguf
from labkit.models.gguf_header import read_header
from labkit.models.tokenizer import Tokenizer

PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
MIXED = [
    "Hello, world!  It's 1234 o'clock… don't  panic\n\n\tok ",
    "你好，世界。今天是2024年的第一天！",
    "مرحبا بالعالم، العدد ١٢٣",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 and 👍🏽",
    "naïve café — “quoted” ½ Ⅷ ²",
    "def f(x):\n    return x**2  # 3.14e-10\n",
    "   leading and trailing   ",
    "A<|im_end|>B <|im_start|>user",
]


class SlowBpe:
    """Digits one by one; GPT-2's expression on what lies between; bytes; merges by rank.

    A byte without a token is dropped before merging, so its neighbours become neighbours.
    """

    def __init__(self, metadata: dict) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.special = [
            t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3
        ]
        shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " " and b not in (0xA0, 0xAD)]
        self.byte = {b: chr(b) for b in shown}
        for b in range(256):
            if b not in self.byte:
                self.byte[b] = chr(256 + len(self.byte) - len(shown))

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text):
            if part in self.special:
                ids.append(self.ids[part])
                continue
            for segment in self.segments(part):
                for piece in PIECES.findall(segment):
                    ids += self.piece(piece)
        return ids

    @staticmethod
    def segments(text: str) -> list[str]:
        found, run = [], ""
        for character in text:
            if unicodedata.category(character) in ("Nd", "Nl", "No"):
                found += [run, character]
                run = ""
            else:
                run += character
        return [s for s in [*found, run] if s]

    def piece(self, piece: str) -> list[int]:
        word = [c for b in piece.encode("utf-8") if (c := self.byte[b]) in self.ids]
        while len(word) > 1:
            pairs = [(self.ranks.get(pair, 1 << 60), i) for i, pair in enumerate(pairwise(word))]
            rank, at = min(pairs)
            if rank == 1 << 60:
                break
            word[at : at + 2] = [word[at] + word[at + 1]]
        return [self.ids[token] for token in word]


@pytest.fixture(scope="module")
def metadata(smollm2_path) -> dict:
    return read_header(smollm2_path).metadata


@pytest.fixture(scope="module")
def tokenizer(metadata) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def slow(metadata) -> SlowBpe:
    return SlowBpe(metadata)


def silent_bytes(slow: SlowBpe) -> set[int]:
    return {b for b in range(256) if slow.byte[b] not in slow.ids}


def test_thousands_of_random_strings_encode_like_the_slow_reference(tokenizer, slow):
    rng = random.Random(20)
    words = " ".join(MIXED).split(" ")
    alphabets = [
        "abcdefghij etaoin  ETAOIN'’.,;",
        "0123456789 .-+eE",
        "的一是了我不人在他有这 中大来上",
        "ابتثجحخ دذرزسش ٠١٢٣",
        "👩👨🏽‍❤️‍💋🇺🇳 ",
        " \n\t\r\u00a0\u3000\u2003",
        "'s't're'll'd ' ",
        "éüßñçœ½²Ⅷ①𝟘",
        "".join(map(chr, range(256))),
    ]
    count = 0
    for _ in range(4_000):
        alphabet = rng.choice([*alphabets, "".join(alphabets)])
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 24)))
        if rng.random() < 0.4:
            text += rng.choice(["", " ", "\n"]) + rng.choice(words) + " " + rng.choice(words)
        assert tokenizer.encode(text) == slow.encode(text), repr(text)
        count += 1
    assert count == 4_000


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_any_text_encodes_like_the_slow_reference_and_decodes_like_the_library(tokenizer, slow, text):
    ids = tokenizer.encode(text)
    assert ids == slow.encode(text)
    assert tokenizer.decode(ids) == tokenizer.inner.decode(ids, skip_special_tokens=True)
    if not silent_bytes(slow) & set(text.encode("utf-8")):
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", MIXED)
def test_real_text_round_trips(tokenizer, slow, text):
    ids = tokenizer.encode(text)
    assert ids == slow.encode(text)
    assert tokenizer.decode(ids, special=True) == text


def test_facts_of_the_default_tokenizer(tokenizer, slow):
    assert tokenizer.vocab_size == 49152 and len(slow.ranks) == 48900 and len(slow.special) == 17
    assert tokenizer.eos_ids == (2,) and not tokenizer.add_bos
    assert tokenizer.encode("1234") == [tokenizer.encode(d)[0] for d in "1234"]
    assert len(silent_bytes(slow)) == 21
    silent = "".join(chr(b) for b in silent_bytes(slow) if b < 128)
    assert silent and tokenizer.encode(silent) == [] == slow.encode(silent)
    assert tokenizer.encode("") == []


def test_control_tokens_in_text_can_be_read_as_plain_text(tokenizer):
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode("<|im_end|>", special=False)
    assert 2 not in plain and tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2]  # the switch does not stick


def test_bos_is_added_only_on_request(tokenizer):
    assert tokenizer.encode("hi", bos=True) == [1, *tokenizer.encode("hi")]
    assert tokenizer.encode("<|im_start|>x", bos=True) == tokenizer.encode("<|im_start|>x")


def test_lone_surrogates_do_not_raise(tokenizer):
    assert tokenizer.encode("a\udce9b") == tokenizer.encode("a?b")
    with pytest.raises(InputError, match="text"):
        tokenizer.encode(b"bytes")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_streamed_pieces_join_to_the_decoded_text(tokenizer, ids):
    for special in (False, True):
        stream = tokenizer.stream(special=special)
        pieces = [stream.put(i) for i in ids]
        text = "".join(pieces) + stream.finish()
        assert text == tokenizer.decode(ids, special=special)
        assert text == tokenizer.inner.decode(ids, skip_special_tokens=not special)


def test_incomplete_characters_are_held_back(tokenizer):
    ids = tokenizer.encode("👩‍👧")
    assert len(ids) > 4
    stream = tokenizer.stream()
    pieces = [stream.put(i) for i in ids]
    assert "" in pieces and all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == "👩‍👧" and stream.finish() == ""
    cut = tokenizer.stream()
    assert cut.put(ids[0]) + cut.finish() == "\ufffd"


def test_ids_outside_the_vocabulary(tokenizer):
    assert tokenizer.decode([49152, 60_000]) == ""  # rows that pad an embedding have no text
    with pytest.raises(InputError, match="ids"):
        tokenizer.decode([-1])


def test_chat_template_of_the_default_model(tokenizer):
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}]
    assert tokenizer.render_chat(own, generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
    )
    ids = tokenizer.apply_chat(own)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2


@pytest.mark.parametrize("messages", [[], "hi", [{"role": "user"}], [{"role": "user", "content": 3}], ["hi"]])
def test_malformed_messages_are_refused(tokenizer, messages):
    with pytest.raises(InputError, match="messages"):
        tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('no system role') }}",
        "{% if %}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_run_in_a_sandbox(tokenizer, template):
    other = Tokenizer(tokenizer.inner, chat_template=template)
    with pytest.raises(InputError, match="chat template"):
        other.render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(InputError, match="without a chat template"):
        Tokenizer(tokenizer.inner).render_chat([{"role": "user", "content": "x"}])


def test_tokenizer_json_with_the_files_beside_it(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    tiny = load_gguf(tmp_path / "m.gguf").tokenizer
    tiny.inner.save(str(tmp_path / "tokenizer.json"))
    bare = Tokenizer.from_file(tmp_path / "tokenizer.json", eos_ids=(0,))
    assert bare.eos_ids == (0,) and bare.chat_template is None
    settings = {
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": "<|im_start|>",
        "chat_template": "A{{ bos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}', encoding="utf-8")
    full = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert full.eos_ids == (2, 0) and full.bos_id == 1 and full.chat_template == "A{{ bos_token }}"
    text = "hello the world"
    assert full.encode(text) == tiny.encode(text) and full.decode(full.encode(text)) == text
    assert full.render_chat([{"role": "user", "content": ""}]) == "A<|im_start|>"
    (tmp_path / "chat_template.jinja").write_text("B", encoding="utf-8")
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").chat_template == "B"
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFileError, match="tokenizer_config"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFileError, match="not a tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(MissingModelError):
        Tokenizer.from_file(tmp_path / "none.json")


def test_other_decoders_stream_too(tmp_path):
    """A SentencePiece-like vocabulary: words with a mark for the space, single bytes as <0x..>."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁the": 256, "▁cat": 257}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(inner)
    ids = [256, 257, *"é".encode(), 257, *"👍".encode(), 256]
    stream = tokenizer.stream()
    pieces = [stream.put(i) for i in ids]
    assert "".join(pieces) + stream.finish() == " the caté cat👍 the" == tokenizer.decode(ids)
    assert pieces[2] == "" and pieces[3] == "é"
    assert tokenizer.decode([0xF0]) == "\ufffd"


class Watched:
    """A tokenizer that notes how many ids it is asked to decode."""

    def __init__(self, inner):
        self.inner, self.longest = inner, 0

    def decode(self, ids, **options):
        self.longest = max(self.longest, len(ids))
        return self.inner.decode(ids, **options)


def sentence_pieces(*, strip):
    """Llama 2's kind: the mark of a space, bytes, a space stripped at the beginning; id 259 is special."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁the": 256, "▁cat": 257, "s": 258}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.add_special_tokens(["</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer = Tokenizer(inner)
    tokenizer.inner = Watched(inner)
    return tokenizer


ATOMS = st.one_of(
    st.sampled_from([[256], [257], [258], [259]]),
    st.characters(codec="utf-8", exclude_characters="\ufffd").map(lambda c: list(c.encode())),
)


@given(st.lists(ATOMS, min_size=1, max_size=60), st.integers(1, 40), st.booleans(), st.booleans())
@settings(deadline=None)
def test_long_answers_of_other_decoders_stream_by_windows(atoms, times, strip, special):
    tokenizer = sentence_pieces(strip=strip)
    ids = [i for atom in atoms for i in atom] * times
    stream = tokenizer.stream(special=special)
    text = "".join([stream.put(i) for i in ids]) + stream.finish()
    window = tokenizer.inner.longest
    assert text == tokenizer.decode(ids, special=special)
    # Three more bytes of a character; and tokens without text say nothing about what may be forgotten.
    assert window <= 64 + 3 or 259 in ids


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_other_pre_tokenisers_split_digits_their_way(tmp_path, pre):
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": pre})
    tokenizer = load_gguf(tmp_path / "m.gguf").tokenizer
    split = [piece for piece, _ in tokenizer.inner.pre_tokenizer.pre_tokenize_str("it 12345")]
    assert (
        split
        == {
            "gpt-2": ["it", "Ġ12345"],
            "qwen2": ["it", "Ġ", "1", "2", "3", "4", "5"],
            "llama-bpe": ["it", "Ġ", "123", "45"],
        }[pre]
    )
    assert not tokenizer.add_bos  # the file says so
    write_gguf(
        tmp_path / "n.gguf", metadata={"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None}
    )
    assert load_gguf(tmp_path / "n.gguf").tokenizer.encode("in")[:1] == ([1] if pre == "llama-bpe" else [267])
    assert tokenizer.vocab_size == len(vocabulary())
