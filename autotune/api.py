"""Tuning from Python: studies that are asked for trials and told results, and that call functions for them.

The public names are those of ``autotune`` itself (``autotune.Study``, ``autotune.tune`` ...); they are documented with
examples in ``docs/python_api.md``.
"""

from __future__ import annotations

import datetime
import inspect
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from autotune.apply.select import front_trials, knee_trial
from autotune.paths import check_name
from autotune.prior.predict import TaskPrior
from autotune.prior.rows import default_rows_file, read_rows
from autotune.search.samplers import DEFAULT_SAMPLER, make_sampler
from autotune.search.warm_start import task_prior_of
from autotune.space.command import CommandSpace
from autotune.space.command_grammar import command_space
from autotune.space.fidelity import ProgramFidelity
from autotune.space.objectives import Objective
from autotune.space.space import Scalar, TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import Stop
from autotune.study.driver import Driver, FirstFailures, Silent
from autotune.study.function_executor import FunctionExecutor, Measured, TrialFailed, call, outcome_of_failure
from autotune.study.growth import with_checkpoint
from autotune.study.guesses import guess_of
from autotune.study.measured import outcome_of_measured
from autotune.study.record import trial_folder
from autotune.study.snapshot import StudySnapshot
from autotune.study.study import OPEN_LOCK, Nothing
from autotune.study.study import Study as StoredStudy
from autotune.study.study_file import StudyFile, read_study_file, this_environment, write_study_file
from autotune.trials import Trial, TrialResult, result_of, trial_of
from engine.errors import UserError
from engine.file_lock import file_lock
from engine.outcome import Outcome
from engine.units import parse_duration

if TYPE_CHECKING:
    from autotune.study.executor import Executor

WAIT_SECONDS = 0.2
TRIAL_ARGUMENT = "trial"
"""A function with a parameter of this name gets the ``Trial`` itself there."""

Objectives = Mapping[str, str | Mapping[str, Any]] | Sequence[Mapping[str, Any]]
"""Name -> ``minimize`` or ``maximize``, or a mapping with ``direction`` and ``bound``; or a list as in a space file."""


class Study:
    """A search over named values: ask it what to try, tell it what came out.

    Without a folder and storage it lives in memory. With a folder it is kept there, and the same call goes on with it,
    also from several processes at once; below ``runs/studies`` it has its report by ``autotune report NAME``.

    Args:
        space: Name -> value or form, as in a space file: ``[16, 32]``, ``{"log_float": [1e-4, 1e-1]}``, ``{"int": [1,
            8]}``, with ``when`` and ``default`` for what is not always searched.
        objectives: Name -> ``minimize`` or ``maximize``, or a mapping with ``direction`` and ``bound``.
        folder: Folder of the study; its name is the study's.
        storage: Database address, such as ``sqlite:///studies.db``, in place of a journal in the folder.
        name: Of the study in a database, where no folder is given; commands know studies by their folders alone.
        constraints: Conditions over the values that every candidate has to meet.
        trials: Trials in total, earlier ones included; None for no limit.
        seed: Seed of a new study (0 by default).
        sampler: What proposes candidates; None for the study's own, or the default in a new one.
        task: What is trained, for the meta-learned prior (see ``docs/command_sweeps.md``).
        guesses: Values to try first.
        prior: Whether to begin with what earlier training runs say of hyperparameters, where there is a ``task``.
        fidelity: How trials grow, such as ``{"of": "epochs", "min": 0.1}`` (see ``docs/command_sweeps.md``); None where
            each is a full training.

    Raises:
        UserError: A mistake in any of these, or another space than the study was begun with.

    Example:
        >>> import autotune
        >>> study = autotune.Study({"x": {"float": [0, 1]}}, {"loss": "minimize"}, sampler="random")
        >>> for _ in range(20):
        ...     trial = study.ask()
        ...     study.tell(trial, (trial.params["x"] - 0.3) ** 2)
        >>> study.best.values["loss"] < 0.01
        True
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        objectives: Objectives,
        *,
        folder: str | Path | None = None,
        storage: str | None = None,
        name: str | None = None,
        constraints: Sequence[str] = (),
        trials: int | None = None,
        seed: int | None = None,
        sampler: str | None = None,
        task: Mapping[str, Any] | None = None,
        guesses: Sequence[Mapping[str, Scalar]] = (),
        prior: bool = True,
        fidelity: Mapping[str, Any] | None = None,
    ) -> None:
        if folder is not None and name is not None:
            raise UserError("a study has the name of its folder", hint="leave 'name' out, or the folder")
        if storage is not None and folder is None and name is None:
            raise UserError("a study in a database needs a name", hint='add name="mine", or a folder')
        _check_numbers(trials, seed)
        if not isinstance(space, Mapping):
            raise UserError(f"a space is a mapping of names to values, got {space!r}", hint='example: {"x": [1, 2]}')
        if isinstance(constraints, str) or isinstance(guesses, str | Mapping):
            given = "constraints" if isinstance(constraints, str) else "guesses"
            raise UserError(f"{given!r} is a list, even of one", hint="put it in [ ]")
        if not all(isinstance(guess, Mapping) for guess in guesses):
            raise UserError("each of 'guesses' is a mapping of names to values", hint='example: [{"x": 0.5}]')
        self._is_stored, self._is_kept = folder is not None or storage is not None, folder is not None
        self._scratch = None if folder is not None else tempfile.TemporaryDirectory(prefix="autotune-")
        scratch = Path() if self._scratch is None else Path(self._scratch.name)
        place = scratch / check_name(name or "study", "study") if folder is None else Path(folder)
        self.space: CommandSpace = command_space(
            space, objectives, constraints=constraints, task=task, fidelity=fidelity, name=place.absolute().name
        )
        if not self._is_kept and _resumes(self.space):
            raise UserError(
                "'fidelity.resumes': without a folder nothing is kept to go on from",
                hint="give the study a folder, or leave 'resumes' out",
            )
        chosen = [guess_of(guess, self.space) for guess in guesses]
        task_prior = task_prior_of(self.space, read_rows(default_rows_file())) if prior and task else None
        if self._is_stored:
            self._study = StoredStudy.create_or_open(
                place,
                self.space,
                sampler=sampler,
                storage_url=storage,
                num_trials=trials,
                seed=seed,
                task_prior=task_prior,
                guesses=chosen,
            )
        else:
            name = sampler or DEFAULT_SAMPLER
            self._study = _in_memory(place, self.space, name, trials, seed or 0, task_prior, chosen)
        self._asked: dict[int, Assignment] = {}
        self._end = weakref.finalize(self, _let_go, self._study, self._asked, self._scratch)

    @classmethod
    def open(cls, folder: str | Path, *, trials: int | None = None, sampler: str | None = None) -> Self:
        """A study that exists, with the space it was begun with: one of a function, a merged or an imported one.

        Args:
            folder: The study's.
            trials: Trials in total, earlier ones included.
            sampler: What proposes candidates from now on.

        Raises:
            UserError: There is none, or its trials are runs of the engine or of a program.
        """
        data = read_study_file(Path(folder)).space
        if "model" in data or "command" in data:
            raise UserError(
                f"the trials of study {Path(folder).name!r} are no calls of a function",
                hint="go on with it by: autotune sweep",
            )
        return cls(
            data["space"],
            data["objectives"],
            folder=folder,
            constraints=data.get("constraints", ()),
            task=data.get("task"),
            fidelity=data.get("fidelity"),
            trials=trials,
            sampler=sampler,
        )

    # Ask and tell ----------------------------------------------------------------------------------------------------

    def ask(self) -> Trial | None:
        """The next trial, ours until it is told; one that a killed process left comes first.

        Returns:
            The trial; None when the budget is used up, nothing new is in the space, or others run the last trials.

        Raises:
            UserError: The study is closed, or no candidate of its space is legal.
        """
        if not self._end.alive:
            raise UserError("the study is closed", hint="make it again with the same arguments, and it goes on")
        asked = self._study.ask()
        if asked is Nothing.EXHAUSTED and not self.snapshot().trials:
            raise UserError(
                "no candidate of the space is legal", hint="see which constraint refuses them, and loosen it"
            )
        return None if isinstance(asked, Nothing) else self._taken(asked)

    def tell(self, trial: Trial, result: Measured | TrialFailed) -> None:
        """What came out of a trial.

        Args:
            trial: From ``ask``.
            result: Objective -> value (further figures are kept too), the only objective's value, or a ``TrialFailed``.
                A value that is missing or not finite is a failure of the trial too.

        Raises:
            UserError: It is no trial of this study, or was told or given back already.
        """
        self._check_ours(trial)
        if isinstance(result, TrialFailed):
            outcome = outcome_of_failure(result)
        else:
            outcome = with_checkpoint(outcome_of_measured(result, self.space.objectives), trial.assignment)
        self._study.tell(trial.assignment, outcome)
        del self._asked[trial.number]  # not when the storage fails: it may be told again then

    def release(self, trial: Trial) -> None:
        """Give a trial back untold: it is asked for again.

        Raises:
            UserError: It is no trial of this study, or was told or given back already.
        """
        self._check_ours(trial)
        self._study.release(trial.assignment)
        self._asked.pop(trial.number, None)

    # Functions -------------------------------------------------------------------------------------------------------

    def run(
        self,
        function: Callable[..., Measured],
        *,
        trials: int | None = None,
        time: str | float | None = None,
        workers: int = 1,
        processes: bool = False,
        trial_seconds: float | None = None,
    ) -> Self:
        """Call a function for each trial until the budget is used up. An exception is a failure of its trial and ends
        nothing else, unless the first trials all fail in the same words. Ctrl-C ends the sweep; the trial that ran is
        free for whoever goes on.

        Args:
            function: Gets the values by name, and the ``Trial`` where it has a parameter ``trial``. It returns the
                objective's value or a mapping, or raises ``TrialFailed`` to say how it failed.
            trials: Trials in total, earlier ones included; more of them extends the study.
            time: Start no trial after this time, such as ``10m``.
            workers: Calls at a time.
            processes: Call it in worker processes: a crash, a hang or a leak is one trial's failure. The function must
                be importable there, as functions at the top of a module are.
            trial_seconds: Time limit of a trial, with ``processes``.

        Raises:
            UserError: No budget, the function takes other arguments, worker processes can't call it, or the first
                trials all failed alike.
        """
        seconds = None if time is None else parse_duration(time)
        own_limit = self._study.num_trials
        if trials is None and own_limit is None and seconds is None:
            raise UserError("the study has no budget", hint='give trials=50 or time="10m"')
        if trial_seconds is not None and not processes:
            raise UserError("a call in this process can't be ended", hint="add processes=True for trial_seconds")
        if workers < 1:
            raise UserError(f"a sweep has at least 1 worker, got {workers}", hint="workers is how many calls at a time")
        if TRIAL_ARGUMENT in {*self.space.fixed, *(dimension.name for dimension in self.space.dimensions)}:
            raise UserError(f"a function gets the Trial as {TRIAL_ARGUMENT!r}", hint="call the value something else")
        call_it = _Caller(function, self.space, self._is_kept)
        call_it.check()
        try:
            if trials is not None:
                self._extend(trials)
            if workers == 1 and not processes:
                self._run_here(call_it, seconds)
            else:
                self._drive(call_it, seconds, workers, processes, trial_seconds)
        finally:
            self._study.set_budget(own_limit)
        return self

    def _drive(
        self, function: _Caller, seconds: float | None, workers: int, processes: bool, trial_seconds: float | None
    ) -> None:
        if processes:
            from autotune.study.process_executor import ProcessExecutor

            executor: Executor = ProcessExecutor(function, self.space.objectives, workers)
        else:
            executor = FunctionExecutor(function, self.space.objectives)
        limits = self.space.limits.changed(seconds=trial_seconds or float(2**31))
        try:
            Driver(self._study, _Limited(executor, limits), Silent(), workers, seconds).run()
        finally:
            executor.close()

    def _run_here(self, function: Callable[[Assignment], Measured], seconds: float | None) -> None:
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        first_failures = FirstFailures(self._study)
        while time.monotonic() < deadline:
            asked = self._study.ask()
            if asked is Nothing.WAIT and not self._asked:
                time.sleep(WAIT_SECONDS)
                continue
            if isinstance(asked, Nothing):
                return
            try:
                outcome = call(function, asked, self.space.objectives)
            except BaseException:
                self._study.release(asked)
                raise
            self._study.tell(asked, outcome)
            first_failures.add(outcome)

    # What is known ---------------------------------------------------------------------------------------------------

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What is optimised."""
        return self.space.objectives

    @property
    def trials(self) -> list[TrialResult]:
        """All trials, by number."""
        return [result_of(row, self.space) for row in self.snapshot().trials]

    @property
    def front(self) -> list[TrialResult]:
        """The Pareto front of the feasible trials, by number."""
        return [result_of(row, self.space) for row in front_trials(self.snapshot())]

    @property
    def best(self) -> TrialResult | None:
        """The best feasible trial; of several objectives the knee of the front. None while there is none."""
        snapshot = self.snapshot()
        knee = knee_trial(snapshot, front_trials(snapshot))
        return None if knee is None else result_of(knee, self.space)

    def snapshot(self) -> StudySnapshot:
        """The study now as plain data, for ``reports`` and ``autotune.apply``."""
        return self._study.snapshot()

    def to_frame(self) -> Any:
        """All trials as a ``pandas.DataFrame``: number, state, ``value.NAME``, ``param.NAME``, ``metric.NAME`` ..."""
        from autotune.study.frame import data_frame

        return data_frame(self.snapshot())

    # Its end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the study; trials that were asked for and not told are free for others. What is in memory is lost.
        Called at the end of a ``with`` block, and when the study is no longer used."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(f"{o.name}: {o.direction}" for o in self.objectives)
        return f"<Study {self._study.file.name}: {names}; {len(self.snapshot().trials)} trials>"

    def _extend(self, trials: int) -> None:
        _check_numbers(trials, None)
        self._study.set_budget(trials)
        folder = self._study.folder
        with file_lock(folder / OPEN_LOCK):  # others may have changed it since
            file = read_study_file(folder) if self._is_stored else self._study.file
            self._study.file = file.changed(trials=max(trials, file.trials or 0))
            if self._is_stored:
                write_study_file(folder, self._study.file)

    def _taken(self, assignment: Assignment) -> Trial:
        self._asked[assignment.number] = assignment
        return trial_of(assignment, self.space, self._is_kept)

    def _check_ours(self, trial: Trial) -> None:
        if not isinstance(trial, Trial):
            raise UserError(f"a trial is what 'ask' returned, got {trial!r}", hint="trial = study.ask()")
        if trial.assignment.folder != trial_folder(self._study.folder, trial.number):
            raise UserError(f"trial {trial.number} is of another study", hint="tell it to the study that was asked")
        if trial.number not in self._asked:
            raise UserError(f"trial {trial.number} was told already, or given back", hint="tell each trial once")


@dataclass(frozen=True)
class _Caller:
    """Calls a user's function with the values of a trial."""

    function: Callable[..., Measured]
    space: CommandSpace
    is_kept: bool

    def __call__(self, assignment: Assignment) -> Measured:
        trial = trial_of(assignment, self.space, self.is_kept)
        values: dict[str, Any] = dict(trial.params)
        if self._signature is not None and TRIAL_ARGUMENT in self._signature.parameters:
            values[TRIAL_ARGUMENT] = trial
        return self.function(**values)

    @property
    def _signature(self) -> inspect.Signature | None:
        """None where it is not known, as of some functions that are written in C."""
        try:
            return inspect.signature(self.function)
        except ValueError:
            return None

    def check(self) -> None:
        """Make sure that the function takes the values of every trial.

        Raises:
            UserError: It does not.
        """
        signature = self._signature
        if signature is None:
            return
        always = {*self.space.fixed, *(d.name for d in self.space.dimensions if d.when is None)}
        trial = {TRIAL_ARGUMENT} & set(signature.parameters)
        if not trial and _resumes(self.space):
            raise UserError(
                "'fidelity.resumes': the function does not see its trial's folder, so it can't go on from there",
                hint=f"give it a parameter {TRIAL_ARGUMENT!r}: its checkpoints are in trial.folder / 'checkpoints'",
            )
        for names in (always, always | {d.name for d in self.space.dimensions}):
            try:
                signature.bind(**dict.fromkeys(names | trial))
            except TypeError as error:
                called = getattr(self.function, "__name__", repr(self.function))
                raise UserError(
                    f"the function {called}{signature} can't be called with the values of a trial: {error}",
                    hint=f"it gets by name: {', '.join(sorted(names))}; give it these parameters",
                ) from None


@dataclass(frozen=True)
class _Limited:
    """An executor under limits of its own."""

    executor: Executor
    limits: TrialLimits

    def run(
        self,
        assignment: Assignment,
        limits: TrialLimits,
        *,
        stop: Callable[[], Stop],
        on_start: Callable[[], None],
        on_waiting: Callable[[], None],
    ) -> Outcome | None:
        """See ``Executor``."""
        return self.executor.run(assignment, self.limits, stop=stop, on_start=on_start, on_waiting=on_waiting)

    def close(self) -> None:
        """See ``Executor``."""
        self.executor.close()


def _resumes(space: CommandSpace) -> bool:
    """Whether trials go on from what earlier ones left."""
    return isinstance(space.fidelity, ProgramFidelity) and space.fidelity.resumes


def _check_numbers(trials: int | None, seed: int | None) -> None:
    for name, number, least in (("trials", trials, 1), ("seed", seed, 0)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise UserError(f"{name!r} is a whole number from {least} on, got {number!r}", hint=f"or leave {name} out")


def _in_memory(
    folder: Path,
    space: CommandSpace,
    sampler: str,
    trials: int | None,
    seed: int,
    task_prior: TaskPrior | None,
    guesses: Sequence[Mapping[str, Scalar]],
) -> StoredStudy:
    from optuna.storages import InMemoryStorage

    folder.mkdir(parents=True)
    file = StudyFile(
        name=folder.name,
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        seed=seed,
        trials=trials,
        sampler=sampler,
        guesses=tuple(map(dict, guesses)),
        environment=this_environment(),
        space=dict(space.data),
    )
    proposer = make_sampler(sampler)
    return StoredStudy(folder, file, space, None, InMemoryStorage(), trials, proposer, task_prior=task_prior)


def _let_go(study: StoredStudy, asked: dict[int, Assignment], scratch: tempfile.TemporaryDirectory[str] | None) -> None:
    for assignment in asked.values():
        study.release(assignment)
    asked.clear()
    study.close()
    if scratch is not None:
        scratch.cleanup()
