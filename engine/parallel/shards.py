"""Whole tensors in and out of split parameters, without any assumption on who split them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from engine.torch_private import StridedShard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slice(whole: Tensor, split: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``split``, a tensor of the same full shape."""
    if not isinstance(split, DTensor):
        return whole
    mesh = split.device_mesh
    # Axes are applied in mesh order, except that a strided one divides what the later axes left.
    axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(split.placements[axis], StridedShard))
    for axis in axes:
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
    return split.full_tensor() if isinstance(split, DTensor) else split
