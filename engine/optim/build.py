"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.optim.groups import decays
from engine.spec import Hyperparameters


def build_optimizer(parameters: Mapping[str, nn.Parameter], hyperparameters: Hyperparameters) -> torch.optim.Optimizer:
    """AdamW (fused kernel) or SGD (which torch fuses for plain tensors only), with all states, zero, from the start.

    Zero states act as missing ones do in torch, and checkpoints before and after the first step have one form.

    Args:
        parameters: This rank's parameters by name.
        hyperparameters: Optimizer, betas, epsilon and weight decay; the learning rate is set at each step.
    """
    h = hyperparameters
    members: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for fqn, parameter in parameters.items():
        # Fused kernels take tensors of one kind: plain ones, or DTensors of one mesh.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        members.setdefault((decays(fqn, parameter), mesh), []).append(parameter)
    groups = [
        {"params": tensors, "weight_decay": h.weight_decay if decay else 0.0} for (decay, _), tensors in members.items()
    ]
    optimizer: torch.optim.Optimizer
    if h.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=h.learning_rate, momentum=h.beta1, foreach=True)
    else:
        optimizer = torch.optim.AdamW(groups, lr=h.learning_rate, betas=(h.beta1, h.beta2), eps=h.eps, fused=True)
    for parameter in parameters.values():
        optimizer.state[parameter] = _zero_state(parameter, hyperparameters)
    return optimizer


def _zero_state(parameter: nn.Parameter, hyperparameters: Hyperparameters) -> dict[str, torch.Tensor]:
    if hyperparameters.optimizer == "sgd":
        return {"momentum_buffer": torch.zeros_like(parameter)} if hyperparameters.beta1 else {}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
