"""Trials as a user of Python sees them: what is handed out to be tried, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.space.command import CommandSpace
from autotune.space.space import Scalar
from autotune.study.assignment import Assignment
from autotune.study.snapshot import TrialRow
from engine.atomic import make_folder


@dataclass(frozen=True)
class Trial:
    """Values to try, as ``Study.ask`` hands them out."""

    number: int
    """In the study, from 0; numbers that were refused or known already are left out."""
    params: Mapping[str, Scalar]
    """Name -> value: the chosen ones, the fixed ones (the one that grows at this trial's length), and defaults where a
    value is not searched."""
    seed: int
    """For all that is random in it; a function of the study's seed and the trial's place in it."""
    assignment: Assignment
    """What the study knows it by."""
    is_kept: bool
    """The study has a folder."""

    @property
    def folder(self) -> Path | None:
        """For files of the trial, kept with the study and made when it is asked for; None without a study's folder."""
        return make_folder(self.assignment.folder) if self.is_kept else None


@dataclass(frozen=True)
class TrialResult:
    """A trial of a study."""

    number: int
    """In the study."""
    params: Mapping[str, Scalar]
    """As of ``Trial``: what the function was called with."""
    state: str
    """``ok``; the kind of its failure; ``running``; or ``waiting`` to be run (again)."""
    values: Mapping[str, float] | None
    """Objective -> value; None unless ``ok``."""
    metrics: Mapping[str, float]
    """Further figures that were told."""
    detail: str
    """How it failed, in a line."""
    feasible: bool
    """Ok and within all bounds."""
    seconds: float | None
    """Wall time."""
    share: float = 1.0
    """Share of a full training that it was, where trials grow; only full trainings are feasible."""


def trial_of(assignment: Assignment, space: CommandSpace, is_kept: bool) -> Trial:
    """What a study handed out, as its user sees it."""
    values = {**space.fixed, **assignment.parameters, **assignment.grown}
    return Trial(assignment.number, values, assignment.seed, assignment, is_kept)


def result_of(row: TrialRow, space: CommandSpace) -> TrialResult:
    """A row of a snapshot, as a user of Python sees it."""
    outcome = row.outcome
    objectives = row.values or {}
    metrics = {} if outcome is None else {k: v for k, v in outcome.metrics.items() if k not in objectives}
    return TrialResult(
        number=row.number,
        params={**space.fixed, **row.parameters, **(space.grown(row.rung) if row.share < 1 else {})},
        state=row.state if outcome is None else outcome.kind,
        values=row.values,
        metrics=metrics,
        detail="" if outcome is None else outcome.detail,
        feasible=row.feasible,
        seconds=row.seconds,
        share=row.share,
    )
