"""Step time of a live run, robust to stragglers, and whether it has become worse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.prior.robust import Floats, median_and_sigma
from autotune.twin.history import History

RECENT_STEPS = 16
BASELINE_STEPS = 256
MIN_BASELINE_STEPS = 16
DROP_RATIO = 1.25
"""A step time so many times the baseline's is a drop of throughput, if it is also beyond the usual spread."""
_DROP_SIGMAS = 4.0


@dataclass(frozen=True)
class StepTime:
    """Median step time, and tokens per second at it."""

    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class ThroughputDrop:
    """Step time of the last steps against the steps before them, at the same micro-batch."""

    recent_seconds: float
    baseline_seconds: float
    threshold_seconds: float


def step_time(history: History, tokens_per_step: int) -> StepTime | None:
    """Over the last steps that count for speed; None before the first."""
    seconds = history.step_seconds[history.timed][-4 * RECENT_STEPS :]
    if not len(seconds):
        return None
    median = float(np.median(seconds))
    return StepTime(median, tokens_per_step / median if median > 0 else 0.0)


def find_drop(history: History, undisturbed: npt.NDArray[np.bool_]) -> ThroughputDrop | None:
    """Whether the last ``RECENT_STEPS`` steps took clearly longer than those before.

    Args:
        undisturbed: Which steps ran without a canary beside them, [num_steps].
    """
    if not len(history):
        return None
    usable = history.timed & undisturbed & (history.micro_batch_size == history.micro_batch_size[-1])
    seconds: Floats = history.step_seconds[usable][-(BASELINE_STEPS + RECENT_STEPS) :]
    if len(seconds) < RECENT_STEPS + MIN_BASELINE_STEPS:
        return None
    recent = float(np.median(seconds[-RECENT_STEPS:]))
    baseline, sigma = median_and_sigma(seconds[:-RECENT_STEPS])
    threshold = max(DROP_RATIO * float(baseline), float(baseline + _DROP_SIGMAS * sigma))
    return ThroughputDrop(recent, float(baseline), threshold) if recent > threshold else None
