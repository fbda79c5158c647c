"""Runs that continue: only what is on disk and fits is kept, and nobody else's file is ever touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_state, tiny_config, write_gguf, write_hf

from labkit.errors import InputError, ModelFileError
from labkit.models import quantize_checkpoint as module
from labkit.models.checkpoint import load_checkpoint
from labkit.models.quantize_checkpoint import QuantizeProgress, quantize_checkpoint

SHARD = 12_000


class Stop(Exception):
    pass


def stop_after(folder: Path, out: Path, weights: int, **options: Any) -> Path:
    """Begin quantising ``folder`` into ``out`` and stop; returns the working folder."""

    def progress(now: QuantizeProgress) -> None:
        if now.done == weights:
            raise Stop

    with pytest.raises(Stop):
        quantize_checkpoint(folder, out, progress=progress, **{"shard_bytes": SHARD, **options})
    return out.with_name(out.name + ".partial")


def everything(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("llama")
    return write_hf(tmp_path_factory.mktemp("model") / "src", config, random_state(config))


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """The files of an uninterrupted run."""
    return everything(quantize_checkpoint(source, source.parent / "whole", shard_bytes=SHARD).out)


# ---- what an earlier run finished ---------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("how", ["gone", "shorter", "renamed in the record", "no record of its weights"])
def test_a_shard_that_is_lost_takes_those_behind_it_along(
    tmp_path: Path, source: Path, whole: dict[str, bytes], lost: int, how: str
) -> None:
    assert sum(name.endswith(".safetensors") for name in whole) > 3
    work = stop_after(source, tmp_path / "out", 20)
    shard = work / f"weights-{lost:05d}.safetensors"
    record = work / "progress.json"
    state = json.loads(record.read_text(encoding="utf-8"))
    assert len(state["done"]) >= 3
    kept = sum(len(done["weights"]) for done in state["done"][: lost - 1])
    if how == "gone":
        shard.unlink()
    elif how == "shorter":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "renamed in the record":
        state["done"][lost - 1]["file"] = "weights-00009.safetensors"
    else:
        state["done"][lost - 1]["weights"] = 7
    record.write_text(json.dumps(state), encoding="utf-8")
    result = quantize_checkpoint(source, tmp_path / "out", shard_bytes=SHARD)
    assert result.resumed == kept and result.weights == 21
    assert everything(tmp_path / "out") == whole


def test_another_shard_size_never_leaves_a_weight_out(tmp_path: Path, source: Path) -> None:
    probe = quantize_checkpoint(source, tmp_path / "probe", shard_bytes=30_000)
    shards = len(list(probe.out.glob("*.safetensors")))
    same_count = 0
    for size in range(26_000, 36_001, 1000):
        out = tmp_path / f"out{size}"
        stop_after(source, out, 18, shard_bytes=30_000)
        try:
            result = quantize_checkpoint(source, out, shard_bytes=size)
        except InputError as error:
            assert error.argument == "shard_bytes"  # another number of shards is refused
            continue
        same_count += 1
        assert result.weights == 21 and len(list(out.glob("*.safetensors"))) == shards
        assert everything(out) == everything(
            quantize_checkpoint(source, tmp_path / f"new{size}", shard_bytes=size).out
        )
    assert same_count > 2


def test_a_manifest_that_would_lack_weights_is_not_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._Job.run

    def forgetful(self: Any, *args: Any) -> None:
        real(self, *args)
        self.done[1]["weights"].popitem()

    monkeypatch.setattr(module._Job, "run", forgetful)
    with pytest.raises(InputError, match=r"got 20 weights .*expected the 21 weights") as caught:
        quantize_checkpoint(source, tmp_path / "out", shard_bytes=SHARD)
    assert "--no-resume" in caught.value.fix
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial" / "labkit.json").exists()


# ---- what is not an earlier run's ---------------------------------------------------------------


def test_a_source_named_like_the_working_folder_survives(tmp_path: Path) -> None:
    config = tiny_config("llama")
    state = random_state(config)
    folder = write_hf(tmp_path / "q.partial", config, state)
    (tmp_path / "g.partial").mkdir()
    file = write_gguf(tmp_path / "g.partial" / "m.gguf", config, state)
    deeper = tmp_path / "d.partial" / "models" / "src"
    shutil.copytree(folder, deeper)
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    before = everything(tmp_path)
    for src, out in ((folder, "q"), (file, "g"), (deeper, "d"), (link, "q")):
        for resume in (True, False):
            with pytest.raises(InputError, match="source") as caught:
                quantize_checkpoint(src, tmp_path / out, resume=resume)
            assert caught.value.argument == "out"
    assert everything(tmp_path) == before


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name", ["thesis.txt", "model.safetensors", "weights-1.safetensors", ".hidden", "data/a.bin", ".x.y.part"]
)
def test_a_working_folder_with_a_strangers_file_is_refused_by_its_name(
    tmp_path: Path, source: Path, name: str, begun: bool, resume: bool
) -> None:
    work = tmp_path / "out.partial"
    if begun:
        stop_after(source, tmp_path / "out", 12)
    (work / name).parent.mkdir(parents=True, exist_ok=True)
    (work / name).write_text("mine", encoding="utf-8")
    before = everything(work)
    with pytest.raises(InputError) as caught:
        quantize_checkpoint(source, tmp_path / "out", resume=resume, shard_bytes=SHARD)
    assert repr(name.partition("/")[0]) in str(caught.value) and str(work) in caught.value.fix
    assert everything(work) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("record", [None, "{", '{"percent": 40}', "[]"])
@pytest.mark.parametrize("resume", [False, True])
def test_names_like_ours_do_not_make_a_folder_ours(
    tmp_path: Path, source: Path, record: str | None, resume: bool
) -> None:
    finished = quantize_checkpoint(source, tmp_path / "one").out
    work = finished.rename(tmp_path / "out.partial")  # a finished checkpoint under an unlucky name
    if record is not None:
        (work / "progress.json").write_text(record, encoding="utf-8")
    before = everything(work)
    with pytest.raises(InputError, match="no unfinished run"):
        quantize_checkpoint(source, tmp_path / "out", resume=resume)
    assert everything(work) == before


def test_links_and_a_lock_that_holds_text_are_not_ours(tmp_path: Path, source: Path) -> None:
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    work = stop_after(source, tmp_path / "out", 12)
    link = work / "weights-00009.safetensors.part"
    link.symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="weights-00009"):
        quantize_checkpoint(source, tmp_path / "out", shard_bytes=SHARD)
    link.unlink()
    (work / "lock").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="'lock'"):
        quantize_checkpoint(source, tmp_path / "out", shard_bytes=SHARD)
    assert (work / "lock").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"
    (tmp_path / "file.partial").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"file\.partial, a file"):
        quantize_checkpoint(source, tmp_path / "file")


def test_what_killed_runs_leave_is_removed(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    early = tmp_path / "early.partial"  # killed before its first record
    early.mkdir()
    for name in ("lock", ".progress.json.ab_1cd2e.part"):
        (early / name).touch()
    quantize_checkpoint(source, tmp_path / "early", shard_bytes=SHARD)
    late = stop_after(source, tmp_path / "late", 12)
    for name in (
        "labkit.json",
        "config.json",
        "tokenizer.json",
        ".labkit.json.ab_1cd2e.part",
        "weights-00007.safetensors",
        "weights-00003.safetensors.part",
    ):
        (late / name).write_text("half", encoding="utf-8")
    quantize_checkpoint(source, tmp_path / "late", shard_bytes=SHARD)
    assert everything(tmp_path / "early") == everything(tmp_path / "late") == whole


# ---- what is found before the work begins -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"{"),
        ("tokenizer_config.json", b"[1]"),
        ("special_tokens_map.json", b"\xff{}"),
        ("chat_template.jinja", b"{{ '\xff' }}"),
    ],
)
def test_a_damaged_tokenizer_is_found_before_the_first_weight(
    tmp_path: Path, source: Path, name: str, content: bytes
) -> None:
    src = Path(shutil.copytree(source, tmp_path / "src"))
    (src / name).write_bytes(content)
    seen: list[QuantizeProgress] = []
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        quantize_checkpoint(src, tmp_path / "out", progress=seen.append)
    assert not seen and not (tmp_path / "out.partial").exists()


def test_companions_are_copied_byte_by_byte(tmp_path: Path, source: Path) -> None:
    src = Path(shutil.copytree(source, tmp_path / "src"))
    (src / "chat_template.jinja").write_bytes("{{ 'é' }}\r\n".encode())
    out = quantize_checkpoint(src, tmp_path / "out").out
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (out / name).read_bytes() == (src / name).read_bytes()
    tokenizer = load_checkpoint(out).tokenizer
    assert tokenizer is not None and tokenizer.chat_template is not None


def test_a_quantised_source_made_float_needs_room_for_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("llama")
    state = random_state(config)
    src = write_gguf(tmp_path / "m.gguf", config, state, kind="Q4_0")
    floats = sum(tensor.numel() * 4 for tensor in state.values())
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("usage", (), {"free": floats - 1}))
    with pytest.raises(InputError, match="free on its disk"):
        quantize_checkpoint(src, tmp_path / "out", bits="none")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("usage", (), {"free": floats}))
    result = quantize_checkpoint(src, tmp_path / "out", bits="none", shard_bytes=40_000, resume=False)
    # Each shard holds what was asked for, or one weight that is larger alone.
    records = json.loads((result.out / "labkit.json").read_text(encoding="utf-8"))["weights"]
    for path in result.out.glob("*.safetensors"):
        named = [name for name, record in records.items() if record["file"] == path.name]
        assert len(named) == 1 or sum(state[name].numel() * 4 for name in named) <= 40_000
    assert all(isinstance(weight, torch.Tensor) for weight in load_checkpoint(result.out).weights.values())
