"""Loops of machine code: instructions of a trip, loads, waits."""

from __future__ import annotations

import pytest

from labkit.errors import InputError
from labkit.kernels import loops
from labkit.kernels.loops import Loop
from labkit.kernels.sass import Instruction
from labkit.kernels.source import KernelSource


def instructions(*texts: str) -> tuple[Instruction, ...]:
    return tuple(Instruction(16 * i, text.split()[0], i + 1, text) for i, text in enumerate(texts))


def loop(*texts: str) -> Loop:
    return Loop("k", "sm_86", instructions(*texts))


def test_registers_of_wide_loads_addresses_and_stores() -> None:
    load, store, add, test = instructions(
        "LDG.E.128.CONSTANT R4, [R18.64+0x10]",
        "STG.E.U16 [R6.64], R0",
        "FFMA R1, R2, R3, R1",
        "ISETP.GE.AND P0, PT, R7, c[0x0][0x18c], PT",
    )
    assert loops.registers(load) == ({4, 5, 6, 7}, {18, 19})
    assert loops.registers(store) == (set(), {6, 7, 0})
    assert loops.registers(add) == ({1}, {1, 2, 3})
    assert loops.registers(test) == (set(), {7})


def test_loads_that_go_out_together_are_waited_for_once() -> None:
    together = loop("LDG.E R1, [R8.64]", "LDG.E R2, [R10.64]", "FADD R3, R1, R3", "FADD R3, R2, R3")
    assert together.marks == ("load", "load", "wait", "other")
    assert (together.waits(), together.together, together.executed()) == (1, 2, 4)


def test_a_load_after_each_use_is_waited_for_each_time() -> None:
    queued = loop("LDG.E R1, [R8.64]", "FADD R3, R1, R3", "LDG.E R2, [R10.64]", "FADD R3, R2, R3")
    assert (queued.waits(), queued.together) == (2, 1)


def test_what_the_last_instruction_loads_is_waited_for_in_the_next_trip() -> None:
    assert loop("FADD R3, R1, R3", "LDG.E R1, [R8.64]").waits() == 1


def test_a_use_far_behind_its_load_is_no_wait_but_one_is_left() -> None:
    far = ("IADD3 R9, R9, 0x1, RZ",) * loops.NEAR
    late = loop("LDG.E R1, [R8.64]", *far, "FADD R3, R1, R3")
    assert late.waits() == 1 and late.marks[-1] == "wait"  # the only one: a trip that loads waits once
    both = loop(
        "LDG.E R1, [R8.64]",
        "LDG.E R2, [R10.64]",
        *far,
        "FADD R3, R1, R3",
        "LDG.E R4, [R12.64]",
        "FADD R3, R4, R2",
    )
    assert [at for at, mark in enumerate(both.marks) if mark == "wait"] == [loops.NEAR + 4]
    near = loop("LDG.E R1, [R8.64]", *far[2:], "FADD R3, R1, R3", "LDG.E R4, [R12.64]", "FADD R3, R4, R3")
    assert near.waits() == 2
    assert loop("FADD R3, R1, R3").waits() == 0


def test_a_register_that_is_written_again_is_not_waited_for() -> None:
    assert loop("LDG.E R1, [R8.64]", "MOV R1, RZ", "FADD R3, R1, R3").waits() == 0


def test_an_address_that_was_loaded_is_a_wait() -> None:
    assert loop("LDG.E.64 R8, [R2.64]", "LDG.E R1, [R8.64]", "FADD R3, R1, R3").waits() == 2


def test_an_inner_loop_counts_by_its_trips() -> None:
    inner = loop("LDG.E R1, [R8.64]", "FADD R3, R1, R3")
    outer = Loop("k", "sm_86", instructions("IADD3 R8, R8, 0x4, RZ"), inner)
    assert (outer.executed(5), outer.waits(5), outer.loads(5)) == (11, 5, {"LDG": 5})


LISTING = """
	.section	.text.other,"ax",@progbits
.L_x_0:
        /*0000*/                   BRA `(.L_x_0) ;
	.section	.text.mine,"ax",@progbits
        /*0000*/                   MOV R1, RZ ;
.L_x_1:
        /*0010*/              @P1 BRA `(.L_x_2) ;
        /*0020*/                   LDG.E R1, [R8.64] ;
.L_x_2:
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   BRA `(.L_x_9) ;
"""


def test_jumps_are_those_of_one_kernel_and_their_labels_may_stand_later() -> None:
    assert loops._jumps(LISTING, "mine") == [(0x10, 0x30), (0x30, 0x10)]
    assert loops._jumps(LISTING, "other") == [(0, 0)]


def nvrtc_or_skip(source: KernelSource) -> Loop:
    try:
        return loops.main_loop(source)
    except InputError as error:
        pytest.skip(str(error))


SUM = r"""
extern "C" __global__ void total(const float* __restrict__ x, float* __restrict__ y, int n, int rows)
{
    float sum = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += 32) {
        sum += x[i];
        BODY
    }
    y[threadIdx.x] = sum;
}
"""


def test_a_real_loop_has_one_load_and_one_wait() -> None:
    found = nvrtc_or_skip(KernelSource.from_text(SUM.replace("BODY", ""), "total"))
    assert found.loads() == {"LDG": 1} and found.waits() == 1 and found.inner is None
    assert found.guarded == frozenset()


def test_a_real_guard_can_be_closed() -> None:
    guarded = "if (rows > 1) { sum = sum * x[i + n] + x[i + 2 * n] / sum; }"
    found = nvrtc_or_skip(KernelSource.from_text(SUM.replace("BODY", guarded), "total"))
    assert found.loads()["LDG"] == 3
    assert found.unguarded().executed() <= found.executed()


def test_a_real_inner_loop_is_found() -> None:
    body = "\n#pragma unroll 1\nfor (int j = 0; j < rows; ++j) { sum += x[i + j * n]; }"
    found = nvrtc_or_skip(KernelSource.from_text(SUM.replace("BODY", body), "total"))
    assert found.inner is not None and found.inner.loads() == {"LDG": 1}
    assert found.loads(4) == {"LDG": 5}


def test_a_kernel_with_no_loop_is_refused() -> None:
    nvrtc_or_skip(KernelSource.from_text(SUM.replace("BODY", ""), "total"))
    text = 'extern "C" __global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    with pytest.raises(InputError, match="a kernel with a loop"):
        loops.main_loop(KernelSource.from_text(text, "copy"))
