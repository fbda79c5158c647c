"""The sampler against plain references: numpy with full sorts, transformers' own filters, chi-square."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.sampling import Sampler, SamplingParams
from labkit.errors import InputError
from labkit.models.sampling import Sampling, greedy, uniform

# Multiples of 1/8: ties occur, and float32 holds them exactly.
LOGITS = st.lists(
    st.one_of(st.integers(-64, 64).map(lambda n: n / 8), st.just(-math.inf)), min_size=1, max_size=30
).filter(lambda values: max(values) > -math.inf)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.5, 1.0, 1.7, 30.0]),
        "top_k": st.integers(0, 32),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "seed": st.integers(0, 50),
    }
)


def reference(
    logits: list[float], params: Sampling, prompt: list[int], output: list[int], slack: float = 1e-12
) -> np.ndarray:
    """Probabilities [V], a step a line: penalties, temperature, min-p, top-k, top-p less ``slack``."""
    scores = np.array(logits, dtype=np.float64)
    for token in {*prompt, *output}:
        rise = scores[token] > 0
        scores[token] *= 1 / params.repetition_penalty if rise else params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    probs = np.exp((scores - scores.max()) / params.temperature)
    probs /= probs.sum()
    probs = np.where(probs >= params.min_p * probs.max(), probs, 0)
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k:
        probs[ranked[params.top_k :]] = 0
    probs /= probs.sum()
    if params.top_p < 1:
        held, keep = 0.0, []
        for token in ranked:
            keep.append(token)
            held += probs[token]
            if held >= params.top_p - slack:
                break
        probs[[i for i in ranked if i not in keep]] = 0
    return probs / probs.sum()


@settings(max_examples=400, deadline=None)
@given(LOGITS, FILTERS, st.data())
def test_the_draw_is_the_point_of_the_reference_distribution(logits, filters, data):
    penalties = data.draw(
        st.fixed_dictionaries(
            {
                "repetition_penalty": st.sampled_from([1.0, 0.5, 1.25]),
                "presence_penalty": st.sampled_from([0.0, -1.5, 2.0]),
                "frequency_penalty": st.sampled_from([0.0, -0.5, 1.0]),
            }
        )
    )
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=8)
    prompt, output = data.draw(ids), data.draw(ids)
    params = Sampling(**filters, **penalties)
    got = Sampler(params).sample(torch.tensor(logits), prompt, output).token
    point = uniform(filters["seed"], len(output))
    right = []
    for slack in (1e-9, -1e-9):  # within rounding of a border, of top-p too, either neighbour is right
        probs = reference(logits, params, prompt, output, slack)
        below = probs[:got].sum()
        right.append(probs[got] > 0 and below - 1e-9 <= point <= below + probs[got] + 1e-9)
    assert any(right)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 0.7, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_counts_of_many_draws_pass_a_chi_square_test(options):
    """The draws are a fixed sequence of the seed, so the result is the same on every run."""
    draws = 4_000
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    params = Sampling(seed=11, **options)
    sampler = Sampler(params)
    counts = np.bincount([sampler.sample(logits, (), range(i)).token for i in range(draws)], minlength=40)
    expected = reference(logits.tolist(), params, [], []) * draws
    assert not counts[expected == 0].any()
    often = expected >= 5  # the test's usual rule; the others go into one cell
    cells = [*zip(counts[often], expected[often]), (counts[~often].sum(), expected[~often].sum())]
    cells = [(seen, wanted) for seen, wanted in cells if wanted > 0]
    score = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    # Wilson-Hilferty: the score that a right sampler passes in 999 of 1,000 sequences.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert score < limit


def test_filters_agree_with_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    rows = torch.randn(30, 500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = list(range(0, 500, 7))
    steps = [
        process.RepetitionPenaltyLogitsProcessor(1.3),
        process.TemperatureLogitsWarper(0.8),
        process.MinPLogitsWarper(0.01),
        process.TopKLogitsWarper(40),
        process.TopPLogitsWarper(0.85),
    ]
    params = Sampling(temperature=0.8, min_p=0.01, top_k=40, top_p=0.85, repetition_penalty=1.3, seed=5)
    for row in rows:
        scores = row[None].clone()
        for step in steps:
            scores = step(torch.tensor([ids]), scores)
        kept = torch.isfinite(scores[0])
        assert 10 < kept.sum() < 40
        sums = scores[0].softmax(-1).cumsum(-1)
        wanted = int(torch.searchsorted(sums, uniform(5, 0), right=True))
        assert Sampler(params).sample(row, ids).token == wanted


def test_a_draw_depends_on_seed_and_place_alone():
    logits = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.0, seed=42)

    def run(order: list[int], sampler: Sampler) -> dict[int, int]:
        return {i: sampler.sample(logits[i], (), range(i)).token for i in order}

    straight = run(list(range(100)), Sampler(params))
    torch.manual_seed(1)  # nor on global generators
    np.random.seed(1)
    assert run(list(reversed(range(100))), Sampler(params)) == straight
    again = Sampler(params)
    run(list(range(60)), again)
    assert run(list(range(100)), again) == straight  # preempted after 60, computed again
    assert run(list(range(100)), Sampler(SamplingParams(temperature=1.0, seed=43))) != straight
    # Without a seed two requests differ, and either can be replayed from the seed it drew.
    free = SamplingParams(temperature=1.0)
    one, other = Sampler(free), Sampler(free)
    assert run(list(range(100)), one) != run(list(range(100)), other)
    replay = Sampler(SamplingParams(temperature=1.0, seed=one.seed))
    assert run(list(range(100)), one) == run(list(range(100)), replay)


def test_points_are_even_and_unrelated():
    points = np.array([uniform(seed, i) for seed in (0, 1, -1, (1 << 64) - 2) for i in range(2_000)])
    assert points.min() >= 0 and points.max() < 1 and len(set(points)) == len(points)
    tenths = np.bincount((points * 10).astype(int), minlength=10)
    assert np.abs(tenths - 800).max() < 4 * math.sqrt(800 * 0.9)
    assert abs(np.corrcoef(points[:2_000], points[2_000:4_000])[0, 1]) < 0.07
    assert abs(np.corrcoef(points[:-1], points[1:])[0, 1]) < 0.04
    assert uniform(7, 3) == 0.1846062188940475  # the sequence is part of the promise


@settings(max_examples=200, deadline=None)
@given(LOGITS, st.integers(0, 100))
def test_filters_at_their_limits(logits, seed):
    row = torch.tensor(logits)
    best = int(greedy(row))
    assert best == logits.index(max(logits))  # the lowest id among equals
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-300, "top_k": 1}, {"temperature": 0}):
        params = Sampling(**{"temperature": 5.0, "seed": seed} | options)
        assert Sampler(params).sample(row).token == best
    plain = Sampler(Sampling(temperature=1.5, seed=seed)).sample(row).token
    wide = Sampling(temperature=1.5, seed=seed, top_k=len(logits), top_p=1.0, min_p=1e-300)
    assert Sampler(wide).sample(row).token == plain
    assert row.tolist() == logits  # untouched


def test_the_ends_of_the_range_pick_no_impossible_token(monkeypatch):
    row = torch.tensor([-math.inf, 1.0, 0.0, 1.0, -math.inf])
    for point, wanted in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr("labkit.models.sampling.uniform", lambda seed, index, point=point: point)
        for options in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.01}):
            assert Sampler(Sampling(temperature=1.0, **options)).sample(row).token == wanted


def test_float64_logits_are_not_changed_in_place():
    row = torch.tensor([3.0, 1.0, -2.0], dtype=torch.float64)
    params = Sampling(temperature=0.5, repetition_penalty=2.0, presence_penalty=1.0, seed=1)
    Sampler(params).sample(row, [0], [0, 2])
    Sampler(Sampling(temperature=0.5, seed=1)).sample(row)
    assert row.tolist() == [3.0, 1.0, -2.0]


def test_penalties_by_hand():
    row = torch.tensor([2.0, 1.9, -1.0, -1.1])

    def pick(prompt: list[int], output: list[int], **options) -> int:
        return Sampler(Sampling(**options)).sample(row, prompt, output).token

    assert pick([0], [], presence_penalty=2.0, frequency_penalty=2.0) == 0  # the prompt is not counted
    assert pick([0], [], repetition_penalty=1.2) == 1  # here it is
    assert pick([], [0], repetition_penalty=1.2) == 1
    assert pick([], [0], presence_penalty=0.2) == 1
    assert pick([], [0], frequency_penalty=0.2) == 1
    assert pick([], [0, 1, 1], frequency_penalty=0.2) == 0  # 1.8 against 1.5
    assert pick([], [0, 1, 1], presence_penalty=0.2) == 0  # 1.8 against 1.7
    negative = torch.tensor([-1.0, -1.1])
    assert Sampler(Sampling(repetition_penalty=1.2)).sample(negative, [0]).token == 1  # multiplied
    assert pick([900], [901], repetition_penalty=1.2, presence_penalty=0.1) == 0  # outside the head


@settings(max_examples=200, deadline=None)
@given(LOGITS, st.integers(0, 20), st.sampled_from([0.0, 0.7]))
def test_logprobs_are_of_the_raw_logits(logits, count, temperature):
    params = SamplingParams(temperature=temperature, top_k=3, presence_penalty=1.0, seed=1, logprobs=count)
    got = Sampler(params).sample(torch.tensor(logits), (), [0])
    wanted = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).tolist()
    assert got.logprob == pytest.approx(wanted[got.token], abs=1e-9)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    ranked = [i for i in ranked if logits[i] > -math.inf]
    assert [token for token, _ in got.top_logprobs] == ranked
    assert [value for _, value in got.top_logprobs] == pytest.approx([wanted[i] for i in ranked], abs=1e-9)
    none = Sampler(Sampling()).sample(torch.tensor(logits))
    assert none.logprob is None and none.top_logprobs == ()


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"temperature": 1.0}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize(
    "bad", [[0.0, math.nan], [1.0, math.inf], [-math.inf] * 3, [math.nan, math.inf], [math.nan] * 2]
)
def test_overflowed_logits_are_refused(options, bad):
    with pytest.raises(InputError, match="logits: got NaN or infinite"):
        Sampler(Sampling(**options)).sample(torch.tensor(bad))


def test_rows_of_a_batch_fail_alone():
    rows = torch.tensor(
        [[1.0, 3.0, 3.0], [0.0, math.nan, 1.0], [-math.inf, -math.inf, 0.0], [math.inf, 0, 0]]
    )
    assert greedy(rows).tolist() == [1, -1, 2, -1]
    assert greedy(rows.half()).tolist() == [1, -1, 2, -1]


def test_padding_of_the_head_is_never_picked():
    row = torch.tensor([1.0, 2.0, 9.0, math.nan])
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"logprobs": 5}):
        got = Sampler(Sampling(**options), vocab=2).sample(row)
        assert got.token < 2 and all(token < 2 for token, _ in got.top_logprobs)
    with pytest.raises(InputError, match="vocab"):
        Sampler(vocab=0)
    for shape in ((), (1, 3), (0,)):
        with pytest.raises(InputError, match="one row"):
            Sampler().sample(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_strides(dtype):
    table = torch.arange(12, dtype=torch.float32).reshape(6, 2).to(dtype)
    column = table[:, 1]  # not contiguous
    for options in ({}, {"temperature": 0.01, "seed": 0}):
        assert Sampler(Sampling(**options)).sample(column).token == 5
    assert table.float().flatten().tolist() == list(range(12))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 1.5),
        ("seed", 1 << 64),
        ("seed", True),
        ("logprobs", 21),
        ("logprobs", True),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("max_tokens", None),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [b"a"]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 2),
        ("stop_token_ids", ["a"]),
        ("include_stop", 1),
        ("ignore_eos", None),
    ],
)
def test_bad_parameters_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: "):
        SamplingParams(**{name: value})


def test_what_ends_an_answer():
    params = SamplingParams(stop="\n\n", stop_token_ids=[7, 7, 9])
    assert params.stop == ("\n\n",) and params.stop_token_ids == (7, 9)
    assert params.end_ids((2, 3)) == {2, 3, 7, 9}
    assert SamplingParams(ignore_eos=True, stop_token_ids=(7,)).end_ids((2, 3)) == {7}
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert hash(params) == hash(SamplingParams(stop=("\n\n",), stop_token_ids=(7, 9)))
    assert SamplingParams().is_argmax
    for options in ({"temperature": 1.0}, {"logprobs": 0}, {"repetition_penalty": 1.1}):
        assert not SamplingParams(**options).is_argmax
    assert SamplingParams(top_p=0.5, top_k=3, stop="x").is_argmax  # filters keep the best
