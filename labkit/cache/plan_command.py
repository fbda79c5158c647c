"""``labkit plan``: read the options, make the plan, show it to a person or a program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from labkit.cache.memory_text import Memory, resolve_memory
from labkit.cache.plan import DEFAULT_CHUNK, MemoryPlan, plan
from labkit.cache.weight_source import ModelHeader, read_model
from labkit.cache.weights import WeightBytes, apply_recipe, as_json, weight_bytes
from labkit.device import Device, devices
from labkit.errors import InputError, require
from labkit.models.recipe import Recipe

DTYPES = ("float32", "bfloat16", "float16")
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_GIB = 2**30


@dataclass(frozen=True)
class Options:
    """The options of the command, as typed."""

    model: str | None = None
    memory: str | None = None
    context: int | None = None
    batch: int = 1
    bits: str | None = None
    group: str | None = None
    offset: bool = False
    layers: tuple[str, ...] = ()
    kv: str | None = None
    block_size: int = 16
    chunk: int = DEFAULT_CHUNK
    device: str = "auto"
    dtype: str | None = None
    graphs: bool | None = None


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made of."""

    header: ModelHeader
    plan: MemoryPlan
    memory: Memory
    weights: str
    where: str


@dataclass(frozen=True)
class _Target:
    device: str
    capability: tuple[int, int] | None
    words: str
    card: Device | None = None


def make(options: Options) -> Planned:
    """Make the plan that the options ask for; nothing of the model is loaded.

    Raises:
        InputError: a bad option, or no such model, by name.
    """
    from labkit.models.commands import group_size, per_layer

    target = _target(options.device)
    dtype_name = options.dtype or ("float32" if target.device == "cpu" else "float16")
    dtype_name = _SHORT.get(dtype_name, dtype_name)
    require(dtype_name in DTYPES, "dtype", repr(options.dtype), ", ".join(DTYPES))
    kv = dtype_name if options.kv is None else _SHORT.get(options.kv, options.kv)
    require(kv in (*DTYPES, "int8"), "kv", repr(options.kv), "fp16, bf16, fp32 or int8")
    memory = _memory(options.memory, target)
    header = read_model(options.model)
    bits, group = options.bits, group_size(options.group)
    if header.kind == "shape" and bits is None:
        bits = "w4"
    rules = per_layer(list(options.layers))
    recipe = Recipe.of(bits, group_size=group, offset=options.offset, per_layer=rules)
    dtype = getattr(torch, dtype_name)

    def bill(of: Recipe) -> WeightBytes:
        weights = apply_recipe(header.weights, of)
        # A GGUF file's weights are copies in memory, and are all there while new ones are made of them.
        converted = header.kind == "gguf" and weights != header.weights
        return weight_bytes(
            header.config,
            weights,
            device=target.device,
            dtype=dtype,
            capability=target.capability,
            mapped=header.kind == "labkit" and weights == header.weights,
            source_bytes=sum(each.nbytes(dtype) for each in header.weights) if converted else 0,
        )

    found = plan(
        header.config,
        bill(recipe),
        memory.nbytes,
        context=options.context,
        batch=options.batch,
        chunk=options.chunk,
        block_size=options.block_size,
        dtype=dtype_name,
        kv_dtype=kv,
        device=target.device,
        graphs=options.graphs,
        capability=target.capability,
        measured=memory.measured,
        others=[(name, bill(of)) for name, of in _others(options.offset)],
    )
    return Planned(header, found, memory, _weights_in_words(header, bits, group, options), target.words)


def run(options: Options, *, as_records: bool = False) -> bool:
    """Print the plan, as a table or as JSON; whether it fits."""
    planned = make(options)
    if as_records:
        print(json.dumps(record(planned), indent=1))
    else:
        from labkit.cache.plan_report import show

        show(planned)
    return planned.plan.fits


def record(planned: Planned) -> dict[str, Any]:
    """The plan as JSON values; what every figure is: computed from headers and formulas."""
    return {
        "model": planned.header.name,
        "source": planned.header.kind,
        "weights_as": planned.weights,
        "where": planned.where,
        "memory_is": planned.memory.text,
        "origin": "computed from headers and formulas, nothing was loaded",
        "weight_bytes": as_json(planned.plan.case.weights),
        **planned.plan.to_dict(),
    }


def _target(name: str) -> _Target:
    """Where the plan is for: this machine's CPU or GPU, or a card of data/devices.json."""
    text = name.strip().lower()
    for card in devices().values():
        if text in (card.key, card.name.lower()):
            return _Target("cuda", card.capability, card.name, card)
    require(
        text in ("auto", "cpu", "cuda"),
        "device",
        repr(name),
        "auto, cpu, cuda, or a card: " + ", ".join(devices()),
    )
    there = torch.cuda.is_available()
    if text == "cpu" or (text == "auto" and not there):
        return _Target("cpu", None, "the CPU" if text == "cpu" else "the CPU: no GPU answers here")
    if not there:
        return _Target("cuda", None, "a GPU, which this machine does not have")
    return _Target("cuda", torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def _memory(text: str | None, target: _Target) -> Memory:
    if text is not None:
        return resolve_memory(text, target.device)
    if target.card is not None:
        return Memory(int(target.card.memory_gib * _GIB), f"all of a {target.card.name}")
    if target.device == "cuda" and not torch.cuda.is_available():
        raise InputError("memory", "nothing, and no GPU to ask", "a size", "--memory 4GB")
    return resolve_memory(0.9, target.device)


def _others(offset: bool) -> list[tuple[str, Recipe]]:
    """Other ways to store the weights, the mildest first."""
    found = []
    for form in ("w4", "mixed", "w3"):
        for group in (None, 128):
            option = f"--bits {form}" + ("" if group is None else f" --group {group}")
            found.append((option, Recipe.of(form, group_size=group, offset=offset)))
        if form != "w4":
            option = f"--bits {form} --group 128 --layer head=w4 --layer embed=w4"
            heads = {"head": "w4", "embed": "w4"}
            found.append((option, Recipe.of(form, group_size=128, offset=offset, per_layer=heads)))
    return found


def _weights_in_words(header: ModelHeader, bits: str | None, group: object, options: Options) -> str:
    if bits is None or bits == "keep":
        words = "as stored"
    else:
        words = bits if group is None else f"{bits} group {group}"
        words += " with offset" if options.offset else ""
        if group is None and bits in ("w4", "w3", "mixed"):
            words += " group 32"
    return ", ".join((words, *options.layers))
