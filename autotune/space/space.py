"""A search space: its dimensions, what is fixed, and which chosen values are a legal candidate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import model_validator

from autotune.space.expression import Expression
from autotune.space.fidelity import Fidelity
from autotune.space.objectives import QUALITY, Objective
from autotune.space.program import Program
from engine.config import RunConfig
from engine.outcome import Outcome
from engine.schema import Schema
from engine.spec import Count, Name, Positive

Scalar = str | int | float | bool | None
Kind = Literal["categorical", "int", "log_int", "float", "log_float"]
"""Of a dimension: a list of choices, or a range."""
DIGITS = 12
"""Significant digits of proposed numbers: more than anybody measures, and short to read in commands and files."""


@dataclass(frozen=True)
class Dimension:
    """One searched value."""

    name: str
    """Dotted name, such as ``plan.micro_batch_size``."""
    kind: Kind
    values: tuple[Scalar, ...] = ()
    """Choices of a categorical dimension."""
    low: float = 0.0
    """Least value of the other kinds."""
    high: float = 0.0
    """Greatest value, included."""
    step: int = 1
    """Step of an int dimension."""
    when: Expression | None = None
    """Searched only where this holds of the values chosen before; elsewhere the default is used."""

    @property
    def is_range(self) -> bool:
        """Numbers between two ends."""
        return self.kind != "categorical"

    @property
    def is_whole(self) -> bool:
        """A range of whole numbers."""
        return self.kind in ("int", "log_int")

    @property
    def is_real(self) -> bool:
        """A range of real numbers."""
        return self.kind in ("float", "log_float")

    @property
    def is_log(self) -> bool:
        """A range that is searched by its logarithm."""
        return self.kind in ("log_int", "log_float")

    def choices(self) -> Sequence[Scalar] | None:
        """All values of a discrete dimension, never listed where they are a range; None for a continuous one."""
        if not self.is_range:
            return self.values
        if self.is_whole:
            return range(int(self.low), int(self.high) + 1, self.step)
        return None

    def nearest(self, number: float) -> int | float | None:
        """The value that is nearest to a number; None in a list without numbers. Real ones have ``DIGITS`` digits."""
        if self.is_real:
            return min(max(float(f"{number:.{DIGITS}g}"), self.low), self.high)
        if self.is_whole:
            last = int(self.high - self.low) // self.step
            return int(self.low) + self.step * min(max(round((number - self.low) / self.step), 0), last)
        numbers = [value for value in self.values if isinstance(value, int | float) and not isinstance(value, bool)]
        return min(numbers, key=lambda value: abs(value - number), default=None)

    def contains(self, value: Scalar) -> bool:
        """Whether ``value`` is in the dimension."""
        if self.is_whole:
            return type(value) is int and value in (self.choices() or ())
        if not self.is_range:
            return any(type(value) is type(choice) and value == choice for choice in self.values)
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def describe(self) -> str:
        """One line for people."""
        if not self.is_range:
            text = ", ".join(map(str, self.values))
        elif self.is_whole:
            text = f"{int(self.low)} to {int(self.high)}" + (f" in steps of {self.step}" if self.step > 1 else "")
        else:
            text = f"{self.low:g} to {self.high:g}"
        text += " (log)" if self.is_log else ""
        return f"{text}, when {self.when.text}" if self.when else text


class Budget(Schema):
    """When a sweep ends; whichever comes first. Not part of the space: more of it extends the study."""

    trials: Count | None = None
    """Trials to run."""
    seconds: Positive | None = None
    """Wall time, written as ``time`` in a space file (``10m``)."""


class TrialLimits(Schema):
    """Limits of each trial."""

    seconds: Positive = 600.0
    """Wall time, anew for each attempt, written as ``time`` (``90s``)."""
    memory_bytes: Count | None = None
    """Resident memory of all its processes, written as ``memory`` (``4GiB``); null for its share of the machine."""
    heartbeat_seconds: Positive = 120.0
    """A trial without a step for so long hangs, written as ``heartbeat`` (``60s``)."""
    checkpoint_seconds: Positive | None = None
    """Time between checkpoints, from which another attempt goes on when the machine died, written as ``checkpoint``
    (``5m``); null for none: it begins anew."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.checkpoint_seconds is not None and self.checkpoint_seconds >= self.seconds:
            times = f"({self.checkpoint_seconds:g} s and {self.seconds:g} s)"
            raise ValueError(f"'checkpoint' is not below 'time' {times}, so none would ever be written")
        return self


@dataclass(frozen=True)
class Candidate:
    """Chosen values as something that can be run, or why they are nothing."""

    run: RunConfig | None = None
    """The run of the engine; None for a user's own program or function, and for a refused candidate."""
    rule: str = ""
    """The rule that refused it; ``constraint`` for one of the space's own; ``value`` for a value out of bounds."""
    reason: str = ""
    """Message for people."""
    key: str = ""
    """Hash of what it is: candidates with equal keys are the same experiment."""
    label: str = ""
    """A few words for people: the plan, or the values."""

    @property
    def is_legal(self) -> bool:
        """Whether it may be tried."""
        return not self.rule


@dataclass(frozen=True)
class Space:
    """What is searched, for which objectives. What candidates are is said by the kinds of spaces: ``TrainingSpace``
    (runs of the engine), ``CommandSpace`` (runs of a user's program or calls of a function)."""

    name: Name
    objectives: tuple[Objective, ...]
    dimensions: tuple[Dimension, ...]
    """In the order they are chosen: conditions read only earlier ones."""
    fixed: dict[str, Any]
    """Name -> value of everything else that is set."""
    constraints: tuple[Expression, ...] = ()
    budget: Budget = Budget()
    limits: TrialLimits = TrialLimits()
    fidelity: Fidelity | None = None
    """How trials grow; None where each is a full training."""
    data: dict[str, Any] = field(default_factory=dict)
    """The resolved file as plain data, without the budget: two studies with equal data search the same space."""
    notes: tuple[str, ...] = ()
    """What was rounded, for people."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Our name of a hyperparameter or objective -> what it is called in this space, where that differs."""

    @property
    def quality_name(self) -> str:
        """What held-out loss is called in this space, whether it is an objective or not."""
        return self.roles.get(QUALITY, QUALITY)

    def is_active(self, dimension: Dimension, chosen: Mapping[str, Any]) -> bool:
        """Whether ``dimension`` is searched, given the values chosen before it."""
        return dimension.when is None or bool(dimension.when(self.names(chosen)))

    def active(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Of a value for every dimension, those that are searched given the ones before them, in order."""
        chosen: dict[str, Scalar] = {}
        for dimension in self.dimensions:
            if self.is_active(dimension, chosen):
                chosen[dimension.name] = values[dimension.name]
        return chosen

    def names(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Everything a condition can read, with the values chosen so far."""
        return {**self.fixed, **chosen}

    def candidate(self, chosen: Mapping[str, Any]) -> Candidate:
        """The candidate of chosen values, or the rule or constraint that refuses them.

        Args:
            chosen: Dimension name -> value for every active dimension.
        """
        for dimension in self.dimensions:
            if dimension.name in chosen and not dimension.contains(chosen[dimension.name]):
                value = chosen[dimension.name]
                reason = f"{dimension.name} = {value!r} is not in {dimension.describe()}"
                return Candidate(rule="value", reason=reason)
        values = self.names(chosen)
        for constraint in self.constraints:
            if not bool(constraint(values)):
                return Candidate(rule="constraint", reason=f"does not hold: {constraint.text}")
        return self._candidate(values, chosen)

    def grown(self, rung: int) -> dict[str, Scalar]:
        """What a rung sets in place of fixed values, where trials grow by one of these; else nothing."""
        return {}

    def program(
        self, chosen: Mapping[str, Any], seed: int, grown: Mapping[str, Scalar] | None = None
    ) -> Program | None:
        """The user's own program that a trial of chosen values starts; None where a trial is something else.

        Args:
            chosen: Dimension name -> value for every active dimension of a legal candidate.
            seed: The trial's.
            grown: Of its rung; None for a full training.
        """
        return None

    def completed(self, outcome: Outcome, run: RunConfig | None) -> Outcome:
        """An outcome with the metrics that follow from it and this space."""
        return outcome

    def _candidate(self, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> Candidate:
        label = " ".join(f"{name}={_short(value)}" for name, value in chosen.items())
        return Candidate(key=hash_of({**self.fixed, **chosen}), label=label)


def hash_of(data: Any) -> str:
    """A short hash of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
