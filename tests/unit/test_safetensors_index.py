"""A safetensors header is believed only after it has been compared with the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_raw_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from labkit.errors import MissingModelError, ModelFileError
from labkit.models.safetensors_index import TensorFile, read_header


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_public_library_wrote(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.arange(6, dtype=torch.int32).view(2, 3),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "odd": torch.arange(3, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = TensorFile.open(tmp_path / "x.safetensors")
    assert file.header.metadata == {"format": "pt"}
    assert set(file.header.entries) == set(tensors)
    for name, tensor in tensors.items():
        for got in (file.read(name), file.view(name)):
            assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
    file.close()


def test_a_view_is_private(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(16)}, path)
    before = path.read_bytes()
    TensorFile.open(path).view("a").fill_(7)
    assert path.read_bytes() == before


def test_misaligned_data_is_copied_not_misread(tmp_path: Path) -> None:
    header = {"u": entry("U8", (3,), (0, 3)), "f": entry("F32", (2,), (3, 11))}
    data = bytes([1, 2, 3]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    file = TensorFile.open(write_raw_safetensors(tmp_path / "x.safetensors", header, data))
    assert file.view("f").tolist() == [1.5, -2.0]
    assert file.view("u").tolist() == [1, 2, 3]


@pytest.mark.parametrize("length", [2**63 - 1, 10**12, 100_000_001, 40])
def test_a_lying_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = write_raw_safetensors(tmp_path / "x.safetensors", b"{}", bytes(8), length=length)
    tracemalloc.start()
    with pytest.raises(ModelFileError, match=f"header length of {length} bytes in a file of 18 bytes"):
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


LIES: list[tuple[Any, bytes, str]] = [
    ({"a": entry(offsets=(0, 2**60), shape=(2**58,))}, bytes(8), "data section of 8 bytes"),
    ({"a": entry(offsets=(0, 8)), "b": entry(offsets=(4, 12))}, bytes(12), "overlapping"),
    ({"a": entry(offsets=(0, 8)), "b": entry(offsets=(0, 8))}, bytes(8), "overlapping"),
    ({"a": entry(offsets=(0, 8)), "b": entry(offsets=(16, 24))}, bytes(24), "hole of 8 bytes"),
    ({"a": entry()}, bytes(12), "4 bytes that belong to no tensor"),
    ({"a": entry(shape=(3,))}, bytes(8), "12 bytes for shape"),
    ({"a": entry(dtype="F16")}, bytes(8), "4 bytes for shape"),
    ({"a": entry(dtype="F8_E4M3", shape=(8,))}, bytes(8), "dtype 'F8_E4M3'"),
    ({"a": entry(offsets=(8, 0))}, bytes(8), "begin <= end"),
    ({"a": entry(offsets=(-8, 0))}, bytes(8), "data_offsets"),
    ({"a": entry(shape=(-1, -2))}, bytes(8), "shape"),
    ({"a": entry(shape=(True, 2))}, bytes(8), "shape"),
    ({"a": entry(shape=(0, 10**30), offsets=(0, 0))}, b"", "shape"),
    ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "dtype, shape and data_offsets"),
    ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    ([], b"", "list"),
    (b'{"a":', b"", "not JSON"),
    (b"\xff\xfe", b"", "not JSON"),
    (b"[" * 200_000, b"", "not JSON"),
    (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', bytes(8), "not JSON"),
    (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        bytes(1),
        "'a' twice",
    ),
]


@pytest.mark.parametrize(("header", "data", "words"), LIES)
def test_a_lying_header_is_refused_by_name(tmp_path: Path, header: Any, data: bytes, words: str) -> None:
    path = write_raw_safetensors(tmp_path / "lie.safetensors", header, data)
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert words in str(caught.value) and "lie.safetensors" in str(caught.value)


def test_absent_empty_and_short_files(tmp_path: Path) -> None:
    with pytest.raises(MissingModelError, match="no such file"):
        read_header(tmp_path / "none.safetensors")
    (tmp_path / "e.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError, match="0 bytes"):
        read_header(tmp_path / "e.safetensors")


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flip=st.integers(0, 150), value=st.integers(0, 255))
def test_any_truncation_and_any_changed_header_byte_gives_an_answer_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": torch.ones(8, 4), "b": torch.ones(5, dtype=torch.float16)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(ModelFileError):
        read_header(path)
    changed = bytearray(whole)
    changed[flip] = value
    path.write_bytes(changed)
    try:
        header = read_header(path)
    except ModelFileError:
        return
    assert all(0 <= e.begin <= e.end <= header.file_size for e in header.entries.values())


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ModelFileError, match="no tensor 'b'"):
        TensorFile.open(path).read("b")
