"""Addresses to lines, and names that are no trouble."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit import emulator
from labkit.emulator import build, lines, toolchain

TEXT = """
__device__ __forceinline__ int inner(int x) {
    return x * 3;
}
__device__ __noinline__ void outer(int* o, int x) {
    o[0] = inner(x);
}
__global__ void k(int* o) {
    outer(o, 5);
    o[1] = inner(2);
}
"""


def test_lines_of_functions() -> None:
    trace = emulator.compile(TEXT, isolate=False).trace((1,), (1,), [np.zeros(2, np.int32)])
    assert [(row.line, row.kind) for row in trace.rows] == [(6, "write"), (10, "write")]


@pytest.mark.parametrize("filename", ["kernel.cu", "我的 kernel.cu", 'odd "name".cu', "cell 3"])
def test_file_names(filename: str) -> None:
    kernel = emulator.compile(TEXT, filename=filename, isolate=False)
    trace = kernel.trace((1,), (1,), [np.zeros(1, np.int32)])
    (fault,) = trace.faults
    assert (fault.file, fault.line) == (filename, 10) and "line 10 writes" in fault.message
    with pytest.raises(emulator.CompileError) as caught:
        emulator.compile(TEXT.replace("int x)", "in x)"), filename=filename)
    assert str(caught.value).startswith(f"{filename} line 2: ")


def test_line_of_an_included_function_that_is_not_inlined(tmp_path: Path) -> None:
    folder = tmp_path / "带 spaces"
    folder.mkdir()
    (folder / "mine.cuh").write_text(
        "__device__ __attribute__((noinline)) void store(int* o) {\n    o[9] = 1;\n}\n", encoding="utf-8"
    )
    text = '#include "mine.cuh"\n__global__ void k(int* o) { store(o); }'
    trace = emulator.compile(text, include_dirs=[folder]).trace((1,), (1,), [np.zeros(4, np.int32)])
    (fault,) = trace.faults
    assert (fault.file, fault.line) == ("mine.cuh", 2)
    assert "mine.cuh line 2 writes o[9]" in fault.message and fault.message.endswith("    2 |     o[9] = 1;")


def test_info_is_kept_beside_the_library() -> None:
    kernel = emulator.compile(TEXT, isolate=False)
    built = kernel._built(trace=True)
    again = lines.read(built.library, "kernel.cu", "labkit_kernel.cpp")
    for key in ("anchor", "files"):
        assert again[key] == built.info[key]
    assert [list(row) for row in again["rows"]] == [list(row) for row in built.info["rows"]]
    table = lines.LineTable(built.info, "kernel.cu")
    address = next(
        row[0] for row in built.info["rows"] if row[2] == 10 and built.info["files"][row[1]] == "kernel.cu"
    )
    assert table.at(address + 1) == ("kernel.cu", 10)
    assert table.at(0) == ("", None) and table.at(1 << 60) == ("", None)


def test_fast_and_traced_fault_name_the_same_line() -> None:
    text = "__global__ void k(float* o, int n) {\n  float v = o[0];\n  o[n + 100000] = v;\n}\n"
    kernel = emulator.compile(text)
    with pytest.raises(emulator.KernelFault) as caught:
        kernel((1,), (1,), [torch.zeros(4), 1])
    trace = kernel.trace((1,), (1,), [torch.zeros(4), 1])
    assert caught.value.line == trace.faults[-1].line == 3


def test_works_in_any_locale(tmp_path: Path) -> None:
    """Messages of the compiler and comments of the kernel under the C locale."""
    text = "// 你好\n__global__ void k(int* o) { o[0] = 1; /* ü */ }"
    code = (
        "import numpy as np; from labkit import emulator; o = np.zeros(1, np.int32)\n"
        f"k = emulator.compile({text!r}, filename='核.cu'); k((1,), (1,), [o])\n"
        "print(o[0], k.trace((1,), (1,), [o]).ok)\n"
        f"try:\n    emulator.compile({text!r} + 'x', filename='核.cu')\n"
        "except emulator.CompileError as error:\n    print(ascii(str(error)[:10]))\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.stdout.split()[:2] == [b"1", b"True"], done.stderr.decode("utf-8", "replace")
    assert b"\\u6838.cu" in done.stdout


def test_windows_library_has_lines(tmp_path: Path) -> None:
    """DWARF in a PE file, as zig makes it for Windows."""
    pytest.importorskip("ziglang")
    compiler = toolchain.cross("x86_64-windows-gnu")
    assert compiler is not None
    (tmp_path / "k.cpp").write_text(
        '#line 1 "kernel.cu"\nextern "C" __declspec(dllexport)\nvoid cuemu_launch(int* o) { o[0] = 1; }\n',
        encoding="utf-8",
    )
    options = f"-target {compiler.target} -g -gdwarf-4 -fno-sanitize=undefined -c k.cpp -o k.o"
    command = [*compiler.command, *options.split()]
    assert compiler.run(command, tmp_path, seconds=120) == (0, "")
    options = "lld-link /dll /noentry /nodefaultlib /debug:dwarf k.o /out:k.dll"
    link = [*compiler.command[:-1], *options.split()]
    code, output = compiler.run(link, tmp_path, seconds=120)
    assert code == 0, output
    info = lines.read(tmp_path / "k.dll", "kernel.cu", "k.cpp")
    assert info["anchor"] > 0 and info["files"] == ["kernel.cu"]
    table = lines.LineTable(info, "kernel.cu")
    assert table.at(info["anchor"] + 1) == ("kernel.cu", 2)


def test_builds_are_named_by_what_they_depend_on() -> None:
    one, two = (emulator.compile(TEXT, defines={"X": x}, isolate=False)._built(trace=False) for x in (1, 2))
    assert one.library.parent != two.library.parent
    assert one.copy(1) != one.library and one.copy(1).read_bytes() == one.library.read_bytes()
    assert build.copies() >= 1
