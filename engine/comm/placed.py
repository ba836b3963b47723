"""Which rank a process takes when a topology is known, settled before the process group begins."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from engine.errors import UserError
from engine.plan import Plan
from engine.rank_placement import place
from engine.topology import Links, Topology, load_topology

_KEY = "topology"


@dataclass(frozen=True)
class Place:
    """A process's rank."""

    rank: int
    links: Links
    """Between the ranks."""
    numbers: np.ndarray
    """As what the process of each rank was started, [ranks]."""
    store: Store
    """Where the processes have met already."""


def take_place(plan: Plan, path: str, number: int, time_limit: timedelta) -> Place:
    """The rank of the process that was started as ``number``. All processes call it; the first reads the file for all.

    Raises:
        UserError: On every process: the file can't be read, or is of another number of devices.
    """
    # Met under the numbers of the start: the first may have to serve the store for the others.
    store, _, _ = next(rendezvous("env://", number, plan.world_size, timeout=time_limit))
    store.set_timeout(time_limit)
    if number == 0:
        try:
            topology = checked_topology(plan, path)
        except UserError as error:
            store.set(_KEY, f"!{error}")
            store.wait([f"{_KEY}/{other}" for other in range(1, plan.world_size)])  # it may serve the store
            raise
        store.set(_KEY, topology.model_dump_json())
    else:
        told = store.get(_KEY).decode()
        store.set(f"{_KEY}/{number}", "")
        if told.startswith("!"):
            message, _, hint = told[1:].partition("\nhint: ")
            raise UserError(message, hint=hint)
        topology = Topology.model_validate_json(told)
    links = topology.links()
    devices = place(plan, links)
    rank = int(np.flatnonzero(devices == number)[0])
    return Place(rank, links.among(devices.tolist()), devices, PrefixStore("placed", store))


def checked_topology(plan: Plan, path: str) -> Topology:
    """The file, if it is of as many devices as the plan has ranks.

    Raises:
        UserError: It can't be read, is incomplete, or is of another number.
    """
    topology = load_topology(path)
    if topology.num_devices != plan.world_size:
        raise UserError(
            f"runtime.topology is of {topology.num_devices} devices, the plan {plan.mesh} has {plan.world_size} ranks",
            hint=f"measure {plan.world_size} devices: torchrun --nproc-per-node=... -m engine.probe --pairs --output"
            f" {path}",
            where=path,
        )
    topology.links()
    return topology
