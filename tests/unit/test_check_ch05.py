"""Chapter 05's checks: right answers pass, near misses do not; a race is said in words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from seed_cases import check_accurate, random_weight, random_x

from labkit import check
from labkit.kernels import resources, runner
from labkit.kernels.source import KernelSource
from labkit.quant.formats import QuantWeight
from labkit.solutions import ch05 as reference


def own(name: str) -> str:
    """The reference text in words of a student's own, so that it is not refused as a copy."""
    return re.sub(r"//[^\n]*", "", getattr(reference, name)).replace("const int row", "int const row", 1)


@pytest.mark.parametrize(
    "answer",
    [
        lambda rows, columns: 2.0,
        lambda rows, columns: rows * columns / (rows + columns),
        lambda rows, columns: 1 / rows + 1 / (columns + 1),
        lambda rows, columns: "0.75",
        lambda rows, columns: (rows, columns),
    ],
)
def test_loads_near_misses(answer: Any) -> None:
    verdict = check.find("loads_per_fma")(answer)
    assert verdict.state == "not yet" and verdict.hint


def test_loads_as_a_sum_of_shares_are_right() -> None:
    assert check.find("loads_per_fma")(lambda rows, columns: 1 / rows + 1 / columns).state == "passed"


def test_a_race_is_said_with_both_lines_and_a_hint_about_the_loop() -> None:
    found = re.sub(
        r"        __syncthreads\(\);\n    }", "    }", own("second_barrier").replace("();  ", "();")
    )
    assert found.count("__syncthreads") == 1
    verdict = check.find("second_barrier")(found)
    assert verdict.state == "not yet" and verdict.got.startswith("race")
    assert "shared_a[row][col]" in verdict.got and "the loop comes round" in verdict.hint


def test_two_tiles_in_turn_need_no_second_barrier() -> None:
    text = own("second_barrier").replace("();  ", "();")
    text = re.sub(r"        __syncthreads\(\);\n    }", "    }", text)
    text = text.replace("shared_a[16][16]", "a[2][16][16]").replace("shared_b[16][17]", "b[2][16][17]")
    text = text.replace("shared_a[", "a[first_k / 16 & 1][").replace("shared_b[", "b[first_k / 16 & 1][")
    assert text.count("__syncthreads") == 1
    assert check.find("second_barrier")(text).state == "passed"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sum +=", "sum =", "wrong"),
        ("first_k < K", "first_k < K - 16", "wrong"),
        ("out[m * N + n + col]", "if (col) out[m * N + n + col]", "never written"),
        ("first_k += 16", "first_k += 15", "out-of-bounds"),
    ],
)
def test_barrier_near_misses(old: str, new: str, words: str) -> None:
    text = own("second_barrier")
    assert text.count(old) == 1
    verdict = check.find("second_barrier")(text.replace(old, new))
    assert verdict.state == "not yet" and words in f"{verdict.got} {verdict.expected} {verdict.hint}", verdict


@pytest.mark.parametrize(("pad", "score"), [(0, 2048), (1, 192), (2, 128), (3, 192), (4, 256), (6, 128)])
def test_padding_is_scored_by_the_stores(pad: int, score: int) -> None:
    text = own("padded_tile").replace("#define PAD 2", f"#define PAD {pad}")
    verdict = check.find("padded_tile")(text)
    assert verdict.score == score
    assert verdict.state == ("passed" if score <= 192 else "not yet")


def test_an_answer_without_the_tile_or_with_other_weights_does_not_pass() -> None:
    wrong = own("padded_tile").replace("code_w4(codes, 1)", "code_w4(codes, 0)")
    assert "wrong" in check.find("padded_tile")(wrong).got
    text = own("padded_tile")
    body = text[text.index("        tile[k][n]") : text.rindex("}")]
    direct = """        out[column * N + row] = __float2half(code_w4(codes, 0) * scale);
        out[(column + 1) * N + row] = __float2half(code_w4(codes, 1) * scale);
    }
"""
    verdict = check.find("padded_tile")(text.replace(body, direct))
    assert verdict.state == "not yet" and "shared memory" in verdict.expected


def test_a_conflict_that_moved_to_the_reads_does_not_pass() -> None:
    text = (
        own("padded_tile").replace("tile[32][64 + PAD]", "tile[64][32]").replace("tile[k][n]", "tile[n][k]")
    )
    text = text.replace("tile[k + 1][n]", "tile[n][k + 1]")
    text = text.replace("tile[cell / 64][cell % 64]", "tile[cell % 64][cell / 64]")
    verdict = check.find("padded_tile")(text)
    assert verdict.state == "not yet" and "reads" in verdict.expected, verdict


def test_a_product_without_a_tile_is_another_exercise() -> None:
    text = re.sub(r"    __shared__.*\n", "", own("second_barrier"))
    text = re.sub(r"        shared_.*\n", "", text).replace("__syncthreads();", "")
    text = text.replace("shared_a[row][k]", "x[m * K + first_k + k]")
    text = text.replace("shared_b[k][col]", "w[(n + col) * K + first_k + k]")
    verdict = check.find("second_barrier")(text)
    assert verdict.state == "not yet" and "shared memory" in verdict.got, verdict


@pytest.mark.parametrize(
    ("answer", "state", "score"),
    [
        (lambda warp, lane: (8 * warp + lane % 8, lane // 8), "passed", 10),
        (lambda warp, lane: (warp + 8 * (lane >> 2), lane & 3), "passed", 10),
        (lambda warp, lane: (torch.tensor(8 * warp + (lane >> 2)), lane & 3), "passed", 10),
        (lambda warp, lane: (lane + 32 * (warp & 1), warp >> 1), "not yet", 32),
        (lambda warp, lane: (16 * (warp >> 1) + lane // 2, 2 * (warp & 1) + lane % 2), "not yet", 17),
        (lambda warp, lane: (8 * warp + (lane >> 3), lane & 3), "not yet", None),
        (lambda warp, lane: (lane, warp), "not yet", None),
        (lambda warp, lane: 8 * warp + (lane >> 2), "not yet", None),
        (lambda warp, lane: (8 * warp + lane / 4, lane & 3), "not yet", None),
    ],
)
def test_lane_maps(answer: Any, state: str, score: float | None) -> None:
    verdict = check.find("w3_lane")(answer)
    assert verdict.state == state, verdict
    assert verdict.score == score if score is None else verdict.score == pytest.approx(score, abs=1)


# --- the lesson's kernel with a free tile ----------------------------------------------------------------

SHAPES: list[dict[str, int]] = [
    {},
    {"TILE_K": 64},
    {"PAD_A": 2, "PAD_B": 2},
    {"TILE_M": 64, "THREAD_M": 4, "BLOCKS": 4},
    {"TILE_M": 64, "TILE_N": 128, "THREAD_M": 4, "THREAD_N": 8, "BLOCKS": 3},
]


@pytest.mark.parametrize("defines", SHAPES, ids=str)
def test_every_tile_shape_is_right_without_a_race_or_a_spill(defines: dict[str, int]) -> None:
    m, n, k = 35, 70, 128
    weight: QuantWeight = random_weight("w4", n, k, 32, None)
    x = random_x(m, k)
    out = torch.full((m, n), float("nan"), dtype=torch.float16)
    source = KernelSource("lesson/gemm_tile_shapes.cu", defines=defines)
    bm, bn = defines.get("TILE_M", 32), defines.get("TILE_N", 64)
    grid = (-(-n // bn), -(-m // bm))
    args = [x, weight.packed, weight.scales, out, m, n, k, 5]
    trace = runner.load(source, "cpu").trace(grid, (256,), args)
    assert trace.ok, trace.report()
    check_accurate(out, x, weight)
    assert resources.usage(source, "sm_86").spills == 0
