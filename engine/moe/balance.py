"""The experts' load over all ranks, once a step, and what follows from it: the selection bias and the next step's
auxiliary loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from engine.context import ParallelContext
from engine.moe.auxiliary import AuxiliaryLosses
from engine.moe.layer import MixtureOfExperts
from engine.spec import Hyperparameters


def bias_step(load: Tensor, rate: float) -> Tensor:
    """Change of a selection bias: experts with more than the mean load are chosen less, in proportion to the excess and
    at most by ``rate`` (loss-free balancing, Wang et al. 2024, with a proportional instead of a sign controller).

    Args:
        load: Assignments of each expert, [E].
        rate: Largest change.
    """
    load = load.double()
    excess = load - load.mean()
    return -rate * (excess / load.mean().clamp_min(torch.finfo(load.dtype).tiny)).clamp(-1.0, 1.0)


class ExpertBalance:
    """Keeps the experts of one rank's layers evenly loaded; all ranks call each method together.

    Args:
        layers: The mixtures of experts on this rank by name.
        hyperparameters: Coefficients and rate.
        context: This rank's place.
        num_layers: Mixtures of experts of the whole model.
        splits_tokens: Whether the ranks of ``tp`` route different tokens; else all route the same.
    """

    def __init__(
        self,
        layers: Mapping[str, MixtureOfExperts],
        hyperparameters: Hyperparameters,
        context: ParallelContext,
        *,
        num_layers: int,
        splits_tokens: bool,
    ) -> None:
        self._layers = layers
        self._device = context.device
        self._num_layers = num_layers
        self._speaks_for_layers = context.coordinate("data") == context.tp_rank == 0
        self._rate = hyperparameters.expert_bias_rate
        axes = ("data", "tp") if splits_tokens else ("data",)
        self._groups = [context.group(axis) for axis in axes if context.has_axis(axis)]
        self._auxiliary = AuxiliaryLosses(
            hyperparameters.router_aux_loss_coefficient,
            hyperparameters.router_aux_loss_scope,
            hyperparameters.router_z_loss_coefficient,
        )
        for layer in layers.values():
            # Of ranks that route the same tokens and sum the router's gradients, one adds the losses.
            layer.auxiliary = self._auxiliary if splits_tokens or context.tp_rank == 0 else None

    def begin_step(self, num_tokens: int) -> None:
        """Prepare for the forward passes of a step.

        Args:
            num_tokens: Of the whole global batch.
        """
        self._auxiliary.begin_step(num_tokens)
        for layer in self._layers.values():
            layer.load.zero_()

    @torch.no_grad()
    def sum_loads(self) -> Tensor:
        """Sum the step's loads over the ranks that hold different tokens.

        Returns:
            This rank's shares of the weighted auxiliary losses and of the layers' mean evenness (mean load over the
            largest), fp64 [2]; the sums over all ranks are the whole.
        """
        shares = torch.zeros(2, dtype=torch.float64, device=self._device)
        if not self._layers:
            return shares
        loads = torch.stack([layer.load for layer in self._layers.values()])
        for group in self._groups:
            dist.all_reduce(loads, group=group)
        for layer, load in zip(self._layers.values(), loads, strict=True):
            layer.load.copy_(load)
        if self._auxiliary.total is not None:
            shares[0] = self._auxiliary.total
        if self._speaks_for_layers:
            evenness = loads.double().mean(dim=1) / loads.amax(dim=1).clamp_min(1)
            shares[1] = evenness.sum() / self._num_layers
        return shares

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the selection biases by the loads; left out where the step was skipped."""
        for layer in self._layers.values():
            layer.previous_load.copy_(layer.load)
            if layer.selection_bias is not None and self._rate:
                layer.selection_bias += bias_step(layer.load, self._rate)

    def selection_biases(self) -> dict[str, Tensor]:
        """The buffers by name, as live tensors: they belong to the model's weights."""
        layers = self._layers.items()
        return {
            f"{name}.selection_bias": layer.selection_bias for name, layer in layers if layer.selection_bias is not None
        }

    def previous_loads(self) -> dict[str, Tensor]:
        """The buffers by name, as live tensors: what the next step needs besides weights."""
        return {f"{name}.previous_load": layer.previous_load for name, layer in self._layers.items()}
