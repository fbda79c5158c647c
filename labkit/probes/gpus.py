"""NVIDIA GPUs through the driver's own libraries (CUDA driver API and NVML) by ctypes."""

from __future__ import annotations

import ctypes
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from labkit.doctor import Finding

GIB = 2**30
# CUdevice_attribute numbers of cuda.h, stable since CUDA 4.
SM_COUNT, CLOCK_KHZ, MEMORY_CLOCK_KHZ, BUS_BITS, L2_BYTES, CC_MAJOR, CC_MINOR = 16, 13, 36, 37, 38, 75, 76
NO_DRIVER = "no NVIDIA driver: every chapter runs on the CPU emulator"


@dataclass(frozen=True)
class Gpu:
    """What the driver says of one GPU. Bandwidth is 2 × memory clock × bus width, nominal."""

    index: int
    name: str
    capability: str
    sms: int
    memory_bytes: int
    free_bytes: int | None
    bandwidth_gb_s: float | None
    l2_bytes: int
    clock_mhz: float


@dataclass(frozen=True)
class Driver:
    """Driver facts: CUDA version it supports, its own version, GPUs, or why there are none."""

    cuda: str | None
    version: str | None
    gpus: tuple[Gpu, ...]
    reason: str = ""


def _load(names: tuple[str, ...]) -> Any | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def driver_library() -> Any | None:
    """The CUDA driver library, or None."""
    return _load(("nvcuda.dll",) if os.name == "nt" else ("libcuda.so.1", "libcuda.so"))


def nvml_library() -> Any | None:
    """The NVIDIA management library, or None."""
    return _load(("nvml.dll",) if os.name == "nt" else ("libnvidia-ml.so.1",))


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _nvml_facts(nvml: Any | None, bus_ids: list[bytes]) -> tuple[str | None, list[int | None]]:
    """Driver version, and free bytes by PCI bus id: NVML needs no context, which would take memory."""
    nothing: list[int | None] = [None] * len(bus_ids)
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return None, nothing
    try:
        text = ctypes.create_string_buffer(96)
        version = (
            text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)) == 0 else None
        )
        free: list[int | None] = []
        for bus_id in bus_ids:
            handle, memory = ctypes.c_void_p(), _NvmlMemory()
            found = nvml.nvmlDeviceGetHandleByPciBusId_v2(ctypes.c_char_p(bus_id), ctypes.byref(handle)) == 0
            ok = found and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            free.append(int(memory.free) if ok else None)
        return version, free
    finally:
        nvml.nvmlShutdown()


def read_driver(cuda: Any | None, nvml: Any | None) -> Driver:
    """Ask the two libraries; every call's error code becomes the reason, never an exception."""
    if cuda is None:
        return Driver(None, None, (), NO_DRIVER)
    code = cuda.cuInit(0)
    if code != 0:
        why = {100: "the driver sees no GPU", 803: "the driver and its library differ in version"}
        return Driver(None, _nvml_facts(nvml, [])[0], (), why.get(code, f"cuInit failed with error {code}"))
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    cuda.cuDeviceGetCount(ctypes.byref(number))
    handles, bus_ids = [], []
    for index in range(number.value):
        handle, bus_id = ctypes.c_int(), ctypes.create_string_buffer(32)
        cuda.cuDeviceGet(ctypes.byref(handle), index)
        cuda.cuDeviceGetPCIBusId(bus_id, 32, handle)
        handles.append(handle)
        bus_ids.append(bus_id.value)
    driver_version, free = _nvml_facts(nvml, bus_ids)
    gpus = tuple(_gpu(cuda, index, handle, free[index]) for index, handle in enumerate(handles))
    return Driver(version, driver_version, gpus)


def _gpu(cuda: Any, index: int, handle: ctypes.c_int, free: int | None) -> Gpu:
    def attribute(number: int) -> int:
        value = ctypes.c_int()
        return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle) == 0 else 0

    name, total = ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, 128, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    bandwidth = 2 * attribute(MEMORY_CLOCK_KHZ) * 1e3 * attribute(BUS_BITS) / 8 / 1e9
    return Gpu(
        index=index,
        name=name.value.decode("utf-8", "replace"),
        capability=f"{attribute(CC_MAJOR)}.{attribute(CC_MINOR)}",
        sms=attribute(SM_COUNT),
        memory_bytes=total.value,
        free_bytes=free,
        bandwidth_gb_s=round(bandwidth, 1) or None,
        l2_bytes=attribute(L2_BYTES),
        clock_mhz=attribute(CLOCK_KHZ) / 1e3,
    )


@lru_cache(maxsize=1)
def installed_driver() -> Driver:
    """The driver of this machine, asked once."""
    return read_driver(driver_library(), nvml_library())


def device_count() -> int:
    """How many GPUs the driver sees."""
    return len(installed_driver().gpus)


def driver() -> Finding:
    """The NVIDIA driver and the newest CUDA it supports."""
    found = installed_driver()
    facts = {"cuda": found.cuda, "version": found.version, "reason": found.reason}
    if found.cuda is None:
        fix = "" if found.reason == NO_DRIVER else "reinstall the NVIDIA driver, then restart"
        return Finding("driver", "note", found.reason, fix, facts)
    value = f"{found.version or 'version unknown'}, supports CUDA {found.cuda}"
    if int(found.cuda.split(".")[0]) < 12:
        return Finding("driver", "problem", value, "update the NVIDIA driver: labkit needs CUDA 12", facts)
    return Finding("driver", "ok", value, facts=facts)


def gpus() -> list[Finding]:
    """One finding a GPU, in order of index; none is a note."""
    found = installed_driver()
    if not found.gpus:
        return [Finding("gpu", "note", "none; every chapter runs without one", facts={"count": 0})]
    findings = []
    for gpu in found.gpus:
        free = f"{gpu.free_bytes / GIB:.1f} GiB free" if gpu.free_bytes is not None else "free memory unknown"
        speed = f"{gpu.bandwidth_gb_s:.0f} GB/s nominal" if gpu.bandwidth_gb_s else "bandwidth unknown"
        total = f"{gpu.memory_bytes / GIB:.1f} GiB"
        value = f"{gpu.name}, SM {gpu.capability}, {gpu.sms} SMs, {total}, {free}, {speed}"
        name = f"gpu {gpu.index}"
        if float(gpu.capability) < 8.0:
            fix = "use the CPU: labkit course --device cpu"
            findings.append(Finding(name, "note", value + "; kernels need SM 8.0", fix, asdict(gpu)))
        elif gpu.free_bytes is not None and gpu.free_bytes < GIB:
            fix = "close programs that use the GPU (nvidia-smi lists them)"
            findings.append(Finding(name, "note", value, fix, asdict(gpu)))
        else:
            findings.append(Finding(name, "ok", value, facts=asdict(gpu)))
    return findings
