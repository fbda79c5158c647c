"""The doctor: every probe guarded, no GPU is a note, and it runs before anything is installed."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit import doctor
from labkit.doctor import Finding, Report
from labkit.probes import cuda, fixes, gpus, host, packages
from labkit.probes.child import ChildFailed, ask
from labkit.probes.fixes import python_command


class FakeCuda:
    """The driver API of a machine with the given GPUs: the calls the probe makes, nothing else."""

    def __init__(self, attributes: list[dict[int, int]], *, init: int = 0, version: int = 12080) -> None:
        self.attributes, self.init, self.version = attributes, init, version

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = len(self.attributes)
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetPCIBusId(self, out: Any, size: int, handle: Any) -> int:
        out.value = f"0000:0{handle.value}:00.0".encode()
        return 0

    def cuDeviceGetAttribute(self, out: Any, number: int, handle: Any) -> int:
        if number not in self.attributes[handle.value]:
            return 1
        out._obj.value = self.attributes[handle.value][number]
        return 0

    def cuDeviceGetName(self, out: Any, size: int, handle: Any) -> int:
        out.value = b"NVIDIA GeForce RTX 3050 Laptop GPU"
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, handle: Any) -> int:
        out._obj.value = 4 * 2**30
        return 0


class FakeNvml:
    """NVML of the same machine; ``free`` bytes for every GPU."""

    def __init__(self, free: int) -> None:
        self.free, self.shut = free, 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.shut += 1
        return 0

    def nvmlSystemGetDriverVersion(self, out: Any, size: Any) -> int:
        out.value = b"572.16"
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, out: Any) -> int:
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.free = self.free
        return 0


LAPTOP = {
    gpus.SM_COUNT: 16,
    gpus.CLOCK_KHZ: 1_500_000,
    gpus.MEMORY_CLOCK_KHZ: 6_000_000,
    gpus.BUS_BITS: 128,
    gpus.L2_BYTES: 2 * 2**20,
    gpus.CC_MAJOR: 8,
    gpus.CC_MINOR: 6,
}


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: gpus.Driver) -> None:
    monkeypatch.setattr(gpus, "installed_driver", lambda: driver)


def test_gpu_facts_come_from_the_driver() -> None:
    nvml = FakeNvml(free=3 * 2**30)
    found = gpus.read_driver(FakeCuda([LAPTOP]), nvml)
    assert (found.cuda, found.version, nvml.shut) == ("12.8", "572.16", 1)
    (gpu,) = found.gpus
    assert (gpu.capability, gpu.sms, gpu.memory_bytes, gpu.free_bytes) == ("8.6", 16, 4 * 2**30, 3 * 2**30)
    assert gpu.bandwidth_gb_s == 192.0  # 2 × 6 GHz × 128 bit / 8
    assert gpu.clock_mhz == 1500.0


def test_gpu_without_nvml_or_clock_is_still_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {gpus.CC_MAJOR: 8, gpus.CC_MINOR: 9, gpus.SM_COUNT: 24}
    use_driver(monkeypatch, gpus.read_driver(FakeCuda([LAPTOP, bare]), None))
    first, second = gpus.gpus()
    assert (first.name, second.name) == ("gpu 0", "gpu 1")
    assert "free memory unknown" in second.value and "bandwidth unknown" in second.value
    assert second.state == "ok"


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (gpus.read_driver(None, None), "no NVIDIA driver"),
        (gpus.read_driver(FakeCuda([], init=100), None), "the driver sees no GPU"),
        (gpus.read_driver(FakeCuda([], init=803), None), "differ in version"),
        (gpus.read_driver(FakeCuda([], init=999), None), "error 999"),
    ],
)
def test_no_gpu_is_a_note(driver: gpus.Driver, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, driver)
    assert gpus.driver().state == "note" and words in gpus.driver().value
    assert [finding.state for finding in gpus.gpus()] == ["note"]


def test_old_driver_old_card_and_full_card_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {**LAPTOP, gpus.CC_MAJOR: 7, gpus.CC_MINOR: 5}
    use_driver(monkeypatch, gpus.read_driver(FakeCuda([old, LAPTOP], version=11080), FakeNvml(free=2**20)))
    assert gpus.driver().state == "problem" and "CUDA 12" in gpus.driver().fix
    turing, full = gpus.gpus()
    assert turing.state == "note" and "kernels need SM 8.0" in turing.value
    assert full.state == "note" and "close programs" in full.fix


def test_cpu_build_of_torch_beside_a_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, gpus.read_driver(FakeCuda([LAPTOP]), None))
    facts = {"version": "2.13.0+cpu", "cuda": None, "threads": 2, "cuda_available": False}
    monkeypatch.setattr(packages, "ask", lambda code: facts)
    finding = packages.torch()
    assert finding.state == "problem" and "CUDA build" in finding.fix
    monkeypatch.setattr(packages, "ask", lambda code: {**facts, "cuda": "12.8"})
    assert "update the NVIDIA driver" in packages.torch().fix


def test_two_cupy_packages_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dist:
        def __init__(self, name: str) -> None:
            self.metadata = {"Name": name}

    names = ["cupy-cuda12x", "cupy-cuda13x", "numpy"]
    monkeypatch.setattr(packages.metadata, "distributions", lambda: [Dist(name) for name in names])
    monkeypatch.setattr(
        packages, "ask", lambda code: {"version": "14", "cuda": None, "devices": 0, "error": ""}
    )
    finding = packages.cupy()
    assert finding.state == "problem" and finding.fix == f"{python_command()} -m pip uninstall cupy-cuda13x"


def test_broken_torch_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(code: str) -> dict:
        raise ChildFailed("OSError: libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(packages, "ask", crash)
    finding = packages.torch()
    assert finding.state == "problem" and "libcudart" in finding.value and finding.fix


def test_child_that_crashes_hangs_or_says_nothing() -> None:
    with pytest.raises(ChildFailed, match="ZeroDivisionError"):
        ask("1/0")
    with pytest.raises(ChildFailed, match=r"exit code (-11|3221225477)"):
        ask("import ctypes; ctypes.string_at(0)")
    with pytest.raises(ChildFailed, match="no answer within 1 s"):
        ask("import time; time.sleep(60)", seconds=1)
    with pytest.raises(ChildFailed, match="no answer"):
        ask("print('hello')")
    assert ask("print('noise'); print('{\"a\": 1}')") == {"a": 1}


def test_a_probe_that_raises_does_not_hide_the_others() -> None:
    def broken() -> Finding:
        raise RuntimeError("sensor on fire")

    report = doctor.collect([("first", broken), ("second", lambda: Finding("second", "ok", "fine"))])
    assert [(f.name, f.state) for f in report.findings] == [("first", "note"), ("second", "ok")]
    assert "sensor on fire" in report.findings[0].value


def test_exit_code_counts_problems_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = iter([Report((Finding("a", "note", "x"),)), Report((Finding("a", "problem", "x", "mend"),))])
    monkeypatch.setattr(doctor, "collect", lambda: next(reports))
    assert [doctor.main([]), doctor.main([])] == [0, 1]
    assert "→ mend" in capsys.readouterr().out


def test_non_ascii_path_and_foreign_locale_are_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host.paths, "__file__", str(tmp_path / "课程 一" / "labkit" / "paths.py"))
    finding = host.path()
    assert finding.state == "note" and "non-ASCII characters and spaces" in finding.value
    monkeypatch.setattr(host.locale, "getencoding", lambda: "cp936")
    assert host.locale_and_encoding().state == "note"


def test_nvrtc_and_headers_are_found_in_the_wheels() -> None:
    """Set-up installs both wheels, so that kernels can be compiled with no GPU."""
    assert cuda.nvrtc().state == "ok" and cuda.nvrtc().facts["version"].startswith("12.")
    assert (Path(cuda.headers().facts["found"][0]) / "cuda_fp16.h").is_file()


def test_report_of_this_machine_as_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "labkit.cli", "doctor", "--json"],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    report = json.loads(done.stdout)
    names = [finding["name"] for finding in report["findings"]]
    assert {"python", "torch", "cupy", "driver", "disk", "locale", "path", "nvrtc", "model"} <= set(names)
    assert {finding["state"] for finding in report["findings"]} <= {"ok", "note", "problem"}
    assert done.returncode == (1 if report["problems"] else 0)
    assert all(finding["fix"] for finding in report["findings"] if finding["state"] == "problem")


def test_runs_with_nothing_installed_and_in_gbk(checkout: Path) -> None:
    """``-S`` hides every installed package: what is left is a bare Python."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONIOENCODING": "gbk"}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "labkit.doctor"], capture_output=True, env=environment, check=False
    )
    text = done.stdout.decode("gbk")
    assert done.returncode == 1 and done.stderr == b""
    assert "PROBLEM  torch" in text and "not installed" in text and "make course" in text


def test_library_that_is_not_nvrtc_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "libnvrtc.so.12"
    wrong.write_bytes(b"not a library")
    monkeypatch.setattr(cuda, "find_nvrtc", lambda: [wrong])
    assert cuda.nvrtc().state == "problem"
    with pytest.raises(OSError):
        ctypes.CDLL(str(wrong))


def test_fixes_name_this_interpreter_as_the_shell_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare pip, in an environment that is not activated, would change another Python."""
    assert (
        fixes.pip_install("torch", "/a b/python") == "'/a b/python' -m pip install -c constraints.txt torch"
    )
    monkeypatch.setattr(fixes, "WINDOWS", True)
    assert fixes.pip_install("torch", r"C:\my lab\python.exe").startswith('& "C:\\my lab\\python.exe" -m pip')
    assert fixes.set_up() == r"py -3 labkit\bootstrap.py"
