"""Pipeline parallelism: one stage per rank, run by torch's 1F1B schedule with shapes that are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from engine.context import ParallelContext
from engine.errors import UserError
from engine.models.decoder import Decoder
from engine.models.loss import IGNORED
from engine.parallel.runner import LossFunction
from engine.plan import Plan
from engine.precision.policy import PrecisionPolicy
from engine.spec import ModelSpec


class PipelineRunner:
    """Runs this rank's stage on every micro-batch of its data-parallel rank.

    Args:
        parts: The stages.
        loss: Of the last stage's logits.
        spec: The architecture.
        context: This rank's place.
        policy: Dtypes.
        num_micro_batches: Per step; at least the number of stages (rule ``pp.micro_batches``).
        sequence_length: Tokens per sequence.
    """

    def __init__(
        self,
        parts: Sequence[Decoder],
        loss: LossFunction,
        spec: ModelSpec,
        context: ParallelContext,
        policy: PrecisionPolicy,
        *,
        num_micro_batches: int,
        sequence_length: int,
    ) -> None:
        plan = context.plan
        self.micro_batch_size = plan.micro_batch_size
        self._context = context
        self._local_batch = num_micro_batches * plan.micro_batch_size
        self._scale = 1.0
        self._loss = loss
        (part,) = parts
        self._first, self._last = part.embedding is not None, part.head is not None
        stage = PipelineStage(
            part,
            part.stage,
            plan.pp,
            context.device,
            input_args=_input_shape(spec, plan, policy, sequence_length, first=self._first),
            output_args=_output_shape(spec, plan, policy, sequence_length, last=self._last),
            group=context.group("pp"),
        )
        self._schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=self._scaled_loss, scale_grads=False)

    def set_micro_batch(self, size: int) -> None:
        """See ``Runner``; only the size in force is possible."""
        if size != self.micro_batch_size:
            raise UserError(
                f"the micro-batch cannot change from {self.micro_batch_size} to {size} while a pipeline runs",
                hint="change plan.micro_batch_size and start again from a checkpoint",
            )

    def train(self, tokens: Tensor, labels: Tensor, scale: float) -> Tensor:
        """See ``Runner``."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs, targets = self._of_this_stage(tokens, labels)
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return self._total(losses)

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """See ``Runner``. The batch is filled up with ignored sequences to the schedule's fixed shape."""
        self._scale = 1.0
        losses: list[Tensor] = []
        batches = zip(tokens.split(self._local_batch), labels.split(self._local_batch), strict=True)
        for some_tokens, some_labels in batches:
            missing = self._local_batch - len(some_tokens)
            inputs, targets = self._of_this_stage(
                F.pad(some_tokens, (0, 0, 0, missing)), F.pad(some_labels, (0, 0, 0, missing), value=IGNORED)
            )
            of_batch: list[Tensor] = []  # the schedule empties the list it is given
            self._schedule.eval(*inputs, target=targets, losses=of_batch, return_outputs=False)
            losses += of_batch
        return self._total(losses)

    def _of_this_stage(self, tokens: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The inputs that only the first stage takes, and the labels that only the last one does."""
        return (tokens,) if self._first else (), labels if self._last else None

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._loss(logits, labels) * self._scale

    def _total(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._context.device)
        return torch.stack(losses).detach().double().sum()


def _hidden(spec: ModelSpec, plan: Plan, policy: PrecisionPolicy, sequence_length: int) -> Tensor:
    """What passes between stages: [micro-batch, L, H], the sequence split where the plan splits it."""
    length = sequence_length // plan.tp if plan.sequence_parallel else sequence_length
    shape = (plan.micro_batch_size, length, spec.hidden_size)
    return torch.empty(shape, dtype=policy.compute, device="meta", requires_grad=True)


def _input_shape(spec: ModelSpec, plan: Plan, policy: PrecisionPolicy, sequence_length: int, *, first: bool) -> Tensor:
    if first:
        return torch.empty(plan.micro_batch_size, sequence_length, dtype=torch.int64, device="meta")
    return _hidden(spec, plan, policy, sequence_length)


def _output_shape(spec: ModelSpec, plan: Plan, policy: PrecisionPolicy, sequence_length: int, *, last: bool) -> Tensor:
    if last:
        vocab = spec.vocab_size // plan.tp if plan.vocab_parallel else spec.vocab_size
        return torch.empty(
            plan.micro_batch_size, sequence_length, vocab, dtype=policy.compute, device="meta", requires_grad=True
        )
    return _hidden(spec, plan, policy, sequence_length)


def gather_to_main(weights: Mapping[str, Tensor], context: ParallelContext) -> dict[str, Tensor]:
    """Whole weights of every stage on rank 0; empty on the other ranks.

    Args:
        weights: Whole weights of this rank's stage, on the CPU; needed on the first rank of each stage alone.
    """
    if context.dp_rank or context.cp_rank or context.tp_rank:
        return {}
    mine = dict(weights)
    if not context.has_axis("pp"):
        return mine
    group = context.group("pp")
    shapes: list[Any] = [None] * context.plan.pp
    dist.all_gather_object(shapes, {fqn: (tuple(w.shape), w.dtype) for fqn, w in mine.items()}, group=group)
    gathered = dict(mine) if context.is_main else {}
    for stage in range(1, context.plan.pp):
        for fqn, (shape, dtype) in shapes[stage].items():
            if context.is_main:
                gathered[fqn] = torch.empty(shape, dtype=dtype)
                dist.recv(gathered[fqn], group=group, group_src=stage)
            elif context.pp_rank == stage:
                dist.send(mine[fqn], group=group, group_dst=0)
    return gathered
