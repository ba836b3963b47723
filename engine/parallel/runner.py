"""How one rank's share of a global batch is run: in micro-batches one after another (here) or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.parallel.data import begin_micro_batch
from engine.plan import Plan

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Logits [B, L, V] (or this rank's slice of V) and labels [B, L] to the summed loss."""


class Runner(Protocol):
    """Runs the local batch of one rank."""

    micro_batch_size: int
    """Sequences per micro-batch."""

    def set_micro_batch(self, size: int) -> None:
        """Change the micro-batch from the next batch on."""

    def train(self, tokens: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Forward and backward of the local batch. Leaves the gradients of ``scale`` times the summed loss in the
        parameters, summed over data-parallel ranks.

        Returns:
            ``scale`` times this rank's summed loss, a scalar; 0 on ranks that hold no head.
        """

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of the local batch, a scalar; 0 on ranks that hold no head."""


class AccumulationRunner:
    """Micro-batches one after another, gradients accumulated."""

    def __init__(self, part: Decoder, loss: LossFunction, plan: Plan) -> None:
        self.micro_batch_size = plan.micro_batch_size
        self._plan = plan
        self._part = part
        self._loss = loss

    def set_micro_batch(self, size: int) -> None:
        """See ``Runner``."""
        self.micro_batch_size = size

    def train(self, tokens: Tensor, labels: Tensor, scale: float) -> Tensor:
        """See ``Runner``."""
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        micro_batches = self._split(tokens, labels)
        for index, (inputs, targets) in enumerate(micro_batches):
            begin_micro_batch(self._part, self._plan, last=index == len(micro_batches) - 1)
            loss = self._loss(self._part(inputs), targets) * scale
            loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """See ``Runner``."""
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for inputs, targets in self._split(tokens, labels):
            total += self._loss(self._part(inputs), targets)
        return total

    def _split(self, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        size = self.micro_batch_size
        return list(zip(tokens.split(size), labels.split(size), strict=True))
