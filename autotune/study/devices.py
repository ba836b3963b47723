"""The devices of this machine, handed out so that no two trials share one while speed is measured.

Devices are also locked between processes, so that two sweeps on one machine take turns. The locks are the kernel's:
they are free again the moment their owner dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.specs import machine
from autotune.specs.cluster import ClusterSpec
from engine.atomic import make_folder

RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Devices:
    """Devices that one trial uses alone."""

    ids: tuple[int, ...]
    cpus: tuple[int, ...] = ()
    """Logical CPUs that go with them; empty where processes can't be pinned."""
    visible: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of the trial; None for devices that it doesn't govern."""


class DevicePool:
    """Hands out devices of one machine; whoever asked first is served first, so that a large trial does not starve.

    Args:
        cluster: The machine; its devices are numbered from 0.
        lock_folder: Where the locks between processes lie; one folder per user and machine by default.
    """

    def __init__(self, cluster: ClusterSpec, lock_folder: Path | None = None) -> None:
        self.num_devices = cluster.num_devices
        self._names = _device_names(cluster)
        self._is_masked = cluster.device == "cuda"
        self._folder = make_folder(lock_folder or Path(tempfile.gettempdir()) / f"paretune-devices-{os.getuid()}")
        self._cpus = _cpus_by_device(cluster)
        self._held: dict[int, int] = {}
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def num_held(self) -> int:
        """Devices that are handed out."""
        return len(self._held)

    def acquire(self, num_devices: int, should_stop: Callable[[], bool] = lambda: False) -> Devices | None:
        """Wait for ``num_devices`` free devices.

        Returns:
            The devices, or None when ``should_stop`` said so first.
        """
        assert num_devices <= self.num_devices, "rules refuse plans larger than the machine"
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while not should_stop():
                    if self._queue[0] is ticket and (devices := self._try(num_devices)):
                        return devices
                    self._changed.wait(RETRY_SECONDS)
                return None
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def release(self, devices: Devices) -> None:
        """Give devices back."""
        with self._changed:
            for device in devices.ids:
                os.close(self._held.pop(device))
            self._changed.notify_all()

    def _try(self, num_devices: int) -> Devices | None:
        """All or nothing, so that two processes never wait for each other's half."""
        taken: dict[int, int] = {}
        for device in range(self.num_devices):
            if len(taken) < num_devices and device not in self._held:
                handle = self._lock(device)
                if handle is not None:
                    taken[device] = handle
        if len(taken) < num_devices:
            for handle in taken.values():
                os.close(handle)
            return None
        self._held |= taken
        cpus = tuple(cpu for device in taken for cpu in self._cpus.get(device, ()))
        visible = ",".join(self._names[device] for device in taken) if self._is_masked else None
        return Devices(tuple(taken), cpus, visible)

    def _lock(self, device: int) -> int | None:
        handle = os.open(self._folder / f"{self._names[device]}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        return handle


def _device_names(cluster: ClusterSpec) -> list[str]:
    """What each device is called on this machine, whatever part of it ``CUDA_VISIBLE_DEVICES`` shows to this process:
    the UUIDs of GPUs, which that variable takes too."""
    if cluster.device == "cpu":
        return [f"cpu-{device}" for device in range(cluster.num_devices)]
    return [gpu.uuid for gpu in machine.nvidia_gpus()]


def _cpus_by_device(cluster: ClusterSpec) -> dict[int, tuple[int, ...]]:
    """The CPUs of each device: those this process may use, dealt out by physical core in equal runs (by CPU where there
    are fewer cores than devices)."""
    if not hasattr(os, "sched_setaffinity"):
        return {}
    cpus = machine.usable_cpus()
    groups = machine.cpus_by_core(cpus)
    if len(groups) < cluster.num_devices:
        groups = [[cpu] for cpu in cpus]
    each = len(groups) // cluster.num_devices
    runs = [groups[device * each : (device + 1) * each] for device in range(cluster.num_devices)]
    return {device: tuple(cpu for group in run for cpu in group) for device, run in enumerate(runs)}
