"""Data parallelism with sharded parameters: fully_shard on the groups of a decoder.

Gradients are summed over the data-parallel ranks, not averaged: the loss is divided by the valid tokens of the whole
global batch already. ZeRO stage 3 frees the gathered parameters of a group after its forward pass and reduces gradients
at every micro-batch; stage 2 keeps the gathered parameters for the whole step and reduces gradients once, at its end.
In a pipeline the schedule reduces once in both.
"""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.models.layers import Head, Linear
from engine.plan import Plan
from engine.precision.policy import PrecisionPolicy


def apply_data_parallel(part: Decoder, plan: Plan, policy: PrecisionPolicy, context: ParallelContext) -> None:
    """Shard a model or stage, still on the meta device, over the ranks that hold the same parameters.

    Groups: the embedding, each block, the last norm with the head. What is left is the root's group: the embedding of
    positions; with tied embeddings, the embedding and the last norm.
    """
    mesh = context.submesh("dp_replicate", "fsdp")
    if mesh is None:
        return
    mixed = MixedPrecisionPolicy(policy.compute, policy.parameters, cast_forward_inputs=False)
    free = plan.zero_stage == 3
    groups: list[nn.Module | list[nn.Module]] = list(part.layers.values())
    if isinstance(part.head, Linear) and part.norm is not None:
        groups.append([part.norm, part.head])
    tied = isinstance(part.head, Head)
    if part.embedding is not None and not tied:
        groups.append(part.embedding)
    for group in groups:
        last = isinstance(group, list)  # used again at once in the backward pass
        fully_shard(group, mesh=mesh, mp_policy=mixed, reshard_after_forward=free and not last)
    fully_shard(part, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    for module in _sharded(part):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces
    # Under tensor parallelism modules return views; torch warns of in-place changes to them, which there are none of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _sharded(part: nn.Module) -> list[FSDPModule]:
    return [module for module in part.modules() if isinstance(module, FSDPModule)]


def begin_micro_batch(part: nn.Module, plan: Plan, *, last: bool) -> None:
    """Say whether the coming backward pass is the last of the step."""
    if isinstance(part, FSDPModule):
        part.set_is_last_backward(last)
        if plan.zero_stage == 2:
            part.set_requires_gradient_sync(last)
            part.set_reshard_after_backward(last)


def end_evaluation(part: nn.Module) -> None:
    """Free what a forward pass without a backward pass gathered: it would hide later changes of the parameters."""
    for module in _sharded(part):
        module.reshard()
