"""The planner's answer to one question, as plain data: what ``autotune plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.search.compare import Comparison
from autotune.search.estimated import EstimatedPlan
from autotune.search.question import Question
from engine.plan import Plan


@dataclass(frozen=True)
class Counts:
    """What became of the combinations of a space."""

    num_combinations: int
    num_redundant: int
    """Those that differ from another one only in a value without effect."""
    removed: Mapping[str, int]
    """Rule id -> combinations that it removed; each is counted once."""
    num_not_fitting: int
    """Legal ones that need more memory than allowed."""
    num_fitting: int
    """Legal ones that fit, or that a bound shows not to be best whether they fit or not."""
    num_estimated: int
    """Legal ones that were estimated; a bound decided the others."""
    gap_ratio: float
    """By how much at most a plan that was not estimated could be better than the best found; 0: there is none."""
    seconds: float
    """Time of the whole answer."""


@dataclass(frozen=True)
class Share:
    """What one resource takes of the step."""

    resource: str
    """A key of ``RESOURCES``."""
    seconds: float
    ratio: float
    """Of the step time."""
    hidden_seconds: float
    """Of communication that runs beside compute."""


@dataclass(frozen=True)
class Change:
    """One change of cluster, batch or pins, with the best plan under it."""

    id: str
    words: str
    plan: EstimatedPlan | None
    """None where nothing fits under the change either."""
    gain_ratio: float
    """Tokens per second more, relative to the best plan without the change (or what the first objective gains)."""
    keeps_plan: bool
    """Whether the best plan stays the same."""


@dataclass(frozen=True)
class Rung:
    """A step of the ladder from data parallelism alone to the best plan."""

    id: str
    words: str
    plan: EstimatedPlan | None
    """The best plan with what is allowed so far; the one nearest to fitting where none fits; None if none is legal."""
    gain_ratio: float | None
    """Tokens per second more than on the last rung that fits (or what the first objective gains); None where this or
    every rung before does not fit."""
    reason: str
    """Why there is no plan that fits; empty where there is."""


@dataclass(frozen=True)
class Choice:
    """What it costs to decide otherwise in one respect."""

    name: str
    value: Any
    plan: EstimatedPlan | None
    """The best plan with this value of those looked at; None where none fits, or none was looked at."""
    loss_ratio: float
    """Step time (or the first objective) more than the best plan's, relative."""
    is_looked_at: bool = True
    """Whether plans with this value were looked at."""
    is_exact: bool = True
    """Whether all plans with this value were; else the loss is at most ``loss_ratio``."""


@dataclass(frozen=True)
class Misfit:
    """Why no plan fits, and what is the least that would help."""

    closest: EstimatedPlan
    """The plan that needs the least beyond the limit."""
    largest_part: str
    """Part of its memory that takes most."""
    fixes: tuple[Change, ...]
    """Single changes under which a plan fits, each verified by an estimate, smallest first."""
    tried: tuple[str, ...]
    """Changes that do not help alone."""


@dataclass(frozen=True)
class Rival:
    """A plan that the user brought, beside the best."""

    source: str
    plan: Plan
    estimated: EstimatedPlan | None
    """None where a rule forbids the plan."""
    comparison: Comparison | None
    """With the best plan; None where there is none, or no estimate."""
    broken_rules: tuple[str, ...]
    """Messages of the rules it breaks; empty for a legal plan."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the planner says."""

    question: Question
    counts: Counts
    plans: tuple[EstimatedPlan, ...]
    """Best first; empty when nothing fits."""
    comparisons: tuple[Comparison, ...]
    """Each of ``plans`` with the first."""
    num_alike: tuple[int, ...] = ()
    """For each of ``plans``: how many more were found that are tied with it and as it is but for cp, dp and what is
    not part of the mesh."""
    shares: tuple[Share, ...] = ()
    """What the best plan's step is spent on, most first."""
    memory_binds_ratio: float | None = None
    """Tokens per second (or the first objective) more if memory had no limit; None where it does not bind."""
    changes: tuple[Change, ...] = ()
    """What would help, most first."""
    choices: tuple[Choice, ...] = ()
    ladder: tuple[Rung, ...] = ()
    misfit: Misfit | None = None
    rival: Rival | None = None
    replays: tuple[EstimatedPlan | None, ...] = ()
    """The finalists again by replaying their pipelines' schedules; None for a plan without a pipeline."""
    notes: tuple[str, ...] = ()
