"""From the twin and its findings to the next proposal, with its forecasts and its reason. Decides nothing: canaries do.

The search over the learning rate is a line search in log scale: both directions far out first, on in the direction that
won, closer when nothing won. Between trials that change nothing the waits double, so a well-set run is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from autotune.retune.actions import (
    MAX_SCALE,
    MIN_SCALE,
    STEP_DOWN,
    Proposal,
    Recover,
    TryLearningRate,
    TryMicroBatch,
    is_allowed,
    micro_batch_choices,
    rung_factor,
)
from autotune.retune.ledger import FIRST_SPAN, NEXT_SPAN, Direction, Memory
from autotune.twin.health import LOSS_SPIKE, Finding
from autotune.twin.twin import Twin
from engine.units import Interval

TRIAL_RATIO = 0.04
"""Steps of a fork as a share of the run."""
MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 16, 200
ANNEAL_RATIO = 0.5
"""Share of a fork over which it is annealed."""
TRIAL_BUDGET_RATIO = 0.5
"""All forks together may do so many steps as a share of the run's."""
SETTLE_STEPS = 8
"""Steps after warm-up, and after a change, before the next trial."""
PAYBACK_TRIALS = 3
"""No trial in the last steps of the run, so many times a trial's length: it could not pay for itself any more."""
MICRO_BATCH_BLOCK_STEPS = 6
NUM_BLOCKS = 8
"""Turns of a micro-batch trial, A B B A A B B A."""
RECOVERY_FACTOR = STEP_DOWN**4
"""Learning rate after a divergence, relative to before: four steps down."""
MAX_RECOVERIES = 4
"""After so many rollbacks people are asked to take over."""
MIN_SPIKES_FOR_DOWN = 3
"""So many spikes of the loss since the last look speak for a lower rate."""
START_RUNGS = -5
"""Rungs by which a slower start is slower."""
START_RATIO = 0.15
"""Steps of a slower start, as a share of the run."""
MAX_STARTS = 3
"""Trials of one slower start, each from the end of the one before."""
YOUNG_RATIO = 0.5
"""A run is young, and may be begun again, in this share of its steps."""


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint put aside by the retuner, safe from being pruned."""

    step: int
    path: str

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """The checkpoint in a folder, whose name ends in its step."""
        return cls(int(Path(path).name.removeprefix("step-")), str(path))


def trial_steps(num_steps: int) -> int:
    """Steps of each fork for a run of ``num_steps``."""
    return min(max(round(TRIAL_RATIO * num_steps), MIN_TRIAL_STEPS), MAX_TRIAL_STEPS)


def is_due(memory: Memory, interval: Interval, now: float, step: int) -> bool:
    """Whether the wait since the last decision is over: one interval, doubled by each trial that changed nothing; none
    after an accepted change, since the search is under way."""
    waits = 0 if memory.num_holds == 0 else 2 ** (memory.num_holds - 1)
    if interval.num_steps is not None:
        return step - memory.last_step >= waits * interval.num_steps
    assert interval.seconds is not None
    return now - memory.last_time >= waits * interval.seconds


def propose(
    twin: Twin,
    memory: Memory,
    findings: Sequence[Finding],
    *,
    early: HeldCheckpoint | None = None,
    device_memory_bytes: int | None = None,
) -> Proposal | None:
    """What to try next; None to leave the run alone.

    Args:
        early: The checkpoint held from the run's start; None without one.
        device_memory_bytes: Memory of a device, which a larger micro-batch must fit; None when unknown, and then only
            smaller ones are tried.
    """
    length = trial_steps(twin.config.num_steps)
    warm = twin.step >= twin.num_warmup_steps + SETTLE_STEPS
    if memory.is_handed_over or not warm or twin.num_steps_left < PAYBACK_TRIALS * length:
        return None
    direction, reason = _direction(memory, findings)
    # Far up first: a rate that is too low costs most early, and the trial is short.
    looks_up = direction != "down" and memory.span == FIRST_SPAN and is_allowed(rung_factor(FIRST_SPAN) * twin.scale)
    origin = early if memory.slower_start is None else HeldCheckpoint.at(memory.slower_start)
    if origin is not None and not looks_up and _may_start_slower(twin, memory, origin, length):
        reason = "the start may have been too fast, which lowering the rate later does not make good"
        return _learning_rate_proposal(twin, memory, _slower_start(twin, origin), reason)
    if memory.num_holds > 0 and (proposal := _propose_micro_batch(twin, memory, device_memory_bytes)):
        return proposal
    if looks_up:
        rungs = [FIRST_SPAN, 2 * FIRST_SPAN]
    else:
        span = min(memory.span, NEXT_SPAN)
        rungs = {"both": [span, -span], "up": [span, span // 2], "down": [-span, -(span // 2)]}[direction]
    return _learning_rate_proposal(twin, memory, _rates_here(twin, rungs, length), reason)


def _learning_rate_proposal(twin: Twin, memory: Memory, action: TryLearningRate | None, reason: str) -> Proposal | None:
    if action is None:
        return None
    num_steps = action.num_steps * (len(action.factors) + (action.origin == "here"))
    if memory.num_trial_steps + num_steps > TRIAL_BUDGET_RATIO * twin.config.num_steps:
        return None
    forecasts = [twin.forecast(factor) for factor in (1.0, *action.factors)]
    return Proposal(
        step=twin.step,
        scale=twin.scale,
        action=action,
        reason=reason,
        forecasts=tuple(forecast for forecast in forecasts if forecast is not None),
    )


def _rates_here(twin: Twin, rungs: Sequence[int], length: int) -> TryLearningRate | None:
    """Rates so many rungs from the present one, as far as they are allowed."""
    factors = {rung_factor(rung) for rung in rungs if rung and is_allowed(rung_factor(rung) * twin.scale)}
    anneal_steps = round(ANNEAL_RATIO * length)
    if not factors:
        return None
    return TryLearningRate(
        factors=tuple(sorted(factors)), num_steps=length, anneal_steps=anneal_steps, judged_steps=anneal_steps
    )


def _may_start_slower(twin: Twin, memory: Memory, origin: HeldCheckpoint, length: int) -> bool:
    """Whether the run's start may be tried again: once, and on as long as the slower start catches up; while the run is
    young and nothing was changed yet."""
    is_new = memory.num_starts == 0 or (memory.slower_start is not None and memory.num_starts < MAX_STARTS)
    is_young = twin.step <= YOUNG_RATIO * twin.config.num_steps
    # Enough of the trial must lie after warm-up, where rates differ.
    warm_steps = round(START_RATIO * twin.config.num_steps) - max(twin.num_warmup_steps - origin.step, 0)
    is_possible = warm_steps >= length and is_allowed(rung_factor(START_RUNGS) * twin.scale)
    return is_new and memory.num_changes == 0 and is_young and is_possible


def _slower_start(twin: Twin, origin: HeldCheckpoint) -> TryLearningRate | None:
    """The start again at a far lower rate; None while the run is not far enough. A fast rate is ahead at first: a trial
    any shorter would let it off."""
    num_steps = round(START_RATIO * twin.config.num_steps)
    if twin.step - origin.step < num_steps:
        return None
    return TryLearningRate(
        origin="start",
        checkpoint=origin.path,
        factors=(rung_factor(START_RUNGS),),
        num_steps=num_steps,
        judged_steps=max(num_steps // 4, 8),
    )


def _direction(memory: Memory, findings: Sequence[Finding]) -> tuple[Direction, str]:
    spikes = sum(finding.kind == "spike" and finding.quantity == LOSS_SPIKE for finding in findings)
    if spikes >= MIN_SPIKES_FOR_DOWN:
        return "down", f"{spikes} spikes of the loss since the last look: the learning rate may be too high"
    if any(finding.kind == "plateau" for finding in findings):
        return "both", "the loss is on a plateau: the learning rate may be far off"
    if memory.direction != "both":
        return memory.direction, f"the last step {memory.direction} paid: looking further {memory.direction}"
    if memory.num_canaries == 0:
        return "both", "first look at the learning rate"
    return "both", "routine look at the learning rate"


def _propose_micro_batch(twin: Twin, memory: Memory, device_memory_bytes: int | None) -> Proposal | None:
    current = int(twin.history.micro_batch_size[-1])
    if twin.num_steps_left < 4 * NUM_BLOCKS * MICRO_BATCH_BLOCK_STEPS:
        return None
    for size in micro_batch_choices(twin.config, current):
        in_use = twin.memory_bytes
        # Upper bound: as if all memory in use were activations.
        fits = size < current or (
            in_use is not None
            and device_memory_bytes is not None
            and in_use * size / current < 0.9 * device_memory_bytes
        )
        if fits and size not in memory.micro_batches:
            return Proposal(
                step=twin.step,
                scale=twin.scale,
                action=TryMicroBatch(micro_batch_size=size, present_size=current, block_steps=MICRO_BATCH_BLOCK_STEPS),
                reason=f"micro-batch {size} instead of {current} may be faster at the same global batch",
            )
    return None


def choose_recovery(
    memory: Memory, cause: str, *, scale: float, step: int, since_step: int, held: Sequence[HeldCheckpoint]
) -> Recover | None:
    """How to bring back a run that went wrong.

    A change under watch is undone. Else a divergence lowers the rate at once. So does a spike that stays, as long as no
    trial has found the rate right; after that it is passed round by leaving out its batches, the second time also at a
    lower rate.

    Args:
        cause: Kind of finding, or of the outcome that ended the run.
        scale: Learning-rate scale in force.
        step: Steps done.
        since_step: When it began to go wrong.
        held: Checkpoints to go back to.

    Returns:
        None when there is nothing to go back to, or people should look.
    """
    if memory.watched is not None:
        before = memory.watched.data
        return Recover(checkpoint=before["checkpoint"], scale=before["from_scale"])
    sound = [one for one in held if one.step < since_step] or list(held)[:1]
    if not sound or memory.num_recoveries >= MAX_RECOVERIES:
        return None
    target = sound[-1]
    if cause == "persistent_spike" and memory.num_holds > 0:
        factor = 1.0 if memory.recoveries.get(cause, 0) == 0 else STEP_DOWN
        return Recover(checkpoint=target.path, scale=_within(factor * scale), skip_steps=max(step - target.step, 0))
    return Recover(checkpoint=target.path, scale=_within(RECOVERY_FACTOR * scale))


def _within(scale: float) -> float:
    return min(max(scale, MIN_SCALE), MAX_SCALE)
