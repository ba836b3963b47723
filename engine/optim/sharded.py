"""ZeRO stage 1: optimizer states sharded, parameters and gradients whole.

Each rank updates a slice of every parameter (rows, as ``fully_shard`` would slice it) and gathers the others' slices
afterwards. A slice shares the storage of its parameter and is a DTensor in the parameter's full shape, so the states
made from it are read from a checkpoint under any other sharding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from engine.context import ParallelContext
from engine.optim.groups import of_experts
from engine.parallel.replicated import Bucket, in_buckets
from engine.parallel.shards import chunk_of, local, with_local
from engine.torch_private import StridedShard


class OptimizerShards:
    """What the optimizer of a rank updates.

    Args:
        parameters: This rank's parameters by name.
        context: Its place. Without ZeRO stage 1, or an axis to shard over, the optimizer updates the parameters
            themselves and nothing here does anything.

    Attributes:
        tensors: What is updated of each parameter: a slice, or the parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], context: ParallelContext) -> None:
        self._context = context
        self._parameters = dict(parameters)
        self.tensors: dict[str, nn.Parameter] = dict(parameters)
        sliced = []
        for fqn, parameter in parameters.items():
            axis = "efsdp" if of_experts(fqn) else "fsdp"
            if context.plan.zero_stage == 1 and context.has_axis(axis):
                self.tensors[fqn] = _slice(parameter, axis, context)
                sliced.append((axis, parameter))
        self._buckets = in_buckets(sliced)

    def take_gradients(self) -> None:
        """Give every slice its rows of its parameter's whole gradient."""
        for fqn, part in self._slices():
            gradient = self._parameters[fqn].grad
            assert isinstance(part, DTensor)
            axis = part.device_mesh.mesh_dim_names[0]  # type: ignore[index]
            part.grad = None if gradient is None else with_local(part, self._rows(local(gradient), axis))

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the rows that others updated into every parameter; bitwise equal on all ranks afterwards."""
        for _, part in self._slices():
            part.grad = None
        started = None
        for bucket in self._buckets:
            following = self._start_gather(bucket)
            if started is not None:
                _finish_gather(*started)
            started = following
        if started is not None:
            _finish_gather(*started)

    def _slices(self) -> list[tuple[str, nn.Parameter]]:
        return [(fqn, part) for fqn, part in self.tensors.items() if part is not self._parameters[fqn]]

    def _rows(self, whole: Tensor, axis: str) -> Tensor:
        return _rows(whole, self._context.coordinate(axis), self._context.group(axis).size())

    def _start_gather(self, bucket: Bucket) -> tuple[dist.Work, Tensor, list[Tensor]]:
        """Begin to gather a bucket: what to wait for, the slices of all ranks, [ranks, padded elements], and the parts
        of the parameters on this rank that they belong to."""
        group = self._context.group(bucket.axis)
        wholes = [local(parameter) for parameter in bucket.parameters]
        sizes = [_slice_numel(whole, group.size()) for whole in wholes]
        gathered = wholes[0].new_empty(group.size(), sum(sizes))
        mine = gathered[group.rank()]
        rows = [self._rows(whole, bucket.axis).flatten() for whole in wholes]
        places = [place[: part.numel()] for place, part in zip(mine.split(sizes), rows, strict=True)]
        torch._foreach_copy_(places, rows)
        work = dist.all_gather_single(gathered.view(-1), mine, group=group, async_op=True)
        assert work is not None
        return work, gathered, wholes


def _finish_gather(work: dist.Work, gathered: Tensor, wholes: list[Tensor]) -> None:
    """Wait for the slices of all ranks and copy them into the parameters."""
    work.wait()
    sizes = [_slice_numel(whole, len(gathered)) for whole in wholes]
    targets, sources = [], []
    for whole, slices in zip(wholes, gathered.split(sizes, dim=1), strict=True):
        flat, size = whole.view(-1), slices.shape[1]
        full, rest = divmod(flat.numel(), size) if size else (0, 0)
        targets += [flat[: full * size].view(full, size), flat[full * size :]]
        sources += [slices[:full], slices[full, :rest] if rest else flat[full * size :]]
    torch._foreach_copy_(targets, sources)


def _rows(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The rank's rows, as ``Tensor.chunk`` divides them; the last ranks may have fewer or none."""
    rows = chunk_of(range(len(whole)), num_ranks, rank)
    return whole[rows.start : rows.stop]


def _slice_numel(whole: Tensor, num_ranks: int) -> int:
    """Elements of the largest slice."""
    return -(-len(whole) // num_ranks) * (whole.numel() // max(len(whole), 1))


def _slice(parameter: nn.Parameter, axis: str, context: ParallelContext) -> nn.Parameter:
    """The rows of a parameter that this rank updates, in its storage: a DTensor over ``axis`` and, before it, the axes
    that split the parameter already."""
    names: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    within = 1  # how often the rows are divided already
    if isinstance(parameter, DTensor):
        names, placements = tuple(parameter.device_mesh.mesh_dim_names or ()), parameter.placements
        for index, placement in enumerate(placements):
            within *= parameter.device_mesh.size(index) if placement.is_shard(0) else 1
    mesh = context.submesh(axis, *names)
    assert mesh is not None
    whole = local(parameter.detach())
    part = DTensor.from_local(
        _rows(whole, context.coordinate(axis), context.group(axis).size()),
        mesh,
        (StridedShard(0, split_factor=within) if within > 1 else Shard(0), *placements),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
