"""The run-time compiler (libnvrtc) and the CUDA headers, wherever they were installed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from ctypes.util import find_library
from importlib import util
from pathlib import Path

from labkit.doctor import Finding
from labkit.probes.fixes import pip_install

COMPILER_FIX = pip_install("nvidia-cuda-nvrtc-cu12")
HEADERS_FIX = pip_install("nvidia-cuda-runtime-cu12")
DISASSEMBLER_FIX = pip_install("nvidia-cuda-nvdisasm")


def wheel_roots() -> list[Path]:
    """Folders of the ``nvidia`` namespace package, in which the CUDA wheels put their files."""
    spec = util.find_spec("nvidia")
    return [Path(place) for place in spec.submodule_search_locations or []] if spec else []


def toolkit_roots() -> list[Path]:
    """Folders of installed CUDA toolkits, named by the environment or in the usual place."""
    named = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")]
    places = [Path(name) for name in named if name]
    if os.name == "nt":
        places += (
            [Path(os.environ.get("CONDA_PREFIX", "")) / "Library"] if os.environ.get("CONDA_PREFIX") else []
        )
    else:
        places.append(Path("/usr/local/cuda"))
    return [place for place in places if place.is_dir()]


def find_nvrtc() -> list[Path]:
    """All libnvrtc files, wheels first."""
    patterns = ("**/libnvrtc.so.*[0-9]", "**/nvrtc64_*_0.dll")
    found: list[Path] = []
    for root in wheel_roots():
        for pattern in patterns:
            found += sorted(root.glob(pattern))
    for root in toolkit_roots():
        for pattern in ("lib64/libnvrtc.so.*[0-9]", "lib/libnvrtc.so.*[0-9]", "bin/nvrtc64_*_0.dll"):
            found += sorted(root.glob(pattern))
    return [path for path in found if "builtins" not in path.name and ".alt." not in path.name]


def find_headers() -> list[Path]:
    """All folders that hold ``cuda_fp16.h``, wheels first."""
    found = [path.parent for root in wheel_roots() for path in sorted(root.glob("**/cuda_fp16.h"))]
    for root in toolkit_roots():
        found += [
            place
            for place in (root / "include", root / "targets/x86_64-linux/include")
            if (place / "cuda_fp16.h").is_file()
        ]
    return found


def find_nvdisasm() -> list[Path]:
    """All nvdisasm programs: wheels first, then toolkits, then the PATH."""
    found: list[Path] = []
    for root in wheel_roots():
        found += sorted(path for path in root.glob("**/bin/nvdisasm*") if path.suffix in ("", ".exe"))
    for root in toolkit_roots():
        found += [path for name in ("nvdisasm", "nvdisasm.exe") if (path := root / "bin" / name).is_file()]
    on_path = shutil.which("nvdisasm")
    return found + ([Path(on_path)] if on_path and Path(on_path) not in found else [])


def nvrtc_version(library: str) -> str:
    """Version that the library itself reports.

    Raises:
        OSError: it cannot be loaded.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    code = ctypes.CDLL(library).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if code != 0:
        raise OSError(f"nvrtcVersion returned {code}")
    return f"{major.value}.{minor.value}"


def nvrtc() -> Finding:
    """libnvrtc: compiles kernels for a GPU, and counts their registers with no GPU."""
    found = [str(path) for path in find_nvrtc()]
    if not found and (name := find_library("nvrtc")):
        found = [name]
    if not found:
        return Finding("nvrtc", "note", "libnvrtc was not found", COMPILER_FIX, {"found": []})
    try:
        version = nvrtc_version(found[0])
    except OSError as error:
        return Finding("nvrtc", "problem", f"{found[0]}: {error}", COMPILER_FIX, {"found": found})
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding("nvrtc", "ok", f"{version}, {found[0]}{more}", facts={"version": version, "found": found})


def headers() -> Finding:
    """CUDA headers that kernels include, such as ``cuda_fp16.h``."""
    found = [str(path) for path in find_headers()]
    if not found:
        return Finding("cuda headers", "note", "cuda_fp16.h was not found", HEADERS_FIX, {"found": []})
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding("cuda headers", "ok", found[0] + more, facts={"found": found})


def nvdisasm() -> Finding:
    """nvdisasm: shows the machine code of a kernel beside the emulator's counts."""
    found = [str(path) for path in find_nvdisasm()]
    if not found:
        return Finding("nvdisasm", "note", "not found", DISASSEMBLER_FIX, {"found": []})
    done = subprocess.run(
        [found[0], "--version"],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=20,
        check=False,
    )
    release = re.search(r"release (\S+?),", done.stdout)
    version = release[1] if release else "unknown version"
    return Finding("nvdisasm", "ok", f"{version}, {found[0]}", facts={"found": found, "version": version})
