"""One gradient norm over all meshes. Which rank counts a parameter follows from how it is split, not from its name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.context import ParallelContext
from engine.layout import DENSE_AXES, EXPERT_AXES
from engine.optim.groups import GROUPS, group_of
from engine.parallel.shards import local, split_axes
from engine.parametrization import ScalesOf
from engine.precision.policy import wide


def counts_here(parameter: Tensor, context: ParallelContext) -> bool:
    """Whether this rank adds its part of the parameter to a sum over all ranks, so that each element is added once.

    Along an axis over which the parameter is split every rank counts; along one over which it is repeated, rank 0.
    Pipeline stages hold different parameters.
    """
    names = set(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else set()
    split = split_axes(parameter)
    axes = EXPERT_AXES if names & set(EXPERT_AXES) else DENSE_AXES
    return all(axis in split or context.coordinate(axis) == 0 for axis in axes)


def squared_norms(parameters: Mapping[str, nn.Parameter], context: ParallelContext, scales_of: ScalesOf) -> Tensor:
    """This rank's share of the squared gradient norm of each of ``GROUPS``, fp64 [len(GROUPS)]; the sum over all ranks
    is the whole. Not finite if any gradient here is not, whichever rank counts it.

    Args:
        parameters: This rank's, without copies of tied ones.
        context: Its place.
        scales_of: Factors on the gradients.
    """
    gradients: dict[str, list[Tensor]] = {group: [] for group in GROUPS}
    counted: dict[str, list[float]] = {group: [] for group in GROUPS}
    for fqn, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[group_of(fqn)].append(local(parameter.grad))
            counted[group_of(fqn)].append(counts_here(parameter, context) * scales_of(fqn).gradient ** 2)
    shares = torch.zeros(len(GROUPS), dtype=torch.float64, device=context.device)
    for index, (members, weights) in enumerate(zip(gradients.values(), counted.values(), strict=True)):
        if members:
            norms = torch._foreach_norm(members, 2.0, dtype=wide(members[0].dtype))
            shares[index] = torch.stack(norms).double().square() @ shares.new_tensor(weights)
    return shares


def scale_gradients(parameters: Mapping[str, nn.Parameter], factor: float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    gradients = [local(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
