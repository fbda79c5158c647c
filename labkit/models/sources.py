"""Open anything that weights can be quantised from: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from labkit.errors import MissingModelError, ModelFileError
from labkit.models.checkpoint import MANIFEST
from labkit.models.config import ModelConfig
from labkit.models.gguf import GgufFile
from labkit.models.hf import HfFolder, file_fingerprint
from labkit.models.model import Weight

if TYPE_CHECKING:
    from labkit.models.tokenizer import Tokenizer


class WeightSource(Protocol):
    """Weights that are read one at a time; :class:`~labkit.models.hf.HfFolder` is one too."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def nbytes(self, name: str) -> int: ...

    def read(self, name: str) -> Weight: ...

    def where(self, name: str) -> str: ...

    def fingerprint(self) -> dict[str, Any]: ...

    def is_quantised(self, name: str) -> bool: ...

    def companions(self) -> dict[str, str]: ...

    def close(self) -> None: ...


class GgufSource(GgufFile):
    """A GGUF file as a source: one weight at a time, quantised ones exact."""

    @property
    def name(self) -> str:
        """The model's name in the file."""
        return str(self.info["name"])

    def where(self, name: str) -> str:
        """The file."""
        return str(self.path)

    def fingerprint(self) -> dict[str, Any]:
        """Size, time and header hash of the file."""
        return {"kind": "gguf", "files": [file_fingerprint(self.path)]}

    def is_quantised(self, name: str) -> bool:
        """Whether weight ``name`` is stored in blocks and not as floats."""
        return self._tensors[name].type not in ("F32", "F16", "BF16")

    def companions(self) -> dict[str, str]:
        """The file's tokenizer as tokenizer.json and the files that go with it: text by file name."""
        tokenizer = self.tokenizer()
        return {} if tokenizer is None else tokenizer_texts(tokenizer)

    def close(self) -> None:
        """Nothing to close: the mapping ends with the object."""


def open_source(path: str | os.PathLike[str]) -> WeightSource:
    """Open ``path``: a folder with config.json, or a GGUF file.

    Raises:
        MissingModelError: nothing there.
        ModelFileError: damaged or not supported; a folder that labkit made (it is quantised already).
    """
    path = Path(path)
    if path.is_dir():
        if (path / MANIFEST).is_file():
            raise ModelFileError(
                str(path), "a checkpoint that labkit has already quantised", "the model it was made from"
            )
        source = HfFolder.open(path)
        source.check_tied_head()
        return source
    if not path.is_file():
        raise MissingModelError(
            str(path), "no such file or folder", "a GGUF file or a Hugging Face model folder"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError(
            str(path),
            f"a file that begins with {magic!r}",
            "a GGUF file, or the folder that holds config.json and the safetensors",
        )
    return GgufSource(path)


def tokenizer_texts(tokenizer: Tokenizer) -> dict[str, str]:
    """Text by file name of tokenizer.json, and of the chat template and special tokens beside it.

    ``Tokenizer.from_file`` reads the three files back to the same ids, ends and template.
    """
    import tokenizers
    from tokenizers import processors

    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    bos = None if tokenizer.bos_id is None else inner.id_to_token(tokenizer.bos_id)
    if tokenizer.add_bos and bos is not None:
        # In a tokenizer.json it is the post-processor that puts the begin token in front.
        inner.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.bos_id)]
        )
    ends = [inner.id_to_token(token) for token in tokenizer.eos_ids]
    settings = {
        "bos_token": bos,
        "eos_token": ends[0] if ends else None,
        "chat_template": tokenizer.chat_template,
    }
    return {
        "tokenizer.json": inner.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "generation_config.json": json.dumps({"eos_token_id": list(tokenizer.eos_ids)}, indent=2) + "\n",
    }
