"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.optim.groups import decays
from engine.parallel.tied import model_name
from engine.parametrization import Scales, ScalesOf
from engine.spec import Hyperparameters

LEARNING_RATE_FACTOR = "learning_rate_factor"
"""Key of a group: its learning rate as a multiple of the run's."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], hyperparameters: Hyperparameters, scales_of: ScalesOf
) -> torch.optim.Optimizer:
    """AdamW (fused kernel) or SGD (which torch fuses for plain tensors only), with all states, zero, from the start.

    Zero states act as missing ones do in torch, and checkpoints before and after the first step have one form.

    Args:
        parameters: This rank's parameters by name.
        hyperparameters: Optimizer, betas, epsilon and weight decay; the learning rate is set at each step, by
            ``set_learning_rate``.
        scales_of: Each parameter's factors on them.
    """
    h = hyperparameters
    members: dict[tuple[bool, DeviceMesh | None, Scales], list[nn.Parameter]] = {}
    for fqn, parameter in parameters.items():
        # Fused kernels take tensors of one kind: plain ones, or DTensors of one mesh.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        scales = scales_of(model_name(fqn))
        members.setdefault((decays(fqn, parameter), mesh, scales), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "params": tensors,
            "weight_decay": h.weight_decay * scales.weight_decay if decay else 0.0,
            LEARNING_RATE_FACTOR: scales.learning_rate,
        }
        for (decay, _, scales), tensors in members.items()
    ]
    if h.optimizer == "adamw":
        for group, (_, _, scales) in zip(groups, members, strict=True):
            group["eps"] = h.eps * scales.epsilon
    optimizer: torch.optim.Optimizer
    if h.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=h.learning_rate, momentum=h.beta1, foreach=True)
    else:
        optimizer = torch.optim.AdamW(groups, lr=h.learning_rate, betas=(h.beta1, h.beta2), fused=True)
    for parameter in parameters.values():
        optimizer.state[parameter] = _zero_state(parameter, hyperparameters)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group its multiple of the run's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group[LEARNING_RATE_FACTOR]


def _zero_state(parameter: nn.Parameter, hyperparameters: Hyperparameters) -> dict[str, torch.Tensor]:
    if hyperparameters.optimizer == "sgd":
        return {"momentum_buffer": torch.zeros_like(parameter)} if hyperparameters.beta1 else {}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
