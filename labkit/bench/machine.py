"""What a benchmark ran on: device, driver, clocks and throttle reasons; each question guarded."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.course.environment import commit, versions
from labkit.device import devices

# NVML's clocks event reasons (nvml.h): why the clocks are what they are. Several may hold at once.
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks setting",
}

_FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "pstate": "pstate",
}
# Drivers before 535 call the last field clocks_throttle_reasons.active.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_PACKAGES = ("cupy-cuda13x", "triton", "humming-kernels", "nvidia-cuda-nvrtc-cu12", "ziglang")


def nvidia_smi(query: str, index: str = "0", timeout: float = 20.0) -> list[str] | None:
    """Values of one GPU for a comma-separated query; None where nvidia-smi is missing or refuses."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", index]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or len(lines) != 1:
        return None
    values = [value.strip() for value in lines[0].split(",")]
    return values if len(values) == query.count(",") + 1 else None


def clocks(when: str, index: str = "0") -> dict[str, Any]:
    """Clocks, temperature, power and throttle reasons now; says so where they cannot be read."""
    for reasons in _REASONS:
        values = nvidia_smi(",".join((*_FIELDS, reasons)), index)
        if values is not None:
            return {"when": when, **parse_clocks(values)}
    return {"when": when, "unread": "nvidia-smi gave no answer"}


def parse_clocks(values: list[str]) -> dict[str, Any]:
    """Values in the order of the query, the reasons' bit mask last; what the driver does not know is None."""
    found: dict[str, Any] = {name: _number(value) for name, value in zip(_FIELDS.values(), values[:-1])}
    found["throttle_reasons"] = throttle_reasons(values[-1])
    return found


def throttle_reasons(mask: str) -> list[str] | None:
    """Names of the bits of a mask such as 0x0000000000000004; None when it is no number."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return None
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~sum(THROTTLE_REASONS)
    return [*names, f"{unknown:#x}"] if unknown else names


def _number(text: str) -> float | str | None:
    if "N/A" in text or "Not Supported" in text or not text:
        return None
    try:
        return float(text)
    except ValueError:
        return text


def gpu_index() -> str:
    """What nvidia-smi calls torch's current GPU: its PCI address where torch knows it, else its index."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if all(isinstance(part, int) for part in parts):
        domain, bus, device = (int(part or 0) for part in parts)
        return f"{domain:08x}:{bus:02x}:{device:02x}.0"
    return str(torch.cuda.current_device())


def device_facts(device: str) -> dict[str, Any]:
    """Facts of the CPU or of torch's current GPU, for :class:`labkit.bench.record.Record`."""
    if device != "cuda":
        return {"name": cpu_name(), "key": "cpu", "capability": None, "cores": os.cpu_count()}
    import torch

    from labkit.probes.gpus import installed_driver

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = installed_driver()
    limit = nvidia_smi("power.limit", gpu_index())
    return {
        "name": properties.name,
        "key": device_key(properties.name),
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver.version,
        "cuda_driver": driver.cuda,
        "cuda": torch.version.cuda,
        "sms": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "memory_bytes": properties.total_memory,
        "power_limit_w": _number(limit[0]) if limit else None,
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model where the system tells it, else its architecture.

    On Linux ``platform.processor()`` is the architecture or empty: two laptops would look alike.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def device_key(name: str) -> str:
    """Key of ``data/devices.json`` whose name this is, else the name as a file name may hold it."""
    bare = _bare(name)
    for known in devices().values():
        if _bare(known.name) == bare:
            return known.key
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def _bare(name: str) -> str:
    """Words that tell a card from another: no maker, memory size or socket."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return " ".join(word for word in words if not re.fullmatch(r"nvidia|geforce|gpu|sxm\d?|\d+gb", word))


def software_facts() -> dict[str, Any]:
    """Versions of the packages, the checkout's commit, and the system.

    A copy of the tree whose git is missing or stale is told its commit by ``LABKIT_COMMIT``: a hash,
    "-dirty" after it when files were changed.
    """
    found = versions()
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    system = f"{platform.system()} {platform.machine()}"
    return {"versions": found, "commit": _named_commit() or commit(), "system": system}


def _named_commit() -> dict[str, Any] | None:
    name = os.environ.get("LABKIT_COMMIT", "").strip()
    return {"id": name.removesuffix("-dirty"), "dirty": name.endswith("-dirty")} if name else None
