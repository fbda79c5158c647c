"""A memory plan for people: the bill as a table, what fits, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from labkit.cache.memory_text import show_bytes

if TYPE_CHECKING:
    from labkit.cache.plan import MemoryPlan
    from labkit.cache.plan_command import Planned

_MOST_CHANGES = 5


def show(planned: Planned, console: Console | None = None) -> None:
    """Print the plan."""
    console = console or Console(highlight=False)
    plan, case = planned.plan, planned.plan.case
    asked = f"{case.batch} row{'s' if case.batch > 1 else ''} x {case.context} tokens"
    console.print(
        Text(f"{planned.header.name}, {planned.weights}, {case.dtype} activations, on {planned.where}")
    )
    console.print(Text(f"memory: {show_bytes(case.memory)} ({planned.memory.text}); asked for: {asked}\n"))
    console.print(_bill(plan))
    console.print(Text(_verdict(plan), style="bold green" if plan.fits else "bold red"))
    for line in _room(plan) if plan.fits else _missing(plan):
        console.print(Text(line))
    for note in plan.notes:
        console.print(Text(f"Note: {note}."))
    if planned.header.kind == "shape":
        console.print(Text("Weights by the formula of the model's published shape; no file was read."))


def _bill(plan: MemoryPlan) -> Table:
    case, pool = plan.case, plan.kv_blocks
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("of memory", justify="right")
    table.add_column("how")
    cache = pool.first * pool.block_bytes
    how = (
        f"{pool.first} blocks of {case.block_size} tokens, {case.kv_dtype}, "
        f"{show_bytes(pool.block_bytes / case.block_size)} a token"
    )
    rows = [(item.name, item.nbytes, item.note) for item in plan.items]
    at = next((i for i, row in enumerate(rows) if row[0] == "activations"), len(rows))
    rows.insert(at, ("KV cache", cache, how))
    for name, size, note in rows:
        table.add_row(name, show_bytes(size), f"{size / case.memory:.0%}", Text(note, style="dim"))
    if case.loading > case.running:
        table.add_row("while loading", show_bytes(case.loading), f"{case.loading / case.memory:.0%}", "")
    table.add_row("total", show_bytes(plan.total), f"{plan.total / case.memory:.0%}", "", style="bold")
    return table


def _verdict(plan: MemoryPlan) -> str:
    memory = show_bytes(plan.case.memory)
    if plan.fits:
        return f"\nFits: {show_bytes(plan.total)} of {memory}."
    short = show_bytes(plan.needed - plan.case.memory)
    return f"\nDoes not fit: it needs {show_bytes(plan.needed)}, {short} more than the {memory} there are."


def _room(plan: MemoryPlan) -> list[str]:
    case, pool = plan.case, plan.kv_blocks
    most = show_bytes(pool.last * pool.block_bytes)
    lines = [
        f"KV pool: {pool.first} blocks at first, up to {pool.last} ({most}): {plan.tokens:,} tokens, "
        f"or {plan.rows} row{'' if plan.rows == 1 else 's'} of {case.context}."
    ]
    limit = case.config.max_position_embeddings
    why = "the model's own limit" if plan.longest == limit else "as far as memory reaches"
    lines.append(f"Longest context of one row: {plan.longest:,} tokens ({why}).")
    if plan.grow_bytes:
        lines.append(f"{show_bytes(plan.grow_bytes)} stay free: a pool that grows holds one layer twice.")
    return lines


def _missing(plan: MemoryPlan) -> list[str]:
    fitting = [change for change in plan.changes if change.fits]
    lines = []
    if fitting:
        lines.append("Any one of these makes it fit:")
    elif plan.changes:
        lines.append("No single change is enough. What each would save:")
    for change in (fitting or list(plan.changes))[:_MOST_CHANGES]:
        lines.append(
            f"  {change.option:<58} saves {show_bytes(change.saves):>9}, needs {show_bytes(change.needed)}"
        )
    if plan.together:
        lines.append("Together these make it fit:")
        lines.append("  " + " ".join(plan.together))
    elif not fitting:
        lines.append("No combination of these fits: take a smaller model or more memory.")
    if any("--layer" in line for line in lines):
        lines.append("(--layer is an option of `labkit quantize`, which writes such a model.)")
    lines.append(f"Or more memory: {show_bytes(plan.needed)} would do.")
    return lines
