"""Where this process stands among the ranks of a plan, and the few things all ranks do together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engine.comm.placed import checked_topology, take_place
from engine.config import RuntimeOptions
from engine.errors import UserError
from engine.layout import DENSE_AXES, EXPERT_AXES, axis_groups, dense_ranks, expert_ranks
from engine.plan import Plan
from engine.topology import Links

T = TypeVar("T")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

OWN_GROUP = ("cp", "ep")
"""Axes whose group no other axis shares: what attention and experts wait for must not queue behind parameters that are
gathered ahead of time, nor behind gradients."""


@dataclass
class ParallelContext:
    """One rank of one plan. Axes of degree 1 have no group and cost nothing.

    Works without a process group when the plan has one rank. The axes are those of ``engine.layout.axis_groups``.
    """

    plan: Plan
    device: torch.device
    rank: int = 0
    local_rank: int = 0
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict, repr=False)
    """The process group of each axis above degree 1 that this rank belongs to."""
    links: Links | None = field(default=None, repr=False)
    """Between the ranks, where ``runtime.topology`` tells them."""
    numbers: np.ndarray | None = field(default=None, repr=False)
    """As what the process of each rank was started (its RANK), [ranks], where that is not the rank."""

    @property
    def world_size(self) -> int:
        """Ranks of the plan."""
        return self.plan.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all (rank 0)."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Data-parallel degree."""
        return self.plan.dp

    @property
    def dp_rank(self) -> int:
        """Which slice of each global batch is this rank's."""
        return self.coordinate("dp")

    @property
    def cp_rank(self) -> int:
        """Which part of each sequence is this rank's."""
        return self.coordinate("cp")

    @property
    def tp_rank(self) -> int:
        """Which slice of each split layer is this rank's."""
        return self.coordinate("tp")

    @property
    def pp_rank(self) -> int:
        """Which pipeline rank this is."""
        return self.coordinate("pp")

    def has_axis(self, axis: str) -> bool:
        """Whether this rank has neighbours along an axis."""
        return axis in self.groups

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of an axis that exists."""
        return self.groups[axis]

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis; 0 where the axis does not exist."""
        return dist.get_rank(self.groups[axis]) if axis in self.groups else 0

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of an axis of parameters that exists."""
        mesh = self.submesh(name)
        assert mesh is not None, f"the plan has no axis {name}"
        return mesh

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """The mesh of those of ``axes`` that exist, in this order; None without any.

        Args:
            axes: Of ``DENSE_AXES`` or of ``EXPERT_AXES``.
        """
        found = tuple(axis for axis in axes if axis in self.groups)
        if not found:
            return None
        mesh = self._experts if found[0] in EXPERT_AXES else self._dense
        assert mesh is not None
        return mesh[found] if found != mesh.mesh_dim_names else mesh

    @cached_property
    def _dense(self) -> DeviceMesh | None:
        return self._mesh(dense_ranks(self.plan), DENSE_AXES)

    @cached_property
    def _experts(self) -> DeviceMesh | None:
        return self._mesh(expert_ranks(self.plan), EXPERT_AXES)

    def _mesh(self, ranks: np.ndarray, axes: Sequence[str]) -> DeviceMesh | None:
        """The mesh of this rank's part of the pipeline, made from the context's groups.

        Args:
            ranks: [pp, *axes].
            axes: Their names.
        """
        found = tuple(axis for axis in axes if axis in self.groups)
        if not found:
            return None
        here = torch.from_numpy(np.ascontiguousarray(ranks[self.pp_rank].squeeze()))
        return DeviceMesh.from_group(
            [self.groups[axis] for axis in found], self.device.type, here, mesh_dim_names=found
        )

    def sum_over_batch(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold different tokens, in place."""
        if self.has_axis("data"):
            dist.all_reduce(values, group=self.group("data"))
        return values

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; bitwise equal on all of them."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` (plain data) on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain data), in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def on_main(self, action: Callable[[], T]) -> T:
        """Let rank 0 do something for all: its result (plain data) on every rank.

        Raises:
            UserError: On every rank, when ``action`` raised it.
        """
        result, refusal = self.broadcast(_attempt(action) if self.is_main else None)
        if refusal:
            raise UserError(**refusal)
        return result  # type: ignore[no-any-return]

    def together(self, action: Callable[[], T]) -> T:
        """Let every rank do something by itself, without the others, so that all go on or all refuse.

        Raises:
            UserError: On every rank, when ``action`` raised it on some: that of the lowest of them.
        """
        result, refusal = _attempt(action)
        refusals = self.gather(refusal)
        told = next((one for one in refusals if one), None)
        if told:
            if not all(refusals):
                told["message"] = f"rank {refusals.index(told)}: {told['message']}"
            raise UserError(**told)
        return result

    def all_agree(self, flag: bool) -> bool:
        """Whether ``flag`` is true on every rank."""
        if self.world_size == 1:
            return flag
        vote = torch.tensor(int(flag))
        dist.all_reduce(vote, op=dist.ReduceOp.MIN)
        return bool(vote.item())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_agree(True)

    def synchronize(self) -> None:
        """Wait for this rank's device, before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _attempt(action: Callable[[], Any]) -> tuple[Any, dict[str, Any] | None]:
    """The result of ``action``, or the parts of the UserError it raised."""
    try:
        return action(), None
    except UserError as error:
        return None, {"message": error.message, "hint": error.hint, "where": error.where}


def open_context(plan: Plan, runtime: RuntimeOptions, *, has_experts: bool = True) -> ParallelContext:
    """Take this process's place in the plan, from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK).

    Uses the process group that exists, or starts one when the plan has several ranks. With ``runtime.topology`` the
    ranks of a group that is started are those that suit the links, not the RANKs.

    Args:
        plan: The plan.
        runtime: Device, threads and time limits.
        has_experts: Whether the model has experts; else no groups are made for them.

    Raises:
        UserError: The number of processes is not the plan's, the device does not exist, or the topology is of others.
    """
    running = dist.is_initialized()
    world_size = dist.get_world_size() if running else int(os.environ.get("WORLD_SIZE", "1"))
    rank = dist.get_rank() if running else int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world_size != plan.world_size:
        raise UserError(
            f"the plan {plan.mesh} needs {plan.world_size} processes, {world_size} were started",
            hint=f"start {plan.world_size} processes with torchrun, or change the plan's degrees",
        )
    device = _device(runtime, local_rank)
    time_limit = timedelta(seconds=runtime.hang_timeout_seconds)
    links = numbers = None
    if plan.world_size > 1 and not running:
        start: dict[str, Any] = {}
        if runtime.topology:
            place = take_place(plan, runtime.topology, rank, time_limit)
            rank, links, numbers = place.rank, place.links, place.numbers
            start = {"store": place.store, "rank": rank, "world_size": world_size}
        dist.init_process_group(
            _BACKENDS[device.type],
            timeout=time_limit,
            device_id=device if device.type == "cuda" else None,
            **start,
        )
    elif runtime.topology:
        links = checked_topology(plan, runtime.topology).links()
    return ParallelContext(plan, device, rank, local_rank, _groups(plan, time_limit, has_experts), links, numbers)


def _device(runtime: RuntimeOptions, local_rank: int) -> torch.device:
    if runtime.device == "cpu":
        torch.set_num_threads(runtime.threads_per_rank)
        return torch.device("cpu")
    # Of all processes of the node, so that every one of them refuses, the one that speaks for the node too.
    num_needed = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)
    if num_needed > torch.cuda.device_count():
        raise UserError(
            f"runtime.device is cuda and this node needs {num_needed} GPUs, torch sees {torch.cuda.device_count()}",
            hint="set runtime.device to cpu, start fewer processes per node, or check CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _groups(plan: Plan, time_limit: timedelta, has_experts: bool) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis. Axes with the same members share a group, but for those in ``OWN_GROUP``.

    Each rank makes the groups that it belongs to and no others, since there are thousands of them in a large world; the
    groups that torch would make for a mesh know no time limit but its default.
    """
    made: dict[tuple[str, int, bytes], dist.ProcessGroup] = {}
    groups = {}
    for axis, members in axis_groups(plan, has_experts=has_experts).items():
        mine = members[(members == dist.get_rank()).any(axis=1)]
        own = axis in OWN_GROUP
        key = (axis if own else "", members.shape[1], members.tobytes())
        if key not in made:
            if not own and members.shape[1] == plan.world_size:
                assert dist.group.WORLD is not None, "a plan of several ranks has a process group"
                made[key] = dist.group.WORLD
            else:
                # A rank that has none (of ``ends``) makes one by itself: torch names groups by how many there were, and
                # NCCL splits communicators on all ranks at once.
                ranks = mine[0].tolist() if len(mine) else [dist.get_rank()]
                made[key] = dist.new_group(ranks, timeout=time_limit, use_local_synchronization=True)
        if len(mine):
            groups[axis] = made[key]
    return groups
