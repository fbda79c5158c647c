"""The layer -> bits map: its bytes against the storage formats, its rules against the loader."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import quoted
from labkit.errors import InputError
from labkit.models.layer_bits import layer_bits
from labkit.quant import quantize
from labkit.widgets.base import View
from labkit.widgets.layer_bits_map import RESERVE_GIB, LayerBitsMap, stored_bytes

GIB = 2**30
FORMATS = ("w3", "w4", "q8", "fp16")


@given(
    form=st.sampled_from(("w3", "w4", "q8")),
    n=st.integers(1, 40),
    k=st.integers(1, 300),
    group=st.sampled_from((32, 64, 128)),
    offset=st.booleans(),
)
def test_bytes_are_those_of_a_stored_weight(form: str, n: int, k: int, group: int, offset: bool) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(k))
    if form == "q8":
        stored = quantize(weight, "q8_0", 32)
    else:
        stored = quantize(weight, form, group, offset=offset)
    assert stored_bytes(form, n, k, group, offset) == stored.nbytes


def test_fp16_is_the_sum_of_all_weights() -> None:
    for key, shape in quoted.models().items():
        chart = LayerBitsMap(key, attn="fp16", mlp="fp16", head="fp16", embed="fp16")
        assert chart.weight_bytes == 2 * shape.resident_weights
        assert chart.bits_per_weight == 16


def test_default_model_as_stored_meets_the_formula() -> None:
    chart = LayerBitsMap("smollm2-135m", group=32)
    layers = 30 * 3_538_944 * 4.5 / 8
    assert chart.part_bytes()["attention"] + chart.part_bytes()["MLP"] == layers
    assert chart.part_bytes()["head"] == 49152 * 576 * 9 / 8
    assert chart.part_bytes()["embedding"] == 0


def test_total_fits_and_ceiling() -> None:
    chart = LayerBitsMap("qwen2.5-7b")
    assert chart.total_bytes == pytest.approx(4.88 * GIB, rel=0.01)
    assert not chart.fits
    assert chart.total_bytes == sum(chart.part_bytes().values()) + RESERVE_GIB * GIB
    chart.update(mlp="w3", edge=2, head="w4", embed_on_cpu=True)
    assert chart.fits
    read = chart.weight_bytes + chart.part_bytes()["KV cache"]
    assert chart.ceiling_tok_s == pytest.approx(192e9 / read)


def test_embedding_moves_off_the_card_only_when_untied() -> None:
    untied = LayerBitsMap("qwen2.5-7b")
    before = untied.weight_bytes
    ceiling = untied.ceiling_tok_s
    untied.update(embed_on_cpu=True)
    assert before - untied.weight_bytes == stored_bytes("q8", 152064, 3584, 128, False)
    assert untied.ceiling_tok_s == ceiling  # a step reads one row of it either way
    tied = LayerBitsMap("qwen2.5-3b")
    before = tied.weight_bytes
    tied.update(embed_on_cpu=True, embed="w3")
    assert tied.weight_bytes == before


@given(edge=st.integers(0, 6), edge_format=st.sampled_from(FORMATS))
def test_edges_are_the_first_and_the_last_layers(edge: int, edge_format: str) -> None:
    chart = LayerBitsMap("qwen2.5-3b", attn="w4", mlp="w3", edge=edge, edge_format=edge_format)
    formats = chart.layer_formats()
    assert len(formats) == 36
    assert formats[:edge] == formats[36 - edge :] == [(edge_format, edge_format)] * edge
    assert set(formats[edge : 36 - edge]) == {("w4", "w3")}


@pytest.mark.parametrize("head", ["w4", "q8", "fp16"])
def test_rules_give_the_loader_the_same_map(head: str) -> None:
    chart = LayerBitsMap("smollm2-135m", attn="w4", mlp="w3", edge=1, edge_format="q8", head=head)
    rules = layer_bits("none", chart.per_layer())
    name = "none" if head == "fp16" else head
    assert rules.format_of("model.embed_tokens.weight") == name
    for layer, (attn, mlp) in enumerate(chart.layer_formats()):
        prefix = f"model.layers.{layer}."
        assert rules.format_of(prefix + "self_attn.q_proj.weight") == attn
        assert rules.format_of(prefix + "mlp.down_proj.weight") == mlp
        assert rules.format_of(prefix + "input_layernorm.weight") == "none"


def test_cache_grows_with_the_context_and_int8_halves_it() -> None:
    chart = LayerBitsMap("qwen2.5-7b", context=2048)
    fp16 = chart.part_bytes()["KV cache"]
    assert fp16 == 2 * 28 * 4 * 128 * 2 * 2048
    chart.update(context=8192)
    assert chart.part_bytes()["KV cache"] == 4 * fp16
    chart.update(context=2048, kv="int8")
    assert chart.part_bytes()["KV cache"] == fp16 * (1 + 2 / 128) / 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "gpt-9"},
        {"attn": "w5"},
        {"edge": 7},
        {"group": 48},
        {"offset": "yes"},
        {"context": 3},
        {"kv": "int4"},
        {"card": "abacus"},
    ],
)
def test_a_wrong_state_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        LayerBitsMap(**wrong)  # type: ignore[arg-type]
    assert caught.value.argument == next(iter(wrong))
    chart = LayerBitsMap()
    with pytest.raises(InputError):
        chart.update(**wrong)
    assert chart == LayerBitsMap()


def test_unknown_format_of_a_matrix_is_refused() -> None:
    with pytest.raises(InputError, match="format"):
        stored_bytes("w2", 8, 32, 32, False)


def test_picture_has_a_cell_for_every_layer_and_words() -> None:
    chart = LayerBitsMap("qwen2.5-3b", mlp="w3", edge=2)
    root = ElementTree.fromstring(chart.picture())
    assert root.attrib["aria-label"] == chart.alt()
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    cells = [title for title in titles if title.startswith("layer ")]
    assert len(cells) == 2 * 36
    assert cells.count("layer 0 MLP: W4") == 1
    assert cells.count("layer 2 MLP: W3") == 1
    assert "fits" in chart.text() and "edge layers" in chart.text()


def test_bar_stays_inside_the_picture_when_it_does_not_fit() -> None:
    chart = LayerBitsMap("qwen2.5-7b", attn="fp16", mlp="fp16", head="fp16", embed="fp16")
    root = ElementTree.fromstring(chart.picture())
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= 680.01
    assert "does not fit" in chart.text()
    assert "does not fit" in chart.html()


def test_view_moves_the_map() -> None:
    chart = LayerBitsMap()
    view = View(chart)
    view.inputs["mlp"].value = "w3"
    view.inputs["head"].value = "w4"
    view.inputs["embed_on_cpu"].value = True
    assert chart.fits
    assert ">fits: " in view.output.value
    assert 'role="alert"' not in view.output.value
