"""Quantising a checkpoint on disk: bounded memory, resumable after a kill, atomic, and clear refusals."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    is_linear,
    packed_state,
    random_state,
    tiny_config,
    wide_model,
    write_gguf,
    write_hf,
    write_index,
)
from safetensors.torch import save_file

from labkit.errors import InputError, MissingModelError, ModelFileError
from labkit.models import quantize_checkpoint as module
from labkit.models.checkpoint import load_checkpoint
from labkit.models.gguf import load_gguf
from labkit.models.hf import load_hf
from labkit.models.quantize_checkpoint import QuantizeProgress, quantize_checkpoint
from labkit.models.sources import tokenizer_texts
from labkit.models.tokenizer import Tokenizer
from labkit.quant.formats import QuantWeight
from labkit.quant.quantize import quantize

SHARD = 12_000


def source_in(folder: Path, **changes: Any) -> Path:
    config = tiny_config("llama", **changes)
    return write_hf(folder / "src", config, random_state(config, dtype=torch.bfloat16), shards=2)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Stop(Exception):
    pass


def stop_at(weight: int) -> Any:
    def progress(now: QuantizeProgress) -> None:
        if now.done == weight:
            raise Stop

    return progress


# ---- progress, resuming, atomicity --------------------------------------------------------------


def test_progress_counts_weights_and_bytes(tmp_path: Path) -> None:
    seen: list[QuantizeProgress] = []
    result = quantize_checkpoint(
        source_in(tmp_path), tmp_path / "out", bits="w4", progress=seen.append, shard_bytes=SHARD
    )
    assert [now.done for now in seen] == list(range(1, result.weights + 1))
    assert all(a.bytes_done < b.bytes_done for a, b in itertools.pairwise(seen))
    assert seen[-1].bytes_done == seen[-1].bytes_total == result.bytes_read
    assert seen[-1].shard == seen[-1].shards > 3 and result.resumed == 0
    assert result.formats == {"tensor": 5, "q8_0": 2, "w4": 14}
    assert not (tmp_path / "out.partial").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors") == [
        "config.json",
        "labkit.json",
        "tokenizer.json",
    ]


CHILD = """
import sys, time
from labkit.models.quantize_checkpoint import quantize_checkpoint
def wait_in_the_fourth_shard(now):
    if now.shard == 4:
        print("there", flush=True)
        time.sleep(600)
quantize_checkpoint(
    sys.argv[1], sys.argv[2], bits="mixed", offset=True, progress=wait_in_the_fourth_shard, shard_bytes=12_000
)
"""


def test_killed_runs_continue_and_end_with_the_same_bytes(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    options: dict[str, Any] = {"bits": "mixed", "offset": True, "shard_bytes": SHARD}
    quantize_checkpoint(source, tmp_path / "whole", **options)
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(out)], stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"
    child.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    child.wait(30)
    child.stdout.close()

    assert not out.exists()
    finished = {path.name: path.stat() for path in partial.glob("*.safetensors")}
    assert len(finished) == 3 and (partial / "weights-00004.safetensors.part").exists()
    with pytest.raises(ModelFileError, match="not finished"):
        load_checkpoint(out)

    seen: list[QuantizeProgress] = []
    result = quantize_checkpoint(source, out, progress=seen.append, **options)
    assert 0 < result.resumed == seen[0].resumed == seen[0].done - 1
    assert seen[-1].bytes_done == seen[-1].bytes_total
    for name, before in finished.items():
        after = (out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), name
    assert contents(out) == contents(tmp_path / "whole")


def test_a_run_that_ends_by_an_exception_continues_too_and_starts_again_when_told(tmp_path: Path) -> None:
    source, out = source_in(tmp_path), tmp_path / "out"
    with pytest.raises(Stop):
        quantize_checkpoint(source, out, bits="w4", progress=stop_at(9), shard_bytes=SHARD)
    assert not list((tmp_path / "out.partial").glob("*.part"))
    fresh = quantize_checkpoint(source, out, bits="w4", resume=False, shard_bytes=SHARD)
    assert fresh.resumed == 0
    quantize_checkpoint(source, tmp_path / "whole", bits="w4", shard_bytes=SHARD)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_shard_that_lost_bytes_is_made_again(tmp_path: Path) -> None:
    source, out = source_in(tmp_path), tmp_path / "out"
    with pytest.raises(Stop):
        quantize_checkpoint(source, out, bits="w4", progress=stop_at(12), shard_bytes=SHARD)
    os.truncate(tmp_path / "out.partial" / "weights-00002.safetensors", 100)
    quantize_checkpoint(source, out, bits="w4", shard_bytes=SHARD)
    quantize_checkpoint(source, tmp_path / "whole", bits="w4", shard_bytes=SHARD)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "other",
    [
        {"bits": "w3"},
        {"bits": "w4", "group_size": 16},
        {"bits": "w4", "offset": True},
        {"bits": "w4", "per_layer": {"mlp": "q8"}},
    ],
)
def test_other_options_do_not_continue_a_run(tmp_path: Path, other: dict[str, Any]) -> None:
    source, out = source_in(tmp_path), tmp_path / "out"
    with pytest.raises(Stop):
        quantize_checkpoint(source, out, bits="w4", progress=stop_at(9), shard_bytes=SHARD)
    before = contents(tmp_path / "out.partial")
    with pytest.raises(InputError, match="other options") as caught:
        quantize_checkpoint(source, out, shard_bytes=SHARD, **other)
    assert (
        f"labkit quantize {source} {out} --bits w4" in caught.value.fix and "--no-resume" in caught.value.fix
    )
    assert contents(tmp_path / "out.partial") == before
    with pytest.raises(InputError, match="shards"):
        quantize_checkpoint(source, out, bits="w4", shard_bytes=10 * SHARD)
    quantize_checkpoint(source, out, shard_bytes=SHARD, resume=False, **other)


def test_a_source_that_changed_does_not_continue_a_run(tmp_path: Path) -> None:
    source, out = source_in(tmp_path), tmp_path / "out"
    with pytest.raises(Stop):
        quantize_checkpoint(source, out, bits="w4", progress=stop_at(9), shard_bytes=SHARD)
    shard = next(source.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-2] ^= 1  # the same size, one bit
    shard.write_bytes(raw)
    os.utime(shard, ns=(0, time.time_ns()))
    with pytest.raises(InputError, match="a source that has changed since"):
        quantize_checkpoint(source, out, bits="w4", shard_bytes=SHARD)


def test_a_finished_folder_is_recognised_or_refused(tmp_path: Path) -> None:
    source, out = source_in(tmp_path), tmp_path / "out"
    first = quantize_checkpoint(source, out, bits="w4")
    before = contents(out)
    again = quantize_checkpoint(source, out, bits="w4")
    assert again.already_complete and again.bytes_written == first.bytes_written
    with pytest.raises(InputError, match="another source or other options"):
        quantize_checkpoint(source, out, bits="w3")
    assert contents(out) == before
    with pytest.raises(ModelFileError, match="already quantised"):
        quantize_checkpoint(out, tmp_path / "twice", bits="w3")


# ---- places it must not write to ----------------------------------------------------------------


def test_out_must_be_a_new_place(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    before = contents(source)
    with pytest.raises(InputError, match="which is the source"):
        quantize_checkpoint(source, source / ".." / "src", bits="w4")
    with pytest.raises(InputError, match="inside the source"):
        quantize_checkpoint(source, source / "w4", bits="w4")
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="which exists"):
        quantize_checkpoint(source, used, bits="w4")
    with pytest.raises(InputError, match="which exists"):
        quantize_checkpoint(source, used / "thesis.txt", bits="w4")
    assert contents(source) == before and contents(used) == {"thesis.txt": b"mine"}
    (tmp_path / "empty 空").mkdir()
    quantize_checkpoint(source, tmp_path / "empty 空", bits="w4")
    load_checkpoint(tmp_path / "empty 空")


def test_a_source_that_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(MissingModelError):
        quantize_checkpoint(tmp_path / "none", tmp_path / "out")
    (tmp_path / "x.bin").write_bytes(b"PK\x03\x04....")
    with pytest.raises(ModelFileError, match="begins with"):
        quantize_checkpoint(tmp_path / "x.bin", tmp_path / "out")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(MissingModelError, match=r"config\.json"):
        quantize_checkpoint(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_said_and_the_work_so_far_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = source_in(tmp_path), tmp_path / "out"
    writes = 0
    real = module.ShardWriter._write

    def full(self: Any, name: str, tensor: torch.Tensor) -> None:
        nonlocal writes
        writes += 1
        if writes > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(module.ShardWriter, "_write", full)
        with pytest.raises(InputError, match="no space left") as caught:
            quantize_checkpoint(source, out, bits="w4", shard_bytes=SHARD)
    assert f"labkit quantize {source} {out}" in caught.value.fix
    assert not out.exists()
    assert quantize_checkpoint(source, out, bits="w4", shard_bytes=SHARD).resumed > 0


def test_too_small_a_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"0\.0 MB free on its disk; expected 0\.\d MB"):
        quantize_checkpoint(source_in(tmp_path), tmp_path / "out", bits="w4")
    assert not list((tmp_path / "out.partial").glob("*.safetensors*"))


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_two_runs_do_not_write_the_same_folder(tmp_path: Path) -> None:
    source, out = source_in(tmp_path), tmp_path / "out"

    def second(now: QuantizeProgress) -> None:
        with pytest.raises(InputError, match="in use by another run"):
            quantize_checkpoint(source, out, bits="w4")

    quantize_checkpoint(source, out, bits="w4", progress=second)


# ---- other kinds of source ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_packed_checkpoints_are_imported_exactly(tmp_path: Path, method: str) -> None:
    config = tiny_config("qwen2")
    packed, plain = packed_state(
        random_state(config), method, group=16, symmetric=False, desc_act=method == "gptq"
    )
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 16, "version": "gemm"}
    source = write_hf(tmp_path / "src", config, packed, shards=2)
    result = quantize_checkpoint(source, tmp_path / "out", bits="w4", shard_bytes=SHARD)
    assert result.formats["w4"] == 14
    for name, weight in load_checkpoint(tmp_path / "out").weights.items():
        if isinstance(weight, QuantWeight):
            assert torch.equal(weight.dequantize(torch.float64), plain[name]), name
    saved = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in saved


def test_the_default_model_is_kept_exactly(tmp_path: Path, smollm2_path: Path) -> None:
    original = load_gguf(smollm2_path)
    kept = load_checkpoint(quantize_checkpoint(smollm2_path, tmp_path / "kept", bits="keep").out)
    assert kept.config == original.config and set(kept.weights) == set(original.weights)
    weights: dict[str, Any] = dict(original.weights)
    for name, weight in weights.items():
        got: Any = kept.weights[name]
        if isinstance(weight, torch.Tensor):
            assert torch.equal(weight, got), name
        else:
            assert all(
                torch.equal(tensor, got.tensors()[part]) for part, tensor in weight.tensors().items()
            ), name
    text = "Hello 2024, 世界 🙂!\n<|im_start|>user"
    assert kept.tokenizer is not None and original.tokenizer is not None
    assert kept.tokenizer.encode(text) == original.tokenizer.encode(text)
    assert kept.tokenizer.eos_ids == original.tokenizer.eos_ids
    assert kept.tokenizer.chat_template == original.tokenizer.chat_template


def test_a_gguf_file_is_quantised(tmp_path: Path) -> None:
    config = tiny_config("llama")
    state = random_state(config)
    source = write_gguf(tmp_path / "m.gguf", config, state)
    result = quantize_checkpoint(source, tmp_path / "out", bits="w3", group_size=16, offset=True)
    assert result.formats == {"tensor": 5, "q8_0": 2, "w3": 14}
    weights = load_checkpoint(tmp_path / "out").weights
    for name, tensor in state.items():
        got: Any = weights[name]
        if is_linear(name):
            expected: Any = quantize(tensor, "w3", 16, offset=True)
            assert torch.equal(got.packed, expected.packed) and torch.equal(got.offset, expected.offset), name
    with pytest.raises(InputError, match="which is the source"):
        quantize_checkpoint(source, source)


def test_a_tokenizer_that_adds_a_begin_token_keeps_doing_so(tmp_path: Path) -> None:
    config = tiny_config("llama")
    inner = load_hf(write_hf(tmp_path / "m", config, random_state(config))).tokenizer
    assert inner is not None
    original = Tokenizer(inner.inner, bos_id=1, add_bos=True, eos_ids=(2, 0), chat_template="{{ messages }}")
    for name, text in tokenizer_texts(original).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert again.encode("héllo") == original.encode("héllo") and again.encode("x")[0] == 1
    assert (again.bos_id, again.eos_ids, again.chat_template) == (1, (2, 0), "{{ messages }}")
    assert inner.encode("x")[0] != 1  # the source's own tokenizer was not touched


# ---- memory -------------------------------------------------------------------------------------

MEASURE = """
import json, sys
import torch
from labkit.models.quantize_checkpoint import quantize_checkpoint
torch.set_num_threads(1)
def peak():
    for line in open("/proc/self/status", encoding="utf-8"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
torch.isfinite(torch.ones(8, 8).to(torch.bfloat16)).all()
before = peak()
result = quantize_checkpoint(sys.argv[1], sys.argv[2], bits="w4", group_size=128)
print(json.dumps({"growth": peak() - before, "read": result.bytes_read}))
"""


def big_checkpoint(folder: Path, layers: int) -> tuple[Path, int]:
    """A BF16 checkpoint of 23 MiB a layer, one shard a layer; returns it and its largest tensor's bytes."""
    config, parts = wide_model(layers, torch.bfloat16)
    weight_map = {}
    folder.mkdir()
    for layer, part in enumerate(parts):
        file = f"layer-{layer}.safetensors"
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    write_index(folder, weight_map)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder, max(tensor.nbytes for tensor in parts[0].values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_memory_is_that_of_the_largest_tensor_not_of_the_checkpoint(tmp_path: Path) -> None:
    source, largest = big_checkpoint(tmp_path / "src", layers=13)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    measured = json.loads(run.stdout)
    print(f"measured: {measured}, largest tensor {largest} bytes")
    assert measured["read"] > 260 << 20
    # The tensor as stored, its result, and temporaries of the quantiser (32 MiB chunks).
    assert measured["growth"] < 3 * largest + (64 << 20)
