"""Write a file so that a reader sees the old one or the whole new one, never a part."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` and rename it over ``path`` when the block succeeds.

    Args:
        path: the file to write; its folder is created when missing.
        binary: open in binary mode; text mode writes UTF-8 with ``\\n`` line ends.

    On any exception the temporary file is removed and ``path`` is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    temporary = Path(name)
    try:
        mode: dict[str, Any] = (
            {"mode": "wb"} if binary else {"mode": "w", "encoding": "utf-8", "newline": "\n"}
        )
        with os.fdopen(handle, **mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; a result file is meant to be read by others.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8, atomically."""
    with replacing(path) as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented UTF-8 JSON, keys in the order given, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
