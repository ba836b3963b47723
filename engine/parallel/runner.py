"""How one rank's share of a global batch is run: in micro-batches one after another (here) or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from engine.models.decoder import Decoder

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Logits [B, L, V] (or this rank's slice of V) and labels [B, L] to the summed loss."""


class Runner(Protocol):
    """Runs the local batch of one rank."""

    micro_batch_size: int
    """Sequences per micro-batch."""

    def set_micro_batch(self, size: int) -> None:
        """Change the micro-batch from the next batch on."""

    def train(self, tokens: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Forward and backward of the local batch; gradients of ``scale`` times the summed loss are left in the parameters,
        summed over data-parallel ranks.

        Returns:
            ``scale`` times this rank's summed loss, a scalar; 0 on ranks that hold no head.
        """

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of the local batch, a scalar; 0 on ranks that hold no head."""


class AccumulationRunner:
    """Micro-batches one after another, gradients accumulated."""

    def __init__(self, part: Decoder, loss: LossFunction, micro_batch_size: int) -> None:
        self.micro_batch_size = micro_batch_size
        self._part = part
        self._loss = loss

    def set_micro_batch(self, size: int) -> None:
        """See ``Runner``."""
        self.micro_batch_size = size

    def train(self, tokens: Tensor, labels: Tensor, scale: float) -> Tensor:
        """See ``Runner``."""
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        micro_batches = list(zip(tokens.split(self.micro_batch_size), labels.split(self.micro_batch_size), strict=True))
        for index, (inputs, targets) in enumerate(micro_batches):
            if isinstance(self._part, FSDPModule):
                self._part.set_is_last_backward(index == len(micro_batches) - 1)
            loss = self._loss(self._part(inputs), targets) * scale
            loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """See ``Runner``."""
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for inputs, targets in zip(tokens.split(self.micro_batch_size), labels.split(self.micro_batch_size), strict=True):
            total += self._loss(self._part(inputs), targets)
        return total
