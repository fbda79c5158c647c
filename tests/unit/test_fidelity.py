"""A rounded model against its original: figures by hand, and against labkit's perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from labkit.errors import InputError
from labkit.models import fidelity, perplexity, requant, zoo

IDS = list(range(100, 148))


@pytest.fixture(scope="module")
def model(smollm2_path: Path):
    return zoo.load_model(smollm2_path)


def test_a_model_equals_itself(model) -> None:
    found = fidelity.compare(model, IDS, fidelity.log_probs(model, IDS))
    assert (found.change, found.noise, found.kl, found.same_top, found.tokens) == (0, 0, 0, 1, 47)
    library = perplexity.perplexity(model, IDS, window=len(IDS))
    assert found.perplexity == pytest.approx(library.ppl, rel=1e-4)


def test_figures_are_those_of_the_definition(model) -> None:
    other = requant.requantise(model, bits="none", per_layer={"model.layers.29.mlp.*_proj": "w3"})
    p, q = (fidelity.log_probs(m, IDS).double() for m in (model, other))
    found = fidelity.compare(other, IDS, fidelity.log_probs(model, IDS))
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert found.kl > 0.01
    nll = [-table[torch.arange(47), torch.tensor(IDS[1:])] for table in (p, q)]
    assert found.change == pytest.approx(float((nll[1] - nll[0]).mean().exp()) - 1, rel=1e-4)
    assert found.noise == pytest.approx(float((nll[1] - nll[0]).std()) / 47**0.5, rel=1e-4)
    assert found.same_top == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    row = found.row()
    assert row["change %"] == 100 * found.change
    assert row["origin"] == "measured"


def test_bad_input_is_named(model) -> None:
    with pytest.raises(InputError, match="ids"):
        fidelity.log_probs(model, [5])
    with pytest.raises(InputError, match="reference"):
        fidelity.compare(model, IDS, torch.zeros(3, 3))
