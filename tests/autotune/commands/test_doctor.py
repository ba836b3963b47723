"""`autotune doctor`: what is found, what is missing for what, with torch and machine made up."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main
from autotune.commands import doctor
from autotune.specs import machine

FACTS: dict[str, Any] = {
    "torch": "2.13.0",
    "accelerator": "CUDA 12.8",
    "devices": [{"name": "NVIDIA H200", "memory_bytes": 140 * 2**30}],
    "gloo": None,
    "nccl": None,
    "cache_error": None,
}


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the torch probe says: everything is there. Tests change it."""
    found = FACTS | {"cache": str(tmp_path / "cache")}
    monkeypatch.setattr(doctor, "probe_torch", lambda: found)
    monkeypatch.setattr(doctor, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(machine, "nvidia_gpus", list)
    return found


def status(diagnosis: doctor.Diagnosis) -> dict[str, str]:
    return {check.name: check.status for check in diagnosis.checks}


@pytest.mark.unit
def test_a_machine_with_everything(facts: dict[str, Any], tmp_path: Path) -> None:
    diagnosis = doctor.diagnose(tmp_path / "runs")
    assert not diagnosis.ready["training"]
    assert not diagnosis.ready["training on GPUs"]
    assert not diagnosis.ready["reports"]
    assert {status(diagnosis)[name] for name in ("torch", "GPUs", "NCCL", "gloo", "runs folder", "corpus cache")} == {
        "ok"
    }
    assert not (tmp_path / "runs").exists(), "looking changes nothing"


@pytest.mark.unit
def test_without_a_gpu_training_is_still_possible(facts: dict[str, Any], tmp_path: Path) -> None:
    facts |= {"devices": [], "accelerator": None, "nccl": "torch was built without NCCL"}
    diagnosis = doctor.diagnose(tmp_path)
    assert not diagnosis.ready["training"]
    assert "GPU" in diagnosis.ready["training on GPUs"]
    assert status(diagnosis)["GPUs"] == "optional"


@pytest.mark.unit
def test_gpus_that_torch_cannot_use_are_told(
    facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts |= {"devices": [], "accelerator": None}
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: [machine.Gpu(0, "GPU-0", "NVIDIA H200", 2**37)])
    check = next(check for check in doctor.diagnose(tmp_path).checks if check.name == "GPUs")
    assert "1 NVIDIA H200, but torch can't use them" in check.detail
    assert "build for CUDA" in check.hint


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "name", "hint"),
    [
        ({"error": "ImportError: libfoo.so is missing"}, "torch", "pip install"),
        ({"gloo": "unable to resolve the host name"}, "gloo", "GLOO_SOCKET_IFNAME"),
        ({"cache": None, "cache_error": "cannot write /x"}, "corpus cache", ""),
    ],
)
def test_what_stops_training_is_told(
    facts: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    name: str,
    hint: str,
) -> None:
    facts |= change
    diagnosis = doctor.diagnose(tmp_path)
    check = next(check for check in diagnosis.checks if check.name == name)
    assert check.status == "missing"
    assert hint in check.hint
    assert diagnosis.ready["training"]
    assert diagnosis.ready["sweeps"]
    assert main(["doctor", "--runs-dir", str(tmp_path)]) == 1
    assert "no, missing" in capsys.readouterr().out


@pytest.mark.unit
def test_a_runs_folder_that_cannot_be_written(facts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    diagnosis = doctor.diagnose(tmp_path / "file" / "runs")
    assert status(diagnosis)["runs folder"] == "missing"
    assert "runs folder" in diagnosis.ready["training"]


@pytest.mark.unit
def test_a_missing_package_names_its_extra(
    facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = (
        doctor.Package("no_such_module_a", "a-package", "reports"),
        doctor.Package("no_such_module_b", "b-package", "MLflow logging", "logging"),
    )
    monkeypatch.setattr(doctor, "PACKAGES", packages)
    checks = {check.name: check for check in doctor.diagnose(tmp_path).checks}
    assert (checks["a-package"].status, checks["a-package"].hint) == ("missing", "pip install a-package")
    assert (checks["b-package"].status, checks["b-package"].hint) == ("optional", "pip install -e '.[logging]'")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no torch\n"), "ImportError: no torch"),
        (subprocess.CompletedProcess([], -11, "", ""), "exit status -11"),
    ],
)
def test_a_broken_torch_breaks_only_its_own_process(
    monkeypatch: pytest.MonkeyPatch, done: subprocess.CompletedProcess[str], reason: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert reason in doctor.probe_torch()["error"]


@pytest.mark.dist
def test_the_command_looks_at_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The real probe: torch, gloo and the cache folder, in a process of its own."""
    main(["doctor", "--json", "--runs-dir", str(tmp_path)])
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["torch"]["status"] == "ok"
    assert checks["gloo"]["status"] == "ok"
    assert set(told["ready"]) >= {"training", "training on GPUs", "sweeps", "reports", "TensorBoard logging"}
