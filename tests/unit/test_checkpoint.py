"""labkit's own folder: loads from disk as it was made, memory-mapped, or says what is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_state, tiny_config, write_hf

from labkit.errors import MissingModelError, ModelFileError
from labkit.models.checkpoint import MANIFEST, is_checkpoint, load_checkpoint
from labkit.models.hf import load_hf
from labkit.models.model import Model
from labkit.models.quantize_checkpoint import quantize_checkpoint
from labkit.models.zoo import load_file


@pytest.fixture
def made(tmp_path: Path) -> Path:
    config = tiny_config("qwen2")
    source = write_hf(tmp_path / "src", config, random_state(config, dtype=torch.bfloat16), shards=2)
    quantize_checkpoint(source, tmp_path / "out", bits="mixed", offset=True, shard_bytes=20_000)
    return tmp_path / "out"


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    tensors = one.tensors(), two.tensors()
    return one.metadata() == two.metadata() and all(
        torch.equal(tensors[0][part], tensors[1][part]) for part in tensors[0] | tensors[1]
    )


@pytest.mark.parametrize("bits", ["w4", "w3", "mixed", "q8", "none"])
@pytest.mark.parametrize("offset", [False, True])
def test_what_was_quantised_on_load_is_what_the_folder_holds(tmp_path: Path, bits: str, offset: bool) -> None:
    config = tiny_config("qwen3")
    source = write_hf(tmp_path / "src", config, random_state(config, dtype=torch.float16), shards=3)
    result = quantize_checkpoint(
        source, tmp_path / "out", bits=bits, group_size=16, offset=offset, shard_bytes=15_000
    )
    loaded = load_checkpoint(tmp_path / "out")
    direct = load_hf(source, bits=bits, group_size=16, offset=offset)
    assert loaded.config == direct.config and set(loaded.weights) == set(direct.weights)
    assert all(same(loaded.weights[name], direct.weights[name]) for name in direct.weights)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and sum(path.stat().st_size for path in files) == result.bytes_written
    assert result.weights == len(direct.weights) and sum(result.formats.values()) == result.weights


def test_it_computes_and_speaks(made: Path) -> None:
    file = load_file(made)  # the door that the command line uses
    assert file.info["format"] == "labkit" and file.info["name"] == "src"
    assert file.tokenizer is not None and file.tokenizer.decode(file.tokenizer.encode("你好")) == "你好"
    direct = load_hf(made.parent / "src", bits="mixed", offset=True)
    ids = torch.arange(2, 14).view(2, 6)
    with torch.no_grad():
        assert torch.equal(Model.build(file).decoder(ids), Model.build(direct).decoder(ids))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_loading_leaves_the_codes_on_disk(tmp_path: Path) -> None:
    config = tiny_config("llama", hidden_size=512, intermediate_size=4096, vocab_size=512)
    source = write_hf(tmp_path / "src", config, random_state(config), tokenizer=False)
    out = tmp_path / "out"
    quantize_checkpoint(source, out, bits="w4", group_size=128)
    file = load_checkpoint(out)
    size, resident = 0, 0
    current = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            current = str(out) in line
        elif current and line.startswith("Size:"):
            size += int(line.split()[1]) * 1024
        elif current and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    total = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert total > 6_000_000 and size >= total  # every byte of the shards is mapped ...
    assert resident < total / 2  # ... and most of them have not been read
    for weight in file.weights.values():
        if not isinstance(weight, torch.Tensor):
            weight.dequantize()


def test_a_half_done_folder_names_the_line_that_finishes_it(tmp_path: Path) -> None:
    config = tiny_config("llama")
    source = write_hf(tmp_path / "src", config, random_state(config))
    out = tmp_path / "out"

    def stop(now: Any) -> None:
        if now.shard == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            source, out, bits="w3", group_size=64, offset=True, progress=stop, shard_bytes=9_000
        )
    assert not out.exists() and is_checkpoint(out)
    for path in (out, tmp_path / "out.partial"):
        with pytest.raises(ModelFileError, match=r"not finished \(2 of \d+ shards\)") as caught:
            load_checkpoint(path)
        assert caught.value.fix == f"labkit quantize {source} {out} --bits w3 --group 64 --offset"


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        change(manifest)
        (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    return damage


def _truncate(path: Path) -> None:
    os.truncate(path / "weights-00002.safetensors", 1000)


def _other_header(path: Path) -> None:
    shard = path / "weights-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[9:30] = b"?" * 21
    shard.write_bytes(raw)


def _not_finite(path: Path) -> None:
    from labkit.models.safetensors_index import read_header

    shard = path / "weights-00002.safetensors"
    header = read_header(shard)
    entry = next(entry for name, entry in header.entries.items() if name.endswith("scales"))
    raw = bytearray(shard.read_bytes())
    raw[header.data_start + entry.begin : header.data_start + entry.begin + 2] = b"\x00\x7e"
    shard.write_bytes(raw)


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (_truncate, "1000 bytes"),
    (lambda p: (p / "weights-00001.safetensors").unlink(), "no such file"),
    (_other_header, "weights-00002.safetensors"),
    (_not_finite, "scales"),
    (_edit(lambda m: m.update(version=99)), "version 99"),
    (_edit(lambda m: m.pop("weights")), "'weights'"),
    (_edit(lambda m: m["weights"].popitem()), "missing"),
    (_edit(lambda m: m["weights"].update(x=m["weights"]["model.norm.weight"])), "'x'"),
    (_edit(lambda m: m["files"].update({"../x.safetensors": 5})), "names of files in this folder"),
    (_edit(lambda m: m["files"].update({"weights-00001.safetensors": "5"})), "a number of bytes"),
    (_edit(lambda m: m["weights"]["lm_head.weight"].update(k=10**9)), "lm_head"),
    (_edit(lambda m: m["weights"]["lm_head.weight"].update(file="nope")), "names one of the files"),
    (_edit(lambda m: m["weights"]["lm_head.weight"].update(file=[])), "names one of the files"),
    (_edit(lambda m: m["weights"].update({"lm_head.weight": []})), "names one of the files"),
    (_edit(lambda m: m["weights"]["lm_head.weight"].update(format="w9")), "'w9'"),
    (_edit(lambda m: m["weights"]["lm_head.weight"].update(format=[])), "format []"),
    (_edit(lambda m: m["config"].update(hidden_size="wide")), "hidden_size"),
    (lambda p: (p / MANIFEST).write_text("{", encoding="utf-8"), "not JSON"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damage_is_one_error_that_names_it(made: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(made)
    with pytest.raises(ModelFileError) as caught:
        load_checkpoint(made)
    assert words in str(caught.value)


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert not is_checkpoint(".") and not is_checkpoint("..") and not is_checkpoint("/")
    with pytest.raises(MissingModelError, match="labkit quantize"):
        load_checkpoint(tmp_path)
