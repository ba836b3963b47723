"""A sweep on disk: created or continued, asked for trials, told their outcomes.

Several drivers may work on one study at once, on one machine or several. Whatever has to be decided once (which trials
are within the budget, who takes over an interrupted trial) is decided by the order in which the storage numbers what is
created: whoever creates a number sees all lower ones.
"""

from __future__ import annotations

import datetime
import math
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.prior.predict import TaskPrior
from autotune.search.fidelity import TOLERANCE, next_growth
from autotune.search.forecast import Forecast
from autotune.search.gain import Gain
from autotune.search.sampler import Interruptible, Sampler, SearchStopped
from autotune.search.samplers import DEFAULT_SAMPLER, make_sampler
from autotune.space.enumerate import Enumeration
from autotune.space.space import Candidate, Scalar, Space
from autotune.study.assigning import Assigner
from autotune.study.assignment import Assignment
from autotune.study.child import end_recorded
from autotune.study.growth import (
    curve_of,
    drop_checkpoint,
    is_first,
    links_of,
    num_spent,
)
from autotune.study.holding import Holding
from autotune.study.proposing import Proposer
from autotune.study.record import (
    Record,
    lease_of,
    measured_values,
    outcome_of,
    record_of,
    snapshot_of,
    trial_folder,
)
from autotune.study.runner import evidence
from autotune.study.snapshot import StudySnapshot
from autotune.study.store import absolute_url, open_database, open_journal, read_journal
from autotune.study.study_file import (
    ANOTHER_STUDY,
    STUDY_FILE,
    StudyFile,
    changed_search,
    differences,
    read_study_file,
    refuse_changes,
    storage_address,
    this_environment,
    write_study_file,
)
from autotune.study.trial_table import TrialTable
from engine.atomic import make_folder, write_text
from engine.errors import UserError
from engine.file_lock import file_lock, is_locked
from engine.outcome import OUTCOME_FILE, Outcome

OPEN_LOCK = "study.flock"
"""Held while a study is created or opened."""
DRIVERS_LOCK = "drivers.flock"
"""Shared by all living drivers of a study."""
STOP_FILE = "stop"
"""Drivers that started before it was written end."""
MAX_ATTEMPTS = 10
"""A trial that was interrupted so often (it may be what kills its driver) is given up as a fault of the machine."""


class Nothing(Enum):
    """Why there is no trial to run."""

    WAIT = "others run the last ones"
    DONE = "the budget is used up"
    EXHAUSTED = "every candidate of the space was tried"
    ENOUGH = "one more trial is not expected to be worth it"


class CorpusChanged(UserError):
    """The text is no longer what the study began with, so losses can't be compared."""


class Study:
    """An open study. Made by ``create_or_open``; safe to use from several threads; ``close`` it at the end."""

    def __init__(
        self,
        folder: Path,
        file: StudyFile,
        space: Space,
        enumeration: Enumeration | None,
        storage: BaseStorage,
        num_trials: int | None,
        sampler: Sampler,
        forecast: Forecast | None = None,
        task_prior: TaskPrior | None = None,
        enough: float | None = None,
    ) -> None:
        self.folder = folder
        self.file = file
        self.space = space
        self.num_trials = num_trials
        self._started = time.time()
        self._forecast = forecast
        self._storage = storage
        self._table = TrialTable(storage, file.name, space)
        candidates = [(space.candidate(guess), guess) for guess in file.guesses]
        guesses = {candidate.key: guess for candidate, guess in candidates if candidate.is_legal}
        plans = forecast.enumeration if forecast else enumeration
        self._proposer = Proposer(
            space, self._table, sampler, file.seed, num_trials, guesses, plans, forecast, task_prior, enough
        )
        self._lock = threading.RLock()
        self._held = Holding(self._table)
        self._assigner = Assigner(folder, file.name, file.seed, space, self._table)
        self._num_rejected = 0
        self._is_exhausted = self._is_stopping = False
        self._repeats: tuple[int, int] | None = None
        if isinstance(sampler, Interruptible):
            sampler.should_stop = lambda: self._is_stopping or self.stop_requested()
        self._alive = ExitStack()
        self._alive.enter_context(file_lock(folder / DRIVERS_LOCK, shared=True))

    @classmethod
    def create_or_open(
        cls,
        folder: Path,
        space: Space,
        enumeration: Enumeration | None = None,
        *,
        sampler: str | None = None,
        storage_url: str | None = None,
        num_trials: int | None = None,
        seed: int | None = None,
        forecast: Forecast | None = None,
        task_prior: TaskPrior | None = None,
        guesses: Sequence[Mapping[str, Scalar]] = (),
        enough: float | None = None,
    ) -> Study:
        """Create the study in ``folder``, or continue the one that is there.

        Args:
            folder: The study's folder; its name is the study's.
            space: What to search.
            enumeration: The legal plans of a training space.
            sampler: Name of what proposes candidates; None for the study's own, or the default in a new one.
            storage_url: Database address; None for the journal in the folder, or for where the study lives already.
            num_trials: Trials in total, earlier ones included; None for no limit.
            seed: Seed of a new study (0 by default); of an existing one it must be the same.
            forecast: What the cost model says of the candidates, to rank and filter them by; None to try them all.
            task_prior: What the meta-learned prior says of quality, for samplers.
            guesses: Candidates to try first (``guesses.guess_of``), beside those that the study has already.
            enough: End when one more trial is expected to gain less (see ``gain``); None to use up the budget.

        Raises:
            UserError: The space, seed or storage differs from the study's (with the difference), or it can't be opened.
        """
        make_folder(folder)
        with file_lock(folder / OPEN_LOCK):
            refuse_changes(folder, space, storage_url, seed)
            if (folder / STUDY_FILE).exists():
                file = read_study_file(folder)
                if num_trials is not None:
                    file = file.changed(trials=max(num_trials, file.trials or 0))
                if sampler is not None:
                    file = file.changed(sampler=sampler)
                file = file.changed(guesses=(*file.guesses, *(dict(g) for g in guesses if dict(g) not in file.guesses)))
            else:
                file = StudyFile(
                    name=folder.name,
                    created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                    seed=seed or 0,
                    storage=storage_address(storage_url),
                    trials=num_trials,
                    sampler=sampler or DEFAULT_SAMPLER,
                    guesses=tuple(map(dict, guesses)),
                    environment=this_environment(),
                    space=dict(space.data),
                )
            proposer = make_sampler(file.sampler)
            url = absolute_url(storage_url) if storage_url else file.storage
            storage = open_database(url) if url else open_journal(folder)
            study = cls(folder, file, space, enumeration, storage, num_trials, proposer, forecast, task_prior, enough)
            try:
                study._claim_storage()
                write_study_file(folder, file)
            except BaseException:
                study.close()
                raise
            return study

    def close(self) -> None:
        """Let go of the study. Trials of ours that have no outcome are free for the next driver."""
        self._held.close()
        self._alive.close()

    def ask(self) -> Assignment | Nothing:
        """The next trial to run: an interrupted one, else a new one, else a repeat that was planned."""
        with self._lock:
            while True:
                try:
                    return self._next()
                except UpdateFinishedTrialError:  # this process was held up so long that another gave its number up
                    continue
                except SearchStopped:  # its number is free when we close, and given up by whoever comes next
                    return Nothing.WAIT

    def tell(self, assignment: Assignment, outcome: Outcome) -> bool:
        """Record the outcome of a trial.

        Returns:
            False when somebody else took the trial over meanwhile: then the outcome is not recorded.

        Raises:
            CorpusChanged: The run used another text than the study; its outcome is not recorded.
        """
        with self._lock:
            if not self._held.is_ours(assignment.number, assignment.attempt):
                return False
            if outcome.kind == "ok" and outcome.corpus_hash is not None:
                try:
                    self.require_corpus(outcome.corpus_hash)
                except CorpusChanged:
                    (assignment.folder / OUTCOME_FILE).unlink(missing_ok=True)  # no evidence of this study
                    self.release(assignment)
                    raise
            try:
                self._finish(assignment, self.space.completed(outcome, assignment.config))
            except UpdateFinishedTrialError:
                self._held.drop(assignment.number)
                return False
            self._held.drop(assignment.number)  # not when the storage fails: the same call is made again then
            return True

    def _finish(self, assignment: Assignment, outcome: Outcome) -> None:
        fidelity, config, number = self.space.fidelity, assignment.config, assignment.number
        is_partial, curve = assignment.share < 1, None
        if fidelity is not None and config is not None and assignment.repeat_of is None:
            trials = self._table.all()
            record = record_of(trials[number])
            assert record is not None
            folders = [trial_folder(self.folder, link) for link in links_of(number, record, trials)]
            curve = curve_of(config, fidelity, folders)
        self._table.finish(number, outcome, curve, is_partial=is_partial)
        if config is not None and (outcome.kind != "ok" or not is_partial):  # what a program keeps is its own
            drop_checkpoint(assignment.folder)

    def release(self, assignment: Assignment) -> None:
        """Give an unfinished trial back, for whoever asks next."""
        with self._lock:
            if self._held.is_ours(assignment.number, assignment.attempt):
                self._held.release(assignment.number)
            self._held.drop(assignment.number)

    def retry(self, assignment: Assignment) -> Assignment | None:
        """The same trial for one more attempt, still ours (after a fault of the machine); None where it is not."""
        with self._lock:
            is_ours = self._held.is_ours(assignment.number, assignment.attempt)
            return self._hold(assignment, assignment.attempt + 1) if is_ours else None

    def require_corpus(self, corpus_hash: str) -> None:
        """Make sure that the text is the one the study's trials used; that of a new study is remembered.

        Raises:
            CorpusChanged: It is another.
        """
        with self._lock:
            known = self._table.corpus_hash()
            if known is None:
                self._table.set_corpus_hash(corpus_hash)
            elif known != corpus_hash:
                hashes = f"(hash {known[:12]}, now {corpus_hash[:12]})"
                message = f"the text changed since study {self.file.name!r} began {hashes}: losses can't be compared"
                raise CorpusChanged(message, hint=f"bring the old text back, or {ANOTHER_STUDY}")

    def is_lost(self, number: int) -> bool:
        """Whether another driver took a trial of ours over, because it could not see us for too long."""
        return self._held.is_lost(number)

    def set_budget(self, num_trials: int | None) -> None:
        """Trials in total from now on, earlier ones included; None for no limit."""
        with self._lock:
            self.num_trials = num_trials
            self._proposer = replace(self._proposer, num_trials=num_trials)

    def plan_repeats(self, number: int, count: int) -> None:
        """Have ``ask`` hand out repeats of a trial with other seeds, until the study has ``count`` of them, and nothing
        new (a budget of time alone would never end)."""
        self._repeats = (number, count)

    def remarks(self) -> list[str]:
        """What the search has to say of itself now, for people."""
        with self._lock:
            return self._proposer.remarks()

    def expected_gain(self) -> Gain | None:
        """What one more trial is expected to bring; None while that is not known."""
        with self._lock:
            return self._proposer.expected_gain()

    def stop_proposing(self) -> None:
        """Give up a proposal that takes long: ``ask`` says to wait then. May be called from signal handlers."""
        self._is_stopping = True

    def stop_requested(self) -> bool:
        """Whether ``request_stop`` was called since this study was opened."""
        try:
            return (self.folder / STOP_FILE).stat().st_mtime > self._started
        except OSError:
            return False

    def snapshot(self) -> StudySnapshot:
        """The study now, as plain data."""
        with self._lock:
            return snapshot_of(self.folder, self.file, self._storage)

    def _claim_storage(self) -> None:
        """Make sure that the trials in the storage are of this search (another runs folder may use the database)."""
        search = {"seed": self.file.seed, **self.file.space}
        known = self._table.search()
        if known is None:
            self._table.set_search(search)
        elif changes := differences(known, search):
            raise changed_search(self.file.name, changes)

    def _next(self) -> Assignment | Nothing:
        if (taken := self._take_over()) is not None:
            return taken
        while True:
            trials = self._table.all()
            if self._repeats is not None:
                reason = Nothing.DONE
                break
            if (assignment := self._grow(trials)) is not None:
                return assignment
            if not self._may_begin(trials):
                reason = Nothing.DONE
                break
            if self._proposer.is_enough():
                reason = Nothing.ENOUGH
                break
            proposal = None if self._is_exhausted else self._propose()
            if proposal is None and not self._is_exhausted:
                self._is_exhausted = True  # those begun may go on now
                continue
            if proposal is None:
                reason = Nothing.EXHAUSTED
                break
            number, chosen = proposal
            if (assignment := self._decide(number, chosen)) is not None:
                return assignment
        if any(trial.state == TrialState.RUNNING for trial in trials):
            return Nothing.WAIT
        return self._repeat(trials) or reason

    # What to try next ------------------------------------------------------------------------------------------------

    def _left(self, trials: Sequence[FrozenTrial]) -> float:
        """What is left of the budget beside these numbers, in full trainings."""
        if self.num_trials is None:
            return math.inf
        return self.num_trials - num_spent(trials, self.space.fidelity.cost(0) if self.space.fidelity else 1.0)

    def _may_begin(self, trials: Sequence[FrozenTrial]) -> bool:
        """Whether the budget has room for one more candidate to be trained in full."""
        needed = self.space.fidelity.cost_from(0) if self.space.fidelity else 1.0
        return self._left(trials) >= needed - TOLERANCE

    def _grow(self, trials: Sequence[FrozenTrial]) -> Assignment | None:
        """The next candidate to train on, where trials grow; None to begin a new one."""
        fidelity = self.space.fidelity
        if fidelity is None:
            return None
        while True:
            may_begin = self._may_begin(trials) and not self._is_exhausted
            growth = next_growth(
                self._proposer.measured(len(trials)), fidelity, self._left(trials), may_begin=may_begin
            )
            if growth is None:
                return None
            before = record_of(trials[growth.of])
            assert before is not None
            share, cost = fidelity.share(growth.rung), fidelity.cost(growth.rung)
            record = replace(before, role="growth", of=growth.of, rung=growth.rung, share=share, cost=cost, origin="")
            parameters = trials[growth.of].params
            number = self._table.create(self._held.new_lease(1), record=record, parameters=parameters)
            lower = self._table.all()[:number]
            if is_first(record, lower) and self._left(lower) >= cost - TOLERANCE:
                return self._fresh(number, self.space.candidate(parameters), parameters, record)
            self._reject(number, Record("surplus"))  # another driver was first
            trials = self._table.all()

    def _propose(self) -> tuple[int, dict[str, Scalar]] | None:
        """A fresh number with chosen values; None when the space is used up."""
        guess = self._proposer.next_guess()
        if guess is not None:  # known to all from the first moment: others may be about to choose the same
            return self._table.create(self._held.new_lease(1), parameters=guess), guess
        number = self._table.create(self._held.new_lease(1))
        chosen = self._proposer.propose(number, self._num_rejected)
        if chosen is None:
            self._reject(number, Record("surplus"))
            return None
        self._table.write_parameters(number, chosen)
        return number, chosen

    def _decide(self, number: int, chosen: Mapping[str, Scalar]) -> Assignment | None:
        """Make a chosen number a trial, unless it is refused, known, or beyond the budget."""
        candidate = self.space.candidate(chosen)
        if not candidate.is_legal:
            self._reject(number, Record("refused", rule=candidate.rule))
            return None
        key = candidate.key
        is_guess = key in self._proposer.guesses
        if not is_guess and self._forecast and candidate.run and (rule := self._forecast.refusal(candidate.run)):
            self._reject(number, Record("refused", rule=rule))
            return None
        if (twin := self._table.twin_of(number, key, chosen)) is not None:
            self._reject(number, Record("cached", key=key, of=twin))
            return None
        if not self._may_begin(self._table.all()[:number]):
            self._reject(number, Record("surplus", key=key))
            return None
        self._num_rejected = 0
        forecast = self._forecast.of(candidate.run) if self._forecast and candidate.run else {}
        record = Record("trial", key, candidate.label, forecast=forecast, is_guess=is_guess)
        if (fidelity := self.space.fidelity) is not None:
            record = replace(record, share=fidelity.share(0), cost=fidelity.cost(0))
        self._table.write_record(number, record)
        return self._fresh(number, candidate, chosen, record)

    def _reject(self, number: int, record: Record) -> None:
        self._num_rejected += record.role in ("refused", "cached")
        self._table.write_record(number, record)
        self._close_rejected(number, record)

    def _close_rejected(self, number: int, record: Record) -> None:
        """Tell the sampler what a number is worth that is never run."""
        original = self._table.all()[record.of] if record.of is not None else None
        if record.role == "refused":
            self._table.tell(number, None)
        elif record.role == "cached" and original is not None and original.state == TrialState.COMPLETE:
            outcome = outcome_of(original)
            values = measured_values(outcome, self.space.objectives) if outcome else None
            self._table.tell(number, values, is_partial=self.space.fidelity is not None)
        else:  # nothing is known yet, or nothing is to be learnt
            self._table.dismiss(number)

    def _repeat(self, trials: Sequence[FrozenTrial]) -> Assignment | None:
        if self._repeats is None:
            return None
        of, count = self._repeats
        original = trials[of]
        original_record = record_of(original)
        assert original_record is not None
        record = Record("repeat", original_record.key, original_record.plan, of=of)

        def num_repeats(trials: Sequence[FrozenTrial]) -> int:
            return sum(record_of(trial) == record for trial in trials)

        if num_repeats(trials) >= count:
            return None
        number = self._table.create(self._held.new_lease(1), record=record, parameters=original.params)
        if num_repeats(self._table.all()[:number]) >= count:  # another driver was first
            self._reject(number, Record("surplus"))
            return None
        return self._fresh(number, self.space.candidate(original.params), original.params, record)

    # Who runs it -----------------------------------------------------------------------------------------------------

    def _take_over(self) -> Assignment | None:
        """An interrupted trial to run again; those that only lack their telling are told on the way."""
        for trial in self._table.all():
            if trial.state != TrialState.RUNNING or trial.number in self._held.leases:
                continue
            lease = lease_of(trial, self._table.all())
            if lease is None or not self._held.is_free(lease):
                continue
            record = record_of(trial)
            if record is None:
                self._table.write_record(trial.number, Record("abandoned"))
                self._table.dismiss(trial.number)
            elif record.role not in ("trial", "growth", "repeat"):
                self._close_rejected(trial.number, record)
            elif record.role == "growth" and not is_first(record, self._table.all()[: trial.number]):
                self._reject(trial.number, Record("surplus"))  # its driver died before it could
            elif self._held.claim(trial.number, lease.attempt + 1):
                assignment = self._again(trial, lease.attempt + 1)
                if assignment is not None:
                    return assignment
        return None

    def _again(self, trial: FrozenTrial, attempt: int) -> Assignment | None:
        candidate = self.space.candidate(trial.params)
        assert candidate.is_legal, "the space is the one the trial was made from"
        record = record_of(trial)
        assert record is not None
        assignment = self._hold(self._assigner.assignment(trial.number, candidate, trial.params, record), attempt)
        end_recorded(assignment.folder)
        outcome = outcome_of(trial) or evidence(assignment)
        if outcome is None and (count := self._held.num_abandoned(trial)) >= MAX_ATTEMPTS:
            outcome = Outcome(kind="infra", detail=f"given up: its driver ended {count} times while it ran")
        if outcome is None:
            return self._assigner.prepared(assignment)
        self.tell(assignment, outcome)
        return None

    def _fresh(self, number: int, candidate: Candidate, chosen: Mapping[str, Scalar], record: Record) -> Assignment:
        assignment = self._assigner.assignment(number, candidate, chosen, record)
        if assignment.folder.exists():
            trials = self._table.all()
            lease = lease_of(trials[number], trials)
            if lease is None or lease.attempt > 1:
                raise UpdateFinishedTrialError("another driver took it over")
            # Of a number that was lost when an older journal was put back.
            end_recorded(assignment.folder)
            shutil.rmtree(assignment.folder)
        return self._assigner.prepared(self._hold(assignment, 1))

    def _hold(self, assignment: Assignment, attempt: int) -> Assignment:
        """Take the lease of an attempt and renew it from now on."""
        self._held.take(assignment.number, attempt)
        return replace(assignment, attempt=attempt)


def load_snapshot(folder: Path) -> StudySnapshot:
    """A study as plain data, read without disturbing those who write it.

    Raises:
        UserError: Unknown study, damaged journal, or a database that can't be reached.
    """
    file = read_study_file(folder)
    return snapshot_of(folder, file, open_database(file.storage) if file.storage else read_journal(folder))


def is_running(folder: Path) -> bool:
    """Whether a driver of the study lives on this machine."""
    return is_locked(folder / DRIVERS_LOCK)


def request_stop(folder: Path) -> None:
    """Ask all drivers of a study to end gracefully."""
    write_text(folder / STOP_FILE, datetime.datetime.now().astimezone().isoformat() + "\n")
