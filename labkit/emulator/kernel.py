"""A compiled kernel: launch it, or trace it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.emulator import arena, messages
from labkit.emulator.arguments import Bound, bind, grid_and_block
from labkit.emulator.build import KERNELS, Built, Request, build, identifier
from labkit.emulator.faults import CompileError, Diagnostic, Fault, KernelFault
from labkit.emulator.inprocess import InProcess
from labkit.emulator.lanes import Sample
from labkit.emulator.launcher import Launcher, WorkerLost
from labkit.emulator.lines import LineTable, Resolver
from labkit.emulator.rewrite import initialised_shared, keeps_state
from labkit.emulator.run import Run
from labkit.emulator.source import Entry, Parameter, entries, made_by_macro
from labkit.emulator.trace import KINDS, Trace, accesses, spread
from labkit.errors import refuse, require

MAX_SHARED = 99 * 1024  # what SM86 gives one block


def compile(
    text: str,
    entry: str | None = None,
    *,
    filename: str = "kernel.cu",
    defines: Mapping[str, object] | None = None,
    include_dirs: Sequence[str | Path] = (),
    isolate: bool = True,
    time_limit: float | None = 20.0,
    first: str = "fast",
) -> EmulatedKernel:
    """Compile CUDA C++ for this machine's CPU.

    Args:
        text: the kernel's text; ``types.cuh``, ``ptx.cuh`` and labkit's other headers can be included.
        entry: kernel to launch; needed when the text has several. A template names its arguments:
            ``"scale<4>"``.
        filename: name of the text in messages.
        defines: macros, as with ``-D``.
        include_dirs: more folders to look for headers in.
        isolate: compile and launch so that a crash, a wild pointer or an endless loop cannot reach this
            process. False is for trusted kernels: less copying, and no other process.
        time_limit: seconds a launch may take; None for no limit.
        first: the build to make now, "fast" or "trace"; the other one is made when it is asked for.

    Returns:
        The kernel; compiled results are cached on disk, one library for all kernels of a text.

    Raises:
        CompileError: the text is not valid; the message shows its own lines.
        InputError: there is no C++ compiler; the fix is the line that brings one.
    """
    require(isinstance(text, str), "text", type(text).__name__, "the kernel's text, a str")
    text = text.removeprefix("\ufeff")  # some editors begin a file with a mark
    if time_limit is not None:
        require(time_limit > 0, "time_limit", time_limit, "seconds above 0, or None")
    require(first in ("fast", "trace"), "first", repr(first), '"fast" or "trace"')
    macros = dict(defines or {})
    found = _choose(text, entry, filename, macros)
    folders = tuple(Path(folder).resolve() for folder in include_dirs)
    for folder in folders:
        require(folder.is_dir(), "include_dirs", str(folder), "an existing folder")
    name = entry or found.name
    request = Request(text, filename, _exported(text, macros, found, name), macros, folders)
    kernel = EmulatedKernel(request, replace(found, name=name), isolate, time_limit)
    kernel._built(trace=first == "trace")
    return kernel


def _exported(text: str, defines: Mapping[str, object], found: Entry, name: str) -> tuple[str, ...]:
    """Kernels of the library: all of the text, so that it is compiled once, whichever is launched first."""
    if found.template:
        return (name,)
    plain = [kernel.name for kernel in entries(text, defines) if not kernel.template]
    return tuple(plain) if name in plain else (name,)


def _choose(text: str, entry: str | None, filename: str, defines: Mapping[str, object]) -> Entry:
    known = entries(text, defines)

    def fail(message: str, fix: str, line: int | None = None) -> CompileError:
        source = text.splitlines()[line - 1] if line else ""
        return CompileError(filename, (Diagnostic(line, None, message, source),), fix)

    for kernel in known:
        if not kernel.returns_void:
            raise fail(f"{kernel.name} does not return void", "a kernel returns nothing", kernel.line)
    if (line := initialised_shared(text)) is not None:
        fix = "let a thread write it in the kernel, then __syncthreads()"
        raise fail("a __shared__ variable cannot have an initial value", fix, line)
    if made_by_macro(text) and not any(entry in (None, kernel.name) for kernel in known):
        if entry is None:
            raise fail("the kernels are made by a macro", 'say which one: entry="name"')
        return Entry(entry, (), 1)
    if not known:
        raise fail("no __global__ function", "write the kernel as __global__ void name(…) { … }")
    names = ", ".join(kernel.name for kernel in known)
    if entry is None:
        if len(known) > 1:
            raise fail(f"several kernels: {names}", f'say which one: entry="{known[0].name}"')
        if known[0].template:
            example = f'entry="{known[0].name}<…>"'
            raise fail(f"{known[0].name} is a template", f"name its arguments: {example}", known[0].line)
        return known[0]
    plain = entry.split("<")[0].strip()
    for kernel in known:
        if kernel.name == plain or kernel.name.rsplit("::", 1)[-1] == plain:
            if kernel.template and "<" not in entry:
                raise fail(f"{plain} is a template", f'name its arguments: entry="{plain}<…>"', kernel.line)
            return kernel
    raise fail(f"no kernel is called {entry}", f"entry is one of {names}")


class EmulatedKernel:
    """A kernel that runs on the CPU.

    Call it as ``kernel(grid, block, args, shared_bytes=0)``; :meth:`trace` counts its memory accesses.
    """

    def __init__(self, request: Request, entry: Entry, isolate: bool, time_limit: float | None) -> None:
        self._request = request
        self._entry = entry
        self._id = identifier(entry.name)
        self._limit = time_limit
        self._launcher: Launcher
        if isolate:
            from labkit.emulator.isolate import isolated

            self._launcher = isolated()
        else:
            self._launcher = InProcess()
        self._builds: dict[tuple[bool, bool], Built] = {}
        self._tables: dict[Path, LineTable] = {}
        self._sources: dict[str, list[str]] = {request.filename: request.text.splitlines()}
        # Printed lines must come in the blocks' order, and copies of the library each have their own
        # __device__ variables: such kernels run on one core.
        self._ordered = "printf" in request.text or keeps_state(request.text)

    @property
    def name(self) -> str:
        """Name of the kernel, with template arguments."""
        return self._entry.name

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters as written."""
        return self._entry.parameters

    @property
    def source(self) -> str:
        """The text it was compiled from."""
        return self._request.text

    def __repr__(self) -> str:
        names = ", ".join(f"{p.type} {p.name}" for p in self.parameters)
        return f"<emulated kernel {self.name}({names})>"

    def __call__(self, grid: Any, block: Any, args: Sequence[Any], shared_bytes: int = 0) -> Run:
        """Launch.

        Args:
            grid: one to three integers.
            block: one to three integers, at most 1024 threads.
            args: tensors, arrays, numbers or None, in the parameters' order; results are written in place.
            shared_bytes: bytes of dynamic shared memory.

        Raises:
            InputError: an argument does not fit its parameter.
            KernelFault: the launch failed.
        """
        built = self._built(trace=False)
        request, bound = self._prepare(built, grid, block, args, shared_bytes)
        outcome = self._launch(built, request, bound)
        if outcome["code"]:
            raise KernelFault(self._fatal(outcome, built))
        gx, gy, gz = request["grid"]
        bx, by, bz = request["block"]
        return Run(outcome["seconds"], outcome["output"], gx * gy * gz, bx * by * bz)

    def trace(
        self,
        grid: Any,
        block: Any,
        args: Sequence[Any],
        shared_bytes: int = 0,
        *,
        blocks: Any = None,
        keep_going: bool = True,
        blocks_executed: bool = False,
    ) -> Trace:
        """Launch with every memory access recorded and checked.

        Args:
            grid, block, args, shared_bytes: as in a launch.
            blocks: blocks to run: None for all; a number, spread evenly over the grid with the first and the
                last; a list of linear ids or of (x, y, z).
            keep_going: go on after an access out of bounds (it then touches spare memory).
            blocks_executed: count basic blocks by line, too (:attr:`Trace.warp_instructions`); slower.

        Returns:
            Counts and faults; faults are not raised.

        Raises:
            InputError: an argument does not fit its parameter.
        """
        built = self._built(trace=True, blocks_executed=blocks_executed)
        request, bound = self._prepare(built, grid, block, args, shared_bytes)
        request["trace"] = {
            "race": 1,
            "stats": 1,
            "stop": int(not keep_going),
            "blocks_executed": int(blocks_executed),
        }
        request["blocks"] = spread(blocks, request["grid"])
        outcome = self._launch(built, request, bound)
        return self._trace(outcome, built, request, bound)

    # ------------------------------------------------------------------------------------- launching

    def _built(self, *, trace: bool, blocks_executed: bool = False) -> Built:
        key = (trace, blocks_executed)
        if key not in self._builds or not self._builds[key].library.exists():
            self._builds[key] = build(replace(self._request, trace=trace, blocks_executed=blocks_executed))
        return self._builds[key]

    def _prepare(
        self, built: Built, grid: Any, block: Any, args: Sequence[Any], shared_bytes: int
    ) -> tuple[dict[str, Any], Bound]:
        grid, block = grid_and_block(grid, block)
        ok = isinstance(shared_bytes, int) and not isinstance(shared_bytes, bool)
        require(ok, "shared_bytes", repr(shared_bytes), "a number of bytes")
        require(0 <= shared_bytes <= MAX_SHARED, "shared_bytes", shared_bytes, f"0 to {MAX_SHARED}")
        try:
            signature = self._launcher.signature(built, self._id)
        except WorkerLost as lost:  # loading it runs the constructors of its global variables
            raise KernelFault(Fault(lost.kind, str(lost), fatal=True)) from None
        except OSError as error:
            text = f"crash: the kernel cannot be loaded: {error}"
            raise KernelFault(Fault("crash", text, fatal=True)) from None
        parameters = list(self.parameters)
        if len(parameters) != len(signature):  # a macro made the list
            parameters = [Parameter(f"arg{i}", "the parameter") for i in range(len(signature))]
        bound = bind(self.name, parameters, signature, args)
        request: dict[str, Any] = {
            "entry": self._id,
            "grid": grid,
            "block": block,
            "shared": shared_bytes,
            "values": bound.values,
            "regions": [],
            "trace": None,
            "blocks": None,
            "limit": 0.0,
            "ordered": self._ordered,
        }
        return request, bound

    def _launch(self, built: Built, request: dict[str, Any], bound: Bound) -> dict[str, Any]:
        try:
            outcome = self._launcher.launch(built, request, bound.buffers, self._limit)
        except WorkerLost as lost:
            fault = Fault(lost.kind, str(lost), fatal=True)
            return {"code": 1, "error": "", "fault": fault, "seconds": lost.seconds, "output": "", "base": 0}
        if outcome["code"] == 2:
            refuse(
                "launch", outcome["error"].removeprefix("invalid configuration: "), "a valid configuration"
            )
        return outcome

    # --------------------------------------------------------------------------------------- results

    def _resolver(self, built: Built, base: int) -> Resolver:
        table = self._tables.setdefault(built.library, LineTable(built.info, self._request.filename))

        def resolve(address: int) -> tuple[str, int | None]:
            file, line = table.at(address - base)
            if file and file not in self._sources:
                self._sources[file] = self._read(file)
            return file, line

        return resolve

    def _read(self, file: str) -> list[str]:
        for folder in (*self._request.include_dirs, KERNELS):
            if (folder / file).is_file():
                return (folder / file).read_text(encoding="utf-8", errors="replace").splitlines()
        return []

    def _fatal(self, outcome: Mapping[str, Any], built: Built) -> Fault:
        if "fault" in outcome:
            return outcome["fault"]
        resolve = self._resolver(built, outcome["base"])
        place = outcome.get("place")
        return messages.fatal(
            outcome["error"],
            resolve,
            self._sources,
            self._request.filename,
            place,
            bool(outcome.get("trace")),
        )

    def _trace(
        self, outcome: Mapping[str, Any], built: Built, request: dict[str, Any], bound: Bound
    ) -> Trace:
        data = outcome.get("trace") or {"pcs": [], "regions": [], "reports": []}
        resolve = self._resolver(built, outcome["base"])
        where = {point["pc"]: resolve(point["pc"]) for point in data["pcs"]}
        layout = arena.arrange(bound.buffers, arena.WIDE)
        sizes = {region.name: (region.size, region.itemsize) for region in layout.regions}
        shared = {r["name"]: r["bytes"] for r in data["regions"] if r["space"] == 1}
        faults = messages.reported(
            data["reports"], resolve, self._sources, self._request.filename, request["block"], sizes, shared
        )
        if outcome["code"]:
            faults = _with_fatal(faults, self._fatal(outcome, built))
        total = request["grid"][0] * request["grid"][1] * request["grid"][2]
        phases = {region.name: region.offset % 32 for region in layout.regions}
        executed: dict[int, int] = {}
        for point in data.get("blocks", ()):
            file, line = resolve(point["pc"])
            if line is not None and file == self._request.filename:
                executed[line] = executed.get(line, 0) + point["req"]
        return Trace(
            kernel=self.name,
            rows=accesses(data["pcs"], where, self._sources),
            faults=faults,
            seconds=outcome["seconds"],
            output=outcome["output"],
            blocks_traced=total if request["blocks"] is None else len(request["blocks"]),
            blocks_total=total,
            compulsory={r["name"]: r["launch_sectors"] for r in data["regions"] if r["space"] == 3},
            warp_instructions=executed,
            samples=tuple(_samples(data["pcs"], where, phases)),
        )


def _samples(
    points: Sequence[Mapping[str, Any]],
    where: Mapping[int, tuple[str, int | None]],
    phases: Mapping[str, int],
) -> list[Sample]:
    out = []
    for point in points:
        file, line = where[point["pc"]]
        for sample in point.get("samples", ()):
            space = "shared" if point["space"] == 1 else "global"
            offsets = tuple(None if offset < 0 else offset for offset in sample["offsets"])
            block = tuple(sample["block"])
            phase = phases.get(point["buf"], 0) if space == "global" else 0
            kind = KINDS[point["kind"]]
            out.append(
                Sample(
                    file,
                    line or 0,
                    kind,
                    point["buf"],
                    space,
                    point["size"],
                    block,
                    sample["warp"],
                    offsets,
                    phase,
                )
            )
    return out


def _with_fatal(faults: list[Fault], fault: Fault) -> list[Fault]:
    """The fatal fault last; where the same access was reported before, that report says more."""
    reported = ("out-of-bounds", "misaligned", "illegal memory access")

    def repeats(known: Fault) -> bool:
        # An address far outside a buffer is reported, and then faults.
        outside = fault.kind == "illegal memory access" and known.buffer == fault.buffer
        return known.kind in reported and known.line == fault.line and (known.kind == fault.kind or outside)

    for known in faults:
        if repeats(known):
            return [*(other for other in faults if other is not known), replace(known, fatal=True)]
    return [*faults, fault]
