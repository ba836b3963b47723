"""What the machine lets a process use, read from made-up system folders."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from autotune.specs import machine

pytestmark = pytest.mark.unit

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def fake_cpus(root: Path, siblings: list[str]) -> None:
    for cpu, text in enumerate(siblings):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)


def test_hardware_threads_of_a_core_are_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cpus(tmp_path, ["0,2", "1,3", "0,2", "1,3"])
    assert machine.cpus_by_core([0, 1, 2, 3], tmp_path) == [[0, 2], [1, 3]]
    monkeypatch.setattr(machine, "usable_cpus", lambda: [0, 2, 3])
    assert machine.num_usable_cores(tmp_path) == 2


def test_unknown_topology_counts_each_cpu(tmp_path: Path) -> None:
    assert machine.cpus_by_core([0, 1], tmp_path) == [[0], [1]]


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
def test_the_quota_of_a_control_group_limits_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: [0, 1, 2, 3])
    write(tmp_path / "proc/self/cgroup", "0::/jobs/mine")
    write(tmp_path / "sys/fs/cgroup/jobs/cpu.max", quota)
    assert machine.num_usable_cores(tmp_path) == cores


def test_the_quota_of_the_older_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "3:cpu:/a\n2:memory:/b\n0::/")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert machine.cpu_quota(tmp_path) == 1.5


def test_the_tightest_memory_limit_counts(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert machine.memory_limit_bytes(tmp_path) == total
    write(tmp_path / "proc/self/cgroup", "0::/jobs/mine")
    write(tmp_path / "sys/fs/cgroup/jobs/memory.max", str(GIB))
    write(tmp_path / "sys/fs/cgroup/jobs/mine/memory.max", "max")
    assert machine.memory_limit_bytes(tmp_path) == GIB


def test_the_memory_limit_of_the_older_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "2:memory:/b\n1:name=systemd:/x")
    write(tmp_path / "sys/fs/cgroup/memory/b/memory.limit_in_bytes", str(GIB // 2))
    assert machine.memory_limit_bytes(tmp_path) == GIB // 2


SMI = "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559\n1, GPU-bb, NVIDIA H100 80GB HBM3, 81559\n2, GPU-cc, Old, [N/A]\n"


@pytest.mark.parametrize(
    ("mask", "indices"),
    [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-bb", [1]), ("", []), ("1,7,0", [1]), ("-1", [])],
)
def test_visible_devices_follow_the_mask(monkeypatch: pytest.MonkeyPatch, mask: str | None, indices: list[int]) -> None:
    def answer(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, SMI, "")

    monkeypatch.setattr(subprocess, "run", answer)
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    gpus = machine.nvidia_gpus()
    assert [gpu.index for gpu in gpus] == indices
    assert all(gpu.memory_bytes == 81559 * 2**20 for gpu in gpus)


@pytest.mark.parametrize("failure", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_no_driver_means_no_devices(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", fail)
    assert machine.nvidia_gpus() == []
