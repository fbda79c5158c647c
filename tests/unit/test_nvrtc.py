"""Compiling with NVRTC: errors name the kernel's line, results are kept, threads do not mix."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labkit.errors import InputError
from labkit.kernels import nvrtc
from labkit.kernels.source import KernelSource

SCALE = """\
#include <cuda_fp16.h>
#include "types.cuh"
extern "C" __global__ void scale(half* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __hmul(x[i], __float2half(FACTOR));
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubin"


def scale(factor: str = "2.0f") -> KernelSource:
    return KernelSource.from_text(SCALE, defines={"FACTOR": factor})


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_compile", refuse)


@pytest.mark.parametrize("given", ["sm_86", "SM86", 86, "8.6", (8, 6), "86"])
def test_architecture_in_any_spelling(given: object) -> None:
    assert nvrtc.arch_name(given) == "sm_86" and nvrtc.arch_number(given) == 86


def test_architectures_with_three_digits_or_a_letter() -> None:
    assert [nvrtc.arch_name(a) for a in ("12.0", (12, 0), 120, "sm_90a")] == ["sm_120"] * 3 + ["sm_90a"]
    assert nvrtc.arch_number("sm_90a") == 90


@pytest.mark.parametrize("given", ["ampere", "", 8, None, "compute_86", (8, 6, 1)])
def test_other_words_are_no_architecture(given: object) -> None:
    with pytest.raises(InputError, match="arch"):
        nvrtc.arch_name(given)


def test_unknown_architecture_lists_what_the_library_knows() -> None:
    with pytest.raises(InputError, match=r"sm_77.*sm_86.*nvidia-cuda-nvrtc"):
        nvrtc.compile_cubin(scale(), 77)


def test_target_is_the_card_s_own_or_the_nearest_lower_one() -> None:
    assert nvrtc.target_for((8, 6)) == "sm_86"
    assert nvrtc.target_for((8, 8)) in ("sm_87", "sm_88")  # sm_88 is known from CUDA 13 on
    with pytest.raises(InputError, match="arch"):
        nvrtc.target_for((42, 0))


def test_result_is_a_cubin_of_the_text_with_its_defines() -> None:
    two, three = nvrtc.compile_cubin(scale()), nvrtc.compile_cubin(scale("3.0f"))
    assert two.cubin[:4] == b"\x7fELF" and two.symbol == "scale" and two.arch == "sm_86"
    assert "Used" in two.log and two.nvrtc.count(".") == 1
    assert two.digest != three.digest


def test_mangled_and_template_names_are_found() -> None:
    text = "template <typename T, int N> __global__ void fill(T* x) { x[threadIdx.x] = T(N); }"
    plain = "__global__ void fill(float* x) { x[threadIdx.x] = 1; }"
    assert nvrtc.compile_cubin(KernelSource.from_text(plain)).symbol.startswith("_Z4fill")
    seven = nvrtc.compile_cubin(KernelSource.from_text(text, "fill<float, 7>"))
    eight = nvrtc.compile_cubin(KernelSource.from_text(text, "fill<int, 8>"))
    assert seven.symbol.startswith("_Z4fill") and seven.symbol != eight.symbol


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        (3, "    x[0] = missing;", "missing"),
        (2, "int broken = ;", "expected an expression"),
        (3, "    x[0] = 1", "expected"),
    ],
)
def test_error_names_the_student_s_own_line(line: int, text: str, words: str) -> None:
    kernel = ["__global__ void wrong(float* x) {", "    float y = 0;", "    x[0] = y;", "}"]
    kernel[line - 1] = text
    source = KernelSource.from_text("\n".join(kernel), filename="cell.cu")
    with pytest.raises(nvrtc.KernelCompileError, match=words) as caught:
        nvrtc.compile_cubin(source)
    assert isinstance(caught.value, InputError)
    assert caught.value.line in (line, line + 1)  # a missing semicolon shows on the next line
    assert f"cell.cu line {caught.value.line}" in str(caught.value)
    assert words in caught.value.log


def test_error_in_a_header_says_which() -> None:
    text = '#include "nowhere.cuh"\n__global__ void f(int n) {}'
    with pytest.raises(nvrtc.KernelCompileError, match=r"kernel\.cu line 1.*nowhere\.cuh"):
        nvrtc.compile_cubin(KernelSource.from_text(text))


def test_second_time_comes_from_the_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.compile_cubin(scale())
    assert len(list(cache.glob("*.json"))) == 1
    no_compiler(monkeypatch)
    assert nvrtc.compile_cubin(scale()) == first


def test_all_kernels_of_a_file_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'extern "C" __global__ void one(int* x) {*x = 1;}\nextern "C" __global__ void two(int* x) {*x = 2;}'
    )
    first = nvrtc.compile_cubin(KernelSource.from_text(text, "one"))
    no_compiler(monkeypatch)
    second = nvrtc.compile_cubin(KernelSource.from_text(text, "two"))
    assert (first.symbol, second.symbol) == ("one", "two") and first.cubin == second.cubin


@pytest.mark.parametrize("change", ["define", "arch", "option", "header", "filename"])
def test_what_changes_the_code_is_compiled_again(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    header = folder / "inner.cuh"
    header.write_text("#define STEP 1\n", encoding="utf-8")
    (folder / "outer.cuh").write_text('#include "inner.cuh"\n', encoding="utf-8")
    file = folder / "k.cu"
    file.write_text('#include "outer.cuh"\n' + SCALE, encoding="utf-8")
    nvrtc.compile_cubin(KernelSource(str(file), defines={"FACTOR": "2.0f"}))
    no_compiler(monkeypatch)
    defines, arch, options = {"FACTOR": "2.0f"}, "sm_86", ()
    nvrtc.compile_cubin(KernelSource(str(file), defines=defines), arch, options)
    if change == "define":
        defines["FACTOR"] = "4.0f"
    elif change == "arch":
        arch = "sm_80"
    elif change == "option":
        options = ("--use_fast_math",)
    elif change == "header":
        header.write_text("#define STEP 22\n", encoding="utf-8")
        os.utime(header, ns=(1, 1))
    else:
        file = file.rename(folder / "other.cu")
    with pytest.raises(AssertionError, match="compiled again"):
        nvrtc.compile_cubin(KernelSource(str(file), defines=defines), arch, options)


@pytest.mark.parametrize("content", ["", "{}", "null", "[]", '{"cubin": "bm8="}', "\x00garbage"])
def test_a_damaged_file_is_compiled_again(content: str, cache: Path) -> None:
    first = nvrtc.compile_cubin(scale())
    (kept,) = cache.glob("*.json")
    kept.write_text(content, encoding="utf-8")
    assert nvrtc.compile_cubin(scale()).cubin[:4] == first.cubin[:4]
    assert nvrtc._read(kept).symbol == "scale"


def test_a_folder_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file" / "below"))
    assert nvrtc.compile_cubin(scale()).symbol == "scale"


def test_threads_get_their_own_results() -> None:
    factors = [f"{n}.0f" for n in range(2, 10)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda factor: nvrtc.compile_cubin(scale(factor)), factors))
    again = [nvrtc.compile_cubin(scale(factor)) for factor in factors]
    assert [each.digest for each in found] == [each.digest for each in again]
    assert len({each.digest for each in found}) == len(factors)


def test_no_library_names_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "libraries", lambda: ())
    with pytest.raises(InputError, match=r"libnvrtc was not found.*pip install.*nvidia-cuda-nvrtc-cu12"):
        nvrtc.compile_cubin(scale())


def test_no_headers_names_the_line_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = [nvrtc.Library(each.path, each.version, each.archs, ()) for each in nvrtc.libraries()]
    monkeypatch.setattr(nvrtc, "libraries", lambda: tuple(bare))
    with pytest.raises(InputError, match=r"cuda_fp16\.h.*nvidia-cuda-runtime-cu12"):
        nvrtc.compile_cubin(scale())


def test_headers_belong_to_the_library() -> None:
    for library in nvrtc.libraries():
        for folder in library.include_dirs[:1]:
            assert nvrtc._headers_version(folder)[0] == library.version[0]


def test_a_library_too_old_to_be_asked_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(f"undefined symbol: {name}")

    monkeypatch.setattr(nvrtc.cuda, "find_nvrtc", lambda: [Path("libnvrtc.so.10.2")])
    monkeypatch.setattr(nvrtc.cuda, "nvrtc_version", lambda path: "10.2")
    monkeypatch.setattr(nvrtc, "_load", lambda path: Old())
    assert nvrtc.libraries.__wrapped__() == ()


def test_an_option_that_nvrtc_does_not_take_is_not_blamed_on_the_text() -> None:
    with pytest.raises(InputError, match=r"arch or options: got .*nv_arch"):
        nvrtc.compile_cubin(scale(), "sm_86f")
    with pytest.raises(InputError, match=r"arch or options: got .*no-such"):
        nvrtc.compile_cubin(scale(), "sm_86", ["--no-such-option"])
