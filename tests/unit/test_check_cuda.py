"""Answers in CUDA C++: stubs, refusals, faults at the student's own line, results, scores.

Wording is tested on a stand-in for the emulator where that is enough, and on the emulator itself where
the words come from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from notebook_builder import book, code

from labkit import check, solutions
from labkit.check import cuda, cuda_text, registry, session
from labkit.check.cuda_case import ProductCase, product_case
from labkit.check.registry import exercise
from labkit.check.signatures import differences
from labkit.check.verdict import NotYet, Verdict, not_yet, passed
from labkit.course.gate import check_format
from labkit.course.notebook import dumps
from labkit.course.source import signature_of, stubs, text_stubs
from labkit.emulator.faults import CompileError, Diagnostic, Fault, KernelFault
from labkit.errors import InputError

STUB = r"""// A warp for each output; lanes read neighbouring words.
#include <cuda_fp16.h>
#include "types.cuh"

__global__ void gemv(const uint8_t* packed, const half* scales, const half* x, half* out, int N, int K)
{
    // YOUR CODE
}
"""
HEAD, TAIL = STUB.split("    // YOUR CODE\n")
BODY = r"""    int n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (n >= N) return;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(packed + n * (K / 2));
    float sum = 0.0f;
    for (int i = lane; i < K / 8; i += 32) {
        uint32_t word = words[i];  // eight codes, neighbours of the next lane's
        float scale = __half2float(scales[n * (K / 64) + i / 8]);
        for (int j = 0; j < 8; ++j) {
            int code = (int)(word << (28 - 4 * j)) >> 28;
            sum += code * scale * __half2float(x[8 * i + j]);
        }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (lane == 0) out[n] = __float2half(sum);
"""
ANSWER = HEAD + BODY + TAIL
SOLUTION = HEAD + "    // the course's own words\n" + BODY + TAIL
NAMES = ("packed", "scales", "x", "out", "N", "K")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    check.exercises()
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(session, "current", session.Session())
    # the state is new for every test; compiled kernels need not be
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    yield


@pytest.fixture(scope="module")
def case() -> ProductCase:
    return product_case("w4", n=13, k=256)


@pytest.fixture
def task(case: ProductCase, monkeypatch: pytest.MonkeyPatch) -> check.Exercise:
    monkeypatch.setattr(solutions, "get", lambda name: SOLUTION)

    @exercise("99.1", title="A GEMV", par=52, limit=60, unit="sectors", text_stub=cuda_text.mark(STUB))
    def gemv_task(answer: str, grid: tuple[int, ...] = (4,), **more: Any) -> Verdict:
        outcome = cuda.run(answer, "gemv", grid, (128,), case.args(*NAMES), **more)
        case.judge(outcome)
        return cuda.score_sectors(outcome, "packed", "lanes read neighbouring words")

    return gemv_task


# --- is there an answer? -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        STUB,
        STUB.strip(),
        STUB.replace("    // YOUR CODE\n", ""),
        STUB.replace("// YOUR CODE", "// YOUR CODE: I will do it tomorrow"),
        STUB.replace("{\n", "\n\n  {\n\n"),
        STUB.replace("\n", "\r\n"),
        "",
        "   \n",
        "// nothing but words",
        None,
        ...,
    ],
)
def test_a_stub_is_not_attempted(task: check.Exercise, text: Any) -> None:
    assert task(text).state == "not attempted"


@pytest.mark.parametrize(
    "text",
    [
        STUB.replace("// YOUR CODE", "int lane = threadIdx.x;  // YOUR CODE"),
        STUB.replace("gemv(", "gemm("),
        STUB.replace("// YOUR CODE", ";"),
    ],
)
def test_any_change_of_code_is_an_attempt(text: str) -> None:
    assert not cuda_text.is_unattempted(text, cuda_text.mark(STUB))


@pytest.mark.parametrize("answer", [7, ["text"], lambda: STUB, b"__global__", object()])
def test_what_is_no_text_is_not_yet(task: check.Exercise, answer: Any) -> None:
    verdict = task(answer)
    assert verdict.state == "not yet" and verdict.expected == "a text of CUDA C++"
    assert type(answer).__name__ in verdict.got


def test_the_solution_itself_is_refused_and_its_code_typed_by_hand_is_not(task: check.Exercise) -> None:
    for copied in (SOLUTION, f"// mine\n{SOLUTION}", SOLUTION.replace("    ", "\t")):
        verdict = task(copied)
        assert verdict.state == "not yet" and "labkit.solutions.ch99.gemv_task" in verdict.got
    assert task(ANSWER).state == "passed"


def test_solve_checks_the_reference_text(task: check.Exercise) -> None:
    session.current.solve = True
    verdict = task(STUB)
    assert verdict.state == "passed" and verdict.reference


# --- what is refused before it is compiled --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line", "what"),
    [
        (('#include "types.cuh"', '#include "gemv_row.cu"'), 3, 'include "gemv_row.cu"'),
        (('#include "types.cuh"', "#include <fstream>"), 3, "fstream"),
        (("// YOUR CODE", 'system("ls");'), 7, "system("),
        (("// YOUR CODE", 'auto file = fopen ("x", "r");'), 7, "fopen"),
        (("// YOUR CODE", 'asm volatile("nop");'), 7, "asm"),
        (("// YOUR CODE", "#pragma GCC optimize(3)"), 7, "pragma GCC"),
        (("__global__ void", "__attribute__((noinline)) __global__ void"), 5, "__attribute__"),
        (("// YOUR CODE", "cuemu_stop();"), 7, "cuemu_stop"),
        (("// YOUR CODE", "out[0] = code_w4(packed[0], 0);"), 7, "code_w4"),
    ],
)
def test_host_tricks_and_the_courses_own_kernel_are_refused(
    task: check.Exercise, change: tuple[str, str], line: int, what: str
) -> None:
    verdict = task(STUB.replace(*change), forbidden=("code_w4",))
    assert verdict.state == "not yet" and verdict.got.startswith(f"line {line}: ") and what in verdict.got
    assert verdict.hint


def test_words_in_comments_and_texts_are_free() -> None:
    text = STUB.replace("// YOUR CODE", '// asm, system(), #include "a.cu"\n    printf("asm system( %d", N);')
    assert cuda_text.refusal(text, ("code_w4",)) is None
    assert cuda_text.refusal(STUB.replace("// YOUR CODE", "#pragma unroll\n    for (;;) {}")) is None


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (("gemv(", "gemm("), "kernels: gemm"),
        (("__global__ void", "void"), "no __global__ function"),
        (("int N, int K", "int K, int N"), "gemv(packed, scales, x, out, K, N)"),
        ((", int K", ""), "gemv(packed, scales, x, out, N)"),
    ],
)
def test_another_kernel_is_named(task: check.Exercise, change: tuple[str, str], got: str) -> None:
    verdict = task(ANSWER.replace(*change))
    assert verdict.state == "not yet" and got in verdict.got and "stub" in verdict.hint


# --- the emulator's words, at the student's own line ----------------------------------------------------


class FakeEmulator(ModuleType):
    """Does what it is told: raises, or hands out a trace."""

    CompileError, KernelFault = CompileError, KernelFault

    def __init__(self) -> None:
        super().__init__("labkit.emulator")
        self.on_compile: Exception | None = None
        self.on_launch: Exception | None = None
        self.trace: Any = SimpleNamespace(faults=[])
        self.calls: list[Any] = []

    def compile(self, text: str, entry: str, **options: Any) -> Any:
        self.calls.append(("compile", options))
        if self.on_compile:
            raise self.on_compile
        kernel = FakeKernel()
        kernel.owner = self
        return kernel


class FakeKernel:
    owner: FakeEmulator

    def __call__(self, grid: Any, block: Any, args: list[Any], shared_bytes: int) -> Any:
        self.owner.calls.append(("launch", args))
        if self.owner.on_launch:
            raise self.owner.on_launch
        return SimpleNamespace()

    def trace(self, grid: Any, block: Any, args: list[Any], shared_bytes: int, *, blocks: Any) -> Any:
        self.owner.calls.append(("trace", args))
        return self.owner.trace


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEmulator:
    import labkit.emulator  # so that the attribute below is put back

    made = FakeEmulator()
    monkeypatch.setitem(__import__("sys").modules, "labkit.emulator", made)
    monkeypatch.setattr(labkit, "emulator", made)
    return made


def _run(case: ProductCase, **more: Any) -> Verdict | cuda.Outcome:
    try:
        return cuda.run(ANSWER, "gemv", (4,), (128,), case.args(*NAMES), **more)
    except NotYet as stopped:
        return stopped.verdict


def test_a_fault_keeps_its_hint_and_loses_addresses(fake: FakeEmulator, case: ProductCase) -> None:
    source = "    9 |     if (n >= N) return;  // 0xff"
    fault = Fault("deadlock", f"deadlock: nobody at 0x7f00 can go on. Mend it.\n{source}", line=9, fatal=True)
    early = Fault("race", "race: line 12 reads. Put a barrier.", line=12)
    fake.trace.faults = [early, fault]
    verdict = _run(case)
    assert isinstance(verdict, Verdict) and verdict.expected == "a launch with no fault"
    assert verdict.got == f"line 9: deadlock: nobody can go on\n{source}\nand 1 more report"
    assert verdict.hint == "mend it."
    assert "Traceback" not in repr(verdict) and "kernel.cu" not in repr(verdict)
    fake.trace.faults = [early]
    verdict = _run(case)
    assert isinstance(verdict, Verdict)
    assert verdict.got == "race: line 12 reads\n12 | for (int i = lane; i < K / 8; i += 32) {"


def test_a_wild_address_is_told_by_the_report_before_it(fake: FakeEmulator, case: ProductCase) -> None:
    bounds = Fault("out-of-bounds", "out-of-bounds: line 9 reads x[99]. Guard it.", line=9)
    wild = Fault("illegal memory access", "illegal memory access to 0x10 at line 9", line=9, fatal=True)
    fake.trace.faults = [bounds, wild]
    verdict = _run(case)
    assert isinstance(verdict, Verdict)
    assert verdict.got.startswith("out-of-bounds: line 9 reads x[99]\n9 | if")
    fake.trace.faults = [wild]
    verdict = _run(case)
    assert isinstance(verdict, Verdict) and verdict.got.startswith("illegal memory access at line 9\n9 | if")
    assert verdict.hint  # the runtime had none


def test_errors_of_the_compiler_and_of_the_call_are_verdicts(fake: FakeEmulator, case: ProductCase) -> None:
    found = Diagnostic(9, 9, "'m' was not declared", "    if (m >= N) return;")
    fake.on_compile = CompileError("kernel.cu", (found,))
    verdict = _run(case)
    assert isinstance(verdict, Verdict) and verdict.expected == "a text that compiles"
    assert verdict.got.startswith("line 9: 'm' was not declared\n    9 |     if (m >= N)") and verdict.hint
    fake.on_compile = None
    fake.on_launch = InputError("argument x", "half", "float")
    verdict = _run(case, trace=False)
    assert isinstance(verdict, Verdict) and "argument x" in verdict.got and "stub" in verdict.hint
    fake.on_launch = KernelFault(Fault("time limit", "time limit: more than 2 s"))
    verdict = _run(case, trace=False)
    assert isinstance(verdict, Verdict) and verdict.got == "time limit: more than 2 s" and verdict.hint


def test_what_is_launched(fake: FakeEmulator, case: ProductCase) -> None:
    outcome = _run(case, time_limit=3)
    assert isinstance(outcome, cuda.Outcome) and outcome.run is None
    assert [name for name, _ in fake.calls] == ["compile", "trace"]
    options = fake.calls[0][1]
    assert options["isolate"] is True and options["time_limit"] == 3
    assert fake.calls[1][1][3] is outcome.args["out"]  # the traced launch gives the results
    fake.calls.clear()
    outcome = _run(case, blocks=2)
    assert isinstance(outcome, cuda.Outcome)
    assert [name for name, _ in fake.calls] == ["compile", "trace", "launch"]
    assert fake.calls[1][1][3] is not outcome.args["out"]  # a sample must not leave results behind
    assert fake.calls[2][1][3] is outcome.args["out"]
    fake.calls.clear()
    _run(case, trace=False)
    assert [name for name, _ in fake.calls] == ["compile", "launch"]


def test_any_other_error_is_ours(fake: FakeEmulator, case: ProductCase) -> None:
    fake.on_compile = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        _run(case)
    fake.on_compile = OSError("no disk")
    with pytest.raises(OSError, match="no disk"):
        _run(case)


# --- the emulator itself --------------------------------------------------------------------------------


def test_a_right_answer_passes_with_its_score(task: check.Exercise) -> None:
    verdict = task(ANSWER)
    assert verdict.state == "passed" and verdict.score_line() == "52 sectors, par 52, pass <= 60"
    assert verdict.message == "lanes read neighbouring words" and not verdict.hint


def test_a_wasteful_answer_is_told_its_dearest_line(task: check.Exercise) -> None:
    bytes_of_word = "const uint8_t* b = packed + n * (K / 2) + 4 * i;\n" + " " * 8
    bytes_of_word += "uint32_t word = b[0] | b[1] << 8 | b[2] << 16 | (uint32_t)b[3] << 24;"
    bytewise = ANSWER.replace("uint32_t word = words[i];", bytes_of_word)
    verdict = task(bytewise)
    assert verdict.state == "not yet" and verdict.score_line() == "208 sectors, par 52, pass <= 60"
    assert verdict.hint == "line 14 (read of packed): 4 sectors a request, its bytes would fill 1"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("word << (28", "wrd << (28"), 16, "wrd"),
        (("if (n >= N) return;", ""), 13, "packed"),
        (("sum = 0.0f;", "sum = 0.0f; out[-4000] = x[0];"), 11, "out"),
    ],
)
def test_a_mistake_is_shown_at_its_line(
    task: check.Exercise, change: tuple[str, str], line: int, words: str
) -> None:
    verdict = task(ANSWER.replace(*change))
    assert verdict.state == "not yet" and verdict.hint
    assert f"line {line}" in verdict.got and words in verdict.got and f"{line} |" in verdict.got
    assert "kernel.cu" not in verdict.got and "0x7" not in verdict.got


def test_a_loop_without_end_is_stopped(task: check.Exercise) -> None:
    verdict = task(ANSWER.replace("step /= 2", "step = 16"), time_limit=1)
    assert verdict.state == "not yet" and "time limit" in verdict.got and verdict.hint


def test_a_race_names_both_lines(case: ProductCase) -> None:
    text = r"""extern "C" __global__ void turn(const float* x, float* out)
{
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
"""
    args = {"x": torch.arange(64.0), "out": cuda.poisoned((64,), torch.float32)}
    with pytest.raises(NotYet) as stopped:
        cuda.run(text, "turn", (1,), (64,), args)
    verdict = stopped.value.verdict
    assert verdict.got.startswith(("race", "uninitialised")) and "line 5" in verdict.got
    mended = text.replace("out[", "__syncthreads();\n    out[")
    args["out"] = cuda.poisoned((64,), torch.float32)
    outcome = cuda.run(mended, "turn", (1,), (64,), args)
    cuda.expect(outcome.args["out"], torch.arange(63.0, -1, -1))
    assert outcome.source(5) == "__syncthreads();"
    # 64 words: two wavefronts to write, two to read
    assert cuda.score_wavefronts(outcome, "tile").score == 4
    assert cuda.score_requests(outcome, "x").score == 2
    assert cuda.score_sectors(outcome, "out", kind="write").score == 8
    with pytest.raises(NotYet, match="accesses to other"):
        cuda.score_wavefronts(outcome, "other")


def test_cells_that_nobody_wrote_are_listed(task: check.Exercise) -> None:
    verdict = task(ANSWER, grid=(2,))
    assert verdict.got == "out cells 8…12 were never written"
    assert verdict.expected == "all 13 cells of out written"


# --- results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(cuda._POISON))
def test_poison_is_told_from_every_result(dtype: torch.dtype) -> None:
    output = cuda.poisoned((2, 3), dtype)
    assert cuda.unwritten(output).tolist() == list(range(6))
    output[0, 1] = float("nan") if dtype.is_floating_point else 0
    output[1] = 7
    assert cuda.unwritten(output).tolist() == [0, 2]


def _refusal(output: torch.Tensor, expected: torch.Tensor, **more: Any) -> Verdict:
    with pytest.raises(NotYet) as stopped:
        cuda.expect(output, expected, **more)
    return stopped.value.verdict


def test_a_wrong_value_is_told_in_full() -> None:
    expected = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    cuda.expect(expected + 0.09, expected, 0.1)
    verdict = _refusal(torch.tensor([[1.0, 2.0], [5.0, 8.0]]), expected, bound=0.1, name="out")
    assert verdict.expected == "out[1, 0] = 4 ± 0.1"
    assert verdict.got == "5, relative error 0.25\n1 of 4 cells are wrong: 2"
    assert "work one cell out" in verdict.hint
    assert _refusal(torch.zeros(2, 2), expected, hint="my own").hint == "my own"
    assert "hold 0" in _refusal(torch.zeros(2, 2), expected).hint
    assert "up to cell 1" in _refusal(torch.tensor([[1.0, 2.0], [5.0, 9.0]]), expected).hint
    verdict = _refusal(torch.tensor([[1.0, float("nan")], [4.0, 8.0]]), expected)
    assert verdict.got.startswith("nan") and "NaN" in verdict.hint
    cuda.expect(torch.tensor([3, 4]), torch.tensor([3, 4]))
    assert _refusal(torch.tensor([0, 1]), torch.tensor([0, 2])).got.startswith("1, relative error 0.5")
    assert "relative" not in _refusal(torch.tensor([1]), torch.tensor([0])).got  # of nothing
    with pytest.raises(InputError, match="shape"):
        cuda.expect(torch.zeros(3), torch.zeros(4))


def test_spans() -> None:
    assert cuda.spans([]) == "" and cuda.spans([3]) == "3"
    assert cuda.spans([0, 1, 2, 64, 70, 71]) == "0…2, 64, 70…71"
    assert cuda.spans(range(0, 20, 2)) == "0, 2, 4, 6, …"


@pytest.mark.parametrize("format", ["w4", "w3"])
@pytest.mark.parametrize("offset", [False, True])
def test_a_case_has_the_exact_result_and_is_the_same_every_time(format: str, offset: bool) -> None:
    case = product_case(format, n=5, k=200, m=2, group_size=64, offset=offset, out_dtype=torch.float32)
    again = product_case(format, n=5, k=200, m=2, group_size=64, offset=offset, out_dtype=torch.float32)
    assert torch.equal(case.exact, again.exact) and torch.equal(case.weight.packed, again.weight.packed)
    exact = case.x.double() @ case.weight.dequantize(torch.float64).T
    assert torch.equal(case.exact, exact) and case.exact.shape == (2, 5)
    args = case.args("x", "packed", "scales", "offset", "out", "M", "N", "K", "Kp", "G", "groups", split=3)
    assert list(args)[-1] == "split" and [args[name] for name in ("M", "N", "K", "Kp", "G", "groups")] == [
        2,
        5,
        200,
        256,
        64,
        4,
    ]
    assert (args["offset"] is not None) == offset
    assert args["out"].dtype == torch.float32 and len(cuda.unwritten(args["out"])) == 10
    args["x"].zero_()
    assert case.x.any() and case.args("x")["x"] is not case.x
    plain = torch.nn.functional.linear(case.x, case.weight.dequantize(torch.float16))
    case.judge(cuda.Outcome("", {"out": plain.float()}))
    with pytest.raises(NotYet):
        case.judge(cuda.Outcome("", {"out": (exact * 1.5).float()}))
    with pytest.raises(InputError, match="names"):
        case.args("y")


# --- scores ---------------------------------------------------------------------------------------------


class FakeTrace(SimpleNamespace):
    def select(self, **filters: Any) -> list[Any]:
        return [row for row in self.rows if all(getattr(row, key) == value for key, value in filters.items())]

    def total(self, metric: str, **filters: Any) -> int:
        return sum(getattr(row, metric) for row in self.select(**filters))

    def requests(self, **filters: Any) -> int:
        return self.total("requests", **filters)

    def compulsory_sectors(self, buffer: str) -> int:
        return self.different


def _outcome(sectors: int, useful: int, different: int, **more: Any) -> cuda.Outcome:
    row = SimpleNamespace(
        line=9, kind="read", buffer="packed", space="global", size=1, requests=12, lanes=384
    )
    row.__dict__.update(sectors=sectors, useful_bytes=useful, wavefronts=0, ideal_wavefronts=0)
    row.__dict__.update(more)
    trace = FakeTrace(rows=[row], blocks_traced=1, blocks_total=1, different=different)
    return cuda.Outcome("", {"packed": torch.zeros(768, dtype=torch.uint8)}, trace)


def test_a_score_names_the_dearest_line() -> None:
    verdict = cuda.score_sectors(_outcome(96, 768, 24), "packed")
    assert verdict.score == 96
    assert verdict.hint == "line 9 (read of packed): 8 sectors a request, its bytes would fill 2"
    again = cuda.score_sectors(_outcome(96, 3072, 24), "packed")
    assert "moves 96 sectors, 24 of them different" in again.hint
    assert "12 requests of 1 bytes" in cuda.score_requests(_outcome(24, 768, 24), "packed").hint
    shared = _outcome(0, 0, 24, space="shared", wavefronts=192, ideal_wavefronts=12)
    assert "16 wavefronts a request, 1 without conflicts" in cuda.score_wavefronts(shared).hint


def test_reads_that_are_not_counted_earn_no_score() -> None:
    with pytest.raises(NotYet, match="12 of them in the count"):
        cuda.score_sectors(_outcome(12, 384, 12), "packed")
    outcome = _outcome(12, 384, 12)
    outcome.trace.blocks_total = 2  # a sample of the blocks cannot touch all
    assert cuda.score_sectors(outcome, "packed").score == 12


def test_a_hint_of_a_pass_is_shown_only_when_the_score_fails() -> None:
    @exercise("99.2", title="t", par=24, limit=32, unit="sectors")
    def scored(answer: float) -> Verdict:
        return passed("right", score=answer, hint="line 9 is dear")

    verdict = scored(96)
    assert verdict.state == "not yet" and verdict.hint == "line 9 is dear"
    assert verdict.score_line() == "96 sectors, par 24, pass <= 32"
    assert scored(28).state == "passed" and not scored(28).hint


def test_a_helper_may_end_a_check() -> None:
    @exercise("99.3", title="t")
    def ended(answer: Any) -> Verdict:
        raise NotYet(not_yet("one", "two", "three"))

    verdict = ended(5)
    assert (verdict.state, verdict.expected, verdict.got, verdict.hint) == ("not yet", "one", "two", "three")


# --- stubs, solutions and the notebook ------------------------------------------------------------------


def _notebook(folder: Path, *sources: str) -> Path:
    path = folder / "00_x.ipynb"
    path.write_text(dumps(book(*map(code, sources))), encoding="utf-8")
    return path


def _cell(text: str) -> str:
    return f'mine = r"""{text}"""\n\ncheck.gemv_task(mine)'


def test_a_text_stub_declares_what_the_solution_declares(task: check.Exercise, tmp_path: Path) -> None:
    assert differences(_notebook(tmp_path, _cell(STUB))) == []
    spelled = STUB.replace("const uint8_t* packed", "const  unsigned char *packed").replace("x,", "x ,")
    assert cuda_text.declaration(spelled) == cuda_text.declaration(STUB) == signature_of(SOLUTION)
    (found,) = differences(_notebook(tmp_path, _cell(STUB.replace("int N, int K", "int K, int N"))))
    assert "int K, int N" in found and "int N, int K" in found
    (found,) = differences(_notebook(tmp_path, "def f(a):\n    ...\ncheck.gemv_task(f)"))
    assert "the stub is (a), the solution gemv(" in found
    (found,) = differences(_notebook(tmp_path, "mine = 5\ncheck.gemv_task(mine)"))
    assert "the stub is a value" in found


def test_the_exercise_must_know_its_stub(
    task: check.Exercise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = STUB.replace("// YOUR CODE", "int lane;  // YOUR CODE")
    (found,) = differences(_notebook(tmp_path, _cell(changed)))
    assert f"text_stub={cuda_text.mark(changed)!r}" in found
    monkeypatch.setattr(solutions, "get", lambda name: STUB.replace("// YOUR CODE", "asm(); // YOUR CODE"))
    found = "\n".join(differences(_notebook(tmp_path, _cell(STUB))))
    assert "still says // YOUR CODE" in found and "no comment" in found and "holds asm" in found


def test_stubs_read_texts_and_the_latest_binding(tmp_path: Path) -> None:
    cells = book(code(_cell(STUB)), code("mine = 1\ncheck.two(mine)"))
    assert stubs(cells) == {"gemv_task": cuda_text.declaration(STUB), "two": None}
    assert {name: index for name, (index, _, _) in text_stubs(cells).items()} == {"gemv_task": 0}


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (_cell(STUB), ""),
        (_cell(STUB).replace('r"""', '"""'), 'r"""'),
        (_cell("\n" + STUB), "line of the quotes"),
        (_cell(STUB.replace("YOUR CODE", "your code")), "no comment // YOUR CODE"),
    ],
)
def test_the_gate_reads_text_stubs(cell: str, problem: str) -> None:
    found = [str(item) for item in check_format(book(code(cell))) if item.rule == "text-stub"]
    assert found == [] if not problem else len(found) == 1 and problem in found[0]


def test_a_solution_in_cuda_is_shown_as_it_stands_in_a_file(
    task: check.Exercise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ch99.py"
    file.write_text(f'# Lanes side by side.\ngemv_task = r"""{SOLUTION}"""\n', encoding="utf-8")
    import importlib.util

    spec = importlib.util.spec_from_file_location("ch99", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(solutions, "_module", lambda chapter: module)
    shown = solutions.show("99.1")
    first = ["// Solution of 99.1: A GEMV", "// gemv_task", "// Lanes side by side."]
    assert repr(shown).splitlines()[:3] == first
    assert 'r"""' not in shown.source and shown.source.endswith("}")
    assert "&lt;cuda_fp16.h&gt;" in shown._repr_html_()
    assert cuda_text.holds(shown.source, SOLUTION)
