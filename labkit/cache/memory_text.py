"""Sizes of memory as people write them: ``"4GB"``, ``"3.5GiB"``, bytes, or a share of what is free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from labkit.errors import refuse, require

LEAST_BYTES = 1 << 20
"""A size below this is taken for a slip: 4 is far more often 4 GB without its unit."""

MOST_BYTES = 1 << 50

_SIZE = re.compile(r"^(\d{1,20}(?:\.\d+)?|\.\d+)\s*([kmgt]?)(i?)(b?)$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_EXPECTED = '"4GB", "3.5GiB", bytes, or a share of the free memory such as "0.9" or "90%"'


@dataclass(frozen=True, slots=True)
class Memory:
    """How much memory a plan may use.

    Attributes:
        nbytes: bytes.
        text: where the figure is from, in words.
        measured: it is free memory of this machine, seen from a running process. What that process itself
            takes (interpreter, libraries, CUDA context) is then not in the figure any more.
    """

    nbytes: int
    text: str
    measured: bool = False


def parse_memory(value: object) -> int | float:
    """Read a size or a share.

    Args:
        value: a whole number of bytes, text with a unit (KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB,
            TiB powers of 1024; a single letter is the power of 1000, the smaller of the two), or a share:
            a float above 0 and up to 1, or such text, or a percentage.

    Returns:
        Bytes as an int, or a share as a float.

    Raises:
        InputError: anything else; zero, negative, below 1 MiB, NaN, a share above 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        refuse("memory", repr(value), _EXPECTED)
    if isinstance(value, float):
        require(0 < value <= 1, "memory", value, _EXPECTED, "give bytes as a whole number")
        return value
    if isinstance(value, int):
        return _bytes(value, str(value))
    text = value.strip()
    if text.endswith("%"):
        percent = _number(text[:-1])
        require(
            percent is not None and 0 < percent <= 100, "memory", repr(value), "above 0 % and up to 100 %"
        )
        assert percent is not None
        return percent / 100
    match = _SIZE.match(text)
    if match is None:
        refuse("memory", repr(value), _EXPECTED)
    amount, prefix, binary, _ = match.groups()
    if not (prefix or binary or match.group(4)):
        if "." not in amount:
            return _bytes(int(amount), text)
        share = float(amount)
        require(0 < share <= 1, "memory", repr(value), _EXPECTED, f'"{text}GB" or "{text}GiB"')
        return share
    require(bool(prefix) or not binary, "memory", repr(value), _EXPECTED)
    return _bytes(int(float(amount) * (1024 if binary else 1000) ** _POWERS[prefix.lower()]), text)


def resolve_memory(value: object, device: str) -> Memory:
    """The bytes of :func:`parse_memory` on ``device``, "cpu" or "cuda"; a share needs the device itself.

    Raises:
        InputError: also for a share of a GPU that is not there.
    """
    found = parse_memory(value)
    if isinstance(found, int):
        return Memory(found, "as given")
    free = _free(device)
    return Memory(int(found * free), f"{found:.0%} of the {show_bytes(free)} that are free now", True)


def show_bytes(nbytes: float) -> str:
    """Bytes for people: ``"3.73 GiB"``, ``"16.0 MiB"``, ``"512 B"``."""
    size = abs(nbytes)
    for power, unit, digits in ((3, "GiB", 2), (2, "MiB", 1), (1, "KiB", 1)):
        if size >= 1024**power:
            return f"{nbytes / 1024**power:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def _free(device: str) -> int:
    from labkit.nn.memory import free_memory

    if device == "cpu":
        return free_memory()
    import torch

    require(
        torch.cuda.is_available(),
        "memory",
        "a share of a GPU's memory, and no GPU answers",
        "a size when the plan is for another machine",
        "--memory 4GB",
    )
    return free_memory("cuda")


def _bytes(count: int, text: str) -> int:
    require(
        LEAST_BYTES <= count <= MOST_BYTES,
        "memory",
        f"{text} ({count} bytes)",
        "1 MiB to 1 PiB",
        f'did you mean "{text}GB"?' if 0 < count < 1000 else "",
    )
    return count


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
