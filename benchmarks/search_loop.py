"""Runs a sampler on a function, trial by trial, as a study would but in memory. Not a benchmark itself: others import
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import optuna

from autotune.prior.predict import TaskPrior
from autotune.search.optuna_samplers import suggest
from autotune.search.sampler import Observation, Sampler, SearchState
from autotune.search.seeds import derive_seed
from autotune.space.objectives import Objective
from autotune.space.space import Scalar, Space

MAX_REFUSED = 200
"""Refused proposals in a row after which a search is at its end."""


class Failed(Exception):
    """The candidate ran and gave nothing, with the kind of its failure."""


Function = Callable[[Mapping[str, Scalar]], dict[str, float]]


@dataclass
class Search:
    """What one search tried."""

    observations: list[Observation] = field(default_factory=list)
    """Refused proposals among them."""
    ask_seconds: list[float] = field(default_factory=list)
    """CPU seconds of each proposal."""

    @property
    def trials(self) -> list[Observation]:
        """What was tried."""
        return [observation for observation in self.observations if observation.state != "refused"]


def feasible_values(run: Search, objectives: Sequence[Objective]) -> np.ndarray:
    """Values of the trials of a search, ``[trials, m]``; NaN where a trial gave nothing or lies beyond a bound."""
    rows = [
        [o.values[x.name] for x in objectives]
        if o.values and all(x.violation(o.values[x.name]) <= 0 for x in objectives)
        else [np.nan] * len(objectives)
        for o in run.trials
    ]
    return np.array(rows, dtype=float).reshape(-1, len(objectives))


def observe(number: int, parameters: Mapping[str, Scalar], function: Function) -> Observation:
    """Try a candidate."""
    try:
        return Observation(number, "ok", parameters, function(parameters))
    except Failed as failure:
        return Observation(number, "failed", parameters, None, str(failure))


def search(
    sampler: Sampler,
    space: Space,
    function: Function,
    *,
    seed: int,
    num_trials: int,
    state: SearchState | None = None,
    task_prior: TaskPrior | None = None,
) -> Search:
    """Ask and tell a sampler of ours.

    Args:
        sampler: To be asked.
        space: What is searched.
        function: From parameters to values by objective; raises ``Failed``.
        seed: Of the study.
        num_trials: Refused proposals don't count.
        state: Further facts (plans, forecast) for the sampler.
        task_prior: What is known of the task.
    """
    run = Search()
    facts = state or SearchState(space, (), 0, 0, seed)
    num_refused = 0
    while len(run.trials) < num_trials and num_refused < MAX_REFUSED:
        number = len(run.observations)
        now = replace(
            facts,
            observations=tuple(run.observations),
            number=number,
            seed=derive_seed(seed, "sampler", number),
            study_seed=seed,
            num_trials=num_trials,
            task_prior=task_prior if task_prior is not None else facts.task_prior,
        )
        begun = time.process_time()
        chosen = sampler.propose(now)
        run.ask_seconds.append(time.process_time() - begun)
        if chosen is None:
            break
        candidate = space.candidate(chosen)
        if candidate.is_legal:
            run.observations.append(observe(number, chosen, function))
            num_refused = 0
        else:
            run.observations.append(Observation(number, "refused", chosen, failure=candidate.rule))
            num_refused += 1
    return run


def search_by_optuna(
    sampler: optuna.samplers.BaseSampler | None, space: Space, function: Function, *, num_trials: int
) -> Search:
    """The same by Optuna alone, as its users write it: failures and broken rules as constraints with a finite value.

    Args:
        sampler: None for Optuna's default.
        space: What is searched.
        function: As for ``search``.
        num_trials: Refused proposals don't count.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    run = Search()
    study = optuna.create_study(directions=[o.direction for o in space.objectives], sampler=sampler)
    worst: dict[str, float] = {}
    num_refused = 0
    while len(run.trials) < num_trials and num_refused < MAX_REFUSED:
        begun = time.process_time()
        trial = study.ask()
        chosen = suggest(trial, space)
        run.ask_seconds.append(time.process_time() - begun)
        candidate = space.candidate(chosen)
        if candidate.is_legal:
            observation = observe(trial.number, chosen, function)
            num_refused = 0
        else:
            observation = Observation(trial.number, "refused", chosen, failure=candidate.rule)
            num_refused += 1
        run.observations.append(observation)
        tell_optuna(study, trial, space.objectives, observation.values, worst)
    return run


def tell_optuna(
    study: optuna.Study,
    trial: optuna.Trial,
    objectives: Sequence[Objective],
    values: Mapping[str, float] | None,
    worst: dict[str, float],
) -> None:
    """Tell Optuna a trial; one that gave nothing as a broken constraint with the worst values so far.

    Args:
        study: Optuna's.
        trial: Of the study.
        objectives: In the study's order.
        values: By objective; None of a trial that gave none.
        worst: Highest costs so far by objective; brought up to date.
    """
    trial.set_constraint("failed", 0.0 if values is not None else 1.0)
    told = []
    for objective in objectives:
        sign = -1.0 if objective.direction == "maximize" else 1.0
        if values is not None:
            cost = sign * values[objective.name]
            worst[objective.name] = max(worst.get(objective.name, cost), cost)
        if objective.bound is not None:
            violation = objective.violation(values[objective.name]) if values is not None else 1.0
            trial.set_constraint(objective.name, violation)
        told.append(values[objective.name] if values is not None else sign * worst.get(objective.name, 0.0))
    study.tell(trial, told)
