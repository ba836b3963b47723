"""Judging a proposal before it touches the run, or in short turns on it.

Learning rates are compared in shadow forks over the same batches, by the loss on the same held-out documents: random
numbers are common, so the differences are far less noisy than the losses. Every trial spends a share of one error
budget, so that looking again and again does not add up to false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.prior.robust import Floats
from engine.outcome import OutcomeKind
from engine.schema import Schema

ERROR_BUDGET = 0.05
"""Chance of ever accepting a change that has no effect, over all trials of a run."""
MIN_GAIN_RATIO = 0.003
"""Held-out loss must fall by at least this share, however small the noise."""
MIN_JUDGED_STEPS = 6
MIN_CORRELATION = 0.6
"""Forks drift apart slowly; how slowly, so few steps can't tell. Less correlation than this is not reckoned with."""
NEAR_RATIO = 0.02
"""A fork whose loss is higher by no more than this share is near."""
MIN_SPEED_UP = 0.02
"""A micro-batch must be faster by at least this share."""


class ArmResult(Schema):
    """One fork."""

    factor: float
    """Learning-rate scale over the present one; 1 for the reference."""
    outcome: OutcomeKind
    """How it ended."""
    detail: str = ""
    """Why, where it failed."""
    held_out_loss: float | None = None
    """Nats per token at its end, after annealing."""
    losses: tuple[float | None, ...] = ()
    """Training losses of its steps (nats per token; null where not finite): fresh batches, the same in every fork."""


class Comparison(Schema):
    """One fork against the reference."""

    factor: float
    """Learning-rate scale over the present one."""
    difference: float | None
    """Loss minus the reference's (nats); null where one of them failed."""
    handicap: float = 0.0
    """Progress that the short trial hides, added to the difference."""
    margin: float | None = None
    """How far below zero the sum must lie."""
    accepted: bool
    """Whether it does."""


def error_share(index: int, budget: float = ERROR_BUDGET) -> float:
    """Share of the error budget for trial ``index`` (from 0); all shares together are the budget."""
    return budget / ((index + 1) * (index + 2))


def judge(
    results: Sequence[ArmResult], *, judged_steps: int, index: int, handicaps: Mapping[float, float]
) -> list[Comparison]:
    """Compare every fork with the reference (factor 1).

    Args:
        results: The reference and the other arms.
        judged_steps: Last steps that are compared.
        index: How many trials this run has had before.
        handicaps: By factor, progress to the end of the run that the arm would lose and the trial cannot show (nats).
            Short trials flatter slow rates; negative values count as none, so that a fast rate has to win by itself.
    """
    reference = next((result for result in results if result.factor == 1.0), None)
    arms = [result for result in results if result.factor != 1.0]
    alpha = error_share(index) / max(len(arms), 1)
    return [
        compare(
            reference,
            arm,
            judged_steps=judged_steps,
            alpha=alpha,
            handicap=max(handicaps.get(arm.factor, 0.0), 0.0),
        )
        for arm in arms
    ]


def compare(
    reference: ArmResult | None, arm: ArmResult, *, judged_steps: int, alpha: float, handicap: float = 0.0
) -> Comparison:
    """Whether the arm's loss is lower by more than noise and handicap.

    The loss is the held-out one where both have it, else the training loss. The noise is told from the paired training
    losses: differences on fresh batches, freed of their trend and corrected for autocorrelation. They must have fallen
    as well.
    """
    failed = Comparison(factor=arm.factor, difference=None, accepted=False)
    if reference is None or reference.outcome != "ok" or arm.outcome != "ok":
        return failed
    length = min(len(reference.losses), len(arm.losses))
    judged = slice(max(length - judged_steps, 0), length)
    base = np.array(reference.losses[judged], dtype=float)
    paired = np.array(arm.losses[judged], dtype=float) - base
    paired = paired[np.isfinite(paired)]
    if len(paired) < MIN_JUDGED_STEPS:
        return failed
    if arm.held_out_loss is not None and reference.held_out_loss is not None:
        difference, level = arm.held_out_loss - reference.held_out_loss, reference.held_out_loss
    else:
        difference, level = float(paired.mean()), float(np.nanmean(base))
    error, freedom = _standard_error(paired)
    margin = max(_t_quantile(1 - alpha, freedom) * error, MIN_GAIN_RATIO * level)
    accepted = difference + handicap < -margin and float(paired.mean()) < 0
    return Comparison(factor=arm.factor, difference=difference, handicap=handicap, margin=margin, accepted=accepted)


def is_catching_up(reference: ArmResult, arm: ArmResult, *, judged_steps: int) -> bool:
    """Whether a fork that has not won is at most ``NEAR_RATIO`` behind and coming nearer: longer, it might win."""
    length = min(len(reference.losses), len(arm.losses))
    base = np.array(reference.losses[:length], dtype=float)
    behind = np.array(arm.losses[:length], dtype=float) - base
    if arm.outcome != "ok" or length < 2 * judged_steps:
        return False
    before, now = np.nanmean(behind[-2 * judged_steps : -judged_steps]), np.nanmean(behind[-judged_steps:])
    return bool(now < before and now < NEAR_RATIO * np.nanmean(base[-judged_steps:]))


def best_of(comparisons: Sequence[Comparison]) -> Comparison | None:
    """The accepted arm that gains most; None when none was accepted."""
    accepted = [one for one in comparisons if one.accepted and one.difference is not None]
    return min(accepted, key=lambda one: (one.difference or 0.0) + one.handicap, default=None)


class SpeedComparison(Schema):
    """A micro-batch against the present one."""

    speed_up: float
    """Step time before over after, minus one."""
    lower_bound: float
    """Lower end of its interval."""
    accepted: bool
    """Whether the lower end is above ``MIN_SPEED_UP``."""


def judge_blocks(seconds: Sequence[tuple[bool, float]], *, alpha: float = ERROR_BUDGET) -> SpeedComparison:
    """Judge turns A B B A ... on the live run.

    Args:
        seconds: For each turn whether it ran the new setting (B), and its median step time. Neighbours A B and B A
            are pairs, so a drift of the machine's speed cancels.
        alpha: Chance of accepting a setting that is no faster.
    """
    pairs = [
        math.log(first[1] / second[1]) * (1.0 if second[0] else -1.0)
        for first, second in zip(seconds[::2], seconds[1::2], strict=True)
    ]
    values = np.array(pairs)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
    bound = float(values.mean()) - _t_quantile(1 - alpha, len(values) - 1) * error
    return SpeedComparison(
        speed_up=math.expm1(float(values.mean())),
        lower_bound=math.expm1(bound),
        accepted=bound > math.log1p(MIN_SPEED_UP),
    )


def turns(num_blocks: int) -> list[bool]:
    """Whether each turn runs the new setting: A B B A A B B A ..."""
    return [(block + 1) // 2 % 2 == 1 for block in range(num_blocks)]


def _standard_error(values: Floats) -> tuple[float, float]:
    """Standard error of the mean of autocorrelated values with a linear trend, and its degrees of freedom."""
    positions = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(positions @ values) / float(positions @ positions)
    rest = values - values.mean() - slope * positions
    variance = float(rest @ rest) / (len(values) - 2)
    correlation = float(rest[1:] @ rest[:-1]) / max(float(rest @ rest), 1e-30)
    correlation = min(max(correlation, MIN_CORRELATION), 0.9)
    # Effective number of values of a first-order autoregressive series.
    effective = max(len(values) * (1 - correlation) / (1 + correlation), 3.0)
    return math.sqrt(variance / effective), effective - 1


def _t_quantile(level: float, freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, level))
