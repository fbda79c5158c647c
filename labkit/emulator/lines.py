"""From an address in a built kernel to the line of its text, by the debug information (DWARF).

Read once after a build and kept beside the library, so that a launch needs no ELF reader.
"""

from __future__ import annotations

import bisect
import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXPORTS = "<exports>"
"""File name of the code that calls the kernels: no line of it is shown."""


_NOTHING: dict[str, Any] = {"files": [], "rows": [], "inlined": []}


def read(library: Path, filename: str, kernel_object: str) -> dict[str, Any]:
    """Everything that launches need to know about a built library, as plain JSON values.

    Args:
        library: the built shared library.
        filename: name of the kernel's file in its ``#line``.
        kernel_object: name of the source file that the kernel was compiled from.

    Returns:
        ``anchor``: address of ``cuemu_launch`` in the file; ``files``; ``rows``: (address, file, line)
        sorted by address; ``inlined``: (low, high, line) of calls from the kernel's own lines;
        ``constant``: (address, bytes) of memory that every kernel may read.
    """
    with library.open("rb") as file:
        magic = file.read(4)
    if magic == b"\x7fELF":
        return _read_elf(library, filename, kernel_object)
    if magic[:2] == b"MZ":
        return _read_pe(library, filename)
    return {**_NOTHING, "anchor": 0, "constant": []}  # macOS: lines are not known


def _read_elf(library: Path, filename: str, kernel_object: str) -> dict[str, Any]:
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        elf = ELFFile(file)
        dynamic: Any = elf.get_section_by_name(".dynsym")
        anchor = dynamic.get_symbol_by_name("cuemu_launch")[0]["st_value"]
        constant = [
            [segment["p_vaddr"], segment["p_memsz"]]
            for segment in elf.iter_segments()
            if segment["p_type"] == "PT_LOAD" and not segment["p_flags"] & 2
        ]
        constant += _own_data(elf, kernel_object)
        table = _read_dwarf(elf.get_dwarf_info(), filename) if elf.has_dwarf_info() else {}
    return {**_NOTHING, "anchor": anchor, "constant": constant, **table}


def _read_pe(library: Path, filename: str) -> dict[str, Any]:
    from labkit.emulator.pe import PeFile

    image = PeFile(library.read_bytes())
    dwarf = image.dwarf()
    table = _read_dwarf(dwarf, filename) if dwarf is not None else {}
    anchor = image.exports().get("cuemu_launch", 0)
    return {**_NOTHING, "anchor": anchor, "constant": image.read_only(), **table}


def _own_data(elf: Any, kernel_object: str) -> list[list[int]]:
    """Variables of the kernel's own file: ``__constant__`` tables and ``__device__`` variables."""
    symbols = elf.get_section_by_name(".symtab")
    if symbols is None:
        return []
    ranges: list[list[int]] = []
    in_kernel = False
    for symbol in symbols.iter_symbols():
        info = symbol["st_info"]
        if info["type"] == "STT_FILE":
            # Hidden variables of all files come last, under no file's name.
            in_kernel = symbol.name in (kernel_object, "")
            continue
        own = in_kernel if info["bind"] == "STB_LOCAL" else symbol["st_shndx"] != "SHN_UNDEF"
        if own and info["type"] == "STT_OBJECT" and symbol["st_size"]:
            ranges.append([symbol["st_value"], symbol["st_size"]])
    return ranges


def _read_dwarf(dwarf: Any, filename: str) -> dict[str, Any]:
    files: list[str] = []
    known: dict[str, int] = {}
    rows: list[tuple[int, int, int]] = []
    inlined: list[tuple[int, int, int]] = []
    for unit in dwarf.iter_CUs():
        program = dwarf.line_program_for_CU(unit)
        if not program:
            continue
        # DWARF 5 counts files from 0, earlier versions from 1.
        first = 0 if program.header["version"] >= 5 else 1
        names = [_file_name(entry.name) for entry in program.header["file_entry"]]
        for entry in program.get_entries():
            state = entry.state
            if state is None:
                continue
            index = state.file - first
            name = names[index] if 0 <= index < len(names) else "?"
            number = known.setdefault(name, len(known))
            if number == len(files):
                files.append(name)
            rows.append((state.address, number, 0 if state.end_sequence else state.line))
        own = {index + first for index, name in enumerate(names) if name == filename}
        inlined += _calls(dwarf, unit, own)
    # A sequence's end and the next one's start may share an address: the start counts.
    rows.sort(key=lambda row: (row[0], row[2] != 0))
    return {"files": files, "rows": rows, "inlined": sorted(inlined)}


def _file_name(path: bytes | str) -> str:
    text = path.decode("utf-8", "replace") if isinstance(path, bytes) else path
    return posixpath.basename(text.replace("\\", "/"))


def _calls(dwarf: Any, unit: Any, own: set[int]) -> Iterator[tuple[int, int, int]]:
    """Address ranges of functions that were inlined at a line of the kernel's own file."""
    top = unit.get_top_DIE()
    base_attribute = top.attributes.get("DW_AT_low_pc")
    base = base_attribute.value if base_attribute else 0
    ranges = dwarf.range_lists()
    # Only functions with code are walked: the headers' types and declarations are most of the tree.
    stack = [die for die in top.iter_children() if _has_code(die)]
    while stack:
        die = stack.pop()
        attributes = die.attributes
        call = attributes.get("DW_AT_call_file")
        if die.tag == "DW_TAG_inlined_subroutine" and call is not None and call.value in own:
            line = attributes["DW_AT_call_line"].value
            for low, high in _ranges(die, unit, ranges, base):
                yield low, high, line
        if die.has_children:
            stack.extend(
                child
                for child in die.iter_children()
                if child.tag in ("DW_TAG_inlined_subroutine", "DW_TAG_lexical_block")
            )


def _has_code(die: Any) -> bool:
    return die.tag == "DW_TAG_subprogram" and (
        "DW_AT_low_pc" in die.attributes or "DW_AT_ranges" in die.attributes
    )


def _ranges(die: Any, unit: Any, lists: Any, base: int) -> Iterator[tuple[int, int]]:
    attributes = die.attributes
    if "DW_AT_ranges" in attributes and lists is not None:
        for entry in lists.get_range_list_at_offset(attributes["DW_AT_ranges"].value, unit):
            if hasattr(entry, "base_address"):
                base = entry.base_address
            else:
                shift = 0 if getattr(entry, "is_absolute", False) else base
                yield entry.begin_offset + shift, entry.end_offset + shift
    elif "DW_AT_low_pc" in attributes and "DW_AT_high_pc" in attributes:
        low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
        yield low, high.value if high.form == "DW_FORM_addr" else low + high.value


class LineTable:
    """Lines by address of one library (``info`` as :func:`read` made it)."""

    def __init__(self, info: dict[str, Any], filename: str) -> None:
        self._files: list[str] = info["files"]
        self._rows = info["rows"]
        self._addresses = [row[0] for row in self._rows]
        self._inlined = info["inlined"]
        self._filename = filename
        self._known: dict[int, tuple[str, int | None]] = {}

    def at(self, address: int) -> tuple[str, int | None]:
        """File and line of the call that returns to ``address`` (an address in the library's file).

        Code of a header that was inlined into the kernel belongs to the kernel's line that called it.
        """
        if address not in self._known:
            self._known[address] = self._find(address - 1)
        return self._known[address]

    def _find(self, address: int) -> tuple[str, int | None]:
        index = bisect.bisect_right(self._addresses, address) - 1
        file, line = "", 0
        if index >= 0:
            _, number, line = self._rows[index]
            file = self._files[number]
        if file != self._filename:
            around = [(high - low, at) for low, high, at in self._inlined if low <= address < high]
            if around:
                return self._filename, min(around)[1]
        return (file, line) if line and file != EXPORTS else ("", None)


Resolver = Callable[[int], tuple[str, int | None]]
"""Address of a running library → file and line."""
