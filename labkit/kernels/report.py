"""``labkit resources``: what kernels take on each architecture and device, as text."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.device import devices, get_device
from labkit.errors import require
from labkit.kernels import nvrtc
from labkit.kernels import resources as measured
from labkit.kernels import sass as machine_code
from labkit.kernels.source import KernelSource, find_source, kernel_files


def resources(
    kernel: str | None,
    archs: Sequence[str],
    device_names: Sequence[str],
    defines: Sequence[str],
    threads: int | None,
    dynamic_shared: int,
    sass: bool,
) -> None:
    """Print the tables.

    Args:
        kernel: entry, packaged file or path; None for every packaged kernel.
        archs: architectures; none means all of :data:`labkit.kernels.nvrtc.ARCHS`.
        device_names: devices to compute occupancy for; "all" for the whole table.
        defines: ``NAME=VALUE`` or ``NAME`` texts.
        threads: threads a block, None for the launch bounds.
        dynamic_shared: bytes a block.
        sass: print instructions by source line, for the first architecture.

    Raises:
        InputError: nothing of that name, a text that does not compile, a bad option.
    """
    require(dynamic_shared >= 0, "--shared", dynamic_shared, "at least 0 bytes")
    # Everything that can be wrong is said before the first kernel is compiled.
    names = list(devices()) if "all" in device_names else list(device_names)
    for name in names:
        get_device(name)
    for option, given in (("--threads", threads), ("--shared", dynamic_shared)):
        alone = given and not names
        require(not alone, option, given, "a device to compute occupancy for", "--device rtx3050-laptop")
    pairs = [_define(text) for text in defines]
    sources: list[KernelSource] = []
    for name in [kernel] if kernel else kernel_files():
        sources += find_source(name, pairs)
    wanted = [nvrtc.arch_name(arch) for arch in archs] or list(nvrtc.ARCHS)
    print(measured.usage_table(sources, wanted))
    if names:
        print()
        print(measured.table(sources, names, threads=threads, dynamic_shared=dynamic_shared))
    if sass:
        for source in sources:
            code = machine_code.disassemble(source, wanted[0])
            classes = ", ".join(f"{count} {kind}" for kind, count in code.by_class().items())
            print(f"\n{code.table()}\n{code.count} instructions: {classes}")


def _define(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    return name, value if given else "1"
