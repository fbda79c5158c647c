"""Whether two runs may be compared at all; the answer is a list of reasons against it."""

from __future__ import annotations

from collections.abc import Collection

from labkit.bench.record import Record
from labkit.errors import require
from labkit.results.case import DeviceId, device_of

THROTTLED = (
    "software power cap",
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
)
"""Reasons of :data:`labkit.bench.machine.THROTTLE_REASONS` under which a card runs slower than it could.

"idle" says that it had nothing to do, clocks set by hand are a setting: neither is here.
"""


def throttling(record: Record, accept: Collection[str] = ()) -> list[str]:
    """Why a run's times are not those of the card at its own clocks, such as "software power cap (after)".

    Args:
        accept: reasons of :data:`THROTTLED` to let pass; a laptop that always runs at its power cap
            has no other figures.
    """
    for name in accept:
        require(name in THROTTLED, "accept", repr(name), "one of " + ", ".join(THROTTLED))
    found: dict[str, list[str]] = {}
    for reading in record.clocks:
        for reason in reading.get("throttle_reasons") or ():
            if reason in THROTTLED and reason not in accept:
                found.setdefault(reason, []).append(str(reading.get("when", "")))
    return [f"{reason} ({', '.join(when)})" for reason, when in found.items()]


def unnamed(record: Record) -> bool:
    """Whether figures of a machine do not say of which: two such runs only look as if they were of one.

    Counts of the emulator, simulated and quoted figures are no machine's.
    """
    device = device_of(record)
    return record.kind == "measured" and (not device.name or device.key in ("", "unknown"))


def differences(a: DeviceId, b: DeviceId) -> list[str]:
    """In words, what two devices differ in."""
    fields = ("key", "name", "capability", "power_limit_w")
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in fields]
    return [
        f"{name} {mine or 'unknown'} against {other or 'unknown'}"
        for name, mine, other in pairs
        if mine != other
    ]


def why_not(a: Record, b: Record, *, accept: Collection[str] = ()) -> list[str]:
    """The reasons against comparing the figures of ``a`` and ``b``; empty when they may be compared."""
    reasons = []
    if a.kind != b.kind:
        reasons.append(f"kind: {a.kind} against {b.kind}")
    if found := differences(device_of(a), device_of(b)):
        reasons.append("device: " + ", ".join(found))
    for record in (a, b):
        if unnamed(record):
            reasons.append(f"device: {record.file_name} does not name it")
        if found := throttling(record, accept):
            reasons.append(f"throttled: {record.file_name}: {', '.join(found)}")
    return reasons


def comparable(a: Record, b: Record, *, accept: Collection[str] = ()) -> None:
    """Refuse two runs that must not be compared.

    Raises:
        InputError: with every reason of :func:`why_not`.
    """
    reasons = why_not(a, b, accept=accept)
    fix = "compare runs of one kind and device, made while the card ran at its own clocks"
    require(not reasons, "runs", "; ".join(reasons), "two runs that can be compared", fix)
