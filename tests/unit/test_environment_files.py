"""pyproject.toml (ranges), constraints.txt (pins) and environment.yml (conda) say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

# The conda-forge name of what PyPI calls otherwise.
CONDA_NAMES = {
    "torch": "pytorch-gpu",
    "cupy-cuda12x": "cupy",
    "nvidia-cuda-nvdisasm": "cuda-nvdisasm",
    "nvidia-cuda-nvrtc-cu12": "cuda-nvrtc",
    "nvidia-cuda-runtime-cu12": "cuda-cudart-dev",
    "prometheus-client": "prometheus_client",
}
# conda-forge's own: the interpreter and its tools, and the CUDA selector.
CONDA_ONLY = {"python", "pip", "setuptools", "cuda-version"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*extras: str) -> list[Requirement]:
    table = project()
    lines = list(table["dependencies"])
    for extra in extras:
        lines += table["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, str]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in found, f"{name} is pinned twice"
            found[canonicalize_name(name)] = version
    return found


def conda() -> dict[str, SpecifierSet]:
    found = {}
    entries = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    plain = [entry for entry in entries if isinstance(entry, str)]
    plain += [line for entry in entries if isinstance(entry, dict) for line in entry["pip"]]
    for line in plain:
        name, range_ = re.fullmatch(r"([\w.-]+)(.*)", line).groups()
        if name != "cuda-version":
            found[name] = SpecifierSet(range_)
    return found


@pytest.mark.parametrize("extra", ["", *project()["optional-dependencies"]])
def test_every_requirement_is_pinned_within_its_range(extra: str) -> None:
    for requirement in requirements(*([extra] if extra else [])):
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pin), f"{requirement} does not admit the pin {pin}"


def test_conda_environment_has_the_same_packages_and_ranges() -> None:
    expected = {
        CONDA_NAMES.get(requirement.name, requirement.name): requirement.specifier
        for requirement in requirements("dev")
    }
    found = conda()
    assert set(found) - CONDA_ONLY == set(expected)
    for name, specifier in expected.items():
        assert found[name] == specifier, f"{name}: environment.yml {found[name]}, pyproject {specifier}"


def test_python_range_is_the_same_everywhere() -> None:
    assert conda()["python"] == SpecifierSet(project()["requires-python"])


def test_extras_that_the_design_names_exist() -> None:
    named = {"compiler", "gpu", "classroom", "sweep", "peers", "dev"}
    assert set(project()["optional-dependencies"]) == named


def test_pins_fit_the_environment_that_runs_the_tests() -> None:
    """What is installed is what is pinned, so that a green run speaks of the pins."""
    from importlib import metadata

    wrong = {}
    for requirement in requirements("dev"):
        installed = metadata.version(requirement.name).split("+")[0]
        if installed != pins()[canonicalize_name(requirement.name)]:
            wrong[requirement.name] = (installed, pins()[canonicalize_name(requirement.name)])
    assert not wrong


def test_pins_admit_the_oldest_python_of_the_range() -> None:
    """A distribution's stock Python is often an early patch release: Debian 12 has 3.11.2."""
    from importlib import metadata

    too_new = {}
    for dist in metadata.distributions():
        needs = dist.metadata.get("Requires-Python")
        if canonicalize_name(dist.name) in pins() and needs and not SpecifierSet(needs).contains("3.11.0"):
            too_new[dist.name] = needs
    assert not too_new
