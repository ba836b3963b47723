"""A dry run of one rank: the engine's own step with tensors that have shapes and no values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from engine.config import RunConfig
from engine.context import ParallelContext, open_context
from engine.errors import UserError
from engine.layout import DENSE_AXES, EXPERT_AXES
from engine.moe.dispatch import Loads
from engine.moe.experts import Experts
from engine.optim.groups import GROUPS
from engine.parallel.vocabulary import local_vocab_size
from engine.plan import Plan
from engine.rules_universal import INTERLEAVED
from engine.split_model import make_runner, split_model
from engine.stage_split import V_SHAPED
from engine.step import Stepper
from engine.torch_private import FakeTensorMode, pipelines_without_handshake, shapes_inferred_aside
from engine.trace_collectives import CollectiveCounter, Key, collective_use
from engine.trace_memory import OwnedStorageTracker, kept, owners_of
from engine.traced import MemoryPart, RankTrace


def trace_rank(config: RunConfig, rank: int, tell: Callable[[str], None] = lambda words: None) -> RankTrace:
    """Dry-run one rank of a run in a process group of its own, which sends nothing.

    Once in the life of a process: torch remembers groups by name in what it has worked out for tensors.

    Args:
        config: A run that passed ``engine.rules.check_run``.
        rank: Of the plan's ranks.
        tell: Called with what begins now, for people who wait.

    Raises:
        UserError: There is no such rank.
    """
    plan = config.plan
    if not 0 <= rank < plan.world_size:
        raise UserError(f"the plan {plan.mesh} has no rank {rank}", hint=f"choose one of 0 to {plan.world_size - 1}")
    config = config.changed(runtime=config.runtime.changed(device="cpu", threads_per_rank=1, topology=None))
    alone = plan.world_size == 1
    if not alone:
        distributed.init_process_group("fake", rank=rank, world_size=plan.world_size)
    try:
        with pipelines_without_handshake(), shapes_inferred_aside():
            tell(f"building rank {rank} of {plan.world_size}")
            context = open_context(plan, config.runtime, has_experts=config.model.moe is not None)
            return DryRun(config, context, tell).trace()
    finally:
        if not alone:
            distributed.destroy_process_group()


WAITS_FOR_SENDS = ("gpipe", "1f1b")
"""Schedules that wait for their messages as they go; torch's others do so at the end of the step."""


class ValuelessContext(ParallelContext):
    """A rank whose collectives give no values: what decides how a step goes on is taken to be well."""

    ones = torch.ones(3 + len(GROUPS), dtype=torch.float64)

    def sum_over_batch(self, values: Tensor) -> Tensor:
        """See ``ParallelContext``; one."""
        super().sum_over_batch(values)
        return torch.tensor(1)

    def sum_over_world(self, values: Tensor) -> Tensor:
        """See ``ParallelContext``; the losses, the evenness of loads and the squared gradient norms, one each."""
        super().sum_over_world(values)
        return self.ones


def equal_loads(sent: Tensor, received: Tensor, num_rows: int) -> Loads:
    """Rows for each slot where counts have no values: in equal parts, from every rank alike."""
    whole, rest = divmod(num_rows, len(sent))
    equal = [whole + (slot < rest) for slot in range(len(sent))]
    return Loads(equal, equal)


class Observation(NamedTuple):
    """What a dry step shows."""

    counts: dict[Key, tuple[float, float]]
    """Calls and message bytes of collectives, by kind."""
    peak_bytes: int
    parts: dict[MemoryPart, int]
    """The peak by part; empty where it was not asked for."""


class DryRun:
    """Dry steps of one rank.

    Args:
        config: The run.
        context: The rank's place.
        tell: Called with what begins now.
    """

    def __init__(self, config: RunConfig, context: ParallelContext, tell: Callable[[str], None]) -> None:
        self._config = config
        self._tell = tell
        self._context = ValuelessContext(context.plan, context.device, context.rank, context.local_rank, context.groups)
        for axes in (DENSE_AXES, EXPERT_AXES):
            self._context.submesh(*axes)  # made now: the ranks in a mesh are values
        self._parts, self._loss = split_model(config, self._context, config.model)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        for part in self._parts:
            for module in part.modules():
                if isinstance(module, Experts):
                    module.dispatch.loads_of = equal_loads
            with self._fake:
                part.to_empty(device=context.device)

    def trace(self) -> RankTrace:
        """Run the steps, and what they show."""
        plan, context = self._config.plan, self._context
        wanted = plan.num_micro_batches(self._config.hyperparameters.global_batch_size)
        enough, more = traced_micro_batches(plan, wanted)
        traced = min(wanted, enough + more)
        num_steps = 3 if wanted == traced else 5
        with self._fake:
            seen = self._observe(traced, num_steps)
            counts, parts = seen.counts, dict(seen.parts)
            if wanted > traced:
                fewer = self._observe(enough, num_steps, by_part=False)
                further = (wanted - traced) // more
                counts = extrapolate(counts, fewer.counts, further)
                # The batch, and the inputs that a stage has room for.
                parts["activations"] += further * (seen.peak_bytes - fewer.peak_bytes)
        return RankTrace(
            rank=context.rank,
            pipeline_rank=context.pp_rank,
            world_size=context.world_size,
            num_micro_batches=wanted,
            num_traced_micro_batches=traced,
            collectives=tuple(collective_use(key, *counts[key]) for key in sorted(counts)),
            peak_bytes=sum(parts.values()),
            peak_parts=parts,
        )

    def _observe(self, num_micro_batches: int, num_steps: int, *, by_part: bool = True) -> Observation:
        """Look at a step after the first: the first makes what later ones find (tables of positions, buffers of a
        stage). A third one tells the parts of the peak; ``num_steps`` of all observations is told."""
        stepper, batch = self._start(num_micro_batches)
        of = f"of {num_steps}, {num_micro_batches} micro-batches"
        first = 1 if by_part else 4
        self._tell(f"step {first} {of}: makes what later ones find")
        self._step(stepper, batch)
        with undisturbed():
            self._tell(f"step {first + 1} {of}: collectives and peak memory")
            tracker = self._tracker(stepper, None)
            with CollectiveCounter(self._context) as counter, tracker:
                tracker.track(kept(stepper, batch))
                self._step(stepper, batch)
            if not by_part:
                return Observation(counter.counts(), tracker.peak_bytes, {})
            self._tell(f"step {first + 2} {of}: what the peak consists of")
            look = self._tracker(stepper, tracker.peak_event)
            with look:
                look.track(kept(stepper, batch))
                self._step(stepper, batch)
        assert sum(look.parts.values()) == tracker.peak_bytes, "equal steps have equal peaks"
        return Observation(counter.counts(), tracker.peak_bytes, look.parts)

    def _start(self, num_micro_batches: int) -> tuple[Stepper, Tensor]:
        """A fresh optimizer and runner of the part, and a local batch of so many micro-batches (its labels too)."""
        plan, hyper = self._config.plan, self._config.hyperparameters
        local_batch = num_micro_batches * plan.micro_batch_size
        config = self._config.changed(hyperparameters=hyper.changed(global_batch_size=local_batch * plan.dp))
        runner = make_runner(config, self._context, config.model, self._parts, self._loss)
        stepper = Stepper(config, self._context, config.model, self._parts, runner)
        stepper.placer.watches = False
        return stepper, torch.zeros(2, local_batch, config.workload.sequence_length, dtype=torch.int64)

    @staticmethod
    def _step(stepper: Stepper, batch: Tensor) -> None:
        stepper.train_step(batch[0], batch[1], learning_rate=0.0)

    def _tracker(self, stepper: Stepper, look_at: int | None) -> OwnedStorageTracker:
        plan, spec = self._config.plan, self._config.model
        vocab = local_vocab_size(spec.vocab_size, plan, self._context.tp_rank)
        num_logits = plan.micro_batch_size * self._config.workload.sequence_length // plan.cp * vocab
        return OwnedStorageTracker(
            lambda: owners_of(stepper), num_logits, look_at, keeps_sent=plan.schedule not in WAITS_FOR_SENDS
        )


def traced_micro_batches(plan: Plan, wanted: int) -> tuple[int, int]:
    """How many micro-batches are enough to see what further ones add, and how many further ones are added at a time:
    what they add is the same once the pipeline is full and there are gradients.

    Args:
        plan: The plan.
        wanted: Micro-batches of a step.
    """
    if plan.pp == 1:
        return 2, 1
    if plan.schedule in INTERLEAVED:
        each = wanted // max(wanted // plan.pp, 1)
        return 2 * each, each
    return (2 * plan.pp if plan.schedule in V_SHAPED else plan.pp + 1), 1


def extrapolate(
    counts: Mapping[Key, tuple[float, float]], fewer: Mapping[Key, tuple[float, float]], num_more: int
) -> dict[Key, tuple[float, float]]:
    """Counts of a step with more micro-batches.

    Args:
        counts: Calls and message bytes of a step by kind.
        fewer: The same with fewer micro-batches.
        num_more: How many times that difference more than ``counts``.
    """
    none = (0.0, 0.0)
    return {
        key: tuple(now + num_more * (now - before) for now, before in zip(count, fewer.get(key, none), strict=True))  # type: ignore[misc]
        for key, count in counts.items()
    }


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection meanwhile: storages are freed at the same moments in equal steps."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
