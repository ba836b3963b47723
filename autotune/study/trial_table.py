"""A study's numbers in its storage: created with what must never be missing, and told in steps that can be taken up
again after a kill."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.search.curves import Curve
from autotune.search.optuna_samplers import distribution_of
from autotune.space.objectives import Objective
from autotune.space.space import Scalar, Space
from autotune.study.lease import Lease, lease_key
from autotune.study.record import (
    CORPUS_KEY,
    CURVE_KEY,
    OUTCOME_KEY,
    RECORD_KEY,
    SEARCH_KEY,
    Record,
    lease_of,
    measured_values,
    record_of,
)
from engine.outcome import Outcome

FAILED_VALUES = {"speed": 0.0, "memory": float(2**50), "quality": 100.0}
FAILED_VALUE = 1e30
"""Stored where nothing was measured: finite, and worse than anything real (negated where more is better). A constraint
goes with them."""
FAILED_CONSTRAINT = "failed"
DECISION_SECONDS = 0.02
"""Between looks at what another driver decides."""
PARTIAL_CONSTRAINT = "partial"
"""Of a part of a training: its loss must not pass for that of a whole one."""


class TrialTable:
    """All numbers of one study.

    Args:
        storage: Where they live. The study is created in it if it is not there.
        name: The study's name there.
        space: Its objectives and dimensions.
    """

    def __init__(self, storage: BaseStorage, name: str, space: Space) -> None:
        self._storage = storage
        self._space = space
        directions = [objective.direction for objective in space.objectives]
        self._study = optuna.create_study(study_name=name, storage=storage, directions=directions, load_if_exists=True)
        self._study_id = storage.get_study_id_from_name(name)

    def all(self) -> list[FrozenTrial]:
        """All numbers in order."""
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def create(
        self,
        lease: Lease,
        *,
        record: Record | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        state: TrialState = TrialState.RUNNING,
    ) -> int:
        """A new number that holds its lease (and record, and parameters) from the first moment."""
        distributions: dict[str, BaseDistribution] = {d.name: distribution_of(d) for d in self._space.dimensions}
        attributes: dict[str, Any] = {lease_key(lease.attempt): lease.encode()}
        if record is not None:
            attributes[RECORD_KEY] = record.encode()
        template = create_trial(
            state=state,
            params=dict(parameters or {}),
            distributions={name: distributions[name] for name in parameters or {}},
            user_attrs=attributes,
        )
        trial_id = self._storage.create_new_trial(self._study_id, template)
        return self._storage.get_trial_number_from_id(trial_id)

    def write_parameters(self, number: int, parameters: Mapping[str, Scalar]) -> None:
        """Store the values that were chosen for a number."""
        distributions = {d.name: distribution_of(d) for d in self._space.dimensions}
        for name, value in parameters.items():
            distribution = distributions[name]
            internal = distribution.to_internal_repr(value)
            self._storage.set_trial_param(self._id(number), name, internal, distribution)

    def write_record(self, number: int, record: Record) -> None:
        """Say what the number is."""
        self._write(number, RECORD_KEY, record.encode())

    def write_lease(self, number: int, lease: Lease) -> None:
        """Store a lease on the number."""
        self._write(number, lease_key(lease.attempt), lease.encode())

    def finish(self, number: int, outcome: Outcome, curve: Curve | None = None, *, is_partial: bool = False) -> None:
        """Record the outcome of a trial. It is written first and decides all the rest, so whoever finds a trial that
        has one and is not finished can finish it with the same call.

        Args:
            number: The number.
            outcome: Its outcome.
            curve: Its training loss, where trials grow.
            is_partial: It is a part of a training.
        """
        if curve is not None:
            self._write(number, CURVE_KEY, curve.encode())
        self._write(number, OUTCOME_KEY, outcome.model_dump_json())
        self.tell(number, measured_values(outcome, self._space.objectives), is_partial=is_partial)

    def tell(self, number: int, values: Mapping[str, float] | None, *, is_partial: bool = False) -> None:
        """Finish a number with values and constraints (feasible: at most 0), always finite: a NaN would hide a failure.

        Args:
            number: The number.
            values: Objective name -> value; None for a failure.
            is_partial: They are of a part of a training.
        """
        objectives = self._space.objectives
        trial = optuna.Trial(self._study, self._id(number))
        constraints = {FAILED_CONSTRAINT: 0.0 if values is not None else 1.0}
        constraints |= {PARTIAL_CONSTRAINT: 1.0} if is_partial else {}
        constraints |= {o.name: _violation(o, values) for o in objectives if o.bound is not None}
        for name, violation in constraints.items():
            if name not in trial.constraints:  # a killed driver may have set it
                trial.set_constraint(name, violation)
        told = [_failed_value(o) if values is None else values[o.name] for o in objectives]
        self._study.tell(number, told, state=TrialState.COMPLETE, skip_if_finished=True)

    def dismiss(self, number: int) -> None:
        """Finish a number of which there is nothing to learn."""
        self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def twin_of(self, number: int, key: str, chosen: Mapping[str, Scalar]) -> int | None:
        """Another number with the same candidate; None when it is new.

        Several drivers may have chosen the same at once. Of two that are still being chosen the lower number goes on.
        A higher one may have decided before this one's values could be seen, so that its decision is awaited.

        Args:
            number: A number with chosen values and no record yet.
            key: The candidate's.
            chosen: Its values.
        """
        while True:
            trials = self.all()
            is_unsure = False
            for other in trials[:number] + trials[number + 1 :]:
                record = record_of(other)
                if record is not None:
                    if record.role == "trial" and record.key == key:
                        return other.number
                elif other.state == TrialState.RUNNING and other.params == chosen:
                    if other.number < number:
                        return other.number
                    lease = lease_of(other, trials)
                    is_unsure |= lease is not None and not lease.has_lapsed()
            if not is_unsure:
                return None
            time.sleep(DECISION_SECONDS)

    def search(self) -> dict[str, Any] | None:
        """Space and seed of the study as ``set_search`` kept them, None in a new one."""
        text = self._storage.get_study_user_attrs(self._study_id).get(SEARCH_KEY, "null")
        search: dict[str, Any] | None = json.loads(text)
        return search

    def set_search(self, search: Mapping[str, Any]) -> None:
        """Keep the space and seed beside the trials: a database may be used from several runs folders."""
        self._storage.set_study_user_attr(self._study_id, SEARCH_KEY, json.dumps(search))

    def corpus_hash(self) -> str | None:
        """Hash of the text that the study's trials used, None before the first."""
        return self._storage.get_study_user_attrs(self._study_id).get(CORPUS_KEY)

    def set_corpus_hash(self, corpus_hash: str) -> None:
        """Note the text's hash."""
        self._storage.set_study_user_attr(self._study_id, CORPUS_KEY, corpus_hash)

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _write(self, number: int, key: str, text: str) -> None:
        self._storage.set_trial_user_attr(self._id(number), key, text)


def _violation(objective: Objective, values: Mapping[str, float] | None) -> float:
    return 1.0 if values is None else objective.violation(values[objective.name])


def _failed_value(objective: Objective) -> float:
    return FAILED_VALUES.get(objective.name, -FAILED_VALUE if objective.direction == "maximize" else FAILED_VALUE)
