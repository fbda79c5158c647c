"""Installed packages: torch, CuPy, Jupyter on the server and the kernel side, the model."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from labkit.doctor import Finding
from labkit.errors import MissingModelError
from labkit.models.zoo import default_model_path
from labkit.probes import gpus
from labkit.probes.child import ChildFailed, ask
from labkit.probes.fixes import pip_install, python_command, set_up

INSTALL = set_up()

TORCH = """
import json, torch
out = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
       "cuda_available": bool(torch.cuda.is_available())}
print(json.dumps(out))
"""
CUPY = """
import json, cupy
out = {"version": cupy.__version__, "cuda": None, "devices": 0, "error": ""}
try:
    out["cuda"] = cupy.cuda.runtime.runtimeGetVersion()
    out["devices"] = cupy.cuda.runtime.getDeviceCount()
except Exception as error:
    out["error"] = str(error)
print(json.dumps(out))
"""
VERSIONS = """
import json, sys
from importlib import metadata
out = {"python": sys.version.split()[0], "executable": sys.executable}
for name in %r:
    try:
        out[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        out[name] = None
print(json.dumps(out))
"""


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch() -> Finding:
    """torch, imported in a child process: a broken library must not end the doctor."""
    if util.find_spec("torch") is None:
        return Finding("torch", "problem", "not installed", INSTALL, {"version": None})
    try:
        facts = ask(TORCH)
    except ChildFailed as error:
        fix = pip_install("--force-reinstall torch")
        return Finding("torch", "problem", f"cannot be imported: {error}", fix, {"version": None})
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    value = f"{facts['version']}, {cuda}, {facts['threads']} threads"
    if not facts["cuda_available"] and gpus.device_count() > 0:
        if facts["cuda"]:
            fix = "update the NVIDIA driver: it is older than torch's CUDA"
        else:
            fix = "install torch's CUDA build: choose your system at pytorch.org, Get Started"
        return Finding("torch", "problem", value + "; there is a GPU that it cannot use", fix, facts)
    return Finding("torch", "ok", value, facts=facts)


def cupy() -> Finding:
    """CuPy; with no GPU it is not used, so its absence is a note."""
    if util.find_spec("cupy") is None:
        fix = pip_install("cupy-cuda12x")
        state = "problem" if gpus.device_count() > 0 else "note"
        return Finding(
            "cupy", "problem" if state == "problem" else "note", "not installed", fix, {"version": None}
        )
    several = sorted(
        {
            dist.metadata["Name"]
            for dist in metadata.distributions()
            if (dist.metadata["Name"] or "").startswith("cupy")
        }
    )
    try:
        facts = ask(CUPY)
    except ChildFailed as error:
        fix = pip_install("--force-reinstall cupy-cuda12x")
        return Finding("cupy", "problem", f"cannot be imported: {error}", fix, {"version": None})
    facts["distributions"] = several
    cuda = (
        f"CUDA {facts['cuda'] // 1000}.{facts['cuda'] % 1000 // 10}"
        if facts["cuda"]
        else "no CUDA runtime found"
    )
    value = f"{facts['version']} ({', '.join(several) or 'unnamed'}), {cuda}"
    if len(several) > 1:
        fix = f"{python_command()} -m pip uninstall {' '.join(several[1:])}"
        return Finding("cupy", "problem", value + "; more than one CuPy is installed", fix, facts)
    if gpus.device_count() > 0 and not facts["devices"]:
        fix = pip_install('-e ".[gpu]"')
        return Finding("cupy", "problem", f"{value}; {facts['error'] or 'sees no GPU'}", fix, facts)
    return Finding("cupy", "ok", value, facts=facts)


def _kernel_python() -> str:
    """Interpreter of the ``python3`` kernel; this one when no kernel spec says otherwise."""
    places = [Path(sys.prefix) / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"]
    for place in places:
        if place.is_file():
            command = json.loads(place.read_text(encoding="utf-8")).get("argv") or [sys.executable]
            # ipykernel writes plain "python" when the kernel is to use whatever runs the server.
            return command[0] if Path(command[0]).is_absolute() else sys.executable
    return sys.executable


def _lab_python() -> str | None:
    """Interpreter that would run JupyterLab, from the first line of its script."""
    script = shutil.which("jupyter-lab", path=str(Path(sys.executable).parent)) or shutil.which("jupyter-lab")
    if script is None:
        return None
    first = Path(script).read_bytes().split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    return first[2:].strip() if first.startswith("#!") and "python" in first else sys.executable


def jupyter_server_side() -> Finding:
    """JupyterLab and the widget front end, in the environment that serves the page."""
    python = _lab_python()
    if python is None:
        return Finding("jupyter server", "problem", "JupyterLab is not installed", INSTALL)
    facts = _versions(python, ["jupyterlab", "jupyterlab_widgets", "jupyter_server"])
    value = f"JupyterLab {facts['jupyterlab']}, jupyterlab_widgets {facts['jupyterlab_widgets']}"
    if not facts["jupyterlab"] or not facts["jupyterlab_widgets"]:
        fix = pip_install("jupyterlab jupyterlab_widgets", python)
        return Finding("jupyter server", "problem", value, fix, facts)
    if not facts["jupyterlab_widgets"].startswith("3."):
        fix = pip_install("jupyterlab_widgets", python)
        return Finding("jupyter server", "problem", value + "; ipywidgets 8 needs 3.x", fix, facts)
    return Finding("jupyter server", "ok", value, facts=facts)


def jupyter_kernel_side() -> Finding:
    """ipykernel and ipywidgets, in the environment that runs the cells."""
    python = _kernel_python()
    facts = _versions(python, ["ipykernel", "ipywidgets", "labkit"])
    value = f"ipykernel {facts['ipykernel']}, ipywidgets {facts['ipywidgets']}, {python}"
    if not facts["ipykernel"] or not facts["ipywidgets"]:
        fix = pip_install("ipykernel ipywidgets", python)
        return Finding("jupyter kernel", "problem", value, fix, facts)
    if not facts["ipywidgets"].startswith("8."):
        fix = pip_install("ipywidgets", python)
        return Finding("jupyter kernel", "problem", value + "; the widgets need 8.x", fix, facts)
    return Finding("jupyter kernel", "ok", value, facts=facts)


def _versions(python: str, names: list[str]) -> dict[str, Any]:
    if (
        Path(python).resolve() == Path(sys.executable).resolve()
        and Path(python).parent == Path(sys.executable).parent
    ):
        facts: dict[str, Any] = {name: installed_version(name) for name in names}
        return {"executable": python, **facts}
    return ask(VERSIONS % (names,), python=python, seconds=20)


def course_tools() -> Finding:
    """What runs the chapters headlessly and loads models."""
    names = [
        "papermill",
        "nbclient",
        "nbconvert",
        "matplotlib",
        "tokenizers",
        "gguf",
        "safetensors",
        "typer",
        "rich",
    ]
    facts = {name: installed_version(name) for name in names}
    missing = [name for name, version in facts.items() if version is None]
    if missing:
        return Finding("course tools", "problem", f"missing: {', '.join(missing)}", INSTALL, facts)
    value = ", ".join(
        f"{name} {facts[name]}" for name in ("papermill", "nbclient", "matplotlib", "tokenizers")
    )
    return Finding("course tools", "ok", value, facts=facts)


def model() -> Finding:
    """The default model's file; chapter 09 and ``labkit generate`` use it."""
    try:
        file = default_model_path()
    except MissingModelError as missing:
        return Finding("model", "note", missing.received, missing.fix, {"path": None})
    if file.is_dir():
        return Finding("model", "ok", f"{file}, named by LABKIT_MODEL", facts={"path": str(file)})
    size = file.stat().st_size
    return Finding(
        "model", "ok", f"{file.name}, {size / 1e6:.0f} MB", facts={"path": str(file), "bytes": size}
    )
