"""What a student reads when the compiler does not take the text."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from labkit import emulator
from labkit.emulator import build
from labkit.errors import InputError


def error(text: str, **options: object) -> emulator.CompileError:
    with pytest.raises(emulator.CompileError) as caught:
        emulator.compile(text, **options)  # type: ignore[arg-type]
    assert isinstance(caught.value, InputError)
    message = str(caught.value)
    assert "cuemu" not in message and "/labkit/" not in message, message
    return caught.value


def test_message_shows_the_line_and_the_column() -> None:
    found = error("\n__global__ void k(int* o) {\n    o[0] = missing + 1;\n}\n")
    assert found.line == 3
    first, *rest = str(found).splitlines()
    assert first.startswith("kernel.cu line 3: ") and "'missing'" in first
    assert rest == [
        "    3 |     o[0] = missing + 1;",
        "      |            ^",
    ]


def test_at_most_three_errors_one_a_line() -> None:
    body = "".join(f"  a{i} = b{i} + c{i};\n" for i in range(9))
    found = error("__global__ void k() {\n" + body + "}\n")
    assert [d.line for d in found.diagnostics] == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("__global__ void k(int* o) {\n  float2 v = make_float2(1);\n}", 2, "make_float2"),
        ('__global__ void k(float* o) {\n  o[0] = __shfl_sync(0xffffffff, "a");\n}', 2, "__shfl_sync"),
        ('__global__ void k(float* o) {\n  atomicAdd(o, "x");\n}', 2, "atomicAdd"),
        ("__global__ void k(float* o) {\n  static_assert(sizeof(int) == 8);\n}", 2, "assert"),
        ('#include "nowhere.cuh"\n__global__ void k() {}', 1, "nowhere.cuh"),
        ("#include <cub/cub.cuh>\n__global__ void k() {}", 1, "CUB is not emulated"),
        ("__global__ void k(int* o) {\n  if (o) {\n    o[0] = 1;\n}\n", 1, "never closed"),
        ("void host() {\n  k<<<1, 2>>>();\n}\n__global__ void k() {}", 2, "launched from Python"),
        ("__global__ void k(const int* o) {\n  o[0] = 1;\n}", 2, ""),
        ("\n__global__ int k(int* o) { return 1; }", 2, "k does not return void"),
    ],
)
def test_errors_are_at_the_students_line(text: str, line: int, words: str) -> None:
    found = error(text)
    assert found.line == line
    assert words in str(found)


def test_column_is_left_out_where_the_line_was_rewritten() -> None:
    found = error("__global__ void k(float* o) {\n  __shared__ int s[3]; o[0] = y;\n}")
    assert found.line == 2 and found.diagnostics[0].column is None


def test_column_counts_characters() -> None:
    found = error("__global__ void k(float* o) {\n  /* 你好 */ o[0] = y;\n}")
    column = found.diagnostics[0].column
    assert column is not None and found.diagnostics[0].source[column - 1] == "y"


@pytest.mark.parametrize(
    ("text", "entry", "words"),
    [
        ("int x;", None, "no __global__ function"),
        ("__global__ void a() {}\n__global__ void b() {}", None, 'several kernels: a, b.*entry="a"'),
        ("__global__ void a() {}", "c", "no kernel is called c.*one of a"),
        ("template <int N> __global__ void a() {}", None, "a is a template"),
        ("template <int N> __global__ void a() {}", "a", "a is a template"),
    ],
)
def test_choice_of_the_kernel(text: str, entry: str | None, words: str) -> None:
    found = error(text, entry=entry)
    assert re.search(words, str(found).replace("\n", " "))


def test_undefined_function() -> None:
    text = "__device__ float f(float);\n__global__ void k(float* o) { o[0] = f(1.f); }"
    assert "f(float) is called but not defined" in str(error(text))


def test_runaway_template(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "template <int N, unsigned M> struct A {\n"
        "  static const unsigned v = A<N - 1, 2 * M>::v + A<N - 1, 2 * M + 1>::v;\n};\n"
        "template <unsigned M> struct A<0, M> { static const unsigned v = M; };\n"
        "__global__ void k(int* o) { o[0] = A<28, 1>::v; }"
    )
    monkeypatch.setattr(build, "COMPILE_SECONDS", 1.0)
    assert "more than 1 s" in str(error(text))


def test_error_in_an_included_file(tmp_path: Path) -> None:
    (tmp_path / "mine.cuh").write_text("__device__ int f() { return nothing; }\n", encoding="utf-8")
    found = error('\n#include "mine.cuh"\n__global__ void k(int* o) { o[0] = f(); }', include_dirs=[tmp_path])
    assert found.line == 2 and "'nothing'" in str(found)


def test_errors_survive_pickling() -> None:
    found = error("__global__ void k() {\n  x = 1;\n}")
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == str(found) and again.line == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"time_limit": 0}, "time_limit"), ({"include_dirs": ["/nowhere"]}, "include_dirs")],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        emulator.compile("__global__ void k() {}", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        ("threadIdx.x = 3;", "threadIdx, blockIdx, blockDim and gridDim cannot be changed"),
        ("__syncthread();", "the barrier is __syncthreads()"),
        ("o[0] = __shfl_down(o[0], 1);", "take a mask first"),
        ("__shared__ float s[n]; s[0] = 1;", "extern __shared__ float name[];"),
        ("__shared__ float s[n == 4 ? 4 : 8] = {0};", "let a thread write it"),
        ("half h; h = h * 1.5f;", "convert first: __half2float(h)"),
        ("o[0] = 1；  // 分号", "type ; instead of ；"),
        ("float4 v[2] = {1.f, 2.f};", "its own braces"),
        ('asm volatile("mov.u32 %0, %%laneid;" : "=r"(n));', "call a function of ptx.cuh"),
        ("missing(1);  // ；", ""),
    ],
)
def test_advice_for_common_mistakes(body: str, advice: str) -> None:
    found = error("#include <cuda_fp16.h>\n__global__ void k(float* o, int n) {\n" + body + "\n}\n")
    assert advice in found.fix and bool(advice) == bool(found.fix), str(found)
    assert found.line in (3, 4)


def test_a_missing_semicolon() -> None:
    """g++ stumbles over the next line and clang over the end of this one."""
    found = error("__global__ void k(float* o) {\nint i = threadIdx.x\no[i] = 1;\n}\n")
    assert found.line == 2 or "';' missing at the end of the line above line 3" in found.fix


def test_a_missing_semicolon_before_a_barrier() -> None:
    found = error("__global__ void k(float* o) {\no[0] = sqrtf(o[1])\n__syncthreads();\n}\n")
    assert found.line == 2 or "';' missing at the end of the line above line 3" in found.fix


def test_mark_at_the_start_of_a_file() -> None:
    emulator.compile("\ufeff__global__ void k() {}")


@pytest.mark.parametrize("wish", ["/bin/ls", "'unclosed", "no-such-compiler -x"])
def test_a_compiler_that_is_none(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CXX", wish)
    with pytest.raises(InputError, match=r"LABKIT_CXX: .*expected a C\+\+ compiler that runs"):
        emulator.compile("__global__ void k() {}")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cache folder: .*cannot be written.*LABKIT_CACHE"):
        emulator.compile("__global__ void k() { /* not in any cache */ }")


def test_a_full_disk_is_no_mistake_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    full = "as: can't write 8 bytes to section .text of kernel.o: 'No space left on device'"
    monkeypatch.setattr(build.Compiler, "run", lambda *_, **__: (1, full))
    with pytest.raises(InputError, match=r"cache folder: .*no space is left"):
        emulator.compile("__global__ void k() { /* not in any cache, either */ }")
