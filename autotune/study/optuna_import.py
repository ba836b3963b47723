"""A study of Optuna's made into one of ours: its distributions become a space, its trials are kept as they ended."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.search.samplers import DEFAULT_SAMPLER
from autotune.space.command import CommandSpace
from autotune.space.command_grammar import NAME, command_space
from autotune.space.objectives import Objective
from autotune.space.space import Scalar
from autotune.study.lease import Lease
from autotune.study.measured import outcome_of_measured
from autotune.study.merge import check_new, create_study, finish_draft, start_draft
from autotune.study.record import Record
from autotune.study.store import hide_password, open_database, open_journal
from autotune.study.study_file import StudyFile, this_environment
from autotune.study.trial_table import TrialTable
from engine.errors import UserError
from engine.outcome import Outcome

MAX_STEPS = 1000
"""Values of a range with steps that are listed one by one."""


@dataclass(frozen=True)
class Imported:
    """What an import made."""

    num_trials: int
    num_failed: int
    """Of them: failed and pruned ones."""
    num_left_out: int
    """Trials without an end."""
    notes: tuple[str, ...]
    """What is not quite as it was, for people."""


def import_optuna(url: str, name: str | None, folder: Path) -> Imported:
    """Make a study of ours from one of Optuna's.

    Args:
        url: Where it lives: a database address, or the file of an Optuna journal.
        name: Its name there; None for the only one.
        folder: The new study's.

    Raises:
        UserError: It is not there, its directions are not known, or its parameters fit no space of ours.
    """
    check_new(folder)
    storage = _open(url)
    study_id, name = _find(storage, url, name)
    directions = storage.get_study_directions(study_id)
    trials = storage.get_all_trials(study_id)
    notes: list[str] = []
    objectives = _objectives(directions, storage, study_id, name, notes)
    forms, renamed = _forms(trials, notes)
    space = command_space(forms, objectives, name=folder.name)
    file = StudyFile(
        name=folder.name,
        created="",
        sampler=DEFAULT_SAMPLER,
        environment=this_environment(),
        space=dict(space.data),
    )
    draft = start_draft(folder)
    ours = open_journal(draft)
    create_study(ours, folder.name, file)
    table = TrialTable(ours, folder.name, space)
    known: dict[str, int] = {}
    counts = {"trials": 0, "failed": 0, "left_out": 0}
    for trial in trials:
        outcome = _outcome(trial, list(objectives))
        if outcome is None:
            counts["left_out"] += 1
            continue
        _add(table, space, trial, outcome, renamed, f"{name}/{trial.number}", known)
        counts["trials"] += 1
        counts["failed"] += outcome.kind != "ok"
    finish_draft(draft, folder, file, len(known))
    return Imported(counts["trials"], counts["failed"], counts["left_out"], tuple(notes))


def _open(url: str) -> BaseStorage:
    path = Path(url.removeprefix("sqlite:///").partition("?")[0])
    if "://" not in url:
        if not path.is_file():
            raise UserError(f"there is no Optuna journal {url}", hint="give its path, or a database address")
        try:
            return JournalStorage(JournalFileBackend(url))
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:  # what Optuna makes of other files
            raise UserError(
                f"{url} can't be read as an Optuna journal: {type(error).__name__}: {error}",
                hint="give the file of an Optuna journal, or a database address",
            ) from None
    if url.startswith("sqlite:///") and not path.is_file():  # opening would make an empty one
        raise UserError(f"there is no database {path}", hint="correct the path: sqlite:////absolute/path/studies.db")
    return open_database(url, is_foreign=True)


def _find(storage: BaseStorage, url: str, name: str | None) -> tuple[int, str]:
    studies = {study.study_name: study._study_id for study in storage.get_all_studies()}
    if name is None and len(studies) == 1:
        name = next(iter(studies))
    if name is None or name not in studies:
        known = ", ".join(sorted(studies)) or "none"
        what = "which study is meant?" if name is None else f"there is no study {name!r}"
        raise UserError(f"{what} ({hide_password(url)} holds: {known})", hint="say which: --optuna-name NAME")
    return studies[name], name


def _objectives(
    directions: Sequence[StudyDirection], storage: BaseStorage, study_id: int, name: str, notes: list[str]
) -> dict[str, dict[str, str]]:
    names = storage.get_study_system_attrs(study_id).get("study:metric_names")
    if not names:
        names = ["value"] if len(directions) == 1 else [f"value_{index}" for index in range(len(directions))]
    words = {StudyDirection.MINIMIZE: "minimize", StudyDirection.MAXIMIZE: "maximize"}
    found = {}
    for metric, direction in zip(names, directions, strict=True):
        if direction not in words:
            raise UserError(
                f"study {name!r} does not say whether {metric} is to be minimised or maximised",
                hint="create it in Optuna with a direction; which way is better can't be guessed",
            )
        clean = re.sub(r"[^A-Za-z0-9_.-]", "_", _clean(str(metric)))
        notes += [f"{metric} is called {clean}"] if clean != metric else []
        found[clean] = {"direction": words[direction]}
    if len(found) < len(directions):
        raise UserError(f"metrics can't be told apart: {', '.join(map(str, names))}", hint="rename them in Optuna")
    return found


def _forms(trials: Sequence[FrozenTrial], notes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Parameters as forms of the grammar; what is not quite as it was is added to ``notes``.

    Returns:
        Name -> form or fixed value; name in Optuna -> name.
    """
    found: dict[str, list[BaseDistribution]] = {}
    for trial in trials:
        for name, distribution in trial.distributions.items():
            found.setdefault(name, []).append(distribution)
    if not found:
        raise UserError("the study has no trial with parameters", hint="there is nothing to import")
    renamed = {name: _clean(name) for name in found}
    if len(set(renamed.values())) < len(renamed):
        raise UserError(f"parameters can't be told apart: {', '.join(found)}", hint="rename them in Optuna")
    notes += [f"{old} is called {new}" for old, new in renamed.items() if old != new]
    forms = {}
    for name, distributions in found.items():
        forms[renamed[name]] = _form(name, distributions, notes)
        if any(name not in trial.params for trial in trials if trial.state.is_finished()):
            notes.append(f"{name} was not in every trial; Optuna does not say when, so it is searched always")
    if all(not isinstance(form, dict) for form in forms.values()):
        raise UserError("every parameter of the study has one value alone", hint="there is nothing to search")
    return forms, renamed


def _form(name: str, distributions: Sequence[BaseDistribution], notes: list[str]) -> Any:
    """One form that holds the values of all of a parameter's distributions."""
    kinds = {type(distribution) for distribution in distributions}
    if len(kinds) > 1:
        words = " and ".join(sorted(kind.__name__.removesuffix("Distribution").lower() for kind in kinds))
        raise UserError(f"the parameter {name!r} is {words} in different trials", hint="import them apart")
    first = distributions[0]
    if isinstance(first, CategoricalDistribution):
        choices: list[Any] = []
        for distribution in distributions:
            assert isinstance(distribution, CategoricalDistribution)
            choices += [choice for choice in distribution.choices if not _stands_in(choice, choices)]
        return {"values": choices} if len(choices) > 1 else choices[0]
    ranges = [d for d in distributions if isinstance(d, FloatDistribution | IntDistribution)]
    low, high = min(d.low for d in ranges), max(d.high for d in ranges)
    if any((d.low, d.high) != (low, high) for d in ranges):
        notes.append(f"{name} had several ranges; it is searched from {low:g} to {high:g}")
    if low == high:
        return low
    if isinstance(first, IntDistribution):
        steps = {d.step for d in ranges if isinstance(d, IntDistribution)}
        whole_step = math.gcd(*(int(s or 1) for s in steps), *(int(d.low - low) for d in ranges))
        if all(d.log for d in ranges):  # Optuna knows no steps there
            return {"log_int": [low, high]}
        if any(d.log for d in ranges):
            notes.append(f"{name} was searched by its logarithm at times; it is searched evenly here")
        return {"int": [low, high], "step": max(whole_step, 1)}
    if any(d.step for d in ranges):
        step = min(float(d.step) for d in ranges if d.step)
        count = round((high - low) / step) + 1
        if count <= MAX_STEPS:
            return {"values": [round(low + index * step, 12) for index in range(count)]}
        notes.append(f"{name} had steps of {step:g}; they are left out")
    is_log = all(d.log for d in ranges)
    return {"log_float" if is_log else "float": [low, high]}


def _stands_in(choice: object, choices: Sequence[object]) -> bool:
    return any(type(other) is type(choice) and other == choice for other in choices)


def _clean(name: str) -> str:
    """A name that a space can have."""
    clean = re.sub(r"[\s{}]", "_", name)
    return clean if re.fullmatch(NAME, clean) and clean not in ("seed", "trial_folder") else f"_{clean}"


def _outcome(trial: FrozenTrial, objectives: Sequence[str]) -> Outcome | None:
    """How a trial ended; None when it did not."""
    seconds = trial.duration.total_seconds() if trial.duration is not None else None
    figures = {
        str(key): float(value)
        for key, value in trial.user_attrs.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    if trial.state == TrialState.COMPLETE:
        values = dict(zip(objectives, trial.values, strict=True))
        outcome = outcome_of_measured({**figures, **values}, [Objective(name=name) for name in values])
        broken = {key: value for key, value in _constraints(trial).items() if value > 0}
        if broken and outcome.kind == "ok":
            outcome = outcome.changed(kind="user", detail=f"it broke its constraints: {broken}"[:500])
    elif trial.state == TrialState.PRUNED:
        last = max(trial.intermediate_values, default=None)
        told = "" if last is None else f" at step {last}, with {trial.intermediate_values[last]:g}"
        outcome = Outcome(kind="interrupted", detail=f"pruned{told}", metrics=figures)
    elif trial.state == TrialState.FAIL:
        reason = trial.system_attrs.get("fail_reason") or "failed"
        outcome = Outcome(kind="user", detail=" ".join(str(reason).split())[:500], metrics=figures)
    else:
        return None
    return outcome.changed(wall_seconds=seconds)


def _constraints(trial: FrozenTrial) -> Mapping[str, float]:
    given: Any = trial.constraints
    return given if isinstance(given, Mapping) else {}


def _add(
    table: TrialTable,
    space: CommandSpace,
    trial: FrozenTrial,
    outcome: Outcome,
    renamed: Mapping[str, str],
    origin: str,
    known: dict[str, int],
) -> None:
    values: dict[str, Scalar] = {renamed[name]: value for name, value in trial.params.items()}
    parameters = {d.name: _as_chosen(values[d.name], d.kind) for d in space.dimensions if d.name in values}
    candidate = space.candidate(parameters)
    if not candidate.is_legal:
        raise UserError(f"trial {trial.number} fits no space: {candidate.reason}", hint="leave it out in Optuna")
    first = known.get(candidate.key)
    role: Any = "trial" if first is None else "repeat"
    record = Record(role, candidate.key, candidate.label, of=first, origin=origin)
    number = table.create(Lease.new(1), record=record, parameters=parameters)
    table.finish(number, outcome)
    known.setdefault(candidate.key, number)


def _as_chosen(value: Scalar, kind: str) -> Scalar:
    """A value as the dimension's kind has it: steps of floats are rounded as their list is."""
    return round(value, 12) if kind == "categorical" and isinstance(value, float) else value
