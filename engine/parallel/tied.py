"""Tied embeddings over a pipeline: the last stage's head needs the embedding that the first stage holds.

The last stage holds a copy, named the same in its part. Both begin equal, gradients of the two are summed before
anything is done with them, and both are updated alike, so they stay equal to the last bit. A rank keeps the copy under
a name of its own, since with a V-shaped schedule one rank holds both; for the world outside the two are one parameter,
which counts once in the norm and stands once in checkpoints and exported weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.parallel.shards import local
from engine.spec import ModelSpec

T = TypeVar("T")

_TIED = "embedding.weight"
_COPY = "copy."


def rank_parameters(parts: Sequence[Decoder]) -> dict[str, nn.Parameter]:
    """All parameters of a rank's parts by name, that of a copy marked as such."""
    return {
        fqn if part.takes_tokens or fqn != _TIED else _COPY + fqn: parameter
        for part in parts
        for fqn, parameter in part.named_parameters()
    }


def model_name(name: str) -> str:
    """The name in the model of what ``rank_parameters`` calls ``name``."""
    return name.removeprefix(_COPY)


def without_copies(named: Mapping[str, T]) -> dict[str, T]:
    """What stands for the whole model when all ranks' are put together: each parameter once."""
    return {name: value for name, value in named.items() if not name.startswith(_COPY)}


def by_model_name(named: Mapping[str, T]) -> dict[str, T]:
    """By name in the model; where the original and its copy are both here, the original's value."""
    return {model_name(name): value for name, value in named.items()} | without_copies(named)


@torch.no_grad()
def sum_tied_gradients(parameters: Mapping[str, nn.Parameter], spec: ModelSpec, context: ParallelContext) -> None:
    """Give the embedding and its copy the sum of their gradients.

    All ranks call this together, once gradients are reduced over the data-parallel ranks. The holders are the first and
    the last pipeline rank, which split the parameter alike, or one rank that holds both stages.

    Args:
        parameters: From ``rank_parameters``.
        spec: The architecture.
        context: This rank's place.
    """
    if not spec.tied_embeddings or not context.has_axis("pp"):
        return
    gradients = [_gradient(parameters[name]) for name in (_TIED, _COPY + _TIED) if name in parameters]
    if len(gradients) == 1 and gradients[0].numel():
        dist.all_reduce(gradients[0], group=context.group("ends"))
    elif len(gradients) == 2:
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, zero if none came."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


@torch.no_grad()
def restore_copies(
    parameters: Mapping[str, nn.Parameter], updated: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Where a rank holds both, give the copy the original's values and optimizer states, after these were read.

    Args:
        parameters: From ``rank_parameters``.
        updated: What the optimizer updates of each.
        optimizer: It.
    """
    for name, copy in parameters.items():
        original = model_name(name)
        if original == name or original not in parameters:
            continue
        local(copy).copy_(local(parameters[original]))
        states = optimizer.state[updated[name]]
        for key, value in optimizer.state[updated[original]].items():
            local(states[key]).copy_(local(value))
