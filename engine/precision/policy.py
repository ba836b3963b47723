"""The one home of which dtype is used where.

Parameters and optimizer states are kept in at least fp32. Every parameter is rounded to the compute dtype where it is
used, by the module itself in one process and by FSDP's all-gather in many, so both compute the same. The residual
stream and the matrix multiplications have the compute dtype; norms, the router's softmax, the loss and all reductions
of gradients have at least fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.plan import Precision


def wide(dtype: torch.dtype) -> torch.dtype:
    """``max(dtype, fp32)``: what sensitive arithmetic is done in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of one plan."""

    compute: torch.dtype
    """Of matrix multiplications and of the activations between layers."""

    @property
    def parameters(self) -> torch.dtype:
        """Of the stored (master) parameters, gradients after reduction, and optimizer states."""
        return wide(self.compute)


def precision_policy(precision: Precision) -> PrecisionPolicy:
    """The policy of a plan's ``precision`` (rules refuse what is not built)."""
    return PrecisionPolicy({"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision])
