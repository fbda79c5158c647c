"""What a job leaves, as the bytes of a zip file: they travel back from wherever it ran."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from labkit.errors import InputError, refuse, require

RESULT, NOTEBOOK, FILES = "result.json", "notebook.ipynb", "files"
MOST_BYTES = 64 * 2**20
"""Of a job's own files, unpacked; what is beyond is left out, and named."""


def pack(result: dict[str, Any], notebook: str = "", files: Path | None = None) -> bytes:
    """Pack a result, the executed notebook ("" for none) and the files of a folder.

    Links are left out: they may point anywhere on the machine that ran the job. So is a file that cannot be
    read, and one whose name another system could not have; the result names them, and keeps the others.
    """
    left: list[str] = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        room = MOST_BYTES
        for path in sorted(files.rglob("*")) if files is not None else ():
            if path.is_symlink() or not path.is_file():
                continue
            name = path.relative_to(files).as_posix()  # type: ignore[arg-type]
            try:
                size = path.stat().st_size
                why = f"{size:,} bytes" if size > room else _odd(name)
                content = b"" if why else path.read_bytes()
            except OSError as error:  # gone meanwhile, or locked
                why = error.strerror or type(error).__name__
            if why:
                left.append(f"{name.encode('utf-8', 'replace').decode()} ({why})")
                continue
            room -= size
            out.writestr(f"{FILES}/{name}", content)
        if notebook:
            out.writestr(NOTEBOOK, notebook)
        if left:
            result = {**result, "files_left_out": left}
        out.writestr(RESULT, json.dumps(result, ensure_ascii=False, indent=1))
    return buffer.getvalue()


def _odd(name: str) -> str:
    """Why a name cannot travel to every system; empty when it can."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "a name that is no text"
    return "a name with : or \\" if ":" in name or "\\" in name else ""


def result_of(archive: bytes) -> dict[str, Any]:
    """The result in an archive.

    Raises:
        InputError: not an archive of :func:`pack`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            found = json.loads(file.read(RESULT))
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError) as error:
        raise InputError("job", f"no archive ({error})", "the archive of a job") from error
    require(isinstance(found, dict) and "status" in found, "job", "no result", "the archive of a job")
    return found


def unpack(archive: bytes, folder: Path) -> None:
    """Write an archive to ``folder``, which is replaced as a whole when all of it is there.

    Raises:
        InputError: a name that leads out of the folder, or more bytes than a job may leave.
    """
    new = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            total = sum(info.file_size for info in file.infolist())
            require(total <= 2 * MOST_BYTES, "job", f"{total:,} bytes", f"at most {2 * MOST_BYTES:,}")
            for info in file.infolist():
                _write(file, info, new)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(new, folder)
    except zipfile.BadZipFile as error:
        raise InputError("job", f"a damaged archive ({error})", "the archive of a job") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write(file: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> None:
    name = PurePosixPath(info.filename)
    safe = not name.is_absolute() and ".." not in name.parts and "\\" not in info.filename
    if not safe or ":" in info.filename or info.is_dir():
        refuse("job", repr(info.filename), "names inside the job's folder")
    target = folder.joinpath(*name.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        out.write(file.read(info))
        out.flush()
        os.fsync(out.fileno())
