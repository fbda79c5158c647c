"""Chapter 06's checks: right answers pass, near misses do not, the library's own answer is refused."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import check
from labkit.bench import batch_tile, batch_times
from labkit.errors import InputError
from labkit.solutions import ch06 as reference


@pytest.fixture
def compiler() -> None:
    try:
        batch_tile.code("tile")
    except InputError as error:
        pytest.skip(str(error))


def test_the_library_s_own_answer_is_refused() -> None:
    from labkit.kernels.occupancy import occupancy

    costs = check.find("two_costs")(lambda m1, t1, m2, t2: batch_times.fixed_and_each(m1, t1, m2, t2))
    warps = check.find("resident_warps")(lambda registers, threads: occupancy(registers, 0, threads).warps)
    assert costs.state == warps.state == "not yet"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("two_costs", lambda m1, t1, m2, t2: (t1, (t2 - t1) / (m2 - m1))),
        ("two_costs", lambda m1, t1, m2, t2: (0.0, t1 / m1)),
        ("two_costs", lambda m1, t1, m2, t2: ((t2 - t1) / (m2 - m1), t1)),
        ("two_costs", lambda m1, t1, m2, t2: t1),
        ("two_costs", lambda m1, t1, m2, t2: "much"),
        ("resident_warps", lambda registers, threads: 65536 // (registers * 32)),
        (
            "resident_warps",
            lambda registers, threads: min(48, 65536 // (registers * threads) * threads // 32),
        ),
        ("resident_warps", lambda registers, threads: 48),
        ("resident_warps", lambda registers, threads: one_file(registers, threads)),
    ],
)
def test_near_misses(name: str, answer: Any) -> None:
    verdict = check.find(name)(answer)
    assert verdict.state == "not yet" and verdict.hint


def one_file(registers: int, threads: int) -> int:
    """Right but for the four parts of an SM."""
    warps = -(-threads // 32)
    return warps * min(65536 // (-(-registers * 32 // 256) * 256) // warps, 48 // warps, 16)


TRIPLE = "const uint32_t triple = load_triple(packed + (n * K + k) / 8 * 3);"


def rows_outside(text: str) -> str:
    """The reference with the loop over the rows around the loop over k: M reads of the weight."""
    swapped = text.replace("for (int k = 8 * lane", "for (int m = 0; m < M; ++m) for (int k = 8 * lane")
    inner = "        for (int m = 0; m < M; ++m) {\n            float"
    assert inner in swapped
    return swapped.replace(inner, "        {\n            float").replace("// one for each row", "// by row")


def test_read_once_scores_the_requests_for_the_weight() -> None:
    exercise = check.find("read_once")
    verdict = exercise.function(reference.read_once)
    assert (verdict.state, verdict.score) == ("passed", exercise.par)
    slow = exercise(rows_outside(reference.read_once))
    assert slow.state == "not yet" and slow.score == 480 and "load_triple" in slow.hint


def test_read_once_must_be_right() -> None:
    wrong = reference.read_once.replace("code_w3(triple, i)", "code_w3(triple, 0)")
    verdict = check.find("read_once")(wrong)
    assert verdict.state == "not yet" and "out[" in verdict.expected


def test_read_once_must_be_right_for_every_number_of_rows() -> None:
    five = reference.read_once.replace("m < M; ++m", "m < 5; ++m")
    assert five != reference.read_once
    assert check.find("read_once")(five).state == "not yet"


LOAD = "load_x8(activations, x + min(m, M - 1) * K, k, K);  // no guard, so nothing keeps it back"
BARE = "load_x8(activations, x + m * K, k, K);"


@pytest.mark.usefixtures("compiler")
def test_rows_together_scores_the_waits() -> None:
    exercise = check.find("rows_together")
    good = reference.rows_together
    assert LOAD in good and exercise.function(good).score == exercise.par
    guarded = good.replace(LOAD, BARE).replace(
        "float activations[8];", "if (m >= M) { continue; } float activations[8];"
    )
    slow = exercise(guarded)
    assert slow.state == "not yet" and slow.score is not None and slow.score > exercise.limit
    assert "on their way together" in slow.hint
    split = good.replace(LOAD, "if (m < M) { " + BARE + " }").replace(
        "activations[8];", "activations[8] = {};"
    )
    assert split != good and exercise(split).state == "passed"  # only the load has a guard


@pytest.mark.usefixtures("compiler")
def test_rows_together_must_not_read_a_row_that_is_not_there() -> None:
    verdict = check.find("rows_together")(reference.rows_together.replace(LOAD, BARE))
    assert verdict.state == "not yet" and "out-of-bounds" in verdict.got


@pytest.mark.usefixtures("compiler")
def test_rows_together_must_keep_the_tile() -> None:
    inside = "            float activations[8];\n"
    own = TRIPLE.replace("triple =", "own =").replace("packed +", "(const uint8_t*)packed + m * zero +")
    again = f"            {own}\n            codes[0] = code_w3(own, 0);\n"
    text = reference.rows_together.replace(LOAD, LOAD.partition("  //")[0]).replace(inside, again + inside)
    text = text.replace("    float sums[8] = {};", "    const int zero = M / 100;\n    float sums[8] = {};")
    verdict = check.find("rows_together")(text)
    assert verdict.state == "not yet" and "48 requests" in verdict.expected


@pytest.mark.usefixtures("compiler")
def test_the_verdict_follows_from_the_counts() -> None:
    exercise = check.find("tile_verdict")
    right = dict(reference.tile_verdict)
    assert exercise(dict.fromkeys(right, ...)).state == "not attempted"
    for cause in right:
        for word in batch_tile.JUDGEMENTS:
            if word != right[cause]:
                said = exercise({**right, cause: word})
                assert said.state == "not yet" and cause in said.expected and said.hint
    assert exercise({**right, "occupancy": "guilty"}).state == "not yet"
    assert exercise({"occupancy": "refuted"}).state == "not yet"
    assert exercise("occupancy").state == "not yet"
