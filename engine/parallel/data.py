"""Data parallelism with sharded parameters: fully_shard on the groups of a decoder.

Gradients are summed over the data-parallel ranks, not averaged: the loss is divided by the valid tokens of the whole
global batch already. ZeRO stage 3 frees the gathered parameters of a group after its forward pass and scatters
gradients at every micro-batch; stage 2 keeps the gathered parameters for the whole step and scatters gradients once, at
its end. In both, replicas of the shards sum theirs once a step. In a pipeline the schedule reduces once in all cases.
Parameters without ranks to be sharded over are left whole (``engine.parallel.replicated``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.models.layers import Head, Linear
from engine.optim.groups import of_experts
from engine.parallel.experts import mixtures_of
from engine.plan import Plan
from engine.precision.policy import PrecisionPolicy


def apply_data_parallel(part: Decoder, plan: Plan, policy: PrecisionPolicy, context: ParallelContext) -> None:
    """Shard a model or stage, still on the meta device, over the ranks that hold the same parameters.

    Groups: the embedding, each block, within it its experts (over ranks of their own), the last norm with the head.
    What is left is the root's group: the embedding of positions; with tied embeddings, the embedding and the last norm.
    """
    dense = _shard_mesh("dp_replicate", "fsdp", context)
    experts = _shard_mesh("edp_replicate", "efsdp", context)
    if dense is None and experts is None:
        return
    mixed = MixedPrecisionPolicy(policy.compute, policy.parameters, cast_forward_inputs=False)
    free = plan.zero_stage == 3
    whole = {parameter for fqn, parameter in part.named_parameters() if (experts if of_experts(fqn) else dense) is None}
    if experts is not None:
        for layer in mixtures_of(part).values():
            fully_shard(layer.experts, mesh=experts, mp_policy=mixed, reshard_after_forward=free)
    groups: list[Sequence[nn.Module]] = [[block] for block in part.layers.values()]
    if isinstance(part.head, Linear) and part.norm is not None:
        groups.append([part.norm, part.head])
    if part.embedding is not None and not isinstance(part.head, Head):
        groups.insert(0, [part.embedding])
    if dense is not None:
        for group in groups:
            last = len(group) > 1  # used again at once in the backward pass
            reshard = free and not last
            fully_shard(list(group), mesh=dense, mp_policy=mixed, reshard_after_forward=reshard, ignored_params=whole)
    # Pipelines look at the root alone: it has a group, if only an empty one, where any parameter is sharded.
    root = dense or experts
    fully_shard(part, mesh=root, mp_policy=mixed, reshard_after_forward=False, ignored_params=whole)
    for module in _sharded(part):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces
    _order_prefetches(part, groups, overlap=plan.overlap_dp)
    # Under tensor parallelism modules return views; torch warns of in-place changes to them, which there are none of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _shard_mesh(replicate: str, shard: str, context: ParallelContext) -> DeviceMesh | None:
    """What parameters are sharded over, and replicated over besides; None where they stay whole."""
    if context.plan.zero_stage < 2 or not context.has_axis(shard):
        return None
    return context.submesh(replicate, shard)


def _sharded(part: nn.Module) -> list[FSDPModule]:
    return [module for module in part.modules() if isinstance(module, FSDPModule)]


def _order_prefetches(part: Decoder, groups: Sequence[Sequence[nn.Module]], *, overlap: bool) -> None:
    """Gather the parameters of each of ``groups`` while the one before it computes (in the backward pass, the one after
    it), or each only when it is needed."""
    for module in _sharded(part):
        # Torch has an order of its own unless one is given; what a module itself has gathered is no work.
        module.set_modules_to_backward_prefetch([module])
    if overlap:
        stops = [_sharded(group[0]) for group in groups]
        for earlier, later in pairwise(filter(None, stops)):
            earlier[0].set_modules_to_forward_prefetch(later)
            later[0].set_modules_to_backward_prefetch(earlier)


def begin_micro_batch(part: nn.Module, plan: Plan, *, last: bool) -> None:
    """Say whether the coming backward pass is the last of the step."""
    if isinstance(part, FSDPModule):
        part.set_is_last_backward(last)
        part.set_requires_all_reduce(last)
        if plan.zero_stage == 2:
            part.set_requires_gradient_sync(last)
            part.set_reshard_after_backward(last)


def end_evaluation(part: nn.Module) -> None:
    """Free what a forward pass without a backward pass gathered: it would hide later changes of the parameters."""
    for module in _sharded(part):
        module.reshard()
