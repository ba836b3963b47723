"""Whole tensors in and out of split parameters, without any assumption on who split them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from engine.torch_private import StridedShard, describe_shard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_axes(tensor: Tensor) -> set[str]:
    """The mesh axes over which a tensor is split."""
    if not isinstance(tensor, DTensor):
        return set()
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return {axis for axis, placement in axes if not placement.is_replicate()}


def with_local(tensor: DTensor, part: Tensor) -> DTensor:
    """The tensor with another part on this rank, sharing the part's storage."""
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def chunk_of(span: range, num_chunks: int, index: int) -> range:
    """One of the pieces that ``Tensor.chunk`` cuts; the last ones may be shorter or empty."""
    size = -(-len(span) // num_chunks)
    return span[index * size : (index + 1) * size]


def spans(split: DTensor) -> list[range]:
    """Where this rank's part lies in the whole, by dimension.

    Torch works it out wrongly where two axes divide one dimension and neither evenly: 19 rows over two tensor-parallel
    ranks are 10 and 9, and of these a third of three sharded ranks has 2 and 3, not 3 and 2.
    """
    places = [range(size) for size in split.shape]
    for axis in reversed(_innermost_first(split)):
        placement = split.placements[axis]
        if isinstance(placement, Shard | StridedShard):
            mesh, dim = split.device_mesh, placement.dim
            places[dim] = chunk_of(places[dim], mesh.size(axis), mesh.get_local_rank(axis))
    return places


def saved(tensor: Tensor) -> Tensor:
    """The tensor itself, as distributed checkpoints are to save it or load into it."""
    if isinstance(tensor, DTensor) and any(isinstance(placement, StridedShard) for placement in tensor.placements):
        describe_shard(tensor, spans(tensor))
    return tensor


@torch.no_grad()
def fill(split: Tensor, rows_of_whole: Callable[[range], Tensor]) -> None:
    """Write into ``split`` this rank's part of a whole tensor, of which no more than its rows are asked for; needs no
    communication."""
    rows, *places = spans(split) if isinstance(split, DTensor) else [range(size) for size in split.shape]
    local(split).copy_(rows_of_whole(rows)[(slice(None), *(slice(place.start, place.stop) for place in places))])


@torch.no_grad()
def gather(split: Tensor) -> Tensor:
    """The whole tensor on every rank of the mesh that it is split over; all of them call this together."""
    whole = local(split)
    if not isinstance(split, DTensor):
        return whole
    mesh, lengths = split.device_mesh, list(split.shape)
    steps = []
    for axis in reversed(_innermost_first(split)):
        placement = split.placements[axis]
        if isinstance(placement, Shard | StridedShard):
            dim, size = placement.dim, mesh.size(axis)
            pieces = [len(chunk_of(range(lengths[dim]), size, index)) for index in range(size)]
            lengths[dim] = pieces[mesh.get_local_rank(axis)]
            steps.append((mesh.get_group(axis), dim, pieces))
    for group, dim, pieces in reversed(steps):
        part = whole.movedim(dim, 0)
        padded = part.new_zeros(pieces[0], *part.shape[1:])
        padded[: len(part)] = part
        gathered = [torch.empty_like(padded) for _ in pieces]
        dist.all_gather(gathered, padded, group=group)
        whole = torch.cat([piece[:size] for piece, size in zip(gathered, pieces, strict=True)]).movedim(0, dim)
    return whole.contiguous()


def _innermost_first(split: DTensor) -> list[int]:
    """The mesh axes of a tensor, from the one that divides the smallest part: strided ones divide what others left."""
    axes = range(split.device_mesh.ndim)
    return sorted(axes, key=lambda axis: (not isinstance(split.placements[axis], StridedShard), -axis))
