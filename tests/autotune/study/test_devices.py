"""No two trials share a device, in one process or in several."""

import os
import threading
import time
from pathlib import Path

import pytest

from autotune.specs import machine
from autotune.specs.cluster import ClusterSpec
from autotune.specs.machine import Gpu
from autotune.study.devices import DevicePool, Devices

pytestmark = pytest.mark.unit


def pool(folder: Path, num_devices: int = 2) -> DevicePool:
    cluster = ClusterSpec(name="c", device_kind="cpu", device="cpu", devices_per_node=num_devices, memory_bytes=2**30)
    return DevicePool(cluster, folder)


def taken(devices: Devices | None) -> Devices:
    assert devices is not None
    return devices


def test_devices_and_cpus_are_disjoint(tmp_path: Path) -> None:
    one = pool(tmp_path)
    first, second = taken(one.acquire(1)), taken(one.acquire(1))
    assert {first.ids, second.ids} == {(0,), (1,)}
    assert not set(first.cpus) & set(second.cpus)
    assert set(first.cpus) | set(second.cpus) <= set(os.sched_getaffinity(0))
    one.release(first)
    assert taken(one.acquire(1)).ids == first.ids


def test_gpus_are_named_so_that_a_mask_does_not_shift_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index, f"GPU-{index}", "any", 2**30) for index in range(4)]
    cluster = ClusterSpec(name="c", device_kind="h100", device="cuda", devices_per_node=2, memory_bytes=2**30)
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: gpus[2:])
    mine = taken(DevicePool(cluster, tmp_path).acquire(2))
    assert (mine.ids, mine.visible) == ((0, 1), "GPU-2,GPU-3")
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: gpus[1:3])
    theirs = DevicePool(cluster, tmp_path)  # shares one GPU with the other pool
    assert taken(theirs.acquire(1)).visible == "GPU-1"
    assert theirs.acquire(1, iter([False, True]).__next__) is None


def test_another_pool_of_the_machine_waits(tmp_path: Path) -> None:
    mine, theirs = pool(tmp_path), pool(tmp_path)
    held = taken(mine.acquire(1))
    tries = iter([False, True])
    assert theirs.acquire(2, lambda: next(tries)) is None
    mine.release(held)
    assert taken(theirs.acquire(2)).ids == (0, 1)


def test_a_large_trial_is_not_overtaken(tmp_path: Path) -> None:
    one = pool(tmp_path)
    held = taken(one.acquire(1))
    order: list[int] = []

    def work(count: int) -> None:
        devices = taken(one.acquire(count))
        order.append(count)
        one.release(devices)

    large = threading.Thread(target=work, args=(2,))
    large.start()
    while not one._queue:
        time.sleep(0.01)
    small = threading.Thread(target=work, args=(1,))
    small.start()
    time.sleep(0.3)
    assert order == []
    one.release(held)
    large.join()
    small.join()
    assert order == [2, 1]


def test_more_devices_than_cores_are_not_pinned(tmp_path: Path) -> None:
    many = pool(tmp_path, num_devices=4 * len(os.sched_getaffinity(0)))
    assert taken(many.acquire(1)).cpus == ()
