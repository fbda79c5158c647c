"""Chapter 03's checks: right answers pass; faults, wrong mappings and half a guard are "not yet"."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import check
from labkit.check.ch03 import request_sectors
from labkit.kernels.resources import usage
from labkit.kernels.source import KernelSource
from labkit.solutions import ch03 as reference

TEXTS = ["neighbours", "shares", "ragged", "wide_loads"]
BARRIER = "        __syncthreads();  // the next round reads what other threads wrote in this one\n"
LOOP = "for (int w = lane; w < K / 8; w += 32) {"
GUARD = "    if (n >= N) {  // more warps than rows\n        return;\n    }\n"


def swapped(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def line_of(text: str, words: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if words in line)


# --- 03.1 ----------------------------------------------------------------------------------------------


def test_request_sectors_by_formula() -> None:
    assert request_sectors.function(reference.request_sectors).state == "passed"
    assert check.find("request_sectors")(...).state == "not attempted"


@pytest.mark.parametrize(
    "answer",
    [
        lambda size, stride: 32,
        lambda size, stride: (31 * stride + size) / 32,
        lambda size, stride: (31 * stride + size) // 32,
        lambda size, stride: -(-(31 * stride + size) // 32),
        lambda size, stride: min(32, -(-32 * stride // 32)),
        lambda size, stride: "many",
    ],
)
def test_request_sectors_near_misses(answer: Any) -> None:
    verdict = check.find("request_sectors")(answer)
    assert verdict.state == "not yet" and verdict.hint


def test_the_library_s_own_count_is_refused() -> None:
    from labkit.widgets.warp_access import WarpAccess

    def borrowed(size: int, stride: int) -> int:
        return len(WarpAccess.strided(size, stride // size).sectors)

    assert check.find("request_sectors")(borrowed).state == "not yet"


# --- answers in CUDA C++ --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_references_are_cuda_for_a_real_gpu(name: str) -> None:
    found = usage(KernelSource.from_text(getattr(reference, name)), "sm_86")
    assert found.spills == 0 and found.registers > 0


def test_lanes_far_apart_are_right_and_not_yet() -> None:
    own_row = swapped(
        reference.neighbours,
        ("const int lane = threadIdx.x % 32;\n", "if (blockIdx.x || threadIdx.x >= 16) return;\n"),
        ("(blockIdx.x * blockDim.x + threadIdx.x) / 32;  // a warp for each row", "threadIdx.x;"),
        (LOOP, "for (int w = 0; w < K / 8; ++w) {"),
        ("    sum = warp_sum(sum);\n    if (lane == 0) {\n", "    {\n"),
    )
    verdict = check.find("neighbours")(own_row)
    assert (verdict.state, verdict.score) == ("not yet", 2048), verdict
    assert f"line {line_of(own_row, 'word = words[w]')}" in verdict.hint


def test_a_piece_for_each_lane_is_not_yet() -> None:
    loop = "for (int w = lane * (K / 256); w < (lane + 1) * (K / 256); ++w) {"
    verdict = check.find("neighbours")(swapped(reference.neighbours, (LOOP, loop), ("// the next", "// a")))
    assert (verdict.state, verdict.score) == ("not yet", 1024), verdict


def test_without_the_warp_s_sum_the_values_are_wrong() -> None:
    text = swapped(reference.neighbours, ("    sum = warp_sum(sum);\n", ""))
    verdict = check.find("neighbours")(text)
    assert verdict.state == "not yet" and verdict.expected.startswith("out[0, 0] = ")


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ((BARRIER, "        __syncwarp();\n"), ("race",)),
        (("    part[t] = mine;\n    __syncthreads();\n", "    part[t] = mine;\n"), ("race", "uninitialised")),
        ((f"        }}\n{BARRIER}", f"    {BARRIER}        }}\n"), ("race", "divergent barrier")),
    ],
    ids=["of a warp", "not the first", "in the branch"],
)
def test_a_barrier_that_is_missing_or_in_the_branch(change: tuple[str, str], kinds: tuple[str, ...]) -> None:
    verdict = check.find("shares")(swapped(reference.shares, change))
    assert verdict.state == "not yet" and verdict.expected == "a launch with no fault", verdict
    assert verdict.got.startswith(kinds) and "line " in verdict.got, verdict


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((GUARD, ""), "reads packed["),
        (("if (n >= N) {", "if (n > N) {"), "reads packed["),
        (("if (8 * w + i < K) {", "{"), "reads x["),
        (("if (8 * w + i < K) {", "if (8 * w + i <= K) {"), "reads x["),
    ],
)
def test_half_a_guard_is_named_by_its_line(change: tuple[str, str], words: str) -> None:
    text = swapped(reference.ragged, change)
    line = line_of(text, "= words[w]" if "packed" in words else "sum += code_w4")
    verdict = check.find("ragged")(text)
    assert verdict.state == "not yet" and verdict.got.startswith("out-of-bounds"), verdict
    assert f"line {line} {words}" in verdict.got, verdict


def test_wide_loads_count_instructions_and_keep_the_sectors() -> None:
    words = swapped(reference.neighbours, ("// a warp for each row", "// mine"))
    verdict = check.find("wide_loads")(words)
    assert (verdict.state, verdict.score) == ("not yet", 64), verdict
    far = swapped(
        reference.wide_loads,
        ("for (int p = lane; p < K / 32; p += 32) {", "for (int p = 2 * lane; p < 2 * lane + 2; ++p) {"),
    )
    verdict = check.find("wide_loads")(far)
    assert verdict.state == "not yet" and "sectors of packed" in verdict.expected, verdict


def test_lanes_that_all_store_are_told_to_add_first() -> None:
    text = swapped(reference.neighbours, ("    if (lane == 0) {\n", "    {\n"))
    verdict = check.find("neighbours")(text)
    assert verdict.state == "not yet" and "one lane stores" in verdict.hint, verdict


def test_a_round_that_meets_the_next_is_not_told_to_part_a_line_from_itself() -> None:
    verdict = check.find("shares")(swapped(reference.shares, (BARRIER, "        __threadfence_block();\n")))
    assert verdict.got.startswith("race") and "every round" in verdict.hint, verdict


def test_a_sum_without_shared_memory_is_another_exercise() -> None:
    text = """__global__ void shares(const float* values, float* out)
{
    const float* row = values + 128 * blockIdx.x;
    float sum = 0.0f;
    for (int i = 0; i < 128; ++i) sum += row[i];
    out[128 * blockIdx.x + threadIdx.x] = row[threadIdx.x] / sum;
}
"""
    verdict = check.find("shares")(text)
    assert verdict.state == "not yet" and "shared memory" in verdict.expected, verdict


def test_words_of_a_piece_read_one_by_one_are_told_to_copy_it() -> None:
    text = swapped(
        reference.wide_loads,
        ("        const uint4 piece = pieces[p];  // one load, 32 codes\n", ""),
        ("{piece.x, piece.y, piece.z, piece.w}", "{pieces[p].x, pieces[p].y, pieces[p].z, pieces[p].w}"),
    )
    verdict = check.find("wide_loads")(text)
    assert verdict.state == "not yet" and "copy a whole piece" in verdict.hint, verdict
