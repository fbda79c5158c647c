"""Machine code (SASS) of a kernel by source line, with no GPU: cubin by NVRTC, text by nvdisasm.

The emulator counts accesses as the source writes them; the compiler may merge or split them. The
tables here stand beside those counts and say where the two differ in width.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import tables
from labkit.errors import refuse, require
from labkit.kernels import nvrtc
from labkit.kernels.source import KernelSource
from labkit.probes import cuda

# Base opcode → (space, what it does), in the emulator's words.
MEMORY = {
    "LDG": (("global", "read"),),
    "LD": (("global", "read"),),
    "STG": (("global", "write"),),
    "ST": (("global", "write"),),
    "LDS": (("shared", "read"),),
    "STS": (("shared", "write"),),
    "LDSM": (("shared", "ldmatrix"),),
    "LDGSTS": (("global", "cp.async read"), ("shared", "cp.async write")),
    "LDL": (("local", "read"),),
    "STL": (("local", "write"),),
    "ATOM": (("global", "atomic"),),
    "ATOMG": (("global", "atomic"),),
    "RED": (("global", "atomic"),),
    "REDG": (("global", "atomic"),),
    "ATOMS": (("shared", "atomic"),),
}

# Classes in the order of tables. A leading U (the uniform datapath) and trailing digits do not count.
_CLASS_LINES = """
tensor core: HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA
barrier: BAR DEPBAR LDGDEPBAR MEMBAR WARPSYNC ERRBAR FENCE SYNCS
shuffle and vote: SHFL VOTE VOTEU MATCH REDUX CREDUX
conversion: I2F I2FP F2I F2IP F2F F2FP I2I I2IP FRND
half: HADD HFMA HMUL HMNMX HSET HSETP
float: FADD FFMA FMUL FMNMX FSET FSETP FSEL FCHK FSWZADD MUFU DADD DFMA DMUL DSETP
address and integer: IADD IMAD IMUL IMNMX VIMNMX VIADD VIADDMNMX LEA SHF SHL SHR LOP PLOP PRMT ISETP ISET
address and integer: PSETP IABS BREV FLO POPC SGXT BMSK SEL IDP R2P P2R
move and constant: MOV MOVM CS2R S2R S2UR CS2UR R2UR LDC LDCU R2B B2R
branch: BRA BRX JMP CALL RET EXIT BSSY BSYNC BREAK BMOV YIELD NANOSLEEP KILL BPT PREEXIT ACQBULK
"""
_CLASS_OF = dict.fromkeys(MEMORY, "memory") | {
    name: line.partition(": ")[0]
    for line in _CLASS_LINES.strip().splitlines()
    for name in line.partition(": ")[2].split()
}
CLASSES = (*dict.fromkeys(_CLASS_OF.values()), "other")

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)(.*)$"
)
_LOCATION = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes:
        offset: bytes from the start of the kernel.
        opcode: with modifiers, such as ``"LDS.64"``.
        line: line of the kernel's file it comes from, 0 when it comes from none.
        text: the whole instruction.
    """

    offset: int
    opcode: str
    line: int
    text: str

    @property
    def base(self) -> str:
        """Opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def kind(self) -> str:
        """Its class, one of :data:`CLASSES`."""
        plain = self.base.rstrip("0123456789")
        names = (self.base, plain, self.base.removeprefix("U"), plain.removeprefix("U"))
        return next((_CLASS_OF[name] for name in names if name in _CLASS_OF), "other")

    @property
    def width(self) -> int:
        """Bytes a lane of a memory instruction, 0 for any other."""
        if self.base not in MEMORY:
            return 0
        if self.base == "LDSM":
            return 16  # a lane names one row of 16 bytes
        for part in self.opcode.split(".")[1:]:
            if part in ("128", "64"):
                return int(part) // 8
            if part in ("U8", "S8", "U16", "S16"):
                return int(part[1:]) // 8
        return 4

    @property
    def short(self) -> str:
        """Opcode with its width and without cache hints: ``LDG.E.128.CONSTANT`` → ``LDG.128``."""
        if self.base in MEMORY:
            kept = [part for part in self.opcode.split(".")[1:] if re.fullmatch(r"128|64|[US](?:8|16)", part)]
            return ".".join([self.base, *kept])
        return ".".join(self.opcode.split(".")[:2]) if self.kind == "tensor core" else self.base


@dataclass(frozen=True)
class Sass:
    """The machine code of one kernel; padding is left out.

    Attributes:
        filename: the kernel's file, whose lines the instructions carry.
        arch: such as ``"sm_86"``.
    """

    name: str
    arch: str
    filename: str
    instructions: tuple[Instruction, ...]
    source_lines: tuple[str, ...]

    @property
    def count(self) -> int:
        """Instructions in the code (not how often they run)."""
        return len(self.instructions)

    def by_class(self) -> dict[str, int]:
        """Instructions of each class, the classes that occur."""
        found = Counter(instruction.kind for instruction in self.instructions)
        return {name: found[name] for name in CLASSES if found[name]}

    def at(self, line: int) -> tuple[Instruction, ...]:
        """Instructions of one source line."""
        return tuple(instruction for instruction in self.instructions if instruction.line == line)

    def lines(self, kinds: Iterable[str] = ("memory", "tensor core", "barrier")) -> dict[int, Counter[str]]:
        """Source line → how many of each instruction (``LDS.64``), for these classes, in line order."""
        wanted = set(kinds)
        found: dict[int, Counter[str]] = {}
        for instruction in sorted(self.instructions, key=lambda each: each.line):
            if instruction.kind in wanted:
                found.setdefault(instruction.line, Counter())[instruction.short] += 1
        return found

    def table(self, kinds: Iterable[str] = ("memory", "tensor core", "barrier")) -> tables.Table:
        """Memory, tensor-core and barrier instructions by source line; shows itself in a notebook.

        Raises:
            InputError: the kernel has no instruction of these classes.
        """
        found = self.lines(kinds)
        require(bool(found), "kinds", ", ".join(kinds), f"classes that {self.name} has: {self.by_class()}")
        rows = [
            {"line": line or None, "instructions": _counts(counts), "source": self.text_of(line)}
            for line, counts in found.items()
        ]
        return tables.table(
            rows, origins=False, caption=f"{self.name}: machine code for {self.arch} by source line"
        )

    def text_of(self, line: int) -> str:
        """The source line, without indentation."""
        return self.source_lines[line - 1].strip() if 0 < line <= len(self.source_lines) else ""


@dataclass(frozen=True, slots=True)
class LineWidths:
    """Widths of one kind of access on one source line, as written and as compiled.

    Attributes:
        space: "global" or "shared".
        kind: "read", "write", "atomic", "ldmatrix", "cp.async read" or "cp.async write".
        source: bytes a lane of the accesses that the emulator saw, ascending.
        sass: bytes a lane of the machine instructions of the line, ascending; empty when there
            is none, since the compiler moved it to another line or left it out.
    """

    line: int
    space: str
    kind: str
    source: tuple[int, ...]
    sass: tuple[int, ...]
    text: str

    @property
    def differs(self) -> bool:
        """Whether the emulator's counts of this line are of other widths than the hardware's."""
        return self.source != self.sass


def disassemble(source: KernelSource, arch: object = "sm_86", options: Sequence[str] = ()) -> Sass:
    """Machine code of ``source`` for ``arch``, with the source line of every instruction.

    Args:
        source: the kernel.
        arch: such as ``"sm_86"``.
        options: further options of NVRTC.

    Raises:
        InputError: nvdisasm is missing (with the line that installs it), or the text does not compile.
    """
    compiled = nvrtc.compile_cubin(source, arch, options)
    listing = _nvdisasm(compiled.cubin)
    instructions = tuple(_parse(listing, compiled.symbol, source.filename))
    require(bool(instructions), "nvdisasm", "no instruction", f"the code of {compiled.symbol}")
    return Sass(source.name, compiled.arch, source.filename, instructions, tuple(source.text.splitlines()))


def compare_widths(trace: Any, source: KernelSource, arch: object = "sm_86") -> tuple[LineWidths, ...]:
    """Access widths of an emulator trace beside those of the machine code, line by line.

    Args:
        trace: a ``labkit.emulator`` Trace of the same source.
        source: the kernel that was traced.
        arch: architecture to compile for.

    Returns:
        One entry for each source line, space and kind of access that the trace has; ``differs``
        marks the lines whose counts in the trace are not the hardware's.
    """
    code = disassemble(source, arch)
    compiled: dict[tuple[int, str, str], set[int]] = {}
    for instruction in code.instructions:
        for space, kind in MEMORY.get(instruction.base, ()):
            compiled.setdefault((instruction.line, space, kind), set()).add(instruction.width)
    written: dict[tuple[int, str, str], set[int]] = {}
    for row in trace.rows:
        if Path(row.file).name == source.filename and row.space in ("global", "shared"):
            written.setdefault((row.line, row.space, row.kind), set()).add(row.size)
    return tuple(
        LineWidths(*key, tuple(sorted(sizes)), tuple(sorted(compiled.get(key, ()))), code.text_of(key[0]))
        for key, sizes in sorted(written.items())
    )


def widths_table(found: Iterable[LineWidths]) -> tables.Table:
    """The result of :func:`compare_widths`; shows itself in a notebook."""
    rows = [
        {
            "line": each.line,
            "space": each.space,
            "access": each.kind,
            "bytes a lane (source)": _sizes(each.source),
            "bytes a lane (SASS)": _sizes(each.sass) or "none on this line",
            "note": "differs" if each.differs else "",
            "source": each.text,
        }
        for each in found
    ]
    return tables.table(rows, origins=False, caption="Access widths: source-level counts and machine code")


def _sizes(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in sorted(counts.items()))


@functools.lru_cache(maxsize=64)
def _nvdisasm(cubin: bytes) -> str:
    programs = cuda.find_nvdisasm()
    if not programs:
        refuse("nvdisasm", "not found", "NVIDIA's disassembler", cuda.DISASSEMBLER_FIX)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        # -gi also says which line of the kernel an inlined function was called from.
        done = subprocess.run(
            [str(programs[0]), "-c", "-gi", str(file)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=120,
            check=False,
        )
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    require(done.returncode == 0, "nvdisasm", f"exit code {done.returncode}: {said}", "a listing")
    return done.stdout


def _parse(listing: str, symbol: str, filename: str) -> Iterable[Instruction]:
    inside = False
    line = 0
    places: list[tuple[str, int]] = []  # of the comment lines read since the last instruction
    for text in listing.splitlines():
        function = _FUNCTION.match(text)
        if function:
            inside, line, places = function[1] == symbol, 0, []
            continue
        if not inside:
            continue
        place = _LOCATION.match(text)
        if place:
            places.append((Path(place[1].replace("\\", "/")).name, int(place[2])))
            continue
        found = _INSTRUCTION.match(text)
        if not found:
            continue
        if places:
            # Innermost first: a header's function counts for the kernel's line that calls it.
            line = next((number for name, number in places if name == filename), 0)
            places = []
        if found[2] != "NOP":
            opcode = found[2] + found[3]
            yield Instruction(int(found[1], 16), opcode, line, (opcode + found[4]).rstrip(" ;"))
