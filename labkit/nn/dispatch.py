"""Which kernel for which M: the dispatch table, read from ``data/dispatch.json``.

A row says: on this kind of device, from this compute capability on, for this format and these
activation dtypes, M in m_min..m_max goes to this kernel. Rows of the highest capability that the
device reaches come first, in file order; the first whose kernel can run is chosen, and why the
ones before it could not is recorded. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.errors import InputError, ModelFileError, refuse, require
from labkit.kernels import registry
from labkit.nn.override import Override, parse_overrides

DEVICES = ("cpu", "cuda")
FORMATS = ("w4", "w3", "q8_0", "q4_0")
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        device: "cpu" or "cuda".
        capability: lowest compute capability, such as "8.6"; "0.0" for any, and on the CPU.
        format: storage format, or "*" for all.
        dtypes: activation dtypes.
        m_min: least M, inclusive.
        m_max: greatest M, inclusive; None for no bound.
        kernel: name in labkit.kernels.registry.
        provenance: where the thresholds come from: measured, quoted or assumed, and how.
    """

    device: str
    capability: str
    format: str
    dtypes: tuple[str, ...]
    m_min: int
    m_max: int | None
    kernel: str
    provenance: str

    def covers(self, m: int) -> bool:
        """Whether M = ``m`` is inside this row's bounds."""
        return self.m_min <= m and (self.m_max is None or m <= self.m_max)

    @property
    def bounds(self) -> str:
        """M range in words."""
        if self.m_max is None:
            return f"M >= {self.m_min}"
        return f"M = {self.m_min}" if self.m_min == self.m_max else f"M {self.m_min}..{self.m_max}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one call and why.

    Attributes:
        kernel: its name.
        m: rows of the call.
        row: the table row.
        reason: one line in words, with the kernels that were passed over.
        skipped: (kernel, why it could not run) of the rows that came first.
    """

    kernel: str
    m: int
    row: Row
    reason: str
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DispatchTable:
    """Rows, and the kernels that an override turned off or demands."""

    rows: tuple[Row, ...]
    disabled: frozenset[str] = frozenset()
    forced: str | None = None
    source: str = ""

    @classmethod
    def load(cls, path: Path | None = None) -> DispatchTable:
        """Read a table; the one of the project by default.

        Raises:
            ModelFileError: missing, not JSON, or a row with a wrong or missing field, by row and field.
        """
        if path is None:
            return _project_table()
        return cls(_read_rows(path), source=path.name)

    @classmethod
    def from_params(
        cls, params: Mapping[str, Any] | None, base: DispatchTable | None = None
    ) -> DispatchTable:
        """A table changed by flat parameters, as papermill and the widgets give them.

        Keys (``[format.]`` is optional: without it, every format):

        * ``[format.]single_row_up_to``: greatest M of gemv_single_row;
        * ``[format.]small_batch_up_to``: greatest M of gemv_small_batch; gemm_tiled takes what is above;
        * ``[format.]KERNEL.m_min`` and ``[format.]KERNEL.m_max``: one bound (m_max may be None);
        * ``disable``: kernel names, as a list or a text with commas;
        * ``force``: the one kernel to use, for every M: its bounds do not count.

        Raises:
            InputError: an unknown key, kernel or format, or a value of the wrong type, by name.
        """
        table = base or cls.load()
        for change in parse_overrides(params or {}, {row.kernel for row in table.rows}, FORMATS):
            table = table._apply(change)
        return table

    def with_override(self, **params: Any) -> DispatchTable:
        """:meth:`from_params` on this table; dots in keys need ``with_override(**{"w4.…": 1})``."""
        return DispatchTable.from_params(params, self)

    def candidates(
        self, device: str, capability: tuple[int, int] | None, format: str, dtype: Any, m: int
    ) -> list[Row]:
        """Rows that match, best first; a forced kernel's rows match every M.

        Args:
            device: "cpu" or "cuda".
            capability: (major, minor) of a CUDA device; None on the CPU.
            format: storage format.
            dtype: a torch dtype or its name.
            m: rows of activations, >= 1.
        """
        name = str(dtype).removeprefix("torch.")
        require(device in DEVICES, "device", repr(device), "cpu or cuda")
        require(format in FORMATS, "format", repr(format), ", ".join(FORMATS))
        require(name in DTYPES, "dtype", name, ", ".join(DTYPES))
        require(isinstance(m, int) and m >= 1, "m", m, "a whole number >= 1")
        reached = (0, 0) if capability is None else tuple(capability)
        found = [
            row
            for row in self.rows
            if row.device == device
            and row.format in ("*", format)
            and name in row.dtypes
            and (row.covers(m) or row.kernel == self.forced)
            and parse_capability(row.capability) <= reached
        ]
        return sorted(found, key=lambda row: parse_capability(row.capability), reverse=True)

    def select(
        self,
        device: str,
        capability: tuple[int, int] | None,
        format: str,
        dtype: Any,
        m: int,
        *,
        why_not: Callable[[str], str] = registry.why_not,
    ) -> Choice:
        """Choose a kernel; arguments as in :meth:`candidates`.

        Args:
            why_not: kernel name to the reason why it cannot run, or "" when it can; by default
                only whether it is registered.

        Raises:
            InputError: no row's kernel can run (possible only after an override); says why for each.
        """
        skipped: list[tuple[str, str]] = []
        for row in self.candidates(device, capability, format, dtype, m):
            reason = self._turned_off(row.kernel) or why_not(row.kernel)
            if not reason:
                forced = row.kernel == self.forced
                return Choice(row.kernel, m, row, _explain(row, m, skipped, forced), tuple(skipped))
            if (row.kernel, reason) not in skipped:
                skipped.append((row.kernel, reason))
        what = f"{device}, {format}, {str(dtype).removeprefix('torch.')}, M = {m}"
        if self.forced is not None:
            self._refuse_forced(what, device, dict(skipped))
        detail = "; ".join(f"{kernel}: {reason}" for kernel, reason in skipped) or "no row covers it"
        refuse("dispatch table", f"no kernel for {what} ({detail})", "a row whose kernel can run")

    def _refuse_forced(self, what: str, device: str, skipped: Mapping[str, str]) -> None:
        """What was demanded, and either why it cannot run or what its rows are for."""
        rows = [row for row in self.rows if row.kernel == self.forced and row.device == device]
        served = "; ".join(
            dict.fromkeys(
                f"{'any format' if row.format == '*' else row.format} with {', '.join(row.dtypes)}"
                + ("" if row.capability == "0.0" else f" from {row.capability}")
                for row in rows
            )
        )
        why = skipped.get(self.forced or "") or f"its {device} rows are for {served or 'nothing'}"
        refuse(
            "dispatch table",
            f"no kernel for {what}, since the override forces {self.forced} ({why})",
            "a kernel that can serve the call",
            "force another kernel, or none",
        )

    def _turned_off(self, kernel: str) -> str:
        if self.forced is not None and kernel != self.forced:
            return f"the override forces {self.forced}"
        return "disabled by an override" if kernel in self.disabled else ""

    def _apply(self, change: Override) -> DispatchTable:
        if change.kind == "force":
            return replace(self, forced=change.value)
        if change.kind == "disable":
            return replace(self, disabled=self.disabled | frozenset(change.value))
        rows: list[Row] = []
        touched = False
        for row in self.rows:
            # A row for all formats is split, so that a change for one format leaves the others.
            hit = row.kernel == change.kernel and change.format in (None, row.format)
            split = row.kernel == change.kernel and row.format == "*" and change.format is not None
            touched |= hit or split
            changed = replace(
                row,
                m_min=change.value if change.kind == "m_min" else row.m_min,
                m_max=change.value if change.kind == "m_max" else row.m_max,
                provenance=_overridden(row.provenance, change.key),
            )
            if hit:
                rows.append(changed)
            elif split:
                rows.extend(
                    replace(changed if format == change.format else row, format=format) for format in FORMATS
                )
            else:
                rows.append(row)
        require(
            touched, change.key, f"kernel {change.kernel}, format {change.format}", "a kernel the table has"
        )
        return replace(self, rows=tuple(rows))


def parse_capability(text: str) -> tuple[int, int]:
    """ "8.6" to (8, 6)."""
    major, dot, minor = text.partition(".")
    require(bool(dot) and major.isdigit() and minor.isdigit(), "capability", repr(text), 'text such as "8.6"')
    return int(major), int(minor)


def _overridden(provenance: str, key: str) -> str:
    """Provenance of a changed row: the keys that changed it, and where it came from before."""
    keys, was, origin = provenance.rpartition("; was: ")
    return f"{keys}, {key}; was: {origin}" if was else f"override {key}; was: {origin}"


def _explain(row: Row, m: int, skipped: Iterable[tuple[str, str]], forced: bool) -> str:
    above = "" if row.capability == "0.0" else f" from compute capability {row.capability}"
    bounds = f"{row.bounds}, forced by an override" if forced else row.bounds
    text = f"M = {m}: {row.kernel}, row {row.device} {row.format}{above}, {bounds} ({row.provenance})"
    passed = "; ".join(f"{kernel}: {reason}" for kernel, reason in skipped)
    return f"{text}; passed over {passed}" if passed else text


@functools.cache
def _project_table() -> DispatchTable:
    path = paths.data_dir() / "dispatch.json"
    return DispatchTable(_read_rows(path), source=path.name)


def _read_rows(path: Path) -> tuple[Row, ...]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        rows = value["rows"]
    except OSError as error:
        raise ModelFileError(path.name, error.strerror or "unreadable", "a dispatch table") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(path.name, f"{type(error).__name__}: {error}", 'JSON with "rows"') from error
    return tuple(_read_row(path.name, i, row) for i, row in enumerate(rows))


def _read_row(source: str, i: int, row: Any) -> Row:
    where = f"{source} row {i}"
    names = {field.name for field in fields(Row)}
    require(isinstance(row, dict) and set(row) == names, where, row, "exactly " + ", ".join(sorted(names)))
    try:
        require(row["device"] in DEVICES, "device", row["device"], "cpu or cuda")
        require(row["format"] in (*FORMATS, "*"), "format", row["format"], ", ".join(FORMATS) + " or *")
        parse_capability(str(row["capability"]))
        dtypes = row["dtypes"]
        known = isinstance(dtypes, list) and bool(dtypes) and set(dtypes) <= set(DTYPES)
        require(known, "dtypes", dtypes, "a list of " + ", ".join(DTYPES))
        for field in ("kernel", "provenance"):
            require(isinstance(row[field], str) and bool(row[field]), field, repr(row[field]), "text")
        m_min, m_max = row["m_min"], row["m_max"]
        require(type(m_min) is int and m_min >= 1, "m_min", m_min, "a whole number >= 1")
        require(
            m_max is None or (type(m_max) is int and m_max >= m_min), "m_max", m_max, f">= {m_min}, or null"
        )
    except InputError as error:
        raise ModelFileError(f"{where}: {error.argument}", error.received, error.expected) from error
    return Row(**{**row, "dtypes": tuple(dtypes), "capability": str(row["capability"])})
