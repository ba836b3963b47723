"""Two estimated plans part by part: why one is slower, and whether the cost model can tell them apart at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.search.estimated import EstimatedPlan
from autotune.search.words import settings
from engine.plan import MESH_FIELDS, Plan

NOISE_RATIO = 0.01
"""Step time of one configuration from run to run, relative: less than this no estimate tells apart."""


@dataclass(frozen=True)
class Comparison:
    """A plan against a better one. Positive differences speak for the better one."""

    seconds: float
    """Step time more than the better plan's, for as many tokens."""
    ratio: float
    """The same, relative to the better plan's step time."""
    uncertainty_seconds: float
    """Half-width of the interval of that difference. What both plans share cancels: only parts that differ count."""
    time: dict[str, float]
    """Difference by part, seconds."""
    memory_bytes: float
    """Memory more than the better plan's."""
    memory: dict[str, float]
    """Difference by part, bytes."""
    choices: dict[str, tuple[Any, Any]]
    """Plan field -> values of the better plan and of this one, where they differ."""

    @property
    def is_tie(self) -> bool:
        """Whether the difference lies within its interval, so that the order of the two is not known."""
        return abs(self.seconds) <= self.uncertainty_seconds

    def largest_parts(self, least_ratio: float = 0.1, most: int = 4) -> list[tuple[str, float]]:
        """Parts with the largest differences of either sign, at least ``least_ratio`` of the largest one."""
        parts = sorted(self.time.items(), key=lambda item: -abs(item[1]))
        least = least_ratio * abs(parts[0][1]) if parts else 0.0
        return [(part, seconds) for part, seconds in parts[:most] if seconds and abs(seconds) >= least]


def compare(better: EstimatedPlan, other: EstimatedPlan) -> Comparison:
    """How ``other`` differs from ``better``, brought to the same number of tokens."""
    scale = better.batch_tokens / other.batch_tokens
    time = {part: seconds * scale - better.time[part] for part, seconds in other.time.items()}
    step = better.step_seconds
    error = (step.high - step.low) / 2 / step.value
    uncertainty = difference_uncertainty(step.value, error, list(time.values()))
    seconds = other.step_seconds.value * scale - step.value
    return Comparison(
        seconds=seconds,
        ratio=seconds / step.value,
        uncertainty_seconds=uncertainty,
        time=time,
        memory_bytes=other.memory_bytes.value - better.memory_bytes.value,
        memory={part: size - better.memory[part] for part, size in other.memory.items()},
        choices=differing_choices(better.plan, other.plan),
    )


def difference_uncertainty(step_seconds: float, error_ratio: float, differences: Sequence[float]) -> float:
    """Half-width of the interval of the difference of two plans' step times.

    The cost model's relative error is taken to be the same for a part in both plans and independent between parts, so
    it applies to the differences of the parts; the noise of the plans themselves (``NOISE_RATIO``) is added.

    Args:
        step_seconds: Step time of the better plan.
        error_ratio: Half-width of its interval, relative.
        differences: Seconds that the other plan takes more, by part.
    """
    return math.hypot(NOISE_RATIO * step_seconds, error_ratio * math.hypot(*differences))


def differing_choices(one: Plan, other: Plan) -> dict[str, tuple[Any, Any]]:
    """Fields of Plan in which two plans differ, with both values; those without effect in one are left out."""
    effect = {*MESH_FIELDS, *(settings(one).keys() & settings(other).keys())}
    if one.recompute == other.recompute == "every_k":
        effect.add("recompute_period")
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in Plan.model_fields if name in effect}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
