"""Occupancy against known kernels, and against NVIDIA's own calculator where it can be compiled."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from labkit.device import devices, get_device
from labkit.errors import InputError
from labkit.kernels.occupancy import Occupancy, Waves, occupancy
from labkit.probes.cuda import find_headers


def test_seed_gemm_fills_an_sm_of_the_target_card() -> None:
    found = occupancy(40, 6208, 256)
    assert (found.blocks, found.warps, found.max_warps, found.fraction) == (6, 48, 48, 1.0)
    assert found.limited_by == ("warps", "registers")
    assert dict(found.limits) == {"warps": 6, "blocks": 16, "registers": 6, "shared memory": 14}
    assert "6 blocks an SM, 48 of 48 warps (100%), limited by warps and registers" in str(found)


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "device", "blocks", "by"),
    [
        # registers come in 256 a warp: 41 registers cost as much as 48
        (41, 0, 256, "rtx3050-laptop", 5, "registers"),
        (48, 0, 256, "rtx3050-laptop", 5, "registers"),
        # a part of an SM has 16,384 registers: 3 warps of 160 registers (5,120 a warp), 12 in all
        (160, 0, 32, "rtx3050-laptop", 12, "registers"),
        (255, 0, 1024, "rtx3090", 0, "registers"),
        (64, 0, 1024, "a100", 1, "registers"),
        # 1 KiB reserved a block, granule 128: 48 KiB + 1 KiB fit 100 KiB twice, one byte more does not
        (32, 49 * 1024, 128, "rtx4090", 2, "shared memory"),
        (32, 49 * 1024 + 1, 128, "rtx4090", 1, "shared memory"),
        (32, 99 * 1024, 128, "rtx5090", 1, "shared memory"),
        (32, 99 * 1024 + 1, 128, "rtx5090", 0, "shared memory"),
        (32, 227 * 1024, 128, "h200", 1, "shared memory"),
        (16, 0, 32, "rtx3050-laptop", 16, "blocks"),
        (16, 0, 32, "rtx4060", 24, "blocks"),
        (16, 0, 33, "h200", 32, "blocks"),
        (0, 0, 768, "rtx3060", 2, "warps"),
        (16, 0, 1024, "rtx3060", 1, "warps"),
    ],
)
def test_each_limit_in_turn(
    registers: int, shared: int, threads: int, device: str, blocks: int, by: str
) -> None:
    found = occupancy(registers, shared, threads, device)
    assert found.blocks == blocks and by in found.limited_by


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((32, 0, 0), "threads: got 0"),
        ((32, 0, 1025), "threads: got 1025"),
        ((-1, 0, 32), "registers"),
        ((32, -1, 32), "shared_bytes"),
        ((32, 0, 32, "gtx970"), "rtx3050-laptop"),
    ],
)
def test_nonsense_is_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(InputError, match=words):
        occupancy(*arguments)


def test_waves_of_a_grid() -> None:
    found = occupancy(40, 6208, 256)  # 6 blocks × 16 SMs
    waves = found.waves(100)
    assert waves == Waves(100, 96)
    assert (waves.rounds, waves.tail_blocks) == (2, 4)
    assert waves.waves == pytest.approx(100 / 96) and waves.utilisation == pytest.approx(100 / 192)
    assert found.waves(192).tail_blocks == 0 and found.waves(192).utilisation == 1
    with pytest.raises(InputError, match="grid_blocks"):
        found.waves(0)
    with pytest.raises(InputError, match="0 blocks"):
        occupancy(255, 0, 1024).waves(1)


CALCULATOR = """
#include <limits.h>
#include <stdio.h>
#include "cuda_occupancy.h"
int main() {
    int major, minor, sm_threads, sm_shared, block_shared, registers, shared, threads;
    while (scanf("%d %d %d %d %d %d %d %d", &major, &minor, &sm_threads, &sm_shared, &block_shared,
                 &registers, &shared, &threads) == 8) {
        cudaOccDeviceProp device;
        device.computeMajor = major; device.computeMinor = minor; device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = sm_threads; device.regsPerBlock = 65536;
        device.regsPerMultiprocessor = 65536; device.warpSize = 32; device.sharedMemPerBlock = 49152;
        device.sharedMemPerMultiprocessor = sm_shared; device.numSms = 1;
        device.sharedMemPerBlockOptin = block_shared; device.reservedSharedMemPerBlock = 1024;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers; kernel.sharedSizeBytes = 0;
        kernel.maxDynamicSharedSizeBytes = shared; kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        cudaOccDeviceState state;
        cudaOccResult result;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared))
            return 1;
        printf("%d\\n", result.activeBlocksPerMultiprocessor);
    }
    return 0;
}
"""


def test_agrees_with_nvidia_s_calculator(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    folder = next((f for f in find_headers() if (f / "cuda_occupancy.h").is_file()), None)
    if compiler is None or folder is None:
        pytest.skip("needs a C++ compiler and cuda_occupancy.h")
    program = tmp_path / "calculator.cpp"
    program.write_text(CALCULATOR, encoding="utf-8")
    subprocess.run([compiler, f"-I{folder}", str(program), "-o", str(tmp_path / "calculator")], check=True)
    cards = {card.capability: card for card in devices().values()}
    draw = random.Random(7)
    cases = []
    for card in cards.values():
        most = card.shared_kib_per_block << 10
        for _ in range(2000):
            cases.append(
                (
                    card,
                    draw.randint(1, 255),
                    draw.choice([0, draw.randint(1, 16 << 10), draw.randint(1, most)]),
                    draw.choice([32, 64, 128, 256, 512, 1024, draw.randint(1, 1024)]),
                )
            )
    lines = "".join(
        f"{card.capability[0]} {card.capability[1]} {card.warps_per_sm * 32} {card.shared_kib_per_sm << 10} "
        f"{card.shared_kib_per_block << 10} {registers} {shared} {threads}\n"
        for card, registers, shared, threads in cases
    )
    done = subprocess.run(
        [str(tmp_path / "calculator")], input=lines, capture_output=True, encoding="utf-8", check=True
    )
    expected = [int(word) for word in done.stdout.split()]
    ours: list[Occupancy] = [occupancy(r, s, t, card) for card, r, s, t in cases]
    wrong = [
        (card.key, r, s, t, found.blocks, blocks)
        for (card, r, s, t), found, blocks in zip(cases, ours, expected, strict=True)
        if found.blocks != blocks
    ]
    assert not wrong, wrong[:5]
    assert {found.blocks for found in ours} >= {0, 1, 2, 16, 24, 32}


def test_every_device_of_the_table_has_its_limits() -> None:
    assert len(devices()) >= 8
    for key in devices():
        assert occupancy(32, 0, 128, key).blocks >= 8
    assert get_device("h200").shared_reserved_per_block == 1024
