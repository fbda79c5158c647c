"""The memory plan: its sizes are those of the real thing, and its promises hold for any input."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import gguf_files
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from labkit.bench.random_model import config_of
from labkit.cache import bill, sizes
from labkit.cache.memory_text import Memory, parse_memory, resolve_memory, show_bytes
from labkit.cache.plan import MemoryPlan, plan
from labkit.cache.weight_source import read_model
from labkit.cache.weights import StoredWeight, WeightBytes, apply_recipe, tile_bytes, weight_bytes
from labkit.errors import InputError, ModelFileError
from labkit.models.config import ModelConfig
from labkit.models.decode_step import step_weights
from labkit.models.decoder import Decoder
from labkit.models.model import FINAL_NORM, expected_shapes
from labkit.models.quantize_checkpoint import quantize_checkpoint
from labkit.models.recipe import Recipe
from labkit.models.zoo import load_file, load_model
from labkit.nn import memory as budgets
from labkit.quant import quantize
from labkit.quant import tiles as tiles_module
from labkit.quant.formats import QuantWeight
from labkit.quant.grouped import GroupedWeight

GIB = 2**30
QWEN = config_of("qwen2.5-3b")


# --- sizes as text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4_000_000_000),
        ("3.5GiB", 7 * GIB // 2),
        (" 512 MiB ", 512 << 20),
        ("4g", 4_000_000_000),
        ("4gib", 4 * GIB),
        ("4294967296", 1 << 32),
        (1 << 32, 1 << 32),
        ("0.9", 0.9),
        (0.5, 0.5),
        ("1.0", 1.0),
        ("90%", 0.9),
        (".5TB", 500_000_000_000),
    ],
)
def test_memory_is_read_as_people_write_it(text: object, expected: float) -> None:
    found = parse_memory(text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "text",
    ["", "4", "0", "-4GB", "4 GBit", "GB", "1.5", "0.0", "110%", "0%", "nan", "nan%", "inf", "4iB", 0, -1,
     0.0, 1.5, float("nan"), True, None, "1e9", "4,5GB", "9999999TB", "9" * 400 + "GB", "9" * 5000],
)  # fmt: skip
def test_other_sizes_are_refused_by_name(text: object) -> None:
    with pytest.raises(InputError, match=r"^memory: "):
        parse_memory(text)


@given(st.integers(1, 1 << 20), st.sampled_from(["MB", "MiB", "GB", "GiB"]))
def test_whole_sizes_are_exact(count: int, unit: str) -> None:
    one = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}[unit]
    if 1 << 20 <= count * one <= 1 << 50:
        assert parse_memory(f"{count}{unit}") == count * one


def test_a_share_is_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_memory", lambda: 10 * GIB)
    assert resolve_memory("0.5", "cpu") == Memory(5 * GIB, "50% of the 10.00 GiB that are free now", True)
    assert resolve_memory("2GiB", "cpu") == Memory(2 * GIB, "as given")


def test_a_share_of_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no GPU answers"):
        resolve_memory("0.9", "cuda")


def test_bytes_for_people() -> None:
    assert [show_bytes(n) for n in (0, 999, 1536, 16 << 20, 1023 << 20, 4 * GIB)] == [
        "0 B", "999 B", "1.5 KiB", "16.0 MiB", "1023.0 MiB", "4.00 GiB",
    ]  # fmt: skip


# --- one block -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("block_size", sizes.BLOCK_SIZES)
def test_a_block_is_what_the_storage_allocates(block_size: int, kv_dtype: torch.dtype) -> None:
    from labkit.cache.paged import PagedKV

    config = _tiny("qwen3")
    dtype = torch.float16 if kv_dtype == torch.int8 else kv_dtype
    kv = PagedKV(config, num_blocks=3, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, device="cpu")
    assert kv.nbytes == 3 * sizes.block_bytes(config, block_size, kv_dtype)


def test_the_formula_by_hand() -> None:
    # 36 layers x 2 x 2 heads x 128 values of 2 bytes; INT8: one byte, and 4 bytes of scale a head.
    assert sizes.block_bytes(QWEN, 16, "float16") == 16 * 36 * 2 * 2 * 128 * 2
    assert sizes.block_bytes(QWEN, 16, "int8") == 16 * 36 * 2 * 2 * (128 + 4)


@pytest.mark.parametrize("value", [0, 7, 12, 128, True, 16.0, "16"])
def test_other_block_sizes_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^block_size: "):
        sizes.block_bytes(QWEN, value, "float16")
    with pytest.raises(InputError, match=r"^kv_dtype: "):
        sizes.block_bytes(QWEN, 16, "float64")


# --- weights ---------------------------------------------------------------------------------------


def _tiny(arch: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf_dict(checkpoints.tiny_config(arch, **changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models in every form that labkit reads."""
    root = tmp_path_factory.mktemp("plans")
    made = {}
    for arch, tied in (("llama", True), ("qwen2", False), ("qwen3", False)):
        config = checkpoints.tiny_config(arch, tie_word_embeddings=tied)
        state = checkpoints.random_state(config)
        made[arch] = checkpoints.write_hf(root / arch, config, state)
    config = checkpoints.tiny_config("llama")
    state = checkpoints.random_state(config)
    for method, desc_act, group in (("gptq", True, 32), ("awq", False, 32)):
        packed, _ = checkpoints.packed_state(state, method, group=group, symmetric=False, desc_act=desc_act)
        settings_ = {"quant_method": method, "bits": 4, "group_size": group, "zero_point": True}
        settings_ |= {"desc_act": desc_act, "version": "gemm"} if method == "awq" else {"desc_act": desc_act}
        made[method] = checkpoints.write_hf(
            root / method, config | {"quantization_config": settings_}, packed
        )
    for matrix in ("Q4_1", "Q4_0", "Q8_0", "F16"):
        made[matrix] = root / f"{matrix}.gguf"
        gguf_files.write_gguf(made[matrix], matrix=matrix, embedding="F16" if matrix == "F16" else "Q8_0")
    for bits in ("w4", "mixed"):
        made[f"labkit {bits}"] = root / f"labkit-{bits}"
        quantize_checkpoint(made["qwen2"], made[f"labkit {bits}"], bits=bits, offset=bits == "w4")
    return made


SOURCES = (
    "llama",
    "qwen2",
    "qwen3",
    "gptq",
    "awq",
    "Q4_1",
    "Q4_0",
    "Q8_0",
    "F16",
    "labkit w4",
    "labkit mixed",
)
RECIPES: tuple[dict[str, Any], ...] = (
    {"bits": None},
    {"bits": "w4"},
    {"bits": "w3", "group_size": 64, "offset": True},
    {"bits": "mixed", "per_layer": {"head": "w4", "embed": "w4", "model.layers.0.*": "q8"}},
    {"bits": "w4", "group_size": "row"},
    {"bits": "q8"},
    {"bits": "none"},
    {"bits": None, "per_layer": {"mlp": "w3"}},
)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_weight_bytes_are_those_of_the_loaded_model(
    folders: dict[str, Path], source: str, recipe: dict[str, Any]
) -> None:
    header = read_model(folders[source])
    weights = apply_recipe(header.weights, Recipe.of(**recipe))
    for dtype in (torch.float32, torch.float16):
        file = load_file(folders[source], **recipe)
        decoder = Decoder.from_weights(file.config, file.weights, dtype=dtype)
        found = weight_bytes(header.config, weights, device="cpu", dtype=dtype)
        assert header.config == file.config
        assert found.stored == decoder.weight_bytes()


@pytest.fixture
def unlimited() -> Iterator[budgets.MemoryBudget]:
    """A budget with room for every copy, and the old one back."""
    before = budgets.default_budget()
    yield budgets.set_default_budget(1 << 40)
    budgets._default = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", ["llama", "qwen2", "gptq", "Q4_1", "Q8_0", "labkit mixed"])
def test_copies_on_the_cpu_are_those_that_kernels_take(
    folders: dict[str, Path], source: str, dtype: torch.dtype, unlimited: budgets.MemoryBudget
) -> None:
    bits = "w4" if source in ("llama", "qwen2") else None
    header = read_model(folders[source])
    weights = apply_recipe(header.weights, Recipe.of(bits))
    model = load_model(folders[source], bits=bits, dtype=dtype)
    model.decoder(torch.zeros(1, 3, dtype=torch.int64))
    assert weight_bytes(header.config, weights, device="cpu", dtype=dtype).copies == unlimited.used
    del model
    gc.collect()
    assert unlimited.used == 0


@pytest.mark.parametrize(
    "recipe",
    [RECIPES[1], RECIPES[4], {"bits": "w3", "per_layer": {"head": "w4"}}, {"bits": "mixed"}],
    ids=str,
)
@pytest.mark.parametrize("source", ["llama", "qwen2", "qwen3"])
def test_copies_of_the_decode_step_are_those_that_it_makes(
    folders: dict[str, Path], source: str, recipe: dict[str, Any]
) -> None:
    header = read_model(folders[source])
    weights = apply_recipe(header.weights, Recipe.of(**recipe))
    found = weight_bytes(header.config, weights, device="cuda", dtype=torch.float16)
    file = load_file(folders[source], **recipe)
    decoder = Decoder.from_weights(file.config, file.weights, dtype=torch.float16)
    step = step_weights(decoder)
    # Norms and biases are the decoder's own; what is made anew is the tiles and the dense tables.
    made = {_address(each): each.nbytes for each in (step.embedding, step.head)}
    total = sum(made.values())
    total += sum(
        getattr(layer, name).nbytes for layer in step.layers for name in ("qkv", "out", "gate_up", "down")
    )
    assert found.step == total
    assert found.repeated == sum(
        weight.nbytes(torch.float16) for weight in weights if "_proj.weight" in weight.name
    )


@pytest.mark.parametrize(
    "recipe",
    [RECIPES[1], RECIPES[4], {"bits": "w4", "per_layer": {"head": "w4", "embed": "w4"}}, {"bits": "mixed"}],
    ids=str,
)
@pytest.mark.parametrize("source", ["llama", "qwen2", "qwen3"])
def test_what_a_decode_step_holds_instead_of_packed_codes(
    folders: dict[str, Path], source: str, recipe: dict[str, Any]
) -> None:
    header = read_model(folders[source])
    weights = apply_recipe(header.weights, Recipe.of(**recipe))
    found = weight_bytes(header.config, weights, device="cuda", dtype=torch.float16)
    file = load_file(folders[source], **recipe)
    decoder = Decoder.from_weights(file.config, file.weights, dtype=torch.float16)
    step = step_weights(decoder, release=True)
    held = {_address(each): each.nbytes for each in (step.embedding, step.head)}
    total = sum(held.values())
    total += sum(
        getattr(layer, name).nbytes for layer in step.layers for name in ("qkv", "out", "gate_up", "down")
    )
    assert found.released == total - (found.stored - dict(found.parts)["norms and biases"])


def _address(weight: Any) -> int:
    if isinstance(weight, QuantWeight):
        return int(weight.packed.data_ptr())
    if isinstance(weight, GroupedWeight):
        return int(weight.codes_t.data_ptr())
    return int((weight if isinstance(weight, torch.Tensor) else weight.tiles).data_ptr())


@pytest.mark.parametrize("tied", [True, False])
def test_making_the_decode_step_takes_what_was_planned(tied: bool, tmp_path: Path) -> None:
    """A vocabulary so large that its tables, made in float32 first, are the peak that the profiler sees."""
    config = checkpoints.tiny_config("llama", vocab_size=8192, tie_word_embeddings=tied)
    folder = checkpoints.write_hf(tmp_path / "large", config, checkpoints.random_state(config))
    header = read_model(folder)
    weights = apply_recipe(header.weights, Recipe.of("w4"))
    found = weight_bytes(header.config, weights, device="cuda", dtype=torch.float16)
    file = load_file(folder, bits="w4")
    decoder = Decoder.from_weights(file.config, file.weights, dtype=torch.float16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step_weights(decoder)
    assert 0.9 * found.step_loading <= _peak(seen) <= 1.1 * found.step_loading


@pytest.mark.parametrize("source", ["gptq", "Q4_1", "Q8_0", "llama"])
def test_a_model_that_the_decode_step_cannot_run_says_why(folders: dict[str, Path], source: str) -> None:
    header = read_model(folders[source])
    found = weight_bytes(header.config, header.weights, device="cuda", dtype=torch.float16)
    decoder = load_model(folders[source], dtype=torch.float16).decoder
    try:
        step_weights(decoder)
    except InputError:
        assert found.step is None
        assert found.why_no_step
    else:
        assert found.step is not None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["w4", "w3"]),
    st.integers(1, 40).map(lambda n: 2 * n),
    st.integers(1, 300),
    st.sampled_from([16, 32, 64, 128, "row"]),
    st.booleans(),
    st.booleans(),
)
def test_tile_bytes_are_those_of_the_tiles(
    format: str, n: int, k: int, group: int | str, offset: bool, paired: bool
) -> None:
    weight = quantize(torch.ones(n, k), format, group, offset=offset)
    dtype = None if weight.offset is None else weight.offset.dtype
    stored = StoredWeight("model.layers.0.mlp.up_proj.weight", (n, k), format, weight.group_size, dtype)
    assert stored.nbytes(torch.float16) == weight.nbytes
    if tiles_module.why_not(weight, paired=paired):
        assert tile_bytes(stored, paired=paired) is None
    else:
        assert tile_bytes(stored, paired=paired) == tiles_module.tile_bytes(weight, paired=paired)


@pytest.mark.parametrize(
    ("capability", "dtype", "tiles"),
    [
        ((8, 6), "float16", False),
        ((8, 6), "bfloat16", True),
        ((9, 0), "float16", True),
        ((7, 5), "float16", False),
    ],
)
def test_tiles_are_counted_where_the_dispatch_table_makes_them(
    capability: tuple[int, int], dtype: str, tiles: bool
) -> None:
    weights = apply_recipe(read_model("qwen2.5-0.5b").weights, Recipe.of("w4"))
    config = config_of("qwen2.5-0.5b")
    found = weight_bytes(config, weights, device="cuda", dtype=getattr(torch, dtype), capability=capability)
    assert (found.copies > 0) == tiles


def test_a_half_done_or_damaged_folder_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"qwen2\.5-3b"):
        read_model(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"config\.json"):
        read_model(tmp_path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(folders["Q4_1"].read_bytes()[:200])
    with pytest.raises(ModelFileError, match=r"broken\.gguf"):
        read_model(broken)


def test_nothing_is_read_but_headers(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.models.gguf import GgufFile
    from labkit.models.hf import HfFolder
    from labkit.models.safetensors_index import TensorFile

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a weight was read")

    for owner in (GgufFile, HfFolder, TensorFile):
        monkeypatch.setattr(owner, "read", never)
    monkeypatch.setattr(TensorFile, "view", never)
    for source in SOURCES:
        assert read_model(folders[source]).weights


# --- the plan --------------------------------------------------------------------------------------


WEIGHTS = WeightBytes(
    (("weights", 1_900_000_000),), copies=500_000_000, copies_name="tiles", step=2_000_000_000
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a plan, most of them near the edge between fitting and not."""
    return {
        "memory": draw(st.integers(100 << 20, 12 * GIB)),
        "context": draw(st.integers(1, 32_768)),
        "batch": draw(st.integers(1, 64)),
        "chunk": draw(st.integers(1, 4096)),
        "block_size": draw(st.sampled_from(sizes.BLOCK_SIZES)),
        "dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        "kv_dtype": draw(st.sampled_from([None, "int8"])),
        "device": draw(st.sampled_from(["cpu", "cuda"])),
        "measured": draw(st.booleans()),
    }


OTHERS = [("--bits w3", replace(WEIGHTS, parts=(("weights", 1_400_000_000),), step=1_500_000_000))]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_is_promised_has_room(case: dict[str, Any]) -> None:
    memory = case.pop("memory")
    found = plan(QWEN, WEIGHTS, memory, **case)
    pool = found.kv_blocks
    assert found.fits == (found.needed <= memory)
    assert pool.first * case["block_size"] >= case["batch"] * case["context"]
    assert pool.last >= pool.first or not found.fits
    if found.fits:
        # The whole bill, the pool at its last size, and one layer twice while it grows.
        assert found.fixed_bytes + pool.last * pool.block_bytes + found.grow_bytes <= memory
        assert found.total <= memory
        assert found.rows >= case["batch"]
        assert found.longest >= case["context"]
        assert 0 <= found.copy_bytes <= WEIGHTS.copies
        found.require_fits()
    else:
        with pytest.raises(InputError, match=r"^memory: "):
            found.require_fits()
    assert found.to_dict()["fits"] == found.fits


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 4 * GIB))
def test_more_memory_never_gives_less(case: dict[str, Any], more: int) -> None:
    memory = case.pop("memory")
    # The choice for or against graphs is a step of its own; held still here.
    graphs = False if case["device"] == "cpu" else None
    small = plan(QWEN, WEIGHTS, memory, graphs=graphs, **case)
    large = plan(QWEN, WEIGHTS, memory + more, graphs=small.case.graphs or None, **case)
    assert large.fits or not small.fits
    if small.case.graphs == large.case.graphs:
        assert large.copy_bytes >= small.copy_bytes
        if small.copy_bytes == large.copy_bytes:
            assert large.kv_blocks.last >= small.kv_blocks.last


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_suggestion_does_what_it_says(case: dict[str, Any]) -> None:
    memory = case.pop("memory")
    found = plan(QWEN, WEIGHTS, memory, others=OTHERS, **case)
    for change in found.changes:
        changed = _with(found, (change.option,), memory, case)
        assert changed.needed == change.needed
        assert changed.fits == change.fits
        assert change.saves == found.needed - changed.needed > 0
    fitting = [change.fits for change in found.changes]
    assert fitting == sorted(fitting, reverse=True)
    if found.together:
        assert not found.fits
        assert not any(fitting)
        assert _with(found, found.together, memory, case).fits


def _with(found: MemoryPlan, options: tuple[str, ...], memory: int, case: dict[str, Any]) -> MemoryPlan:
    changed, weights = {"graphs": found.case.graphs, **case}, WEIGHTS
    for option in options:
        name, _, value = option.partition(" ")
        if option == "--no-graphs":
            changed["graphs"] = False
        elif name == "--kv":
            changed["kv_dtype"] = value
        elif name == "--bits":
            weights = OTHERS[0][1]
        else:
            changed[name.removeprefix("--")] = int(value)
    changed["graphs"] = changed["graphs"] or (None if weights.step is None else False)
    return plan(QWEN, weights, memory, **changed)


def test_the_longest_context_that_fits_is_the_longest() -> None:
    found = plan(QWEN, 1_900_000_000, 3_000_000_000, context=32_768, batch=2)
    option = next(c.option for c in found.changes if c.option.startswith("--context"))
    context = int(option.split()[1])
    assert plan(QWEN, 1_900_000_000, 3_000_000_000, context=context, batch=2).fits
    assert not plan(QWEN, 1_900_000_000, 3_000_000_000, context=context + 16, batch=2).fits


def test_the_most_rows_that_fit_are_the_most() -> None:
    found = plan(QWEN, 1_900_000_000, 4_000_000_000, context=8192, batch=32)
    option = next(c.option for c in found.changes if c.option.startswith("--batch"))
    rows = int(option.split()[1])
    assert plan(QWEN, 1_900_000_000, 4_000_000_000, context=8192, batch=rows).fits
    assert not plan(QWEN, 1_900_000_000, 4_000_000_000, context=8192, batch=rows + 1).fits


def test_a_tight_gpu_decodes_without_graphs_and_says_so() -> None:
    tight = plan(QWEN, replace(WEIGHTS, repeated=1_500_000_000), 4_000_000_000)
    assert tight.fits
    assert not tight.case.graphs
    assert "CUDA graphs" in tight.notes[0]
    wide = plan(QWEN, WEIGHTS, 12_000_000_000)
    assert wide.case.graphs
    assert {item.name for item in wide.items} >= {
        "copies of the decode step",
        "CUDA graphs",
        "copies for speed",
    }
    asked = plan(QWEN, WEIGHTS, 4_000_000_000, graphs=True)
    assert not asked.fits
    assert "--no-graphs" in [change.option for change in asked.changes if change.fits]


def test_a_tight_gpu_drops_packed_codes_rather_than_graphs() -> None:
    weights = replace(WEIGHTS, released=100_000_000, released_loading=200_000_000)
    tight = plan(QWEN, weights, 4_000_000_000)
    assert tight.fits and tight.case.graphs and tight.case.release
    assert "dropped once they are tiles" in " ".join(tight.notes)
    names = {item.name for item in tight.items}
    assert "tiles for packed codes" in names and "copies for speed" not in names
    wide = plan(QWEN, weights, 12_000_000_000)
    assert wide.case.graphs and not wide.case.release
    # No room even so: without graphs, and nothing is dropped.
    least = plan(QWEN, weights, tight.needed - 1)
    assert least.fits and not least.case.graphs and not least.case.release
    assert "without CUDA graphs" in " ".join(least.notes)


def test_a_model_that_is_read_twice_over_while_loading_needs_that() -> None:
    weights = replace(WEIGHTS, loading=1_800_000_000)
    found = plan(QWEN, weights, 3_000_000_000, device="cpu", dtype="float32")
    assert not found.fits
    assert found.needed == found.case.loading == 3_700_000_000 + bill.CPU_RUNTIME_BYTES
    assert "labkit quantize" in found.notes[-1]
    # On a GPU that memory is the host's; the decode step has a moment of its own.
    assert plan(QWEN, weights, 3_000_000_000, device="cuda", graphs=False).fits
    on_gpu = plan(QWEN, replace(WEIGHTS, step_loading=3_000_000_000), 5_200_000_000, graphs=True)
    assert on_gpu.needed == on_gpu.case.loading == 4_900_000_000 + bill.GPU_RUNTIME_BYTES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context", 0), ("context", 32_769), ("context", True), ("context", 1.5), ("batch", 0), ("batch", -1),
        ("chunk", 0), ("block_size", 24), ("dtype", "int8"), ("kv_dtype", "int4"), ("device", "tpu"),
        ("memory", 0), ("memory", -5), ("memory", "4GB"), ("weight_bytes", -1), ("weight_bytes", 1.5),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"weight_bytes": 1_900_000_000, "memory": 4_000_000_000, name: value}
    with pytest.raises(InputError, match=f"^{name}: "):
        plan(QWEN, **arguments)


def test_graphs_that_cannot_be_are_refused() -> None:
    without = replace(WEIGHTS, step=None, why_no_step="float weights")
    with pytest.raises(InputError, match=r"^graphs: got float weights"):
        plan(QWEN, without, 40 * GIB, graphs=True)
    with pytest.raises(InputError, match=r"^graphs: got a CPU"):
        plan(QWEN, WEIGHTS, 40 * GIB, graphs=True, device="cpu")
    assert not plan(QWEN, without, 40 * GIB).case.graphs


def test_a_model_without_a_kernel_decodes_without_graphs_and_says_why() -> None:
    odd = ModelConfig.from_dict({**QWEN.to_dict(), "head_dim": 72})
    found = plan(odd, WEIGHTS, 40 * GIB)
    assert not found.case.graphs
    assert "head_dim 72" in found.notes[0]


@pytest.mark.parametrize(
    "shape", [(1, 2, 8, 128, 2048), (3, 3, 3, 64, 8192), (5, 1, 16, 80, 129), (1, 4, 7, 128, 128)]
)
def test_decode_scratch_is_no_less_than_the_kernel_takes(shape: tuple[int, int, int, int, int]) -> None:
    from labkit.kernels.paged_attention import COARSE, Plan, Scratch

    batch, kv_heads, group, head_dim, context = shape
    config = ModelConfig.from_dict(
        {**QWEN.to_dict(), "num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    )
    # The plan that shares a row out the most has the most partial results.
    scratch = Scratch.new(batch, kv_heads, group, head_dim, context, "cpu", planned=Plan(1, COARSE))
    taken = scratch.part.nbytes + scratch.part_ml.nbytes
    formula = bill.attention_scratch_bytes(config, batch, context)
    assert taken - 32 <= formula <= taken * 1.01


@pytest.mark.parametrize("multiprocessors", [16, 46, 132])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(2, 8, 128), (4, 7, 128), (8, 16, 64), (3, 3, 80)]
)
def test_prefill_scratch_is_bounded_and_no_less_than_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, kv_heads: int, group: int, head_dim: int
) -> None:
    from labkit.kernels import paged_plan
    from labkit.kernels.paged_attention import query_tile

    monkeypatch.setattr(paged_plan, "multiprocessors_of", lambda device: multiprocessors)
    config = ModelConfig.from_dict(
        {**QWEN.to_dict(), "num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    )
    queries = query_tile(group)
    for context in (100, 2048, 8192, 32_768):
        for chunk in (16, 100, 512, 2048):
            for int8 in (False, True):
                scratch = paged_plan.Scratch.new(
                    -(-chunk // queries) + 3, kv_heads, group, head_dim, context, "meta",
                    queries=queries, int8=int8,
                )  # fmt: skip
                taken = scratch.part.nbytes + scratch.part_ml.nbytes
                assert taken - 32 <= bill.prefill_scratch_bytes(config, chunk, 3, context)
                assert taken <= paged_plan.MOST_TILE_BYTES
                assert (taken > 32) == (scratch.planned != paged_plan.WALK and context > paged_plan.TURN)


def test_a_short_chunk_over_a_long_context_is_still_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.kernels import paged_plan

    monkeypatch.setattr(paged_plan, "multiprocessors_of", lambda device: 132)

    def planned(tiles: int) -> paged_plan.Plan:
        return paged_plan.Scratch.new(tiles, 2, 8, 128, 32_768, "meta", queries=2).planned

    assert planned(16) == paged_plan.plan(32, 32_768, 132) != paged_plan.WALK
    # 512 tiles and heads: the launch's choice alone would take 308 MiB.
    assert planned(256) == paged_plan.WALK != paged_plan.plan(512, 32_768, 132)


def test_graph_sizes() -> None:
    assert [bill.graph_sizes(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.parametrize(
    "shape", [{}, {"intermediate_size": 512}, {"hidden_size": 256, "head_dim": 64}], ids=str
)
def test_activations_are_bounded_by_the_formula(shape: dict[str, Any]) -> None:
    """The peak that torch's profiler sees in one chunk, and no more than half above it."""
    config = _tiny("llama", **shape)
    weights = {
        name: torch.zeros(size) if name != FINAL_NORM else torch.ones(size)
        for name, size in expected_shapes(config).items()
    }
    decoder = Decoder.from_weights(config, weights)
    tokens = torch.zeros(1, 200, dtype=torch.int64)
    cache = decoder.new_cache(200)
    decoder.hidden(tokens, cache)
    cache.truncate(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        decoder.hidden(tokens, cache)
    peak = _peak(seen)
    formula = bill.activation_bytes(config, 200, 4)
    assert peak <= formula * 1.05
    assert formula <= 2 * peak


def _peak(seen: Any) -> int:
    """Most bytes at once beyond those at the start, from the profiler's own events."""
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        total += event.nbytes()
        peak = max(peak, total)
    return peak
