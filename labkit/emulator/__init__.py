"""CUDA C++ kernels on a CPU: unmodified text, exact counts, faults at the kernel's own lines.

Two builds of one text: fast, for results, and traced, for memory accesses and faults::

    kernel = emulator.compile(text)
    kernel((blocks,), (threads,), [x, y, n])
    trace = kernel.trace((blocks,), (threads,), [x, y, n])
    trace.table()

See ``labkit.emulator.kernel`` for what a launch takes.
"""

from labkit.emulator.faults import CompileError, Diagnostic, Fault, KernelFault
from labkit.emulator.kernel import EmulatedKernel, compile
from labkit.emulator.lanes import LaneMap
from labkit.emulator.run import Run
from labkit.emulator.source import Entry, Parameter, entries
from labkit.emulator.trace import Access, Trace

__all__ = [
    "Access",
    "CompileError",
    "Diagnostic",
    "EmulatedKernel",
    "Entry",
    "Fault",
    "KernelFault",
    "LaneMap",
    "Parameter",
    "Run",
    "Trace",
    "compile",
    "entries",
]
