"""Clocks and throttle reasons from recorded nvidia-smi answers; names of devices."""

from __future__ import annotations

import subprocess

import pytest

from labkit.bench import machine
from labkit.device import devices


def test_a_recorded_answer_is_read() -> None:
    found = machine.parse_clocks(
        ["1980", "3201", "1980", "41", "215.33", "700.00", "P0", "0x0000000000000004"]
    )
    assert found == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "sm_max_mhz": 1980.0,
        "temperature_c": 41.0,
        "power_w": 215.33,
        "power_limit_w": 700.0,
        "pstate": "P0",
        "throttle_reasons": ["software power cap"],
    }


def test_what_a_laptop_does_not_know_is_none() -> None:
    values = ["1500", "6001", "2100", "60", "35.1", "[N/A]", "P3", "[Not Supported]"]
    found = machine.parse_clocks(values)
    assert found["power_limit_w"] is None and found["throttle_reasons"] is None and found["sm_mhz"] == 1500.0


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("0x0000000000000000", []),
        ("0x1", ["idle"]),
        (
            "0x0000000000000068",
            ["hardware slowdown", "software thermal slowdown", "hardware thermal slowdown"],
        ),
        ("0x1000004", ["software power cap", "0x1000000"]),
        ("active", None),
    ],
)
def test_throttle_reasons(mask: str, names: list[str] | None) -> None:
    assert machine.throttle_reasons(mask) == names


def test_an_older_driver_is_asked_with_the_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[1])
        old = "clocks_throttle_reasons" in command[1]
        answer = "210, 405, 2100, 45, 5.1, 60.00, P8, 0x0000000000000001\n"
        return subprocess.CompletedProcess(
            command, 0 if old else 2, answer if old else "Field is not valid", ""
        )

    monkeypatch.setattr(subprocess, "run", run)
    found = machine.clocks("before")
    assert found["throttle_reasons"] == ["idle"] and found["when"] == "before" and len(asked) == 2


@pytest.mark.parametrize(
    "error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 20)]
)
def test_a_machine_without_nvidia_smi_says_so(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert machine.clocks("after") == {"when": "after", "unread": "nvidia-smi gave no answer"}


def test_an_answer_of_several_gpus_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    two = subprocess.CompletedProcess([], 0, "700.00\n700.00\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: two)
    assert machine.nvidia_smi("power.limit") is None


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", "rtx3050-laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "nvidia-rtx-6000-ada-generation"),
        ("Graphics Device", "graphics-device"),
    ],
)
def test_device_key(name: str, key: str) -> None:
    assert machine.device_key(name) == key


def test_every_known_device_is_found_by_its_own_name() -> None:
    for known in devices().values():
        assert machine.device_key(known.name) == known.key


def test_software_names_versions_and_system() -> None:
    found = machine.software_facts()
    assert "torch" in found["versions"] and "labkit" in found["versions"] and found["system"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("abc123", {"id": "abc123", "dirty": False}),
        ("abc123-dirty", {"id": "abc123", "dirty": True}),
        ("", None),
    ],
)
def test_a_tree_without_git_is_told_its_commit(
    monkeypatch: pytest.MonkeyPatch, name: str, wanted: dict[str, object] | None
) -> None:
    monkeypatch.setattr(machine, "commit", lambda: None)
    monkeypatch.setenv("LABKIT_COMMIT", name)
    assert machine.software_facts()["commit"] == wanted
