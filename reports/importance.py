"""Which searched values matter for each objective, by PED-ANOVA less what chance alone would show."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autotune.apply.select import comparable_trials, value_matrix
from autotune.search.pareto import costs_of
from autotune.space.space import Scalar
from autotune.study.snapshot import StudySnapshot, TrialRow
from reports.info import MAX_CATEGORIES, looks_logarithmic, short_name, thinned, varied_parameters

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

MIN_TRIALS = 40
"""With fewer the figure would be chance."""
FEW_TRIALS = 80
"""With fewer it is a hint."""
MAX_TRIALS = 500
"""Of more, an even selection tells as much in less time."""
GOOD_RATIO = 0.25
"""Share of the trials that count as good. On made-up studies of 16 to 80 trials a quarter found the true causes more
often than the usual tenth, which is too few of them."""
NUM_SHUFFLES = 16
"""Chance is measured on so many shuffles of the values."""


class ImportanceInfo(NamedTuple):
    """Importance of each searched value for each objective."""

    parameters: tuple[str, ...]
    """Short names, the most important first (by the sum over the objectives)."""
    objectives: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    """Per objective, the share of each parameter; a row sums to 1, or is all 0 when nothing exceeds chance."""
    num_trials: int
    note: str
    """How far to trust it, or why there is none."""


def get_importance(snapshot: StudySnapshot) -> ImportanceInfo:
    """Importance of each searched value for being in the best quarter of the feasible trials by one objective:
    PED-ANOVA (Watanabe et al., IJCAI 2023) as Optuna has it, less its mean under shuffled values, which in a small
    study is large for parameters that do nothing."""
    trials = comparable_trials(snapshot)
    names = varied_parameters(trials)
    objectives = tuple(objective.label for objective in snapshot.objectives)
    if len(trials) < MIN_TRIALS:
        reason = f"Importance needs at least {MIN_TRIALS} feasible trials; there are {len(trials)}."
        return ImportanceInfo((), objectives, (), len(trials), reason)
    if len(names) < 2:
        reason = "Fewer than two searched values differ between the feasible trials."
        return ImportanceInfo((), objectives, (), len(trials), reason)
    rows = _shares(snapshot, thinned(trials, set(), MAX_TRIALS), names)
    order = np.argsort(-rows.sum(axis=0), kind="stable")
    note = f"From {len(trials)} trials" + (": a hint, not a measurement." if len(trials) < FEW_TRIALS else ".")
    return ImportanceInfo(
        tuple(short_name(names[column]) for column in order),
        objectives,
        tuple(tuple(float(share) for share in row[order]) for row in rows),
        len(trials),
        note,
    )


def _shares(snapshot: StudySnapshot, trials: Sequence[TrialRow], names: Sequence[str]) -> np.ndarray:
    """Shares of ``names`` per objective, ``[k, len(names)]``."""
    costs = costs_of(value_matrix(snapshot, trials), [objective.direction for objective in snapshot.objectives])
    study = _optuna_study(trials, names)
    # PED-ANOVA sees only which trials are good, so chance is the same for every objective.
    random = np.random.default_rng(0)
    ranks = np.arange(len(trials), dtype=np.float64)
    chance = np.mean([_ped_anova(study, names, random.permutation(ranks)) for _ in range(NUM_SHUFFLES)], axis=0)
    above = np.maximum([_ped_anova(study, names, column) - chance for column in costs.T], 0.0)
    totals = above.sum(axis=1, keepdims=True)
    shares: np.ndarray = np.divide(above, totals, out=np.zeros_like(above), where=totals > 0)
    return shares


def _optuna_study(trials: Sequence[TrialRow], names: Sequence[str]) -> Study:
    """The trials as an in-memory Optuna study; the values are not in it, the evaluator is given them apart."""
    import optuna

    present = [[name for name in names if name in trial.parameters] for trial in trials]
    ranges = {name: _distribution([t.parameters[name] for t in trials if name in t.parameters]) for name in names}
    with _quiet():
        study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    study.add_trials(
        optuna.trial.create_trial(
            params={name: trial.parameters[name] for name in mine},
            distributions={name: ranges[name] for name in mine},
            value=0.0,
        )
        for trial, mine in zip(trials, present, strict=True)
    )
    return study


def _ped_anova(study: Study, names: Sequence[str], costs: np.ndarray) -> np.ndarray:
    """Raw importances of ``names`` for low ``costs`` (one per trial)."""
    import optuna

    def cost_of(trial: FrozenTrial) -> float:
        return float(costs[trial.number])

    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=GOOD_RATIO)
    with _quiet():  # it warns of parameters without a say, which get 0 here
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, target=cost_of, normalize=False)
    return np.array([found.get(name, 0.0) for name in names])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's messages about a study that nobody asked for."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _distribution(values: Sequence[Scalar]) -> BaseDistribution:
    """The range that the values of one parameter came from, as far as the values show it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    distinct = list(dict.fromkeys(values))
    if len(numbers) < len(values) or len(distinct) <= MAX_CATEGORIES:
        return CategoricalDistribution(distinct)
    low, high = min(numbers), max(numbers)
    is_log = looks_logarithmic(low, high)
    if all(isinstance(value, int) for value in numbers):
        return IntDistribution(int(low), int(high), log=is_log)
    return FloatDistribution(float(low), float(high), log=is_log)
