"""Pipeline parallelism: this rank's stages, run by torch's schedules with shapes that are known beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from engine.context import ParallelContext
from engine.failures import RunFailure, communication_failure
from engine.models.decoder import Decoder
from engine.parallel.pipeline_stage import Stage
from engine.parallel.runner import LossFunction
from engine.plan import Plan
from engine.precision.policy import PrecisionPolicy
from engine.spec import ModelSpec
from engine.stage_split import stage_rank

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""torch's schedule by the word in Plan. The first two take one stage, the others a list of stages."""

EVALUATED_AT_ONCE = 4
"""Micro-batches for each pipeline rank that an evaluation has room for: enough to keep the ranks busy, whatever the
batch."""

_SCHEDULE_LOG = logging.getLogger(ScheduleGPipe.__module__)


class PipelineRunner:
    """Runs this rank's stages on every micro-batch of its data-parallel rank.

    Args:
        parts: The stages, in ascending order.
        loss: Of the last stage's logits.
        spec: The architecture.
        context: This rank's place.
        policy: Dtypes.
        num_micro_batches: Per step; as many as the schedule needs (rules ``engine.micro_batches``,
            ``pp.micro_batches``, ``schedule.whole_rounds``).
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
        self._context = context
        self._parts = list(parts)
        self._scale = 1.0
        self._loss = loss
        self._takes_tokens = any(part.takes_tokens for part in parts)
        self._has_head = any(part.head is not None for part in parts)
        self._sizes = _Sizes(spec, context.plan, policy, sequence_length)
        self._local_batch = num_micro_batches * context.plan.micro_batch_size
        self.set_micro_batch(context.plan.micro_batch_size)

    def set_micro_batch(self, size: int) -> None:
        """See ``Runner``; the schedule must run the number of micro-batches that this makes."""
        self.micro_batch_size = size
        plan = self._context.plan
        tokens, hidden, logits = self._sizes.tokens(size), self._sizes.hidden(size), self._sizes.logits
        self._stages = [
            Stage(
                part,
                self._context,
                inputs=tokens if part.takes_tokens else hidden,
                outputs=hidden if part.head is None else logits,
            )
            for part in self._parts
        ]
        self._schedule = SCHEDULES[plan.schedule](
            self._stages[0] if plan.virtual_stages == 1 else self._stages,
            self._local_batch // size,
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )
        for stage in self._stages:
            stage.check_place()

    def train(self, tokens: Tensor, labels: Tensor, scale: float) -> Tensor:
        """See ``Runner``.

        Raises:
            RunFailure: A neighbour did not answer in time or is gone; the detail names stage, action and micro-batch.
        """
        self._scale = scale
        losses: list[Tensor] = []
        for stage in self._stages:
            stage.start()
        with self._naming(self._standing), _without_schedule_log():
            self._schedule.step(
                *((tokens,) if self._takes_tokens else ()),
                target=labels if self._has_head else None,
                losses=losses,
                return_outputs=False,
            )
        return self._total(losses)

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """See ``Runner``. Any number of sequences will do.

        Raises:
            RunFailure: As ``train``.
        """
        size, at_once = self.micro_batch_size, EVALUATED_AT_ONCE * self._context.plan.pp
        micro_batches = list(zip(tokens.split(size), labels.split(size), strict=True))
        losses: list[Tensor] = []
        for first in range(0, len(micro_batches), at_once):
            losses += self._forward(first, micro_batches[first : first + at_once])
        return self._total(losses)

    def _forward(self, first: int, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Losses of some micro-batches, the first of them with the number ``first``. Forward passes alone need no
        schedule: a stage takes all of them, then the next one of this rank does."""
        losses: list[Tensor] = []
        sends: list[dist.Work] = []
        handed_on: list[Tensor] = []
        where = ""
        with self._naming(lambda: where):
            for part in self._parts:
                arrivals = self._arrivals(part, [len(some) for some, _ in micro_batches], handed_on)
                handed_on = []
                for number, (some_tokens, some_labels) in enumerate(micro_batches, first):
                    where = f"stage {part.stage} waited for the forward of micro-batch {number} of an evaluation"
                    output = part(some_tokens if part.takes_tokens else next(arrivals))
                    if part.head is not None:
                        losses.append(self._loss(output, some_labels))
                    elif self._rank(part.stage + 1) == self._context.pp_rank:
                        handed_on.append(output)
                    else:
                        sends.append(self._send(output, part.stage + 1))
            where = f"stage {self._parts[-1].stage} waited for what it had sent in an evaluation to be taken"
            for work in sends:
                work.wait()
        return losses

    def _arrivals(self, part: Decoder, sizes: Sequence[int], handed_on: Sequence[Tensor]) -> Iterator[Tensor]:
        """The inputs of a stage, of so many sequences each, as they come in; room for all is made at once."""
        if part.takes_tokens or self._rank(part.stage - 1) == self._context.pp_rank:
            return iter(handed_on)
        group, source = self._context.group("pp"), self._rank(part.stage - 1)
        buffers = [torch.empty_like(self._sizes.hidden(size), device=self._context.device) for size in sizes]
        works = [dist.irecv(buffer, group=group, group_src=source) for buffer in buffers]
        return (_arrived(work, buffer) for work, buffer in zip(works, buffers, strict=True))

    def _send(self, output: Tensor, stage: int) -> dist.Work:
        work = dist.isend(output.contiguous(), group=self._context.group("pp"), group_dst=self._rank(stage))
        assert work is not None
        return work

    def _rank(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return stage_rank(self._context.plan, stage)

    @contextmanager
    def _naming(self, standing: Callable[[], str]) -> Iterator[None]:
        """Turn an error of communication into a failure that says where this rank stood."""
        try:
            yield
        except Exception as error:
            failure = communication_failure(error)
            if failure is None:
                raise
            kind, description = failure
            raise RunFailure(kind, f"{standing()}: {description}") from error

    def _standing(self) -> str:
        """What this rank was doing or waiting for, in words."""
        # What torch has asked for ahead of time, and does not wait for yet.
        ahead = {
            (kind, *place)
            for kind, name in (("forward", "fwd_recv_ops"), ("backward", "bwd_recv_ops"))
            for place in getattr(self._schedule, name, ())
        }
        for stage in self._stages:
            if told := stage.doing() or stage.waiting(ahead):
                return told
        sent = "; ".join(filter(None, (stage.sending() for stage in self._stages)))
        return sent or f"pipeline rank {self._context.pp_rank} waited for its neighbours before the first micro-batch"

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._loss(logits, labels) * self._scale

    def _total(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._context.device)
        return torch.stack(losses).detach().double().sum()


@contextmanager
def _without_schedule_log() -> Iterator[None]:
    """Keep torch from logging its whole schedule, hundreds of lines, where an action fails: the error says what did."""
    level = _SCHEDULE_LOG.level
    _SCHEDULE_LOG.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _SCHEDULE_LOG.setLevel(level)


def _arrived(work: dist.Work | None, buffer: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return buffer


@dataclass(frozen=True)
class _Sizes:
    """Forms of what goes in and out of stages, on the meta device."""

    spec: ModelSpec
    plan: Plan
    policy: PrecisionPolicy
    sequence_length: int

    def tokens(self, size: int) -> Tensor:
        """Of a micro-batch of ``size`` sequences, int64 [size, L]."""
        return torch.empty(size, self.sequence_length // self.plan.cp, dtype=torch.int64, device="meta")

    def hidden(self, size: int) -> Tensor:
        """What passes between stages, [size, L, H], the sequence split where the plan splits it."""
        length = self.sequence_length // self.plan.cp // (self.plan.tp if self.plan.sequence_parallel else 1)
        shape = (size, length, self.spec.hidden_size)
        return torch.empty(shape, dtype=self.policy.compute, device="meta", requires_grad=True)

    @property
    def logits(self) -> Tensor:
        """Nothing: the logits stay on their rank, torch asks for their form but has no use for it."""
        return torch.empty(0, dtype=self.policy.compute, device="meta", requires_grad=True)


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
                dist.send(mine[fqn].contiguous(), group=group, group_dst=0)
    return gathered
