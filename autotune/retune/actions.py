"""What may be proposed to a running job, and within which limits."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from autotune.twin.twin import Forecast
from engine.config import RunConfig
from engine.control import Change, RollBack, SetLearningRateScale, SetMicroBatch, Stop, TakeCheckpoint
from engine.schema import Schema
from engine.spec import Count, CountOrZero, Positive

STEP_DOWN, STEP_UP = 0.7, 1.4
"""One change multiplies the learning rate by at least and at most so much; several may follow one another."""
MIN_SCALE, MAX_SCALE = 1 / 16, 16.0
"""Limits of the factor on the schedule, all changes together."""


class TryLearningRate(Schema):
    """Compare learning rates in forks. ``factors`` are relative to the present scale, which is always compared too.

    ``here``: forks leave the run where it is and are annealed; the winner's rate is given to the run.
    ``start``: forks leave the run near its start, go to about where it is now, and are compared with what the run did
    on the same batches; the run goes on from the winner's last state. That makes a start that was too fast good: its
    harm does not go away when the rate is lowered later.
    """

    kind: Literal["learning_rate"] = "learning_rate"
    origin: Literal["here", "start"] = "here"
    checkpoint: str | None = None
    """Where forks of a ``start`` leave: near the run's start, or the end of an earlier slower start that caught up."""
    factors: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    num_steps: Count
    """Steps of each fork."""
    anneal_steps: CountOrZero = 0
    """Of these, steps over which the learning rate falls to the schedule's minimum."""
    judged_steps: Count
    """Of these, the last steps that are compared."""


class TryMicroBatch(Schema):
    """Compare a micro-batch with the present one in turns on the live run, at the same global batch."""

    kind: Literal["micro_batch"] = "micro_batch"
    micro_batch_size: Count
    present_size: Count
    """Micro-batch in force before."""
    block_steps: Count
    """Steps of each turn."""


class Recover(Schema):
    """Go back to a checkpoint because the run went wrong."""

    kind: Literal["roll_back"] = "roll_back"
    checkpoint: str
    scale: Positive
    skip_steps: CountOrZero = 0
    """Batches left out."""


Action = Annotated[TryLearningRate | TryMicroBatch | Recover, Field(discriminator="kind")]


class Proposal(Schema):
    """One thing to try, why, and what the twin expects of it."""

    proposal_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:8])
    """Names it in the ledger."""
    step: CountOrZero
    """Steps done when it was made."""
    scale: Positive
    """Learning-rate scale in force then."""
    action: Action
    """What to try."""
    reason: str
    """Why, in one line."""
    forecasts: Annotated[tuple[Forecast, ...], Field(strict=False)] = ()
    """Loss expected at the end of the run: as it is, then for each scale to be tried."""


def rung_factor(num_rungs: int) -> float:
    """Factor of so many steps up (above 0) or down (below 0)."""
    return STEP_UP**num_rungs if num_rungs >= 0 else STEP_DOWN**-num_rungs


def describe(change: Change) -> str:
    """A change in words."""
    match change:
        case SetLearningRateScale():
            return f"learning-rate scale {change.scale:.4g}"
        case SetMicroBatch():
            return f"micro-batch {change.micro_batch_size}"
        case RollBack():
            return f"back to {Path(change.checkpoint).name} at learning-rate scale {change.scale:.4g}"
        case TakeCheckpoint():
            return "checkpoint"
        case Stop():
            return "stop at a checkpoint"


def is_allowed(scale: float) -> bool:
    """Whether a scale is within the limits."""
    return MIN_SCALE <= scale <= MAX_SCALE


def ladder(current: float, target: float) -> list[float]:
    """Scales from ``current`` (left out) to ``target``: allowed steps of equal size."""
    change = math.log(target / current)
    largest = math.log(STEP_UP) if change > 0 else -math.log(STEP_DOWN)
    num_steps = max(1, math.ceil(abs(change) / largest - 1e-9))
    return [*(current * math.exp(change * i / num_steps) for i in range(1, num_steps)), target]


def micro_batch_choices(config: RunConfig, current: int) -> list[int]:
    """Micro-batches of double and half the size that divide what a rank has of the global batch; the larger first.

    Pipelines have their micro-batch built in and take none.
    """
    if config.plan.pp > 1:
        return []
    rank_batch = config.hyperparameters.global_batch_size // config.plan.dp
    choices = [2 * current] + ([current // 2] if current % 2 == 0 else [])
    return [size for size in choices if size <= rank_batch and rank_batch % size == 0]
