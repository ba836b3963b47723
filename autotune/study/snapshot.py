"""A study as plain data, for reports, apply and everyone who only reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.search.forecast import Forecasted
from autotune.space.fidelity import Fidelity, ProgramFidelity
from autotune.space.objectives import Objective, ObjectiveName
from autotune.space.space import Scalar
from engine.outcome import Outcome


@dataclass(frozen=True)
class TrialRow:
    """One trial."""

    number: int
    """Number in the study, from 0."""
    state: Literal["waiting", "running", "finished"]
    """Whether it has an outcome yet."""
    parameters: dict[str, Scalar]
    """Searched values by dotted name, such as ``plan.tp`` or ``hyperparameters.learning_rate``."""
    outcome: Outcome | None
    """What was measured or how it failed; None until finished."""
    values: dict[str, float] | None
    """Objective name -> value; None unless the outcome is ``ok`` with every objective measured."""
    feasible: bool
    """Trained in full, ok and within all bounds."""
    plan: str = ""
    """``Plan.describe()`` of the candidate."""
    attempts: int = 1
    """Times it was started (a trial orphaned by a kill is started again)."""
    seconds: float | None = None
    """Wall time of the last attempt."""
    repeat_of: int | None = None
    """The trial this one repeats with another seed."""
    rung: int = 0
    """How far it trained its candidate, where trials grow."""
    share: float = 1.0
    """Share of the full training that was done."""
    cost: float = 1.0
    """What it uses of the budget, in full trainings."""
    continues: int | None = None
    """The trial that trained its candidate before."""
    folder: Path | None = None
    """``trials/<id>``, with ``run.yaml``, ``outcome.json``, ``telemetry.jsonl`` and ``stdout.log``."""
    forecast: dict[ObjectiveName, Forecasted] = field(default_factory=dict)
    """Objective name -> what was estimated before the trial; empty where nothing was."""
    is_guess: bool = False
    """A first guess of the user's."""
    origin: str = ""
    """Study and number that it was copied from (``sweep-1/17``); empty for a trial of its own."""


@dataclass(frozen=True)
class StudySnapshot:
    """A study at one moment."""

    name: str
    folder: Path
    objectives: tuple[Objective, ...]
    trials: tuple[TrialRow, ...]
    """By number; refused and cached proposals are not trials."""
    space: dict[str, Any] = field(default_factory=dict)
    """The resolved space file as data."""
    num_trials_asked: int | None = None
    """The budget, when it is a number of trials."""
    created: str = ""
    """ISO time."""
    corpus_hash: str | None = None
    """Hash of the text all trials used."""
    num_refused: dict[str, int] = field(default_factory=dict)
    """Rule id -> proposals it refused."""

    @property
    def is_growing(self) -> bool:
        """Whether trials are parts of trainings."""
        return any(row.share < 1 for row in self.trials)

    @property
    def needed(self) -> float:
        """What one more candidate needs of the budget to be trained in full, in full trainings."""
        data = self.space.get("fidelity")
        if not data:
            return 1.0
        kind: type[Fidelity] = ProgramFidelity if "of" in data else Fidelity
        return kind.model_validate(data).cost_from(0)

    @property
    def spent(self) -> float:
        """What the ended trials use of the budget, in full trainings."""
        return sum(row.cost for row in self.trials if row.outcome is not None and row.repeat_of is None)
