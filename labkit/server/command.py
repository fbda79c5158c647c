"""What ``labkit serve`` does, apart from reading its options."""

from __future__ import annotations

import gc
import ipaddress
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from labkit.bench.policy_specs import PolicySpec
from labkit.engine.engine import Engine
from labkit.engine.executor_for import executor_for
from labkit.engine.executor_torch import DEFAULT_CHUNK
from labkit.engine.pool import Admission
from labkit.engine.sampling import SamplingParams
from labkit.errors import require
from labkit.models.commands import DTYPES, Loading
from labkit.models.zoo import default_model_path
from labkit.server.process import listen, make_server
from labkit.server.settings import API_KEY_VARIABLE, Settings

_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_PRECISION = re.compile(r"[.-](i?q\d\w*|f16|bf16|f32|fp16|fp32)$", re.IGNORECASE)


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is to be built, as the options say it."""

    model: str | None
    bits: str | None
    group: str | None
    offset: bool
    device: str
    dtype: str | None
    kv_dtype: str | None
    policy: str
    overlap: bool
    admission: str
    prefix_cache: bool
    max_batch: int
    max_context: int | None
    num_blocks: int | None
    invariant: bool


def serve(options: EngineOptions, *, name: str | None, **settings: Any) -> None:
    """Serve until a signal comes. Everything that can be refused is refused before the model is loaded.

    Args:
        name: what clients ask for; by default the name of the model's file or folder.
        settings: of :class:`Settings`.

    Raises:
        InputError: a bad option, or a port in use.
    """
    if settings.get("api_key") is None:
        settings["api_key"] = os.environ.get(API_KEY_VARIABLE) or None
    policy = PolicySpec.parse(options.policy)
    policy.make()
    path = Path(options.model) if options.model else default_model_path()
    kept = {name: getattr(options, name) for name in ("bits", "group", "offset", "dtype", "kv_dtype")}
    chosen = Settings(
        model=served_name(path) if name is None else name, overlap=options.overlap, options=kept, **settings
    )
    for option in ("max_batch", "max_context", "num_blocks"):
        value = getattr(options, option)
        require(value is None or value >= 1, option, value, "a whole number of at least 1")
    require(options.admission in ("peak", "now"), "admission", repr(options.admission), "peak or now")
    kv_name = _SHORT.get(options.kv_dtype or "", options.kv_dtype)
    kinds = (None, *DTYPES, "int8")
    require(kv_name in kinds, "kv_dtype", repr(options.kv_dtype), "fp16, bf16, fp32 or int8")
    with listen(chosen.host, chosen.port) as found:
        if chosen.api_key is None and not _is_loopback(found.getsockname()[0]):
            say("no API key, and not only this machine can connect: anybody who can reach it may use it")
        say(f"loading {path}")
        server = make_server(build(options, policy, kv_name), chosen, say=say)
        # What is loaded stays: the collector need not go through it in the middle of a step (70 ms).
        gc.collect()
        gc.freeze()
        server.run(sockets=[found])


def build(options: EngineOptions, policy: PolicySpec, kv_dtype: str | None) -> Engine:
    """The engine, ready to take requests: its first step is behind it, and its graphs are captured."""
    import torch

    from labkit.course.lab import pick_device

    device = pick_device(options.device)
    dtype = options.dtype or ("float16" if device == "cuda" else "float32")
    dtype = _SHORT.get(dtype, dtype)
    loading = Loading(options.model, options.bits, options.group, options.offset, device, dtype)
    model = loading.load()
    most, chunk = max(model.config.max_position_embeddings, DEFAULT_CHUNK), policy.chunk or 0
    require(chunk <= most, "policy", f"a chunk of {chunk} tokens", f"at most {most} for this model")
    more: dict[str, Any] = {"invariant": True} if options.invariant else {}
    executor = executor_for(
        model,
        num_blocks=options.num_blocks,
        kv_dtype=None if kv_dtype is None else getattr(torch, kv_dtype),
        max_context=options.max_context,
        max_batch=options.max_batch,
        release=device == "cuda",
        chunk=max(DEFAULT_CHUNK, chunk),
        **more,
    )
    executor.warm()
    # In an engine of its own, so that the server's counters begin at 0.
    Engine(executor, prefix_cache=False).generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))
    return Engine(
        executor,
        tokenizer=model.tokenizer,
        policy=policy.make(),
        admission=cast(Admission, options.admission),
        prefix_cache=options.prefix_cache,
        overlap=options.overlap,
        remembered=0,  # nobody reads them, and log probabilities are large
    )


def served_name(path: Path) -> str:
    """Name of a model's file or folder, without the suffix that says how its weights are stored."""
    stem = path.stem if path.suffix.lower() == ".gguf" else path.resolve().name
    return _PRECISION.sub("", stem) or stem or "model"


def say(words: str) -> None:
    """To standard error, at once."""
    print(f"labkit serve: {words}", file=sys.stderr, flush=True)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
