"""The debug information and the exports of a Windows library (PE), for :mod:`labkit.emulator.lines`."""

from __future__ import annotations

import inspect
import io
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Section:
    name: str
    address: int  # relative to the image base
    data: bytes


class PeFile:
    """A PE image.

    Args:
        data: the file's bytes.

    Raises:
        ValueError: not a 64-bit PE file.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        try:
            self._read()
        except (struct.error, IndexError) as error:
            raise ValueError(f"not a PE file: {error}") from None

    def _read(self) -> None:
        data = self._data
        (start,) = struct.unpack_from("<I", data, 0x3C)
        if data[:2] != b"MZ" or data[start : start + 4] != b"PE\0\0":
            raise ValueError("not a PE file")
        count, symbols, symbol_count, optional = struct.unpack_from("<2xH4xIIH", data, start + 4)
        header = start + 24
        (magic,) = struct.unpack_from("<H", data, header)
        if magic != 0x20B:
            raise ValueError("not a 64-bit PE file")
        (self.base,) = struct.unpack_from("<Q", data, header + 24)
        self._exports_at, _ = struct.unpack_from("<II", data, header + 112)
        strings = symbols + 18 * symbol_count  # names longer than 8 characters lie after the symbols
        self.sections = [self._section(header + optional + 40 * number, strings) for number in range(count)]

    def _section(self, at: int, strings: int) -> _Section:
        raw, size, address, stored, offset = struct.unpack_from("<8sIIII", self._data, at)
        name = raw.rstrip(b"\0").decode("ascii", "replace")
        if name.startswith("/") and name[1:].isdigit():
            name = _text(self._data, strings + int(name[1:]))
        return _Section(name, address, self._data[offset : offset + min(size or stored, stored)])

    def exports(self) -> dict[str, int]:
        """Names of the exported functions and their addresses, with the image base."""
        if not self._exports_at:
            return {}
        section = next(s for s in self.sections if s.address <= self._exports_at < s.address + len(s.data))

        def at(address: int) -> int:
            return address - section.address

        directory = struct.unpack_from("<24xIIII", section.data, at(self._exports_at))
        names, functions, name_table, ordinals = directory
        out = {}
        for i in range(names):
            (name,) = struct.unpack_from("<I", section.data, at(name_table) + 4 * i)
            (ordinal,) = struct.unpack_from("<H", section.data, at(ordinals) + 2 * i)
            (address,) = struct.unpack_from("<I", section.data, at(functions) + 4 * ordinal)
            out[_text(section.data, at(name))] = self.base + address
        return out

    def read_only(self) -> list[list[int]]:
        """(address, bytes) of the sections with code and constants."""
        return [
            [self.base + section.address, len(section.data)]
            for section in self.sections
            if section.name in (".text", ".rdata")
        ]

    def dwarf(self) -> Any | None:
        """Its debug information for pyelftools; None when there is none."""
        from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DwarfConfig, DWARFInfo

        found = {
            section.name: DebugSectionDescriptor(
                io.BytesIO(section.data), section.name, 0, len(section.data), 0
            )
            for section in self.sections
            if section.name.startswith(".debug_")
        }
        if ".debug_info" not in found or ".debug_line" not in found:
            return None
        config = DwarfConfig(little_endian=True, machine_arch="x64", default_address_size=8)
        # Which sections it asks for differs between versions.
        wanted = [name for name in inspect.signature(DWARFInfo).parameters if name.endswith("_sec")]
        sections: dict[str, Any] = {name: found.get("." + name.removesuffix("_sec")) for name in wanted}
        return DWARFInfo(config=config, **sections)


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("utf-8", "replace")
