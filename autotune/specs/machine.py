"""What this machine lets a process use: cores, memory and NVIDIA devices, found without importing torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/")
_SMI_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device as its driver reports it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


def usable_cpus() -> list[int]:
    """Logical CPUs this process may run on: the affinity mask where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpus_by_core(cpus: list[int], root: Path = _ROOT) -> list[list[int]]:
    """``cpus`` grouped by physical core, in the order of their first CPU. A CPU of unknown topology is its own core."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.setdefault(_read(siblings) or f"cpu{cpu}", []).append(cpu)
    return list(cores.values())


def num_usable_cores(root: Path = _ROOT) -> int:
    """Physical cores that this process may keep busy at once: within its affinity mask and its control groups' quota
    of CPU time, at least 1."""
    cores = len(cpus_by_core(usable_cpus(), root))
    return max(1, min(cores, int(cpu_quota(root) or cores)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the process's control groups allow; None for no limit."""
    quotas = []
    for folder in _cgroup_folders("cpu", root):
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Memory the process may use: the machine's, or the tightest limit of its control groups."""
    limits = [psutil.virtual_memory().total]
    for folder in _cgroup_folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            limits += [int(text)] if text.isdigit() else []
    return min(limits)


def nvidia_gpus() -> list[Gpu]:
    """NVIDIA devices that ``CUDA_VISIBLE_DEVICES`` leaves visible; empty where there are none or the driver's tool
    doesn't answer."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found: dict[str, Gpu] = {}
    for line in done.stdout.splitlines():
        index, uuid, name, mebibytes = (part.strip() for part in line.split(",", 3))
        if mebibytes.isdigit():
            found[uuid] = Gpu(int(index), uuid, name, int(mebibytes) * 2**20)
    return _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(found: dict[str, Gpu], mask: str | None) -> list[Gpu]:
    """The devices a mask of indices or UUID prefixes names, in its order; it ends at the first that doesn't exist."""
    if mask is None:
        return list(found.values())
    chosen: list[Gpu] = []
    for word in mask.split(","):
        word = word.strip()
        fits = [gpu for uuid, gpu in found.items() if word and (uuid.startswith(word) or str(gpu.index) == word)]
        if not fits:
            break
        chosen.append(fits[0])
    return chosen


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Folders of the process's control group and its parents, for cgroup 2 and for ``controller`` of cgroup 1."""
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        # A container sees its own group at the root, whatever the path says: missing folders are passed over.
        parts = Path(path.lstrip("/")).parts
        folders += [base.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
