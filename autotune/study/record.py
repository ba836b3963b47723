"""What the tuner keeps of a trial in the storage's attributes, as text; and a study read back as plain data."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.search.curves import Curve
from autotune.search.forecast import Forecasted
from autotune.search.sampler import Observation, ObservationState
from autotune.space.objectives import Objective, ObjectiveName
from autotune.study.lease import LEASE_PREFIX, Lease, current_lease
from autotune.study.snapshot import StudySnapshot, TrialRow
from autotune.study.study_file import STUDY_FILE, StudyFile
from engine.errors import UserError
from engine.outcome import Outcome

RECORD_KEY = "record"
OUTCOME_KEY = "outcome"
CORPUS_KEY = "corpus_hash"
CURVE_KEY = "curve"
SEARCH_KEY = "search"
"""Attributes of the study: hash of its text; its space and seed."""

Role = Literal["trial", "growth", "repeat", "refused", "cached", "surplus", "abandoned", "claim"]
"""What a number of the storage was used for. ``trial``, ``growth`` (it trains the candidate of an earlier number on)
and ``repeat`` run. The others never do: ``refused`` broke a rule, ``cached`` equals an earlier candidate, ``surplus``
came when another driver had used up the budget, ``abandoned`` was left by a driver that died while choosing, ``claim``
takes over an interrupted trial (see ``lease``)."""


@dataclass(frozen=True)
class Record:
    """What a number of the storage is. A running number without a record is still being chosen."""

    role: Role
    key: str = ""
    """Hash of the candidate."""
    plan: str = ""
    """The candidate in a few words: ``Plan.describe()``, or the values."""
    rule: str = ""
    """The rule that refused it."""
    of: int | None = None
    """The trial that is repeated, continued, taken over, or equal."""
    forecast: Mapping[ObjectiveName, Sequence[float]] = field(default_factory=dict)
    """Objective name -> estimated value, low and high end, before the trial."""
    is_guess: bool = False
    """A first guess of the user's."""
    rung: int = 0
    """Where trials grow: the rung that it trains its candidate to."""
    share: float = 1.0
    """Share of the full training that is done then."""
    cost: float = 1.0
    """What the number uses of the budget, in full trainings."""
    origin: str = ""
    """Study and number that it was copied from."""

    def encode(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=2**16)
    def decode(text: str) -> Record:
        """The inverse of ``encode``. Every proposal reads the records of all numbers, so they are decoded once."""
        return Record(**json.loads(text))


def record_of(trial: FrozenTrial) -> Record | None:
    """The record of a number, None while it is being chosen."""
    text = trial.user_attrs.get(RECORD_KEY)
    return None if text is None else Record.decode(text)


def place_of(number: int, trials: Sequence[FrozenTrial]) -> int:
    """Place of a number among all but the claims. Seeds come from it: that a trial was interrupted and claimed again
    changes nothing for those after it.

    Args:
        number: The number.
        trials: All lower numbers of the study in order, and any others.
    """
    records = map(record_of, trials[:number])
    return number - sum(record is not None and record.role == "claim" for record in records)


def outcome_of(trial: FrozenTrial) -> Outcome | None:
    """The outcome of a trial, None until it has one."""
    text = trial.user_attrs.get(OUTCOME_KEY)
    return None if text is None else _decoded(text)


@functools.lru_cache(maxsize=2**16)
def _decoded(text: str) -> Outcome:
    """Every proposal reads the outcomes of all numbers, so they are decoded once."""
    return Outcome.model_validate_json(text)


def curve_of(trial: FrozenTrial) -> Curve | None:
    """The curve of a trial, None where none is kept."""
    text = trial.user_attrs.get(CURVE_KEY)
    return None if text is None else Curve.decode(text)


def lease_of(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> Lease | None:
    """The lease in force on a trial.

    Args:
        trial: The trial.
        trials: All numbers of the study in order, with the claims among them.
    """
    claims = []
    for other in trials[trial.number + 1 :]:
        record = record_of(other)
        if record is not None and record.role == "claim" and record.of == trial.number:
            claims += [Lease.decode(text) for key, text in other.user_attrs.items() if key.startswith(LEASE_PREFIX)]
    return current_lease(trial.user_attrs, claims)


def measured_values(outcome: Outcome, objectives: Sequence[Objective]) -> dict[str, float] | None:
    """Objective name -> value; None unless the run was ok and every objective was measured."""
    if outcome.kind != "ok":
        return None
    values: dict[str, float] = {}
    for objective in objectives:
        value = objective.value_of(outcome)
        if value is None or not math.isfinite(value):
            return None
        values[objective.name] = value
    return values


def is_feasible(values: Mapping[str, float] | None, objectives: Sequence[Objective]) -> bool:
    """Measured and within all bounds."""
    return values is not None and all(objective.violation(values[objective.name]) <= 0 for objective in objectives)


def trial_rows(trials: Sequence[FrozenTrial], objectives: Sequence[Objective], folder: Path) -> tuple[TrialRow, ...]:
    """The trials, growths and repeats of a study, by number.

    Args:
        trials: All numbers of the storage in order.
        objectives: The study's.
        folder: The study's folder.
    """
    rows = []
    for trial in trials:
        record = record_of(trial)
        if record is None or record.role not in ("trial", "growth", "repeat"):
            continue
        outcome = outcome_of(trial) if trial.state.is_finished() else None
        lease = lease_of(trial, trials) if trial.state == TrialState.RUNNING else current_lease(trial.user_attrs)
        is_waiting = outcome is None and (lease is None or lease.has_lapsed())
        values = measured_values(outcome, objectives) if outcome is not None else None
        rows.append(
            TrialRow(
                number=trial.number,
                state="finished" if outcome is not None else "waiting" if is_waiting else "running",
                parameters=dict(trial.params),
                outcome=outcome,
                values=values,
                feasible=record.share == 1 and is_feasible(values, objectives),
                plan=record.plan,
                attempts=lease.attempt if lease is not None else 1,
                seconds=outcome.wall_seconds if outcome is not None else None,
                repeat_of=record.of if record.role == "repeat" else None,
                rung=record.rung,
                share=record.share,
                cost=record.cost,
                continues=record.of if record.role == "growth" else None,
                folder=trial_folder(folder, trial.number),
                forecast={name: Forecasted(*values) for name, values in record.forecast.items()},
                is_guess=record.is_guess,
                origin=record.origin,
            )
        )
    return tuple(rows)


def snapshot_of(folder: Path, file: StudyFile, storage: BaseStorage) -> StudySnapshot:
    """A study as plain data.

    Raises:
        UserError: The storage does not hold it.
    """
    try:
        study_id = storage.get_study_id_from_name(file.name)
    except KeyError:
        raise UserError(
            f"the storage of study {file.name!r} does not hold it",
            hint=f"look at 'storage' in {folder / STUDY_FILE}, or run the same sweep again to begin it anew",
        ) from None
    trials = storage.get_all_trials(study_id, deepcopy=False)
    return StudySnapshot(
        name=file.name,
        folder=folder,
        objectives=file.objectives,
        trials=trial_rows(trials, file.objectives, folder),
        space=file.space,
        num_trials_asked=file.trials,
        created=file.created,
        corpus_hash=storage.get_study_user_attrs(study_id).get(CORPUS_KEY),
        num_refused=num_refused(trials),
    )


def observations_of(trials: Sequence[FrozenTrial], objectives: Sequence[Objective]) -> list[Observation]:
    """What may be known of a study's numbers: trials, growths, repeats, and proposals that a rule refused; by number.

    Args:
        trials: All numbers of the storage in order.
        objectives: The study's.
    """
    observations = []
    for trial in trials:
        record = record_of(trial)
        if record is None or record.role not in ("trial", "growth", "repeat", "refused"):
            continue
        state: ObservationState = "running"
        values, failure = None, ""
        outcome = outcome_of(trial) if trial.state.is_finished() else None
        if record.role == "refused":
            state, failure = "refused", record.rule
        elif outcome is not None:
            values = measured_values(outcome, objectives)
            state, failure = ("ok", "") if values is not None else ("failed", outcome.kind)
        observations.append(
            Observation(
                trial.number,
                state,
                trial.params,
                values,
                failure,
                fidelity=record.share,
                repeat_of=record.of if record.role == "repeat" else None,
                rung=record.rung,
                continues=record.of if record.role == "growth" else None,
                curve=curve_of(trial),
                key=record.key,
            )
        )
    return observations


def num_refused(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    """Rule id -> proposals it refused."""
    counts: dict[str, int] = {}
    for trial in trials:
        record = record_of(trial)
        if record is not None and record.role == "refused":
            counts[record.rule] = counts.get(record.rule, 0) + 1
    return counts


def trial_folder(study_folder: Path, number: int) -> Path:
    """``trials/<id>`` of a study."""
    return study_folder / "trials" / str(number)
