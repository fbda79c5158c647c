"""Compiling: once, cached, safe against damage and other processes, with any compiler there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit import emulator
from labkit.emulator import build, lines, toolchain
from labkit.emulator.toolchain import Compiler
from labkit.errors import InputError

TEXT = "__global__ void fill(int* o, int value) { o[threadIdx.x] = value; }\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which has the runtime already: that takes seconds to compile."""
    emulator.compile(TEXT, isolate=False)
    shared = build.cache_dir() / "emulator"
    own = tmp_path / "缓存 with spaces"
    (own / "emulator").mkdir(parents=True)
    compiler = toolchain.find()
    for trace in (False,):
        runtime = build._runtime(compiler, trace=trace)
        target = own / "emulator" / runtime.library.parent.name
        target.mkdir()
        for file in runtime.library.parent.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    assert shared != own
    monkeypatch.setenv("LABKIT_CACHE", str(own))
    return own / "emulator"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands given to the compiler."""
    commands: list[str] = []
    original = Compiler.run

    def run(self: Compiler, command: list[str], folder: Path, *, seconds: float) -> tuple[int, str]:
        commands.append(" ".join(command))
        return original(self, command, folder, seconds=seconds)

    monkeypatch.setattr(Compiler, "run", run)
    return commands


def filled(kernel: emulator.EmulatedKernel) -> list[int]:
    out = np.zeros(4, np.int32)
    kernel((1,), (4,), [out, 7])
    return out.tolist()


def test_kernels_of_one_text_share_a_library(cache: Path, runs: list[str]) -> None:
    text = TEXT + "__global__ void twice(int* o) { o[threadIdx.x] *= 2; }\n"
    out = np.zeros(4, np.int32)
    emulator.compile(text, "fill", isolate=False)((1,), (4,), [out, 7])
    made = len(runs)
    emulator.compile(text, "twice", isolate=False)((1,), (4,), [out])
    assert out.tolist() == [14] * 4
    assert len(runs) == made


def test_only_the_first_build_is_made_at_once(cache: Path) -> None:
    kernel = emulator.compile(TEXT, isolate=False, first="trace")
    assert set(kernel._builds) == {(True, False)}
    assert filled(kernel) == [7] * 4
    with pytest.raises(InputError, match=r'first.*"fast" or "trace"'):
        emulator.compile(TEXT, first="both")


def test_second_compile_asks_no_compiler(cache: Path, runs: list[str]) -> None:
    kernel = emulator.compile(TEXT, isolate=False)
    assert len(runs) == 2  # compile and link
    assert filled(kernel) == [7] * 4
    build._loaded.clear()
    assert filled(emulator.compile(TEXT, isolate=False)) == [7] * 4
    assert len(runs) == 2
    emulator.compile(TEXT + "//", isolate=False)
    emulator.compile(TEXT, defines={"X": 1}, isolate=False)
    assert len(runs) == 6


def test_changed_header_is_seen(cache: Path, tmp_path: Path, runs: list[str]) -> None:
    header = tmp_path / "value.cuh"
    text = '#include "value.cuh"\n' + TEXT.replace("= value", "= VALUE + value * 0")
    for value in (1, 2):
        header.write_text(f"#define VALUE {value}\n", encoding="utf-8")
        kernel = emulator.compile(text, include_dirs=[tmp_path], isolate=False)
        assert filled(kernel) == [value] * 4
    assert len(runs) == 4


@pytest.mark.parametrize("damage", ["cut", "garbage", "no meta", "no library", "empty folder"])
def test_damaged_entry_is_built_again(cache: Path, runs: list[str], damage: str) -> None:
    kernel = emulator.compile(TEXT, isolate=False)
    library = kernel._built(trace=False).library
    meta = library.parent / "meta.json"
    if damage == "cut":
        library.write_bytes(library.read_bytes()[:5000])
    elif damage == "garbage":
        library.write_bytes(b"x" * library.stat().st_size)
    elif damage == "no meta":
        meta.unlink()
    elif damage == "no library":
        library.unlink()
    else:
        for file in library.parent.iterdir():
            file.unlink()
    build._loaded.clear()
    assert filled(emulator.compile(TEXT, isolate=False)) == [7] * 4
    assert len(runs) == 4
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_two_processes_at_once(cache: Path) -> None:
    code = (
        "from labkit import emulator; import numpy as np; o = np.zeros(4, np.int32); "
        f"k = emulator.compile({TEXT!r}, isolate=False); k((1,), (4,), [o, 7]); print(o.tolist())"
    )
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") for _ in range(2)]
    assert [process.communicate()[0].strip() for process in processes] == ["[7, 7, 7, 7]"] * 2
    names = sorted(path.name.split("-")[0] for path in cache.iterdir())
    assert names == ["kernel", "runtime"]


def test_old_builds_are_pruned(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_KEPT", {"kernel": 2})
    kernels = [emulator.compile(TEXT + "/" * 2 + str(i), isolate=False) for i in range(3)]
    assert len(list(cache.glob("kernel-*"))) <= 2
    assert [filled(kernel) for kernel in kernels] == [[7] * 4] * 3  # a pruned one is built again


def test_no_compiler_names_the_line_that_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_zig", lambda: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    toolchain._find.cache_clear()
    with pytest.raises(InputError, match=r"pip install .*ziglang"):
        emulator.compile(TEXT)
    ok, text, fix = toolchain.describe()
    assert not ok and "no C++ compiler" in text and "ziglang" in fix
    toolchain._find.cache_clear()


def test_wished_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LABKIT_CXX", str(tmp_path / "none"))
    with pytest.raises(InputError, match="LABKIT_CXX"):
        toolchain.find()
    assert not toolchain.describe()[0]
    monkeypatch.delenv("LABKIT_CXX")
    ok, text, fix = toolchain.describe()
    assert ok and text and not fix


def test_compiler_run_has_a_time_limit(tmp_path: Path) -> None:
    code, _ = toolchain.find().run(
        [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, seconds=0.2
    )
    assert code == -1


def test_zig_builds_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel alone is enough: a kernel with shared memory, fast and traced, with its lines."""
    pytest.importorskip("ziglang")
    monkeypatch.setenv("LABKIT_CXX", "zig")
    text = """
    __global__ void reverse(int* o) {
        __shared__ int s[64];
        s[threadIdx.x] = threadIdx.x;
        __syncthreads();
        o[threadIdx.x] = s[63 - threadIdx.x];
    }
    """
    kernel = emulator.compile(text, isolate=False)
    out = np.zeros(64, np.int32)
    kernel((1,), (64,), [out])
    np.testing.assert_array_equal(out, np.arange(63, -1, -1))
    trace = kernel.trace((1,), (64,), [out])
    assert trace.ok, trace.report()
    assert [(row.line, row.kind, row.buffer) for row in trace.rows] == [
        (4, "write", "s"),
        (6, "read", "s"),
        (6, "write", "o"),
    ]


@pytest.mark.parametrize("target", ["x86_64-windows-gnu", "aarch64-linux-gnu"])
def test_runtime_compiles_for_other_machines(target: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    compiler = toolchain.cross(target)
    assert compiler is not None
    source = build.HERE / "runtime" / "emulator.cpp"
    flags = [*compiler.runtime_flags(trace=True), f"-I{build.HERE / 'include'}"]
    command = [*compiler.command, *flags, "-c", str(source), "-o", "runtime.o"]
    code, output = compiler.run(command, tmp_path, seconds=300)
    assert code == 0, output
    assert (tmp_path / "runtime.o").stat().st_size > 10_000


def test_exports_are_not_lines_of_the_kernel() -> None:
    assert lines.EXPORTS in build._translation_unit(build.Request(TEXT, "kernel.cu", ("fill",), {}, ()))
