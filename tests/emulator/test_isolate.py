"""Broken kernels end in one readable message, never with this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from labkit import emulator
from labkit.emulator import arena, inprocess, isolate, library, toolchain

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

GOOD = "__global__ void good(int* o, int n) { if (threadIdx.x < n) o[threadIdx.x] = 7; }"


def compiled(body: str, before: str = "", **options: object) -> emulator.EmulatedKernel:
    text = f"{before}\n__global__ void bad(int* o, int n) {{\n{body}\n}}\n"
    return emulator.compile(text, **options)  # type: ignore[arg-type]


def fault_of(kernel: emulator.EmulatedKernel, grid: int = 4) -> emulator.KernelFault:
    with pytest.raises(emulator.KernelFault) as caught:
        kernel((grid,), (32,), [np.zeros(64, np.int32), 64])
    works()
    return caught.value


def works() -> None:
    """The next launch is right, whatever the last one did."""
    out = np.zeros(32, np.int32)
    emulator.compile(GOOD)((1,), (32,), [out, 32])
    assert out.tolist() == [7] * 32


@pytest.mark.parametrize(
    ("body", "kind", "line", "words"),
    [
        ("*(volatile int*)0 = 1;", "illegal memory access", 3, "a null pointer"),
        ("o[n + threadIdx.x] = 1;", "illegal memory access", 3, "o[64], but o has 64 elements"),
        ("o[n * 100000] = 1;", "illegal memory access", 3, "o[6400000], but o has 64 elements"),
        ("o[-1 - n * 100] = 1;", "illegal memory access", 3, "o[-6401], but o has 64 elements"),
        ("*(volatile long*)0x123456789abcdef0 = 1;", "illegal memory access", 3, "line 3"),
        ("exit(3);", "exit", None, "exit(3)"),
        ("abort();", "crash", None, "abort()"),
        ("__trap();", "trap", 3, "__trap()"),
        ("assert(n == 3);", "assert", 3, "n == 3"),
        ("o[0] = n / (n - 64);", "integer division by zero", 3, "line 3"),
        ("if (threadIdx.x < 16) __syncthreads(); else __syncthreads();", "divergent barrier", 3, "line 3"),
        ("if (threadIdx.x < 16) __shfl_sync(~0u, n, 0); __syncthreads();", "deadlock", 3, "line 3"),
        ('for (;;) printf("x");', "time limit", 3, "line 3"),
    ],
)
def test_faults_of_a_fast_launch(body: str, kind: str, line: int | None, words: str) -> None:
    fault = fault_of(compiled(body, time_limit=0.5))
    assert (fault.kind, fault.line) == (kind, line), str(fault)
    message = str(fault)
    assert words in message and message.startswith(kind) and "\x01" not in message
    if line:
        assert fault.block is not None and fault.thread is not None
        assert message.endswith(f"    3 | {body}")


def test_stack_overflow() -> None:
    recursion = (
        "__device__ int f(int n) { volatile char a[999]; a[n % 9] = 1; return n < 0 ? 1 : f(n + 1) + a[3]; }"
    )
    fault = fault_of(compiled("o[0] = f(n);", recursion))
    assert fault.kind == "stack overflow" and fault.line == 1


def test_write_over_everything() -> None:
    fault = fault_of(compiled("for (long i = 0;; i++) ((volatile char*)&o)[i] = 7;", time_limit=2.0))
    assert fault.kind in ("crash", "illegal memory access", "stack overflow", "time limit")


def test_write_beside_a_buffer_is_found_without_tracing() -> None:
    """60 ints end 16 bytes before the guard page: nothing faults, but the canary is gone."""
    kernel = compiled("o[60] = 1;")
    with pytest.raises(emulator.KernelFault, match=r"out-of-bounds: .*o\[60\], but o has 60 elements.*trace"):
        kernel((1,), (32,), [np.zeros(60, np.int32), 60])
    works()


@pytest.mark.parametrize("grid", [1, 8])
@pytest.mark.parametrize("body", ["while (*(volatile int*)o == 0) ;", "for (;;) __syncthreads();"])
def test_endless_loop(body: str, grid: int) -> None:
    fault = fault_of(compiled(body, time_limit=0.5), grid)
    assert fault.kind == "time limit" and fault.line == 3


def test_endless_loop_that_c_plus_plus_lets_a_compiler_drop() -> None:
    fault = fault_of(compiled("while (*o == 0) ;", time_limit=0.5))
    # The load is done once, before the loop, and what is left of the loop has the function's line.
    assert fault.kind == "time limit" and fault.line in (2, 3)


def test_endless_loop_while_tracing() -> None:
    trace = compiled("while (*(volatile int*)o == 0) ;", time_limit=0.5).trace(
        (1,), (32,), [np.zeros(64, np.int32), 64]
    )
    assert [(fault.kind, fault.line, fault.fatal) for fault in trace.faults] == [("time limit", 3, True)]
    with pytest.raises(emulator.KernelFault, match="time limit"):
        trace.raise_on_fault()
    works()


def test_memory_without_end() -> None:
    body = "for (;;) { volatile char* p = (volatile char*)malloc(1 << 28); p[0] = 1; }"
    fault = fault_of(compiled(body, time_limit=10.0), 1)
    assert fault.kind == "illegal memory access"


def test_output_of_the_c_library_does_not_reach_the_protocol() -> None:
    compiled('puts("\\x05\\0\\0\\0hello"); fflush(stdout); fputs("x", stderr);')(
        (1,), (32,), [np.zeros(64, np.int32), 64]
    )
    works()


def test_crash_while_loading() -> None:
    text = "static int f() { abort(); return 1; }\nint at_start = f();\n" + GOOD
    with pytest.raises(emulator.KernelFault, match=r"abort\(\)"):
        emulator.compile(text)((1,), (32,), [np.zeros(32, np.int32), 32])
    works()


def test_worker_killed_between_launches() -> None:
    works()
    worker = isolate.isolated().pid
    assert worker is not None
    works()
    assert isolate.isolated().pid == worker  # it is kept
    os.kill(worker, signal.SIGKILL)
    works()
    assert isolate.isolated().pid not in (None, worker)


def test_worker_that_dies_while_the_buffers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that takes its place must be given the buffers anew: its own file is empty."""
    works()
    worker = isolate.isolated()._worker
    assert worker is not None
    fill = arena.fill

    def kill_and_fill(*arguments: object) -> None:
        monkeypatch.setattr(arena, "fill", fill)
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait(10)
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(arena, "fill", kill_and_fill)
    works()
    assert isolate.isolated()._worker is not worker


def test_device_variables_are_one_for_all_blocks() -> None:
    """Not one for each copy of the library."""
    text = "__device__ int seen = 0;\n__global__ void k(int* o) { if (atomicAdd(&seen, 1) == 39) o[0] = 40; }"
    out = np.zeros(1, np.int32)
    emulator.compile(text)((40,), (1,), [out])
    assert out[0] == 40


def test_buffers_of_a_failed_launch_are_left_alone() -> None:
    out = np.arange(64, dtype=np.int32)
    with pytest.raises(emulator.KernelFault):
        compiled("o[threadIdx.x] = 1; __syncthreads(); abort();")((1,), (32,), [out, 64])
    assert out.tolist() == list(range(64))


def test_interrupt_ends_the_worker_and_is_raised() -> None:
    kernel = compiled("while (*(volatile int*)o == 0) ;", time_limit=60.0)
    works()
    worker = isolate.isolated().pid
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kernel((1,), (32,), [np.zeros(64, np.int32), 64])
    assert isolate.isolated().pid is None
    assert worker is not None and not Path(f"/proc/{worker}").exists()
    works()


def test_interrupt_of_a_launch_in_this_process() -> None:
    """Between two blocks: the launch ends and the library can be used again."""
    body = "for (volatile int i = 0; i < 20000; i++) ; o[threadIdx.x] = 1;"
    kernel = compiled(body, isolate=False, time_limit=None)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kernel((1_000_000,), (32,), [np.zeros(64, np.int32), 64])
    kernel((2,), (32,), [np.zeros(64, np.int32), 64])


def test_interrupt_before_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that is only starting when it is asked to end must not run on behind our back."""
    body = "for (volatile int i = 0; i < 20000; i++) ; o[threadIdx.x] = 1;"
    kernel = compiled(body, isolate=False, time_limit=None)
    kernel((2,), (32,), [np.zeros(64, np.int32), 64])
    original = library.Launch.run

    def late(self: library.Launch) -> dict[str, object]:
        time.sleep(0.4)
        return original(self)

    monkeypatch.setattr(library.Launch, "run", late)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kernel((1_000_000,), (32,), [np.zeros(64, np.int32), 64])
    monkeypatch.undo()
    kernel((2,), (32,), [np.zeros(64, np.int32), 64])  # refused if the other still ran


def test_launch_that_cannot_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless loop in this process cannot be ended; the next launch says so instead of joining in."""
    monkeypatch.setattr(inprocess, "_PATIENCE", 0.2)
    kernel = compiled("while (*(volatile int*)o == 0) ;", isolate=False, time_limit=None)
    out = np.zeros(64, np.int32)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kernel((1,), (32,), [out, 64])
    with pytest.raises(emulator.KernelFault, match="still in one of its blocks"):
        kernel((1,), (32,), [np.ones(64, np.int32), 64])
    out[0] = 1  # lets it end
    monkeypatch.setattr(inprocess, "_PATIENCE", 10.0)
    kernel((1,), (32,), [np.ones(64, np.int32), 64])


def test_time_limit_in_this_process() -> None:
    body = "for (volatile int i = 0; i < 20000; i++) ; o[threadIdx.x] = 1;"
    kernel = compiled(body, isolate=False, time_limit=0.3)
    with pytest.raises(emulator.KernelFault, match="time limit") as caught:
        kernel((1_000_000,), (32,), [np.zeros(64, np.int32), 64])
    assert caught.value.kind == "time limit"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Fifty launches and a few crashes in a process of its own: no file and no process remains."""
    script = tmp_path / "launches.py"
    script.write_text(
        "import numpy as np\nfrom labkit import emulator\nfrom labkit.emulator import isolate\n"
        f"good = emulator.compile({GOOD!r})\n"
        "bad = emulator.compile('__global__ void bad(int* o) { abort(); }')\n"
        "for i in range(50):\n"
        "    good((1,), (32,), [np.zeros(1000 * (i + 1), np.int32), 32])\n"
        "    if i % 20 == 0:\n"
        "        try:\n            bad((1,), (32,), [np.zeros(4, np.int32)])\n"
        "        except emulator.KernelFault:\n            pass\n"
        "print(isolate.isolated().pid)\n",
        encoding="utf-8",
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = dict(os.environ, TMPDIR=str(scratch))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, encoding="utf-8", env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == []
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_worker_ends_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import numpy as np, os, signal\nfrom labkit import emulator\nfrom labkit.emulator import isolate\n"
        f"emulator.compile({GOOD!r})((1,), (32,), [np.zeros(32, np.int32), 32])\n"
        "print(isolate.isolated().pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    worker = int(done.stdout)
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def test_many_kernels_use_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "_MOST_LIBRARIES", 2)
    works()
    first = isolate.isolated().pid
    for value in range(3):
        compiled(f"o[0] = {value};")((1,), (32,), [np.zeros(64, np.int32), 64])
    assert isolate.isolated().pid != first


def test_temporary_folder_with_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memfd (macOS) the shared file lies in the temporary folder, and has no name there."""
    folder = tmp_path / "临时 folder"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    launcher = isolate.Isolated()
    monkeypatch.setattr(isolate, "_isolated", launcher)
    works()
    assert list(folder.iterdir()) == []
    launcher.close()


def test_fault_survives_pickling() -> None:
    import pickle

    fault = fault_of(compiled("__trap();"))
    again = pickle.loads(pickle.dumps(fault))
    assert (str(again), again.kind, again.line) == (str(fault), "trap", 3)


def test_compiler_is_interruptible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        toolchain.find().run(["sleep", "60"], tmp_path, seconds=60)
    assert time.monotonic() - start < 30
