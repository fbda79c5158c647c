"""Kernel declarations are read as the compiler reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.emulator import source as emulator_source
from labkit.errors import InputError
from labkit.kernels.preprocess import preprocess
from labkit.kernels.signature import Parameter, convert_scalar, entries, find_entry
from labkit.kernels.source import kernel_files, kernels_dir

TEXT = """\
#include "types.cuh"
// __global__ void commented(int a) {}
/* __global__ void also(int a) {} */
const char* text = "__global__ void quoted(int a) {";
#ifdef WIDE
typedef uint4 vec;
#else
using vec = unsigned int;
#endif
#ifndef ACT
#define ACT half
#endif
__global__ void later(int n);
extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm(
    const ACT* __restrict__ x, vec const *w, float y[], void* scratch, const float* const* table,
    unsigned long long int n, int64_t stride, const size_t count, uint8_t flags = 3, bool fast = true) {
  if (n) return;
}
template <typename T, int BK = 32, bool FAST = false>
static __global__ __launch_bounds__(64) void walk(T* out, const T *__restrict in, int) { }
__global__ void nothing(void) {}
#if defined(EXTRA) && EXTRA > 1
__global__ void extra(__nv_bfloat16 v) {}
#elif EXTRA
__global__ void one(unsigned char c) {}
#else
__global__ void none(float2* p, half2* q) {}
#endif
"""


def found(**defines: object) -> dict[str, list[str]]:
    return {e.name: [str(p) for p in e.parameters] for e in entries(TEXT, defines)}


def test_all_kernels_and_only_those_that_are_compiled() -> None:
    assert list(found()) == ["gemm", "walk", "nothing", "none"]
    assert list(found(EXTRA=1)) == ["gemm", "walk", "nothing", "one"]
    assert list(found(EXTRA=2)) == ["gemm", "walk", "nothing", "extra"]


def test_parameters_are_canonical() -> None:
    assert found()["gemm"] == [
        "const half* x",
        "const unsigned* w",
        "float* y",
        "void* scratch",
        "float** table",
        "unsigned long long n",
        "long long stride",
        "unsigned long long count",
        "unsigned char flags",
        "bool fast",
    ]
    assert found()["nothing"] == []
    assert found(WIDE=1, ACT="int8_t")["gemm"][:2] == ["const signed char* x", "const uint4* w"]


def test_facts_of_an_entry() -> None:
    gemm, walk, nothing, _ = entries(TEXT, {"THREADS": "4 * 64"})
    assert (gemm.extern_c, gemm.max_threads, gemm.line) == (True, 256, 14)
    assert (walk.template, walk.max_threads, walk.extern_c) == (("T", "BK", "FAST"), 64, False)
    assert nothing.max_threads is None
    assert entries(TEXT)[0].max_threads is None  # THREADS is not defined


def test_sizes() -> None:
    sizes = [p.size for p in find_entry(TEXT, "gemm").parameters]
    assert sizes == [2, 4, 4, None, 8, 8, 8, 8, 1, 1]
    assert [p.size for p in find_entry(TEXT, "none").parameters] == [8, 4]
    assert find_entry(TEXT, "gemm", {"WIDE": 1}).parameters[1].size == 16


def test_templates_are_asked_for_with_their_arguments() -> None:
    walk = find_entry(TEXT, "walk<half, 64, true>")
    assert walk.name == "walk<half, 64, true>"
    assert [str(p) for p in walk.parameters] == ["half* out", "const half* in", "int arg2"]
    with pytest.raises(InputError, match="walk<T, BK, FAST>"):
        find_entry(TEXT, "walk")
    with pytest.raises(InputError, match="no template"):
        find_entry(TEXT, "gemm<3>")


def test_headers_give_macros_and_types(tmp_path: Path) -> None:
    (tmp_path / "shape.cuh").write_text(
        "#pragma once\n#define TILE 32\ntypedef struct { int a; } pair;\ntypedef short code;\n", "utf-8"
    )
    text = '#include "shape.cuh"\n__global__ void __launch_bounds__(TILE * 4) f(const code* c, pair p) {}'
    entry = find_entry(text, include_dirs=[tmp_path])
    assert entry.max_threads == 128
    assert [p.size for p in entry.parameters] == [2, None]


@pytest.mark.parametrize(
    "text",
    [
        "#define WIDE\t1\n#if WIDE\nYES\n#endif",
        "#ifdef NO\nA\n#elifdef __CUDACC__\nYES\n#else\nB\n#endif",
        "#ifdef __CUDACC__\nYES\n#elifndef NO\nA\n#endif",
        "#if \\\r\n1\r\nYES\r\n#else\r\nA\r\n#endif",
        "// all of this \\\nA\nYES",
        'R"(\n#if 0\n)" YES R"(\n#else\n)"',
        "#\n#if ~0 == -1\nYES\n#endif",
        "#if 1 << 999999999999\nYES\n#endif",
        "#if " + "(" * 5000 + "1" + ")" * 5000 + "\nYES\n#endif",
        "#if 0\n#if 1\nA\n#else\nA\n#endif\n#elif 1\nYES\n#endif",
    ],
)
def test_lines_that_the_compiler_sees(text: str) -> None:
    code = preprocess(text).code
    assert code.split() == ["YES"]
    assert len(code) == len(text) and code.index("YES") == text.index("YES")


def test_the_emulator_finds_the_same_kernels_and_parameters() -> None:
    more = Path(__file__).parents[1] / "emulator" / "kernels"
    files = [kernels_dir() / name for name in kernel_files()] + sorted(more.glob("*.cu"))
    assert len(files) > 8
    for file in files:
        text = file.read_text(encoding="utf-8")
        ours = {
            entry.name: [(one.name, one.pointer) for one in entry.parameters]
            for entry in entries(text, include_dirs=(kernels_dir(),))
        }
        theirs = {
            entry.name: [(one.name, one.is_pointer) for one in entry.parameters]
            for entry in emulator_source.entries(text)
        }
        assert ours == theirs, file.name


def test_unknown_names_list_what_exists() -> None:
    with pytest.raises(InputError, match="gemm, walk, nothing, none"):
        find_entry(TEXT, "gem")
    with pytest.raises(InputError, match=r"None, but kernel\.cu has gemm"):
        find_entry(TEXT)
    with pytest.raises(InputError, match="no kernel"):
        find_entry("int x;")


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        ("int", -5, -5),
        ("unsigned", 2**32 - 1, 2**32 - 1),
        ("long long", -(2**63), -(2**63)),
        ("bool", True, True),
        ("int", True, 1),
        ("float", 3, 3.0),
        ("float", float("inf"), float("inf")),
        ("half", 65504, 65504.0),
        ("double", 1e300, 1e300),
    ],
)
def test_scalars_become_the_declared_type(kind: str, value: object, result: object) -> None:
    converted = convert_scalar(Parameter("n", kind), value)
    assert converted == result and type(converted) is type(result)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 2**31),
        ("unsigned", -1),
        ("int", 1.0),
        ("int", "3"),
        ("bool", 2),
        ("float", 1e39),
        ("half", 65536),
        ("float", "x"),
        ("uint4", 3),
        ("unsigned long long", 2**64),
        ("int", None),
    ],
)
def test_scalars_that_do_not_fit_are_refused_by_name(kind: str, value: object) -> None:
    with pytest.raises(InputError, match=r"argument count.*" + kind):
        convert_scalar(Parameter("count", kind), value)
