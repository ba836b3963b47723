"""Where this process stands among the ranks of a plan, and the few things all ranks do together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engine.config import RuntimeOptions
from engine.errors import UserError
from engine.plan import Plan

T = TypeVar("T")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass
class ParallelContext:
    """One rank of one plan. Axes of degree 1 do not exist in the mesh and cost nothing.

    Works without a process group when the plan has one rank.
    """

    plan: Plan
    device: torch.device
    rank: int = 0
    local_rank: int = 0
    mesh: DeviceMesh | None = None
    _owns_group: bool = field(default=False, repr=False)

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
    def tp_rank(self) -> int:
        """Which slice of each split layer is this rank's."""
        return self.coordinate("tp")

    @property
    def pp_rank(self) -> int:
        """Which pipeline stage is this rank's."""
        return self.coordinate("pp")

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.pp_rank == self.plan.pp - 1

    def has_axis(self, axis: str) -> bool:
        """Whether the mesh has the axis ``dp``, ``tp`` or ``pp`` (degree above 1)."""
        return self.mesh is not None and axis in (self.mesh.mesh_dim_names or ())

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of an axis that exists."""
        assert self.mesh is not None
        return self.mesh[name]

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis; 0 where the axis does not exist."""
        return self.axis(axis).get_local_rank() if self.has_axis(axis) else 0

    def sum_over_batch(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel ranks, in place."""
        if self.has_axis("dp"):
            dist.all_reduce(values, group=self.axis("dp").get_group())
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

    def close(self) -> None:
        """Take down the process group if ``open_context`` started it."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False


def _attempt(action: Callable[[], Any]) -> tuple[Any, dict[str, Any] | None]:
    """The result of ``action``, or the parts of the UserError it raised."""
    try:
        return action(), None
    except UserError as error:
        return None, {"message": error.message, "hint": error.hint, "where": error.where}


def open_context(plan: Plan, runtime: RuntimeOptions) -> ParallelContext:
    """Take this process's place in the plan, from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK).

    Uses the process group that exists, or starts one when the plan has several ranks.

    Raises:
        UserError: The number of processes is not the plan's, or the device does not exist.
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
    owns_group = plan.world_size > 1 and not running
    time_limit = timedelta(seconds=runtime.hang_timeout_seconds)
    if owns_group:
        dist.init_process_group(
            _BACKENDS[device.type],
            timeout=time_limit,
            device_id=device if device.type == "cuda" else None,
        )
    return ParallelContext(plan, device, rank, local_rank, _mesh(plan, device, time_limit), owns_group)


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


def _mesh(plan: Plan, device: torch.device, time_limit: timedelta) -> DeviceMesh | None:
    """The mesh of the axes above degree 1, in the plan's rank order (mesh dimensions count from the slowest).

    Made from groups of our own: those that torch would make for a mesh know no time limit but its default.
    """
    degrees = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp}
    order: Sequence[str] = [axis for axis in reversed(plan.rank_order.split("-")) if degrees.get(axis, 1) > 1]
    if not order:
        return None
    world = dist.group.WORLD
    assert world is not None, "a plan of several ranks has a process group"
    ranks = torch.arange(plan.world_size).view([degrees[axis] for axis in order])
    groups = []
    for dim, size in enumerate(ranks.shape):
        if size == plan.world_size:
            groups.append(world)
        else:
            members = ranks.movedim(dim, -1).reshape(-1, size).tolist()
            groups.append(dist.new_subgroups_by_enumeration(members, timeout=time_limit)[0])
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(order))
