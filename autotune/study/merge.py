"""Studies of one search made into one: finished trials renumbered, with where each came from."""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from autotune.search.fidelity import TOLERANCE
from autotune.study.child import STDOUT_FILE
from autotune.study.command_runner import TRIAL_FILE
from autotune.study.record import (
    CORPUS_KEY,
    OUTCOME_KEY,
    RECORD_KEY,
    SEARCH_KEY,
    Record,
    outcome_of,
    place_of,
    record_of,
    trial_folder,
)
from autotune.study.runner import RUN_FILE
from autotune.study.store import open_database, open_journal, read_journal
from autotune.study.study_file import STUDY_FILE, StudyFile, differences, read_study_file, write_study_file
from engine.atomic import make_folder
from engine.errors import UserError
from engine.outcome import OUTCOME_FILE

KEPT_FILES = (RUN_FILE, TRIAL_FILE, OUTCOME_FILE, STDOUT_FILE)
"""What is copied of a trial's folder; telemetry and checkpoints stay where they are."""
RUNNING_ROLES = ("trial", "growth", "repeat")


@dataclass(frozen=True)
class Merged:
    """What a merge made."""

    num_trials: int
    num_repeats: int
    """Trials whose candidate an earlier study had tried too: they are repeats of it with other seeds."""
    num_same: int
    """Left out: the same trial stood in an earlier study, with the same outcome or with the same seed."""
    num_unfinished: int
    """Left out: they have no outcome."""


@dataclass(frozen=True)
class _Source:
    file: StudyFile
    folder: Path
    trials: list[FrozenTrial]
    corpus_hash: str | None


def merge_studies(sources: Sequence[Path], folder: Path) -> Merged:
    """Make one study of several.

    Args:
        sources: Folders of studies with equal spaces. They are only read, and may be running.
        folder: The new study's; its seed and sampler are the first one's.

    Raises:
        UserError: Fewer than two studies, unequal spaces or texts (with the difference), or ``folder`` exists.
    """
    check_new(folder)
    if len({path.resolve() for path in sources}) < 2:
        raise UserError("a merge needs two different studies", hint="autotune studies merge A B --into C")
    read = [_read(source) for source in sources]
    _check_alike(read)
    first = read[0]
    draft = start_draft(folder)
    storage = open_journal(draft)
    corpus_hash = next((source.corpus_hash for source in read if source.corpus_hash), None)
    study_id = create_study(storage, folder.name, first.file, corpus_hash)
    merger = _Merger(storage, study_id, draft)
    for source in read:
        merger.add(source)
    merged = merger.result()
    finish_draft(draft, folder, first.file, merger.num_trainings)
    return merged


def check_new(folder: Path) -> None:
    """Make sure that nothing is where a new study is to be.

    Raises:
        UserError: Something is.
    """
    if (folder / STUDY_FILE).exists():
        raise UserError(f"there is a study {folder.name!r} already", hint="choose another name for the new one")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and holds something else", hint="choose another name for the new study")


def start_draft(folder: Path) -> Path:
    """A place beside ``folder`` where a study is made before it is there, so that a kill leaves no half of one."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    return make_folder(draft)


def finish_draft(draft: Path, folder: Path, file: StudyFile, num_trials: int) -> None:
    """Put the study where it belongs."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    file = file.changed(name=folder.name, created=now, storage=None, trials=num_trials or None)
    write_study_file(draft, file)
    os.replace(draft, folder)


def create_study(storage: BaseStorage, name: str, file: StudyFile, corpus_hash: str | None = None) -> int:
    """The study in its storage; its number there."""
    directions = [objective.direction for objective in file.objectives]
    optuna.create_study(study_name=name, storage=storage, directions=directions)
    study_id = storage.get_study_id_from_name(name)
    storage.set_study_user_attr(study_id, SEARCH_KEY, json.dumps({"seed": file.seed, **file.space}))
    if corpus_hash is not None:
        storage.set_study_user_attr(study_id, CORPUS_KEY, corpus_hash)
    return study_id


def _read(folder: Path) -> _Source:
    file = read_study_file(folder)
    storage = open_database(file.storage) if file.storage else read_journal(folder)
    try:
        study_id = storage.get_study_id_from_name(file.name)
    except KeyError:
        raise UserError(f"the storage of study {file.name!r} does not hold it", hint="leave it out") from None
    corpus_hash = storage.get_study_user_attrs(study_id).get(CORPUS_KEY)
    return _Source(file, folder, storage.get_all_trials(study_id), corpus_hash)


def _check_alike(sources: Sequence[_Source]) -> None:
    first = sources[0]
    for other in sources[1:]:
        changes = differences(first.file.space, other.file.space)
        if first.corpus_hash and other.corpus_hash and first.corpus_hash != other.corpus_hash:
            changes.append(f"changed  text: {first.corpus_hash[:12]} -> {other.corpus_hash[:12]}")
        if changes:
            raise UserError(
                f"studies {first.file.name!r} and {other.file.name!r} search different spaces:\n  "
                + "\n  ".join(changes),
                hint="only trials of one space can be compared: merge studies of the same space file",
            )


class _Merger:
    """Copies trials into one storage."""

    def __init__(self, storage: BaseStorage, study_id: int, folder: Path) -> None:
        self._storage = storage
        self._study_id = study_id
        self._folder = folder
        self._first: dict[str, int] = {}
        self._repeats: set[int] = set()
        self._outcomes: dict[tuple[str, str], int] = {}
        self._seeded: dict[tuple[str, int, int, str], int] = {}
        self._num_trials = self._num_repeats = self._num_same = self._num_unfinished = 0
        self._spent = 0.0

    def result(self) -> Merged:
        """What was done."""
        return Merged(self._num_trials, self._num_repeats, self._num_same, self._num_unfinished)

    @property
    def num_trainings(self) -> int:
        """Full trainings that the trials come to, which a budget counts."""
        return math.ceil(self._spent - TOLERANCE)

    def add(self, source: _Source) -> None:
        """Copy the finished trials of a study."""
        numbers: dict[int, int] = {}
        for trial in source.trials:
            record = record_of(trial)
            if record is None or record.role not in RUNNING_ROLES:
                continue
            outcome = outcome_of(trial)
            if not trial.state.is_finished() or outcome is None:
                self._num_unfinished += 1
                continue
            if record.of is not None and record.of not in numbers:  # what it belongs to is not there
                self._num_unfinished += 1
                continue
            told = (record.key, trial.user_attrs[OUTCOME_KEY])
            # Studies of one seed give equal seeds at equal places: no second look at a candidate then.
            seeded = (record.key, source.file.seed, place_of(trial.number, source.trials), outcome.kind)
            same = self._outcomes.get(told, None if record.origin else self._seeded.get(seeded))
            if same is not None:
                self._num_same += 1
                numbers[trial.number] = same
                continue
            new = self._copied(trial, record, source, numbers)
            self._outcomes[told] = numbers[trial.number] = new
            if not record.origin:
                self._seeded.setdefault(seeded, new)

    def _copied(self, trial: FrozenTrial, record: Record, source: _Source, numbers: dict[int, int]) -> int:
        origin = record.origin or f"{source.file.name}/{trial.number}"
        changed = replace(record, of=None if record.of is None else numbers[record.of], origin=origin)
        is_known = record.role == "trial" and record.key in self._first
        if is_known or changed.of in self._repeats:  # what continues or repeats a repeat is one, too
            changed = replace(changed, role="repeat", of=self._first[record.key])
        template = copy.copy(trial)
        template.user_attrs = {**trial.user_attrs, RECORD_KEY: changed.encode()}
        number = self._storage.get_trial_number_from_id(self._storage.create_new_trial(self._study_id, template))
        self._spent += changed.cost if changed.role in ("trial", "growth") else 0.0
        if changed.role == "trial":
            self._first[record.key] = number
            self._num_trials += 1
        elif changed.role == "repeat":
            self._repeats.add(number)
            self._num_repeats += 1
        copy_files(trial_folder(source.folder, trial.number), trial_folder(self._folder, number))
        return number


def copy_files(source: Path, target: Path) -> None:
    """What is kept of a trial's folder."""
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, make_folder(target) / name)
