"""Whole tensors in and out of split parameters, without any assumption on who split them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from engine.torch_private import StridedShard


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


def local_slice(whole: Tensor, split: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``split``, a tensor of the same full shape."""
    if not isinstance(split, DTensor):
        return whole
    mesh = split.device_mesh
    for axis in reversed(_innermost_first(split)):
        placement = split.placements[axis]
        if isinstance(placement, Shard | StridedShard):
            chunks = whole.chunk(mesh.size(axis), dim=placement.dim)
            index = mesh.get_local_rank(axis)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


@torch.no_grad()
def fill(split: Tensor, whole: Tensor) -> None:
    """Write this rank's part of ``whole`` into ``split``; needs no communication."""
    local(split).copy_(local_slice(whole, split))


def gather(split: Tensor) -> Tensor:
    """The whole tensor on every rank of the mesh that it is split over; all of them call this together."""
    if not isinstance(split, DTensor):
        return split
    placements = list(split.placements)
    for axis in _innermost_first(split):
        placements[axis] = Replicate()
        split = split.redistribute(placements=placements)
    return split.to_local()


def _innermost_first(split: DTensor) -> list[int]:
    """The mesh axes of a tensor, from the one that divides the smallest part: strided ones divide what others left."""
    axes = range(split.device_mesh.ndim)
    return sorted(axes, key=lambda axis: (not isinstance(split.placements[axis], StridedShard), -axis))
