"""Every symbol of torch that is not public, in one place. Written for torch 2.13; tests import each."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["StridedShard", "TorchDispatchMode"]
"""``StridedShard``: what fully_shard makes of a dimension that tensor parallelism splits already. A rank's part is a
slice of the tensor-parallel slice, though its mesh axis stands before."""
