"""The machine under Python: version, memory, disk, locale, paths, compiler."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import sys
from pathlib import Path

from labkit import paths
from labkit.doctor import Finding
from labkit.probes.fixes import set_up

GIB = 2**30


def python() -> Finding:
    """Version and place of the interpreter; labkit needs 3.11."""
    value = f"{platform.python_version()} ({sys.executable})"
    facts = {"version": platform.python_version(), "executable": sys.executable, "prefix": sys.prefix}
    if sys.version_info < (3, 11):  # noqa: UP036  (the doctor also runs by an older Python)
        return Finding("python", "problem", value, f"install Python 3.11 or newer, then: {set_up()}", facts)
    if sys.prefix == sys.base_prefix and not os.environ.get("CONDA_PREFIX"):
        return Finding("python", "note", value + ", no virtual environment", set_up(), facts)
    return Finding("python", "ok", value, facts=facts)


def system() -> Finding:
    """Operating system, processor and usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    value = f"{platform.platform()}, {platform.machine()}, {cores} cores"
    facts = {"platform": platform.platform(), "machine": platform.machine(), "cores": cores}
    return Finding("system", "ok", value, facts=facts)


def _memory_bytes() -> tuple[int, int]:
    """Total and available memory in bytes."""
    try:
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    except ImportError:
        pages = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
        size = os.sysconf("SC_PAGE_SIZE")
        return pages[0] * size, pages[1] * size


def memory() -> Finding:
    """Main memory; the chapters need about 2 GiB free."""
    total, free = _memory_bytes()
    value = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
    facts = {"total_bytes": total, "free_bytes": free}
    if free < 2 * GIB:
        return Finding("memory", "note", value, "close other programs: a chapter needs about 2 GiB", facts)
    return Finding("memory", "ok", value, facts=facts)


def disk() -> Finding:
    """Free space where results are written; an executed course is a few tens of MB."""
    place = paths.results_dir()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    value = f"{free / GIB:.1f} GiB free at {place}"
    facts = {"free_bytes": free, "path": str(place)}
    if not os.access(place, os.W_OK):
        fix = "set LABKIT_RESULTS to a folder you may write to"
        return Finding("disk", "problem", f"{place} is not writable", fix, facts)
    if free < GIB:
        return Finding(
            "disk", "problem", value, "free at least 1 GiB, or set LABKIT_RESULTS to another disk", facts
        )
    return Finding("disk", "ok", value, facts=facts)


def locale_and_encoding() -> Finding:
    """The codec of files opened without one; labkit always names UTF-8, other programs may not."""
    encoding = locale.getencoding() if hasattr(locale, "getencoding") else locale.getpreferredencoding(False)
    output = getattr(sys.stdout, "encoding", None) or "unknown"
    # Environment first: it is what the person set, whatever the C library made of it.
    named = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG") or "default"
    value = f"{named}, files {encoding}, output {output}"
    facts = {"locale": named, "encoding": encoding, "output": output, "utf8_mode": bool(sys.flags.utf8_mode)}
    if encoding.lower().replace("-", "") not in ("utf8", "cp65001"):
        fix = "labkit copes; for other tools set PYTHONUTF8=1"
        return Finding("locale", "note", value, fix, facts)
    return Finding("locale", "ok", value, facts=facts)


def path() -> Finding:
    """Characters in the checkout's path that break other people's tools."""
    place = str(Path(paths.__file__).resolve().parent.parent)
    odd = []
    if not place.isascii():
        odd.append("non-ASCII characters")
    if " " in place:
        odd.append("spaces")
    facts = {"path": place, "ascii": place.isascii(), "spaces": " " in place}
    if odd:
        fix = "labkit copes; if another tool fails, move the folder to a plain path"
        return Finding("path", "note", f"{place}: {' and '.join(odd)}", fix, facts)
    if os.name == "nt" and len(place) > 120:
        return Finding(
            "path", "note", f"{place}: {len(place)} characters", "use a short path on Windows", facts
        )
    return Finding("path", "ok", place, facts=facts)


def compiler() -> Finding:
    """A C++ compiler, which the CPU emulator of the kernels uses."""
    try:
        from labkit.emulator import toolchain
    except ImportError as error:  # a half-finished installation: the doctor still answers
        return Finding("compiler", "note", f"the emulator cannot be imported: {error}", set_up())
    found, value, fix = toolchain.describe()
    return Finding("compiler", "ok" if found else "note", value, fix, {"found": found})
