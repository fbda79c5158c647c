"""What a cubin and the assembler's log say about a kernel: registers, stack, shared memory, code.

A cubin is an ELF file; its ``.nv.info`` sections hold attribute records. The numbers of the
attributes are those that NVIDIA's own tools print (``cuobjdump -elf``); files of CUDA 12 and
CUDA 13 are read alike. Standard library only, since it must run where only CuPy is installed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from labkit.errors import require

# .nv.info attributes (EIATTR_…) that are read.
_FRAME_SIZE, _MIN_STACK_SIZE, _MAX_STACK_SIZE, _REGCOUNT = 0x11, 0x12, 0x23, 0x2F
_MAX_THREADS = 0x05
_SIZED_FORMAT = 0x04  # the record carries its length; the others are 4 bytes in all
# From this architecture on the shared section counts the 1 KiB that every block has reserved.
_RESERVED_IN_SECTION, _RESERVED = 90, 1024


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a cubin.

    Attributes:
        registers: 32-bit registers a thread.
        stack: bytes of local memory a thread for its frame and for spills.
        static_shared: bytes of shared memory a block, without the dynamic part.
        code_bytes: bytes of machine code.
        max_threads: largest block that ``__launch_bounds__`` allows, None without one.
    """

    symbol: str
    registers: int
    stack: int
    static_shared: int
    code_bytes: int
    max_threads: int | None


@dataclass(frozen=True)
class LogEntry:
    """What ``ptxas -v`` prints of one kernel, bytes a thread; spills are in no cubin."""

    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    static_shared: int = 0


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    link: int
    info: int


def read_cubin(cubin: bytes) -> dict[str, KernelCode]:
    """Every kernel of a cubin by its symbol.

    Raises:
        InputError: not a 64-bit ELF file, or one cut short.
    """
    require(
        cubin[:5] == b"\x7fELF\x02", "cubin", repr(cubin[:5]), "a 64-bit ELF file, as NVRTC or nvcc writes it"
    )
    try:
        return _kernels(cubin)
    except (struct.error, ValueError, IndexError) as error:
        require(False, "cubin", f"a damaged file ({error})", "a whole ELF file")
        raise


def cubin_arch(cubin: bytes) -> int:
    """Compute capability that the code is for, as 86 for sm_86."""
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    # CUDA 13 (ABI version 8) moved the number up by a byte.
    return (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF


def _kernels(cubin: bytes) -> dict[str, KernelCode]:
    sections = {section.name: section for section in _sections(cubin)}
    symbols = _symbols(cubin, sections)
    reserved = _RESERVED if cubin_arch(cubin) >= _RESERVED_IN_SECTION else 0
    facts: dict[str, dict[int, int]] = {}
    if ".nv.info" in sections:
        for attribute, value in _attributes(cubin, sections[".nv.info"]):
            if len(value) == 8:
                index, number = struct.unpack("<II", value)
                if index < len(symbols):
                    facts.setdefault(symbols[index], {})[attribute] = number
    found = {}
    for name, section in sections.items():
        if not name.startswith(".text."):
            continue
        symbol = name.removeprefix(".text.")
        own = facts.get(symbol, {})
        shared = sections.get(f".nv.shared.{symbol}")
        found[symbol] = KernelCode(
            symbol=symbol,
            # The upper byte of the text section's info field repeats the register count.
            registers=own.get(_REGCOUNT, section.info >> 24),
            stack=max(own.get(name, 0) for name in (_FRAME_SIZE, _MIN_STACK_SIZE, _MAX_STACK_SIZE)),
            static_shared=max(0, shared.size - reserved) if shared else 0,
            code_bytes=section.size,
            max_threads=_max_threads(cubin, sections.get(f".nv.info.{symbol}")),
        )
    return found


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)]
    names = raw[names_index][4]
    return [_Section(_string(cubin, names + row[0]), row[4], row[5], row[6], row[7]) for row in raw]


def _symbols(cubin: bytes, sections: dict[str, _Section]) -> list[str]:
    table = sections[".symtab"]
    strings = list(sections.values())[table.link].offset
    return [
        _string(cubin, strings + struct.unpack_from("<I", cubin, table.offset + at)[0])
        for at in range(0, table.size, 24)
    ]


def _string(cubin: bytes, start: int) -> str:
    return cubin[start : cubin.index(b"\0", start)].decode()


def _attributes(cubin: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    at, end = section.offset, section.offset + section.size
    while at < end:
        record, attribute = cubin[at], cubin[at + 1]
        size = struct.unpack_from("<H", cubin, at + 2)[0] if record == _SIZED_FORMAT else 0
        yield attribute, cubin[at + 4 : at + 4 + size]
        at += 4 + size


def _max_threads(cubin: bytes, section: _Section | None) -> int | None:
    for attribute, value in _attributes(cubin, section) if section else ():
        if attribute == _MAX_THREADS and len(value) == 12:
            x, y, z = struct.unpack("<III", value)
            return x * y * z
    return None


# --- the assembler's log ----------------------------------------------------------------------------


def read_log(log: str) -> dict[str, LogEntry]:
    """Every kernel of a ``ptxas -v`` log by its symbol."""
    found: dict[str, LogEntry] = {}
    symbol = ""
    for line in log.splitlines():
        named = re.search(r"Compiling entry function '([^']+)'|Function properties for (\S+)", line)
        if named:
            symbol = (named[1] or named[2]).strip("'")
            # Properties of a function that a kernel calls come under that function's name.
            found.setdefault(symbol, LogEntry())
            continue
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if stack and symbol:
            numbers = [int(number) for number in stack.groups()]
            found[symbol] = replace(
                found[symbol], stack=numbers[0], spill_stores=numbers[1], spill_loads=numbers[2]
            )
        used = re.search(r"Used (\d+) registers", line)
        if used and symbol:
            shared = re.search(r"(\d+)(?:\+0)? bytes smem", line)
            found[symbol] = replace(
                found[symbol],
                registers=int(used[1]),
                static_shared=int(shared[1]) if shared else 0,
            )
    return found
