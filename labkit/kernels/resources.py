"""Registers, spills, shared memory and occupancy of a kernel, with no GPU.

The numbers are of real machine code, compiled by NVRTC; occupancy is computed from them and from
the limits in ``data/devices.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit import tables
from labkit.device import Device, get_device
from labkit.device import devices as all_devices
from labkit.errors import refuse, require
from labkit.kernels import nvrtc
from labkit.kernels.cubin import read_cubin, read_log
from labkit.kernels.occupancy import Occupancy, occupancy
from labkit.kernels.source import KernelSource


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture.

    Attributes:
        registers: 32-bit registers a thread.
        spill_stores, spill_loads: bytes a thread that go to local memory for want of registers.
        stack: bytes of local memory a thread, spills included.
        static_shared: bytes of shared memory a block, without the dynamic part.
        code_bytes: bytes of machine code.
        max_threads: largest block that ``__launch_bounds__`` allows, None without one.
        arch: such as ``"sm_86"``.
        compiler: such as ``"NVRTC 12.9"``.
    """

    name: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    code_bytes: int
    max_threads: int | None
    compiler: str

    @property
    def spills(self) -> int:
        """Bytes a thread stored and loaded for want of registers; 0 is what a kernel here must have."""
        return self.spill_stores + self.spill_loads

    def occupancy(
        self, device: str | Device = "rtx3050-laptop", threads: int | None = None, dynamic_shared: int = 0
    ) -> Occupancy:
        """Blocks of this kernel on an SM of ``device``.

        Args:
            device: key of ``data/devices.json``, or a Device, of this architecture.
            threads: threads a block; the launch bounds when left out.
            dynamic_shared: bytes of dynamic shared memory a block.

        Raises:
            InputError: the code is for another architecture, no block size is known, or one beyond
                the launch bounds.
        """
        card = get_device(device) if isinstance(device, str) else device
        require(
            nvrtc.arch_name(card.capability) == self.arch,
            "device",
            f"{card.name} ({nvrtc.arch_name(card.capability)})",
            f"a device of {self.arch}, which this code is for",
            f"usage(source, {nvrtc.arch_name(card.capability)!r})",
        )
        return occupancy(self.registers, self.static_shared + dynamic_shared, self._threads(threads), card)

    def _threads(self, threads: int | None) -> int:
        chosen = self.max_threads if threads is None else threads
        if chosen is None:
            bare = f"None, and {self.name} has no __launch_bounds__"
            refuse("threads", bare, "threads of a block", "threads=256, or --threads 256")
        fits = self.max_threads is None or chosen <= self.max_threads
        require(fits, "threads", chosen, f"at most {self.max_threads}, the __launch_bounds__ of {self.name}")
        return chosen


def usage(source: KernelSource, arch: object = "sm_86", options: Sequence[str] = ()) -> Usage:
    """Compile ``source`` for ``arch`` and read what it takes.

    Args:
        source: the kernel.
        arch: such as ``"sm_86"``, ``86``, ``(8, 6)``.
        options: further options of NVRTC.

    Raises:
        InputError: the text does not compile, or no NVRTC here knows the architecture.
    """
    compiled = nvrtc.compile_cubin(source, arch, options)
    kernels = read_cubin(compiled.cubin)
    require(
        compiled.symbol in kernels, "cubin", ", ".join(kernels) or "no kernel", f"a kernel {compiled.symbol}"
    )
    code = kernels[compiled.symbol]
    log = read_log(compiled.log).get(compiled.symbol)
    if log is None:
        refuse("log", repr(compiled.log[:200]), f"resource lines of {compiled.symbol} (ptxas -v)")
    return Usage(
        name=source.name,
        arch=compiled.arch,
        registers=code.registers or log.registers,
        spill_stores=log.spill_stores,
        spill_loads=log.spill_loads,
        stack=max(code.stack, log.stack),
        static_shared=log.static_shared,
        code_bytes=code.code_bytes,
        max_threads=code.max_threads,
        compiler=f"NVRTC {compiled.nvrtc}",
    )


def stated_registers(source: KernelSource) -> int | None:
    """The number of the line ``// registers: R`` of the kernel's file, None without one."""
    found = re.search(r"^//\s*registers:\s*(\d+)\s*$", source.text, re.MULTILINE)
    return int(found[1]) if found else None


def table(
    sources: KernelSource | Iterable[KernelSource],
    devices: Sequence[str | Device] | None = None,
    *,
    threads: int | None = None,
    dynamic_shared: int = 0,
) -> tables.Table:
    """Resources and occupancy of kernels on devices, one row each pair; shows itself in a notebook.

    Args:
        sources: one kernel or several.
        devices: keys of ``data/devices.json``; all of them when left out.
        threads: threads a block; each kernel's launch bounds when left out.
        dynamic_shared: bytes of dynamic shared memory a block.

    Raises:
        InputError: a kernel that does not compile, an unknown device, no block size.
    """
    chosen = [sources] if isinstance(sources, KernelSource) else list(sources)
    names = list(all_devices()) if devices is None else list(devices)
    cards = [get_device(name) if isinstance(name, str) else name for name in names]
    rows = []
    compilers = set()
    for source in chosen:
        for card in cards:
            found = usage(source, card.capability)
            fits = found.occupancy(card, threads, dynamic_shared)
            compilers.add(found.compiler)
            rows.append(
                {
                    "kernel": found.name,
                    "device": card.name,
                    "arch": found.arch,
                    "registers": found.registers,
                    "spills": found.spills,
                    "shared": found.static_shared + dynamic_shared,
                    "threads": fits.threads,
                    "blocks": fits.blocks,
                    "warps": f"{fits.warps}/{fits.max_warps}",
                    "occupancy": f"{fits.fraction:.0%}",
                    "limited by": " and ".join(fits.limited_by),
                }
            )
    headers = {
        "kernel": "kernel",
        "device": "device",
        "arch": "arch",
        "registers": "registers",
        "spills": "spilled bytes",
        "shared": "shared bytes a block",
        "threads": "threads a block",
        "blocks": "blocks an SM",
        "warps": "warps an SM",
        "occupancy": "occupancy",
        "limited by": "limited by",
    }
    caption = f"Machine code of {', '.join(sorted(compilers))}; occupancy computed from the device's limits"
    return tables.table(rows, headers, caption=caption, origins=False)


def usage_table(sources: Iterable[KernelSource], archs: Sequence[object] = nvrtc.ARCHS) -> tables.Table:
    """What kernels take on each architecture, without a device or a block size."""
    rows = []
    for source in sources:
        for arch in archs:
            found = usage(source, arch)
            rows.append(
                {
                    "kernel": found.name,
                    "arch": found.arch,
                    "registers": found.registers,
                    "spilled bytes": found.spills,
                    "stack bytes": found.stack,
                    "shared bytes": found.static_shared,
                    "code bytes": found.code_bytes,
                    "threads a block": found.max_threads,
                    "compiler": found.compiler,
                }
            )
    return tables.table(rows, origins=False)
