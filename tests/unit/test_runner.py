"""The runner on the CPU, and the checks that both a launch and its arguments pass on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.kernels import arguments, gpu, runner
from labkit.kernels.arguments import convert, launch_shape
from labkit.kernels.signature import Parameter
from labkit.kernels.source import KernelSource

AXPY = KernelSource.from_text(
    """
extern "C" __global__ void axpy(const float* __restrict__ x, float* y, float a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
""",
    filename="axpy.cu",
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path_factory.getbasetemp() / "kernel-cache"))


def test_kernel_runs_on_the_cpu() -> None:
    kernel = runner.load(AXPY, "cpu")
    x, y = torch.arange(70, dtype=torch.float32), torch.ones(70)
    kernel((3,), (32,), [x, y, 0.5, 70])
    assert torch.equal(y, 1 + x / 2)
    assert kernel.name == "axpy" and len(kernel.parameters) == 4


def test_kernel_is_loaded_once_a_device() -> None:
    same = KernelSource.from_text(AXPY.text, "axpy", filename="axpy.cu")
    assert runner.load(AXPY) is runner.load(same, torch.device("cpu"))
    first = runner.load(AXPY)
    runner.forget()
    assert runner.load(AXPY) is not first


@pytest.mark.parametrize("device", ["tpu", "cuda:x", None, 3, "cuda:-1"])
def test_unknown_device_is_refused(device: object) -> None:
    with pytest.raises(InputError, match="device"):
        runner.load(AXPY, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_message_says_so() -> None:
    with pytest.raises(InputError, match="torch finds no GPU"):
        runner.load(AXPY, "cuda")
    with pytest.raises(InputError, match=r"cuda:0.*torch finds no GPU"):
        runner.load(AXPY, "cuda:0")
    assert gpu.why_not() == "torch finds no NVIDIA GPU"


def test_missing_cupy_names_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "pip install" in gpu.why_not() and gpu.why_not().endswith("cupy-cuda13x")
    monkeypatch.setitem(sys.modules, "cupy", None)
    gpu._cupy.cache_clear()
    with pytest.raises(InputError, match=r"cupy.*pip install.*cupy-cuda13x"):
        gpu._cupy()


def test_launch_shapes_are_filled_up() -> None:
    assert launch_shape((5,), [32, 2]) == ((5, 1, 1), (32, 2, 1))
    assert launch_shape((2**31 - 1, 65535, 65535), (1024,))[0] == (2**31 - 1, 65535, 65535)
    assert launch_shape((np.int64(3), 1, 2), (4, 4, 64)) == ((3, 1, 2), (4, 4, 64))


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        ((2**31,), (32,), r"grid\.x: got 2147483648"),
        ((1, 65536), (32,), r"grid\.y: got 65536"),
        ((1, 1, 65536), (32,), r"grid\.z: got 65536"),
        ((0,), (32,), r"grid\.x: got 0"),
        ((1,), (1025,), r"block\.x: got 1025"),
        ((1,), (1, 1, 65), r"block\.z: got 65"),
        ((1,), (32, 33), "1056 threads"),
        ((1,), (1, -1), r"block\.y: got -1"),
        ((1.0,), (32,), r"grid\.x: got 1\.0"),
        ((), (32,), "grid"),
        ((1, 1, 1, 1), (32,), "grid"),
        (4, (32,), "grid: got 4"),
        ((1,), "32", "block"),
    ],
)
def test_impossible_launch_shapes_are_refused(grid: object, block: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        launch_shape(grid, block)  # type: ignore[arg-type]


def test_launch_bounds_limit_the_block() -> None:
    with pytest.raises(InputError, match=r"512 threads.*at most 256"):
        launch_shape((1,), (512,), max_threads=256)


def test_arguments_become_what_a_launch_takes() -> None:
    x = torch.zeros(4, dtype=torch.float16)
    parameters = [
        Parameter("x", "half*", True, True),
        Parameter("none", "float*", True),
        Parameter("anything", "void*", True),
        Parameter("wide", "uint4*", True),
        Parameter("n", "int"),
        Parameter("total", "unsigned long long"),
        Parameter("scale", "float"),
        Parameter("low", "bfloat16"),
        Parameter("flag", "bool"),
    ]
    wide = torch.zeros(64, dtype=torch.uint8)
    done = convert(parameters, [x, None, x, wide, -1, 2**63, 0.5, 1.0, True], CPU)
    assert [value.dtype.str[1:] for value in done] == ["u8"] * 4 + ["i4", "u8", "f4", "i2", "b1"]
    assert [int(value) for value in done[:4]] == [x.data_ptr(), 0, x.data_ptr(), wide.data_ptr()]
    assert [value.item() for value in done[4:]] == [-1, 2**63, 0.5, 0x3F80, True]


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("half*", torch.zeros(4), "float32; expected float16"),
        ("half*", torch.zeros(4, dtype=torch.bfloat16), "bfloat16; expected float16"),
        ("bfloat16*", torch.zeros(4, dtype=torch.float16), "float16; expected bfloat16"),
        ("float*", torch.zeros(4, dtype=torch.int32), "int32; expected float32"),
        ("int*", torch.zeros(4, dtype=torch.int64), "int64; expected a 4-byte integer"),
        ("unsigned*", torch.zeros(4), "float32; expected a 4-byte integer"),
        ("uint4*", torch.zeros(68, dtype=torch.uint8)[4:], "4 bytes past a multiple of 16"),
        ("float*", torch.zeros(4, 4).t(), "contiguous"),
        ("float*", torch.zeros(8)[::2], "contiguous"),
        ("float*", torch.zeros(4, device="meta"), "on meta"),
        ("float*", np.zeros(4, np.float32), "ndarray; expected a torch tensor"),
        ("float*", 12345, "int; expected a torch tensor"),
        ("int", torch.zeros(4), "Tensor"),
        ("int", 2**31, "-2147483648 to 2147483647"),
        ("dim3", 1, "by value"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(kind: str, value: object, words: str) -> None:
    parameter = Parameter("given", kind, kind.endswith("*"))
    with pytest.raises(InputError, match=words) as caught:
        convert([parameter], [value], CPU)
    assert caught.value.argument == "argument given"


def test_integers_of_either_sign_fit_an_integer_pointer() -> None:
    for dtype in (torch.int8, torch.uint8, torch.bool):
        for kind in ("signed char*", "unsigned char*"):
            convert([Parameter("p", kind, True)], [torch.zeros(4, dtype=dtype)], CPU)


def test_wrong_number_of_arguments_shows_the_declaration() -> None:
    with pytest.raises(
        InputError, match=r"2 arguments.*4 for axpy\(const float\* x, float\* y, float a, int n\)"
    ):
        convert(AXPY.parameters, [None, None], CPU, entry="axpy")


def test_packaged_headers_are_found_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "own.cu"
    file.write_text(
        '#include "types.cuh"\n#include "mine.cuh"\n'
        'extern "C" __global__ void fill(uint16_t* x) { x[threadIdx.x] = STEP * (COUNT + threadIdx.x); }\n',
        encoding="utf-8",
    )
    (tmp_path / "mine.cuh").write_text("#define STEP 3\n", encoding="utf-8")
    x = torch.zeros(32, dtype=torch.int16)
    runner.load(KernelSource(str(file), defines={"COUNT": 5}))((1,), (32,), [x])
    assert x.tolist() == [3 * (5 + i) for i in range(32)]


class FakeDriver:
    """The few calls of CuPy that the GPU runner makes, written down instead of done."""

    CU_FUNC_ATTRIBUTE_NUM_REGS = 1
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 2
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 3
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 5
    ptr = 77

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.cuda = SimpleNamespace(Device=self.device, Stream=SimpleNamespace(from_external=self.stream))

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(attributes={"MaxSharedMemoryPerBlockOptin": 100_000})

    def stream(self, handle: Any) -> int:
        return handle.__cuda_stream__()[1]

    def load(self, cubin: bytes) -> None:
        self.calls.append(("load", cubin[:4]))

    def get_function(self, symbol: str) -> FakeDriver:
        self.calls.append(("function", symbol))
        return self

    def funcGetAttribute(self, number: int, function: int) -> int:
        return {1: 40, 2: 0, 3: 1000, 4: 256}[number]

    def funcSetAttribute(self, function: int, number: int, value: int) -> None:
        self.calls.append(("set", function, number, value))

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:
        return 6

    def __call__(self, grid: tuple, block: tuple, args: tuple, *, shared_mem: int, stream: int) -> None:
        self.calls.append(("launch", grid, block, tuple(a.item() for a in args), shared_mem, stream))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(gpu, "_cupy", lambda: (fake, lambda: fake, fake))
    for name, result in {
        "device_count": 1,
        "init": None,
        "get_device_capability": (8, 6),
        "device": contextlib.nullcontext(),
        "is_current_stream_capturing": False,
        "current_stream": SimpleNamespace(cuda_stream=4242),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    gpu._stream.cache_clear()
    return fake


def test_gpu_launch_goes_to_torch_s_stream_with_everything_set(driver: FakeDriver) -> None:
    kernel = gpu.GpuKernel(AXPY, 0)
    assert driver.calls == [("load", b"\x7fELF"), ("function", "axpy")]
    assert (kernel.registers, kernel.static_shared, kernel.max_threads) == (40, 1000, 256)
    assert kernel.compiled.arch == "sm_86" and "axpy on cuda:0, sm_86" in repr(kernel)
    kernel((3,), (64, 2), [None, None, 0.5, 7], shared_bytes=4096)
    assert driver.calls[2:] == [("launch", (3, 1, 1), (64, 2, 1), (0, 0, 0.5, 7), 4096, 4242)]
    assert kernel.max_active_blocks(256) == 6


def test_gpu_shared_memory_above_48_kib_is_asked_for_once(driver: FakeDriver) -> None:
    kernel = gpu.GpuKernel(AXPY, 0).prepare(60_000)
    assert driver.calls[2:] == [("set", 77, 5, 60_000)]
    kernel((1,), (32,), [None, None, 0.5, 7], shared_bytes=50_000)
    assert driver.calls[3][0] == "launch" and len(driver.calls) == 4
    kernel.prepare(49_152 - 1000)
    assert len(driver.calls) == 4
    for bad in (99_001, -1, 1.5):
        with pytest.raises(InputError, match=r"shared_bytes.*0 to 99000"):
            kernel.prepare(bad)  # type: ignore[arg-type]


def test_gpu_kernel_is_not_loaded_inside_a_capture(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="before the capture"):
        gpu.GpuKernel(AXPY, 0)
    assert driver.calls == []


_TYPES = ("int", "unsigned char", "long long", "unsigned long long", "float", "bool", "half")
_POINTERS = ("float*", "half*", "unsigned char*", "uint4*", "int*", "void*")
_TENSORS = [
    torch.zeros(8, 4, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.int8, torch.int32)
]


@given(
    st.sampled_from([*_TYPES, *_POINTERS]),
    st.one_of(
        st.integers(-(2**65), 2**65),
        st.floats(),
        st.booleans(),
        st.none(),
        st.text(max_size=2),
        st.sampled_from([np.int64(7), np.float32(0.5), np.uint8(255)]),
        st.sampled_from([*_TENSORS, *(one.T for one in _TENSORS), *(one.view(-1)[1:] for one in _TENSORS)]),
    ),
)
def test_the_quick_way_of_an_argument_is_the_long_way(kind: str, value: Any) -> None:
    parameter = Parameter("x", kind, kind.endswith("*"))

    def outcome(how: Any) -> tuple[type, bytes] | str:
        try:
            found = how(parameter, value)
        except InputError as error:
            return str(error)
        return type(found), found.tobytes()

    def long_way(parameter: Parameter, value: Any) -> np.generic:
        if parameter.pointer:
            return arguments._pointer(parameter, value, CPU)
        return arguments._scalar(parameter, value)

    assert outcome(lambda one, given: convert([one], [given], CPU)[0]) == outcome(long_way)


@given(st.lists(st.integers(-1, 3) | st.sampled_from([65_535, 65_536, 2**31, True]), max_size=4))
def test_a_tuple_of_a_launch_reads_as_a_list_does(given: list[int]) -> None:
    def outcome(grid: Any) -> Any:
        try:
            return launch_shape(grid, (32,))[0]
        except InputError as error:
            return error.argument, error.expected

    assert outcome(tuple(given)) == outcome(list(given))
