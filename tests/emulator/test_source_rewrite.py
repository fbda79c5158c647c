"""The rewrite of shared-memory declarations, and what is found in a kernel's text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.emulator.rewrite import rewrite
from labkit.emulator.source import active_tokens, entries
from labkit.emulator.tokens import tokenize


def registered(text: str) -> list[tuple[str, str]]:
    return re.findall(r'CUEMU_REG_SHARED\((\w+), "([^"]*)"\)', text)


def kernel(body: str) -> str:
    return "__global__ void k() {\n" + body + "\n}\n"


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("__shared__ half a[32][33];", [("a", "[32][33]")]),
        ("__shared__ float a[BM][BN + 1], b;", [("a", "[BM][BN + 1]"), ("b", "")]),
        ("__shared__ Tile<float, 32> t[2], u;", [("t", "[2]"), ("u", "")]),
        ("__shared__ lab::pair<int, int> p;", [("p", "")]),
        ("__shared__ alignas(16) unsigned char raw[64];", [("raw", "[64]")]),
        ("__shared__ __align__(16) uint4 raw[4];", [("raw", "[4]")]),
        ("alignas(16) static __shared__ float s[4];", [("s", "[4]")]),
        ("__shared__ __attribute__((aligned(16))) float s[4];", [("s", "[4]")]),
        ("volatile __shared__ unsigned long long v;", [("v", "")]),
        ("__shared__ volatile int v[N < 3 ? 1 : 2];", [("v", "[N < 3 ? 1 : 2]")]),
        ("__shared__ float* p, *q[2];", [("p", ""), ("q", "[2]")]),
        ("__shared__ struct { int a, b; } both;", [("both", "")]),
        ("__shared__\n  float\n  a[4];", [("a", "[4]")]),
        ("if (x) { __shared__ int a; }", [("a", "")]),
        ("for (;;) __shared__ int a;", [("a", "")]),
        ("// __shared__ float a[4];", []),
        ("/* __shared__ float a[4]; */", []),
        ('const char* s = "__shared__ float a[4];";', []),
        ('const char* s = R"x(__shared__ float a[4];)x";', []),
    ],
)
def test_shared_declarations_are_registered(declaration: str, expected: list[tuple[str, str]]) -> None:
    text = kernel(declaration)
    out = rewrite(text)
    assert registered(out) == expected
    assert out.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("extern __shared__ float x[];", "float* const x = reinterpret_cast<float*>(cuemu_dyn_shared());"),
        (
            "extern __shared__ __align__(16) unsigned char x[];",
            "unsigned char* const x = reinterpret_cast<unsigned char*>(cuemu_dyn_shared());",
        ),
        (
            "extern __shared__ half x[][64];",
            "half (* const x)[64] = reinterpret_cast<half (*)[64]>(cuemu_dyn_shared());",
        ),
        ("__shared__ extern T x[];", "T* const x = reinterpret_cast<T*>(cuemu_dyn_shared());"),
    ],
)
def test_dynamic_shared_memory_becomes_a_pointer(declaration: str, expected: str) -> None:
    assert rewrite(kernel(declaration)) == kernel(expected)


def test_file_scope_declarations() -> None:
    text = (
        "__shared__ float tile[32];\nextern __shared__ int dyn[];\n__device__ int hits, seen[4] = {1, 2};\n"
        "static __constant__ float lut[2] = {1.f, 2.f};\n__device__ int helper(int x) { return x; }\n"
        "__global__ void k(int* o) { o[0] = hits; }\n"
    )
    lines = rewrite(text).splitlines()
    assert lines[0] == "__shared__ float tile[32];"
    assert lines[1].startswith("static int* const dyn = ")
    assert lines[2].endswith("CUEMU_REG_DEVICE(hits) CUEMU_REG_DEVICE(seen)")
    assert lines[3].split() == ["__constant__", "float", "lut[2]", "=", "{1.f,", "2.f};"]
    assert "REG" not in lines[4]
    assert registered(lines[5]) == [("tile", "[32]")]


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda n: (
        n not in {"int", "half", "float", "char", "short", "long", "if", "do", "for", "auto", "bool", "void"}
        and n not in {"enum", "union", "double", "struct", "class", "const", "signed"}
    )
)
DIMS = st.lists(st.sampled_from(["4", "BM", "BN + 1", "2 * (N)", "sizeof(int)"]), max_size=3)
TYPES = st.sampled_from(["float", "half", "unsigned char", "uint4", "lab::Tile<float, 4>", "volatile int"])
BLANKS = st.sampled_from([" ", "  ", "\n", " /* , ; */ ", " // [x]\n"])


@settings(max_examples=150, deadline=None)
@given(
    TYPES,
    st.lists(st.tuples(NAMES, DIMS), min_size=1, max_size=4, unique_by=lambda d: d[0]),
    st.lists(BLANKS, min_size=4, max_size=4),
    st.sampled_from(["", "static ", "alignas(16) "]),
)
def test_any_declaration_keeps_lines_and_registers_every_name(
    type_text: str, declared: list[tuple[str, list[str]]], blanks: list[str], prefix: str
) -> None:
    comma = "," + blanks[2]
    names = comma.join(name + "".join(f"[{d}]" for d in dims) for name, dims in declared)
    text = kernel(f"{prefix}__shared__{blanks[0]}{type_text}{blanks[1]}{names}{blanks[3]}; use();")
    out = rewrite(text)
    assert out.count("\n") == text.count("\n")
    assert [name for name, _ in registered(out)] == [name for name, _ in declared]
    # The other lines are untouched.
    assert out.splitlines()[0] == text.splitlines()[0] and out.splitlines()[-1] == text.splitlines()[-1]
    assert "use();" in out


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab_(){}[]<>;:,\"'\\/*#\n =+019R", max_size=80))
def test_any_text_is_taken(text: str) -> None:
    """Half-written cells must give a compile error, not a crash of the rewriter."""
    source = "__global__ void k(int* a) {\n__shared__ " + text
    assert rewrite(source).count("\n") == source.count("\n")
    entries(source)
    assert all(source[t.start : t.end] == t.text for t in tokenize(source))


def test_kernels_and_parameters() -> None:
    text = """
    // __global__ void no(int a) {}
    extern "C" __global__ void __launch_bounds__(256, 2) gemm(
        const half* __restrict__ a, unsigned char const* packed, float (&x)[3],
        unsigned long long n = 3, int[], bool flag, lab::View<float, 2> view, int) { }
    __global__ void later(int x);
    __launch_bounds__(32) __global__ void first() { }
    namespace lab { namespace inner { template <int N> __global__ void deep(float* x) { } } }
    __device__ void helper(int y) { }
    """
    found = {entry.name: entry for entry in entries(text)}
    assert list(found) == ["gemm", "first", "lab::inner::deep"]
    assert [p.name for p in found["gemm"].parameters] == [
        "a", "packed", "arg2", "n", "arg4", "flag", "view", "arg7",
    ]  # fmt: skip
    assert found["gemm"].parameters[0].type == "const half*"
    assert found["gemm"].parameters[6].type == "lab::View<float,2>"
    assert found["gemm"].line == 3
    assert found["lab::inner::deep"].template and not found["gemm"].template
    assert found["first"].parameters == ()


def test_untaken_branches_are_left_out() -> None:
    text = """
    #if 0
    __global__ void off() { }
    #endif
    #define OFFSET 2
    __global__ void k(const half* x
    #if OFFSET == 1
        , const half* offset
    #elif OFFSET >= 2 && !defined(NO_OFFSET)
        , const float* offset
    #endif
    #ifdef BIAS
        , const half* bias
    #endif
    ) { }
    """
    (found,) = entries(text)
    assert [p.type + " " + p.name for p in found.parameters] == ["const half* x", "const float* offset"]
    (found,) = entries(text, {"BIAS": 1, "NO_OFFSET": ""})
    assert [p.name for p in found.parameters] == ["x", "bias"]


def test_unknown_conditions_count_as_true() -> None:
    words = [t.text for t in active_tokens('#if FUNCTION(3) + "x"\nyes\n#else\nno\n#endif\nend')]
    assert words == ["yes", "end"]
