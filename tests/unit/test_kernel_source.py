"""A kernel by file, entry and constants."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.errors import InputError
from labkit.kernels.source import KernelSource, find_source, kernel_files, kernels_dir, packaged_entries

TEXT = """\
#ifndef TYPE
#define TYPE float
#endif
extern "C" __global__ void one(TYPE* x, int n) {}
__global__ void two(int n) {}
"""


def test_packaged_kernels_are_listed_with_their_entries() -> None:
    assert "gemm_tiled_w4.cu" in kernel_files()
    assert packaged_entries()["gemm_tiled_w4"] == "gemm_tiled_w4.cu"
    assert set(packaged_entries().values()) == set(kernel_files())


def test_a_packaged_source() -> None:
    source = KernelSource("gemm_tiled_w4.cu")
    assert source.name == source.entry == "gemm_tiled_w4"
    assert source.path == kernels_dir() / "gemm_tiled_w4.cu" and source.include_dirs == (kernels_dir(),)
    assert source.text == source.path.read_text(encoding="utf-8")
    assert source.parameters[0].type == "half*"


def test_defines_are_normalised_so_that_equal_kernels_are_equal() -> None:
    one = KernelSource.from_text(TEXT, "one", {"B": True, "A": 1.5, "TYPE": "short"})
    two = KernelSource.from_text(TEXT, "one", [("TYPE", "short"), ("A", "1.5"), ("B", 1)])
    assert one == two and hash(one) == hash(two) and one.digest == two.digest
    assert one.define_map == {"A": "1.5", "B": "1", "TYPE": "short"}
    assert str(one.parameters[0]) == "short* x"
    assert one != KernelSource.from_text(TEXT, "one")
    assert one.digest != KernelSource.from_text(TEXT, "one").digest


def test_own_text_and_own_file(tmp_path: Path) -> None:
    own = KernelSource.from_text(TEXT, "two", filename="cell.cu")
    assert own.path is None and own.filename == "cell.cu" and own.text == TEXT
    file = tmp_path / "mine.cu"
    file.write_text(TEXT, encoding="utf-8")
    mine = KernelSource(str(file), "two")
    assert mine.include_dirs == (tmp_path, kernels_dir()) and mine.filename == "mine.cu"
    assert [source.name for source in find_source(str(file))] == ["one", "two"]


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    import os

    file = tmp_path / "mine.cu"
    file.write_text(TEXT, encoding="utf-8")
    source = KernelSource(str(file), "two")
    before = source.digest
    file.write_text(TEXT.replace("two(int n)", "two(int n, int m)"), encoding="utf-8")
    os.utime(file, ns=(1, 1))
    assert len(source.parameters) == 2 and source.digest != before


def test_a_file_that_is_no_utf_8_says_so(tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_bytes("// one\n// \u6838\n__global__ void f(float* x) { }\n".encode("gbk"))
    for read in (lambda: KernelSource(str(file)), lambda: find_source(str(file))):
        with pytest.raises(InputError, match=r"k\.cu: got bytes that are no UTF-8 in line 2"):
            read()
    file.write_text("__global__ void f(float* x) { }\n", encoding="utf-8-sig")  # as Windows editors save it
    assert KernelSource(str(file)).name == "f" and KernelSource(str(file)).text.startswith("__global__")


def test_a_file_of_templates_lists_them(tmp_path: Path) -> None:
    file = tmp_path / "t.cu"
    file.write_text("template <int N> __global__ void f(float* x) { x[0] = N; }", encoding="utf-8")
    with pytest.raises(InputError, match=r"t\.cu, which has only templates: f<N>"):
        find_source(str(file))


def test_find_by_entry_file_or_stem() -> None:
    assert [s.name for s in find_source("gemv_row_w3")] == ["gemv_row_w3"]
    assert [s.name for s in find_source("gemv_row.cu")] == [s.name for s in find_source("gemv_row")]
    assert find_source("gemv_row_w3", {"OFFSET": 1})[0].define_map == {"OFFSET": "1"}
    with pytest.raises(InputError, match=r"'nothing'.*gemm_tiled_w4"):
        find_source("nothing")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.cu",), r"nowhere.*gemm_tiled_w4\.cu"),
        (("gemm_tiled_w4.cu", "gemm"), r"'gemm'.*gemm_tiled_w4"),
        (("gemv_row.cu",), r"None, but gemv_row\.cu has gemv_row_w4, gemv_row_w3"),
        (("gemm_tiled_w4.cu", None, {"A B": 1}), "'A B'"),
        (("gemm_tiled_w4.cu", None, {"A": [1]}), "defines\\['A'\\]"),
        (("gemm_tiled_w4.cu", None, {"A": "1\n2"}), "one line"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(arguments: tuple, words: str) -> None:
    with pytest.raises(InputError, match=words):
        KernelSource(*arguments)
