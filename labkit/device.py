"""Device facts as data, and the arithmetic of the roofline.

``data/devices.json`` holds the makers' figures, each with its source. The functions are pure:
bytes in, seconds or tokens out. The two ``measure_*`` functions time this machine.

Units: GB/s and TFLOP/s are decimal (1e9, 1e12); KiB, MiB and GiB are binary.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import refuse, require
from labkit.paths import data_dir


@dataclass(frozen=True)
class Device:
    """One graphics card, nominal figures.

    Attributes:
        capability: compute capability, (major, minor).
        bandwidth_gb_s: device memory, GB/s.
        memory_gib: marketed memory size.
        fp32_tflops: FP32 FMA on the CUDA cores, TFLOP/s.
        tensor_tflops: FP16 in, FP32 accumulate, dense, TFLOP/s.
        shared_kib_per_block: the most one block can have (by opt-in above 48).
        register_granule: registers are given to a warp in multiples of this many.
        warp_granule: parts of an SM, each with its own share of the registers.
        shared_granule: shared memory is given to a block in multiples of this many bytes.
        shared_reserved_per_block: bytes that every block takes on top of its own.
        sources: field name → where the figure is from.
    """

    key: str
    name: str
    capability: tuple[int, int]
    sms: int
    bandwidth_gb_s: float
    memory_gib: float
    l2_mib: float
    clock_ghz: float
    fp32_tflops: float
    tensor_tflops: float
    shared_kib_per_sm: int
    shared_kib_per_block: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    threads_per_block: int
    registers_per_thread: int
    register_granule: int
    warp_granule: int
    shared_granule: int
    shared_reserved_per_block: int
    sources: dict[str, str] = field(compare=False, repr=False)
    origin: str = "quoted"


@functools.cache
def devices() -> dict[str, Device]:
    """All known devices by key, the course's target card first."""
    content = json.loads((data_dir() / "devices.json").read_text(encoding="utf-8"))
    texts = content["sources"]
    allocation = dict(content["allocation"])
    allocation_source = texts[allocation.pop("source")]
    found = {}
    for entry in content["devices"]:
        limits = dict(content["capabilities"][entry["capability"]])
        limit_source = texts[limits.pop("source")]
        facts = {name: fact for name, fact in entry.items() if isinstance(fact, dict)}
        major, minor = entry["capability"].split(".")
        found[entry["key"]] = Device(
            key=entry["key"],
            name=entry["name"],
            capability=(int(major), int(minor)),
            **{name: fact["value"] for name, fact in facts.items()},
            **limits,
            **allocation,
            sources={name: texts[fact["source"]] for name, fact in facts.items()}
            | dict.fromkeys(limits, limit_source)
            | dict.fromkeys(allocation, allocation_source),
        )
    return found


def get_device(name: str) -> Device:
    """A device by key or full name, in any case.

    Raises:
        InputError: unknown name; the message lists the keys.
    """
    wanted = str(name).strip().lower()
    for device in devices().values():
        if wanted in (device.key, device.name.lower()):
            return device
    refuse(
        "device",
        repr(name),
        "one of " + ", ".join(devices()),
        "or add it to data/devices.json with its source",
    )


# --- bytes ------------------------------------------------------------------------------------------


def bytes_per_weight(bits: float, group: int | None = None, offset: bool = False) -> float:
    """Stored bytes per weight: the code, and its share of the group's FP16 scale and offset.

    Args:
        bits: bits of one code (3, 4, 8; 16 for plain FP16).
        group: weights that share one scale; None for no scale.
        offset: the group has an FP16 offset as well.

    Returns:
        Bytes a weight, such as 0.515625 for W4 at group 128.
    """
    require(0 < bits <= 32, "bits", bits, "more than 0 and at most 32")
    require(group is None or group >= 1, "group", group, "at least 1, or None")
    require(group is not None or not offset, "offset", offset, "False where there is no group")
    per_group = 0.0 if group is None else (4.0 if offset else 2.0) / group
    return bits / 8 + per_group


# --- the roofline -----------------------------------------------------------------------------------


def decode_ceiling_tok_s(model_bytes: float, bandwidth_gb_s: float) -> float:
    """Most tokens a second of one sequence when every weight is read once a token."""
    require(model_bytes > 0, "model_bytes", model_bytes, "more than 0")
    require(bandwidth_gb_s > 0, "bandwidth_gb_s", bandwidth_gb_s, "more than 0")
    return bandwidth_gb_s * 1e9 / model_bytes


def achieved_gb_s(nbytes: float, seconds: float) -> float:
    """GB/s when ``nbytes`` were moved in ``seconds``."""
    require(seconds > 0, "seconds", seconds, "more than 0")
    return nbytes / seconds / 1e9


def intensity(m: float, weight_bytes: float) -> float:
    """FLOP per byte of weights when M rows share one read: each weight gives 2·M FLOP.

    Args:
        m: rows of activations.
        weight_bytes: bytes a weight, from :func:`bytes_per_weight`.
    """
    require(m > 0, "m", m, "more than 0")
    require(weight_bytes > 0, "weight_bytes", weight_bytes, "more than 0")
    return 2 * m / weight_bytes


def ridge_m(tflops: float, bandwidth_gb_s: float, weight_bytes: float) -> float:
    """The M at which reading the weights and computing with them take the same time.

    Below it the memory is the limit and one more row is free; above it the arithmetic is.
    """
    require(tflops > 0, "tflops", tflops, "more than 0")
    require(bandwidth_gb_s > 0, "bandwidth_gb_s", bandwidth_gb_s, "more than 0")
    require(weight_bytes > 0, "weight_bytes", weight_bytes, "more than 0")
    return tflops * 1e12 * weight_bytes / (2 * bandwidth_gb_s * 1e9)


def attainable_tflops(m: float, weight_bytes: float, bandwidth_gb_s: float, tflops: float) -> float:
    """The roof above M: the lower of the compute peak and intensity × bandwidth, TFLOP/s."""
    return min(tflops, intensity(m, weight_bytes) * bandwidth_gb_s / 1e3)


def step_seconds(
    weights: float, m: float, weight_bytes: float, bandwidth_gb_s: float, tflops: float
) -> tuple[float, float]:
    """Least seconds of one pass over ``weights`` with M rows: (reading, computing).

    The pass cannot be faster than the larger of the two.
    """
    return weights * weight_bytes / (bandwidth_gb_s * 1e9), 2 * m * weights / (tflops * 1e12)


# --- this machine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Median of repeated timings on this machine.

    Attributes:
        value: GB/s or TFLOP/s at the median time.
        unit: of ``value``.
        seconds: every repeat, in order.
        what: what was timed, with its size.
    """

    value: float
    unit: str
    seconds: tuple[float, ...]
    what: str
    origin: str = "measured"

    @property
    def spread(self) -> float:
        """(slowest − fastest) / median: above about 0.3 the machine was busy, measure again."""
        return (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds)


def time_calls(call: Callable[[], Any], device: str = "cpu", repeats: int = 5) -> tuple[float, ...]:
    """Seconds of each of ``repeats`` calls after one that is not counted.

    On CUDA each call lies between two events of the current stream; on the CPU a monotonic clock.
    """
    require(repeats >= 1, "repeats", repeats, "at least 1")
    call()
    if device == "cuda":
        import torch

        seconds = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return tuple(seconds)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds)


def page_faults() -> int:
    """Page faults of this process so far: a page of memory that had to be made at its first use."""
    try:
        import resource
    except ImportError:  # Windows has no resource module; psutil counts the same there
        import psutil

        return int(psutil.Process().memory_info().num_page_faults)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def measure_copy(device: str = "cpu", mib: int = 256, repeats: int = 5) -> Measurement:
    """Bandwidth of a copy of ``mib`` MiB, GB/s, counting the bytes read and those written."""
    import torch

    require(mib >= 1, "mib", mib, "at least 1")
    source = torch.ones(mib << 18, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    seconds = time_calls(lambda: target.copy_(source), device, repeats)
    moved = 2 * source.numel() * 4
    return Measurement(moved / statistics.median(seconds) / 1e9, "GB/s", seconds, f"copy of {mib} MiB")


def measure_matmul(device: str = "cpu", n: int = 0, repeats: int = 3) -> Measurement:
    """Rate of a dense square matmul, TFLOP/s: FP32 on the CPU, FP16 with FP32 accumulate on CUDA.

    Args:
        n: side of the matrices; 0 for 1536 on the CPU and 8192 on CUDA.
    """
    import torch

    n = n or (8192 if device == "cuda" else 1536)
    dtype = torch.float16 if device == "cuda" else torch.float32
    a = torch.randn(n, n, dtype=dtype, device=device)
    b = torch.randn(n, n, dtype=dtype, device=device)
    out = torch.empty(n, n, dtype=dtype, device=device)
    seconds = time_calls(lambda: torch.mm(a, b, out=out), device, repeats)
    rate = 2 * n**3 / statistics.median(seconds) / 1e12
    name = str(dtype).removeprefix("torch.")
    return Measurement(rate, "TFLOP/s", seconds, f"matmul {n}×{n}×{n} {name}")
