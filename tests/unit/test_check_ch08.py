"""Chapter 08's checks and its lesson kernel: right answers pass, near misses do not; mistakes show."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from bench_records import entry, record
from seed_cases import check_accurate, random_weight, random_x

from labkit import check
from labkit.check import ch08
from labkit.errors import InputError
from labkit.kernels import resources, runner
from labkit.kernels.source import KernelSource
from labkit.quant.tiles import repack
from labkit.solutions import ch08 as reference

TEXTS = ["halves_from_bits", "wait_and_meet"]
LESSON = "lesson/mma_w4.cu"


def own(name: str) -> str:
    """The reference text in words of a student's own, so that it is not refused as a copy."""
    text = re.sub(r"//[^\n]*", "", getattr(reference, name))
    return text.replace("const uint32_t word =", "uint32_t const word =").replace(
        "const int row =", "int const row ="
    )


@pytest.mark.parametrize("name", TEXTS)
def test_an_own_answer_passes(name: str) -> None:
    assert check.find(name)(own(name)).state == "passed"


# --- 08.1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda lane, r, p: (lane // 4 + 8 * (r >> 1), 2 * (lane % 4) + p + 8 * (r & 1)), "which is which"),
        (lambda lane, r, p: (lane // 4 + 8 * (r & 1), 2 * (lane % 4) + 8 * (r >> 1)), "position 1"),
        (lambda lane, r, p: (lane % 8, 2 * (lane // 8) + p), "share a row"),
        (lambda lane, r, p: lane, "share a row"),
        (lambda lane, r, p: (lane / 4, 2 * (lane % 4) + p), "share a row"),
    ],
)
def test_map_near_misses(answer: Any, words: str) -> None:
    verdict = check.find("fragment_map")(answer)
    assert verdict.state == "not yet" and words in verdict.hint, verdict


def test_the_library_s_map_is_no_answer() -> None:
    from labkit.widgets import mma_layout

    verdict = check.find("fragment_map")(lambda lane, r, p: mma_layout.A.place(lane, r, p))
    assert verdict.state == "not yet" and "place" in verdict.got
    tensors = check.find("fragment_map")(
        lambda lane, r, p: (torch.tensor(lane // 4 + 8 * (r & 1)), 2 * (lane % 4) + p + 8 * (r >> 1))
    )
    assert tensors.state == "passed"


# --- 08.2


def loop_of(body: str) -> str:
    text = own("halves_from_bits")
    start = text.index("    for (int p")
    return f"{text[:start]}    for (int p = 0; p < 4; ++p) {{\n{body}\n    }}\n}}\n"


def test_conversions_are_right_and_too_dear() -> None:
    body = """        const int low = (int)(word >> 4 * p & 15) - 8;
        const int high = (int)(word >> (4 * p + 16) & 15) - 8;
        pairs[p] = __floats2half2_rn((float)low, (float)high);"""
    verdict = check.find("halves_from_bits")(loop_of(body))
    assert verdict.state == "not yet" and verdict.score is not None and verdict.score > 30
    assert "I2F" in verdict.hint and "0x6400" in verdict.hint


def test_a_shift_for_each_pair_passes_too() -> None:
    body = """        const uint32_t bits = (word >> 4 * p & 0x000f000f) | 0x64006400;
        half2 pair;
        memcpy(&pair, &bits, 4);
        pairs[p] = __hsub2(pair, __float2half2_rn(1032.0f));"""
    assert check.find("halves_from_bits")(loop_of(body)).state == "passed"
    ready = "        pairs[p] = int4x2_to_half2(word >> 4 * p);"
    assert "int4x2_to_half2" in check.find("halves_from_bits")(loop_of(ready)).got


@pytest.mark.parametrize(
    ("old", "new"),
    [("-72.0f", "-71.0f"), ("-1032.0f", "-1024.0f"), ("0x00f000f0", "0x000000f0"), ("p += 2", "p += 4")],
)
def test_halves_near_misses(old: str, new: str) -> None:
    text = own("halves_from_bits")
    assert text.count(old) == 1
    verdict = check.find("halves_from_bits")(text.replace(old, new))
    assert verdict.state == "not yet" and not verdict.score, verdict


# --- 08.3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda w, p, e: w[p // 5] >> (3 * (p % 5) + 16 * e) & 7 if p < 15 else w[0] >> (13 + 16 * e) & 7,
            "one bit left",
        ),
        (lambda w, p, e: w[0] >> (3 * p + 16 * e) & 7, "which word"),
        (lambda w, p, e: w[p // 5] >> (3 * (p % 5)) & 7, "16 bits higher"),
        (lambda w, p, e: 0.5, "bit 3 p"),
    ],
)
def test_field_near_misses(answer: Any, words: str) -> None:
    verdict = check.find("w3_field")(answer)
    assert verdict.state == "not yet" and words in verdict.hint, verdict


def test_fields_from_the_front_of_the_word_are_right_too() -> None:
    def answer(words: Any, pair: int, position: int) -> int:
        halves = [word >> 16 * position & 0xFFFF for word in words]
        if pair == 15:
            return halves[0] >> 15 | halves[1] >> 15 << 1 | halves[2] >> 15 << 2
        return halves[pair // 5] % 2 ** (3 * (pair % 5) + 3) // 8 ** (pair % 5)

    assert check.find("w3_field")(answer).state == "passed"


# --- 08.4


@pytest.mark.parametrize(
    ("wait", "state", "score"),
    [
        ("cp_async_wait<2>()", "passed", 2),
        ("cp_async_wait<(STAGES / 2)>()", "not yet", None),
        ("cp_async_wait<1>()", "not yet", 1),
        ("cp_async_wait<0>()", "not yet", 0),
        ("cp_async_wait_all()", "not yet", 0),
        ("cp_async_wait<3>()", "not yet", None),
    ],
)
def test_the_wait_is_scored_by_what_it_leaves(wait: str, state: str, score: float | None) -> None:
    text = own("wait_and_meet").replace("cp_async_wait<STAGES - 2>()", wait)
    verdict = check.find("wait_and_meet")(text)
    assert (verdict.state, verdict.score) == (state, score), verdict
    if score is not None and score < 2:
        assert "let them be" in verdict.hint


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cp_async_wait<STAGES - 2>();", "", "cp.async"),
        ("        __syncthreads();", "", "where do all threads meet"),
        ("#define STAGES 4", "#define STAGES 3", "STAGES"),
        ("sum +=", "sum =", "wrong"),
    ],
)
def test_ring_near_misses(old: str, new: str, words: str) -> None:
    text = own("wait_and_meet")
    assert text.count(old) == 1
    verdict = check.find("wait_and_meet")(text.replace(old, new))
    assert verdict.state == "not yet" and words in f"{verdict.got} {verdict.expected} {verdict.hint}", verdict


def test_a_copy_before_the_barrier_is_a_race() -> None:
    text = own("wait_and_meet")
    copy = "        if (step + STAGES - 1 < steps) copy(step + STAGES - 1);\n        cp_async_commit();\n"
    assert text.count(copy) == 1
    early = text.replace(copy, "").replace(
        "        cp_async_wait<STAGES - 2>()", f"{copy}        cp_async_wait<STAGES - 1>()"
    )
    verdict = check.find("wait_and_meet")(early)
    assert verdict.state == "not yet" and "race" in verdict.got, verdict
    # with a second barrier at the end of the step it is right again
    mended = early.replace(
        "        }\n    }\n    out[row]", "        }\n        __syncthreads();\n    }\n    out[row]"
    )
    assert check.find("wait_and_meet")(mended).state == "passed"


def test_plain_loads_are_another_exercise() -> None:
    plain = "*reinterpret_cast<uint4*>(&tile[step % STAGES][r][k]) = "
    plain += "*reinterpret_cast<const uint4*>(&w[r * K + 32 * step + k]);"
    text = own("wait_and_meet").replace(
        "cp_async_16(&tile[step % STAGES][r][k], &w[r * K + 32 * step + k]);", plain
    )
    verdict = check.find("wait_and_meet")(text)
    assert verdict.state == "not yet" and "no asynchronous copy" in verdict.got, verdict


# --- the lesson's kernel


def lesson(m: int, n: int, k: int, **defines: int) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """Trace, output, x, weight of a product with the lesson kernel."""
    weight = random_weight("w4", n, k, 128, None)
    x = random_x(m, k)
    out = torch.full((m, n), float("nan"), dtype=torch.float16)
    kernel = runner.load(KernelSource(LESSON, defines=defines), "cpu")
    trace = kernel.trace((n // 128,), (128,), [x, repack(weight).tiles, out, m, n, k])
    return trace, out, x, weight


@pytest.mark.parametrize(
    ("m", "n", "k", "defines"),
    [
        (8, 128, 512, {}),
        (1, 256, 128, {}),
        (3, 128, 256, {"STAGES": 2}),
        (5, 128, 640, {"STAGES": 4}),
        (8, 128, 384, {"PAD": 8}),
    ],
)
def test_the_lesson_kernel_is_right_and_without_a_race(
    m: int, n: int, k: int, defines: dict[str, int]
) -> None:
    trace, out, x, weight = lesson(m, n, k, **defines)
    assert trace.ok, trace.report()
    check_accurate(out, x, weight)
    used = trace.compulsory_sectors("tiles")
    assert trace.sectors(buffer="tiles") == used == n // 32 * (k // 128) * 2112 // 32


@pytest.mark.parametrize(
    ("mistake", "kinds", "right"),
    [
        ("NO_WAIT", {"cp.async"}, False),
        ("SHORT_WAIT", {"cp.async", "race"}, False),
        ("NO_BARRIER", {"cp.async", "race", "uninitialised"}, False),
        ("EARLY_COPY", {"cp.async", "race"}, True),
    ],
)
def test_every_mistake_of_the_lesson_is_reported(mistake: str, kinds: set[str], right: bool) -> None:
    trace, out, x, weight = lesson(8, 128, 512, **{mistake: 1})
    assert {fault.kind for fault in trace.faults} == kinds
    assert bool(out.isfinite().all()) == right
    if right:
        check_accurate(out, x, weight)


def test_a_row_of_the_lesson_has_the_same_bits_in_every_batch() -> None:
    weight, x = random_weight("w4", 128, 512, 128, None), random_x(8, 512)
    tiles, kernel = repack(weight).tiles, runner.load(KernelSource(LESSON), "cpu")

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), 128), float("nan"), dtype=torch.float16)
        kernel((1,), (128,), [rows, tiles, out, len(rows), 128, 512])
        return out

    whole = product(x)
    for m in range(1, 8):
        assert torch.equal(product(x[m - 1 : m].contiguous())[0], whole[m - 1])
        assert torch.equal(product(x[:m].contiguous()), whole[:m])


def test_a_step_in_machine_code() -> None:
    try:
        used = resources.usage(KernelSource(LESSON), "sm_86")
    except InputError:
        pytest.skip("no NVRTC on this machine")
    assert used.spills == 0
    step = ch08.step_instructions(KernelSource(LESSON))
    names = [each.base for each in step]
    assert names.count("HMMA") == 16  # two halves, eight steps of 16 columns
    assert ch08.instructions_per_weight(KernelSource(LESSON)) == len(step) / 128
    assert len(step) / 128 < 0.6 * 8.3  # SM86 budget of a W4 weight
    with pytest.raises(InputError, match="waits for copies"):
        ch08.step_instructions(KernelSource("gemv_row.cu", "gemv_row_w4"))


# --- times


def test_kept_records_give_rows_with_their_origin() -> None:
    rows = ch08.peer_rows()
    assert rows and all(row["origin"] == "measured" and row["M"] in ch08.SHOWN_M for row in rows)
    assert all(row["peer / ours"] == row["peer (µs)"] / row["ours (µs)"] for row in rows)


def test_the_article_s_rows_are_quoted() -> None:
    rows = ch08.quoted_rows()
    assert {row["weight"] for row in rows} == {"W4 3584×18944", "W3 37888×3584", "W3 3584×18944"}
    assert all(row["origin"] == "quoted" and row["M"] == 30 for row in rows)
    assert next(row["ours (µs)"] for row in rows if row["weight"] == "W4 3584×18944") == 4632


def test_no_record_no_rows(tmp_path: Path) -> None:
    assert ch08.peer_rows(tmp_path) == []
    assert ch08.peer_ratios(tmp_path) == {}


def test_ratios_are_of_every_weight_of_the_kept_record() -> None:
    """What the chapter says: in front up to 8 rows, on most at 30; behind on most at 64, all of 256."""
    ratios = ch08.peer_ratios()
    assert set(ratios) == set(ch08.SHOWN_M) and len({len(each) for each in ratios.values()}) == 1
    shown = {(row["M"], row["peer / ours"]) for row in ch08.peer_rows()}
    assert shown <= {(m, ratio) for m, each in ratios.items() for ratio in each}
    assert min(ratios[1] + ratios[8]) > 1 > max(ratios[256])
    assert median(ratios[30]) > 1 > median(ratios[64])


def test_rows_of_a_record_take_the_family_and_the_best_peer() -> None:
    fast = [
        entry("tensor_core", 8.0, table="fast"),
        entry("gemv_single_row", 6.0, table="fast"),  # the family stands for us, also where it loses
        entry("dense_fp16", 12.0, table="fast"),
        entry("humming_w4", 10.0, table="fast"),
        entry("tensor_core", 9.0, table="fast", m=7),
        entry("tensor_core", 9.0, table="fast", m=8),
        entry("tensor_core", 30.0, table="fast", n=37888),
        entry("tinygemm_w4", 15.0, table="fast", n=37888),
        entry("tensor_core", 30.0, table="fast", n=8000),
        entry("tinygemm_w4", 15.0, table="fast", n=8000),
    ]
    rows = ch08.record_rows(record(fast), "fast")
    assert [(row["weight"], row["M"], row["peer"]) for row in rows] == [
        ("W4 37888×2048", 1, "tinygemm W4"),
        ("W4 5632×2048", 1, "humming W4"),
    ]
    assert [row["peer / ours"] for row in rows] == [0.5, 1.25]
    assert rows[0]["where"] == "NVIDIA H200" and rows[0]["ours"] == "tensor core"
    assert ch08.record_rows(record(), "fast") == []
