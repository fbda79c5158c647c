"""The main loop of a kernel's machine code: instructions of a trip, loads, and waits for them.

A count of :mod:`labkit.kernels.sass` says how much code there is. What costs time is the loop that
runs, and how often a warp has to stop in it for what was loaded just before. Both are read here from the
same listing, in the order in which the instructions stand; a branch forward counts as not taken.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from labkit.errors import require
from labkit.kernels import nvrtc, sass
from labkit.kernels.sass import Instruction
from labkit.kernels.source import KernelSource

_LABEL = re.compile(r"^(\.L_\w+):")
_PLACE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/")
_JUMP = re.compile(r"\bBRA(?:\.\w+)*\s+(?:!?U?P\w+,\s*)?`\((\.L_\w+)\)")
_REGISTER = re.compile(r"\bR(\d+)((?:\.\w+)*)")
_LOADS = ("LDG", "LD", "LDL")

NEAR = 32
"""Instructions after a load from which its use is no wait: a warp starts at most one a clock, and a value
that lies in L1 comes in about 30 clocks."""


@dataclass(frozen=True)
class Loop:
    """One loop that loads from global memory.

    Attributes:
        name, arch: kernel, and architecture such as ``"sm_86"``.
        instructions: of one trip, those of ``inner`` left out.
        inner: a loop inside it that loads as well, or None.
        guarded: offsets of those that a jump forward inside the loop can skip.
    """

    name: str
    arch: str
    instructions: tuple[Instruction, ...]
    inner: Loop | None = None
    guarded: frozenset[int] = frozenset()

    def unguarded(self) -> Loop:
        """The loop with every guard closed: what a trip carries out in any case."""
        kept = tuple(each for each in self.instructions if each.offset not in self.guarded)
        return replace(self, instructions=kept, guarded=frozenset())

    def executed(self, inner_trips: int = 1) -> int:
        """Instructions that a warp carries out in one trip."""
        return len(self.instructions) + (inner_trips * self.inner.executed() if self.inner else 0)

    def loads(self, inner_trips: int = 1) -> Counter[str]:
        """Load instructions of one trip by name and width, such as ``LDG.128``."""
        found = Counter(each.short for each in self.instructions if each.base in _LOADS)
        if self.inner:
            for name, count in self.inner.loads().items():
                found[name] += inner_trips * count
        return found

    def waits(self, inner_trips: int = 1) -> int:
        """How often a trip stops for a value that was loaded fewer than :data:`NEAR` instructions before.

        What is on its way then is taken to come together, so loads that go out together are one wait. A trip
        that loads waits once in any case. The compiler decides how far behind its load a use stands, so this
        count belongs to one text, one compiler and one architecture.
        """
        return self.marks.count("wait") + (inner_trips * self.inner.waits() if self.inner else 0)

    @property
    def together(self) -> int:
        """Most loads that are on their way at one time, in one warp."""
        return max(self._walk()[1], self.inner.together if self.inner else 0)

    @property
    def marks(self) -> tuple[str, ...]:
        """For each instruction "load", "wait" (it stops for what was loaded) or "other"."""
        return self._walk()[0]

    def _walk(self) -> tuple[tuple[str, ...], int]:
        """(marks, most loads on their way) of a trip that follows another one."""
        most = first = 0
        waits: set[int] = set()
        sent: dict[int, int] = {}  # register -> where its load stands
        length = len(self.instructions)
        for at in range(2 * length):  # the second trip may need what the first one loaded
            each = self.instructions[at % length]
            written, read = registers(each)
            used = [sent[number] for number in read & sent.keys()]
            if used:
                newest = max(used)
                near = at - newest < NEAR
                sent = {number: start for number, start in sent.items() if start > newest and not near}
                if at >= length:
                    first = first or at
                    waits |= {at} if near else set()
            sent = {number: start for number, start in sent.items() if number not in written}
            if each.base in _LOADS:
                sent |= dict.fromkeys(written, at)
                most = max(most, len(set(sent.values())))
        waits = waits or {first} - {0}
        kinds = ("load" if each.base in _LOADS else "other" for each in self.instructions)
        marks = ("wait" if at in waits else kind for at, kind in enumerate(kinds, start=length))
        return tuple(marks), most


def registers(instruction: Instruction) -> tuple[set[int], set[int]]:
    """Numbers of the registers that an instruction writes, and of those that it reads."""
    operands = instruction.text.partition(" ")[2]
    first, _, rest = operands.partition(",")
    stores = instruction.base in ("STG", "ST", "STS", "STL", "RED")
    target = "" if stores or not re.match(r"\s*R\d", first) else first
    written = {number + i for number in _numbers(target) for i in range(_count(instruction))}
    return written, _spread(operands if not target else rest)


def main_loop(source: KernelSource, arch: object = "sm_86") -> Loop:
    """The outermost loop of ``source`` that loads from global memory; the longest when there are several.

    Raises:
        InputError: no such loop, no nvdisasm, or a text that does not compile.
    """
    compiled = nvrtc.compile_cubin(source, arch)
    code = sass.disassemble(source, arch)
    jumps = _jumps(sass._nvdisasm(compiled.cubin), compiled.symbol)
    found = loops(code.instructions, jumps)
    found = [span for span in found if _loads(code.instructions, span)]
    require(bool(found), "source", source.name, "a kernel with a loop that loads from global memory")
    outer = max(found, key=lambda span: span[1] - span[0])
    inside = [span for span in found if span != outer and outer[0] <= span[0] and span[1] <= outer[1]]
    inner = max(inside, key=lambda span: span[1] - span[0]) if inside else None
    body = tuple(
        each
        for each in code.instructions
        if outer[0] <= each.offset <= outer[1] and not (inner and inner[0] <= each.offset <= inner[1])
    )
    skipped = {
        each.offset
        for at, to in jumps
        for each in body
        if outer[0] <= at < each.offset < to <= outer[1] + 16 and not (inner and inner[0] <= at <= inner[1])
    }
    inside_loop = _plain(source.name, code, inner) if inner else None
    return Loop(source.name, code.arch, body, inside_loop, frozenset(skipped))


def loops(instructions: tuple[Instruction, ...], jumps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, last) offset of every loop: a jump (from, to) back, wide enough to hold something else."""
    known = {each.offset for each in instructions}
    return sorted({(to, at) for at, to in jumps if to < at and at in known})


def _plain(name: str, code: sass.Sass, span: tuple[int, int]) -> Loop:
    inside = tuple(each for each in code.instructions if span[0] <= each.offset <= span[1])
    return Loop(name, code.arch, inside)


def _loads(instructions: tuple[Instruction, ...], span: tuple[int, int]) -> bool:
    return any(each.base == "LDG" for each in instructions if span[0] <= each.offset <= span[1])


def _jumps(listing: str, symbol: str) -> list[tuple[int, int]]:
    """(offset, offset of the target) of every jump of one kernel."""
    inside = False
    waiting: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for text in listing.splitlines():
        section = re.match(r"^\s*\.section\s+\.text\.([^,\s]+)", text)
        if section:
            inside, waiting = section[1] == symbol, []
            continue
        if not inside:
            continue
        if label := _LABEL.match(text):
            waiting.append(label[1])
        elif place := _PLACE.match(text):
            offset = int(place[1], 16)
            labels.update(dict.fromkeys(waiting, offset))
            waiting = []
            if jump := _JUMP.search(text):
                jumps.append((offset, jump[1]))
    return [(at, labels[label]) for at, label in jumps if label in labels]


def _count(instruction: Instruction) -> int:
    """Neighbouring registers that an instruction writes."""
    if instruction.base in _LOADS or instruction.base == "LDS":
        return max(1, instruction.width // 4)
    return 2 if ".WIDE" in instruction.opcode or instruction.opcode == "CS2R" else 1


def _numbers(operand: str) -> set[int]:
    return {int(found[1]) for found in _REGISTER.finditer(operand)}


def _spread(operands: str) -> set[int]:
    """Registers named in ``operands``; an address of 64 bits takes two."""
    found = set()
    for each in _REGISTER.finditer(operands):
        found.add(int(each[1]))
        if ".64" in each[2]:
            found.add(int(each[1]) + 1)
    return found
