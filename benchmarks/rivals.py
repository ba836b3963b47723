"""Other optimizers behind one ask and tell, on spaces of ranges. Not a benchmark itself: others import it.

Ax, SMAC and HEBO are no dependency of the project (``pip install ax-platform smac`` and ``pip install --no-deps HEBO``
with ``pymoo gpytorch catboost disjoint-set``); what is not installed says so and is left out.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from autotune.search.optuna_samplers import suggest
from autotune.space.space import Space

Point = dict[str, float]


class Rival(Protocol):
    """An optimizer that minimises one cost."""

    def ask(self) -> Point:
        """The next trial."""

    def tell(self, point: Point, cost: float) -> None:
        """What it gave."""


class Missing(Exception):
    """The optimizer is not installed here."""


class _Optuna:
    def __init__(self, space: Space, sampler: Any, start: Point | None = None) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.study = space, optuna.create_study(sampler=sampler)
        if start is not None:
            self.study.enqueue_trial(start)
        self.trial: Any = None

    def ask(self) -> Point:
        self.trial = self.study.ask()
        return dict(suggest(self.trial, self.space))

    def tell(self, point: Point, cost: float) -> None:
        self.study.tell(self.trial, cost)


class _Ax:
    def __init__(self, space: Space, seed: int) -> None:
        from ax.api.client import Client
        from ax.api.configs import RangeParameterConfig

        logging.getLogger("ax").setLevel(logging.ERROR)
        self.client = Client(random_seed=seed)
        self.client.configure_experiment(
            parameters=[
                RangeParameterConfig(
                    name=d.name,
                    parameter_type="float",
                    bounds=(d.low, d.high),
                    scaling="log" if d.is_log else "linear",
                )
                for d in space.dimensions
            ]
        )
        self.client.configure_optimization(objective="-cost")
        self.index = 0

    def ask(self) -> Point:
        ((self.index, point),) = self.client.get_next_trials(max_trials=1).items()
        return dict(point)

    def tell(self, point: Point, cost: float) -> None:
        self.client.complete_trial(self.index, raw_data={"cost": cost})


class _Smac:
    def __init__(self, space: Space, seed: int) -> None:
        from ConfigSpace import ConfigurationSpace, Float
        from smac import HyperparameterOptimizationFacade, Scenario

        configs = ConfigurationSpace(seed=seed)
        for d in space.dimensions:
            configs.add(Float(d.name, (d.low, d.high), log=d.is_log))
        self.folder = tempfile.TemporaryDirectory()
        scenario = Scenario(configs, n_trials=100, seed=seed, deterministic=True, output_directory=self.folder.name)
        self.facade = HyperparameterOptimizationFacade(
            scenario, lambda config, seed=0: 0.0, overwrite=True, logging_level=False
        )
        self.info: Any = None

    def ask(self) -> Point:
        self.info = self.facade.ask()
        return {name: float(value) for name, value in dict(self.info.config).items()}

    def tell(self, point: Point, cost: float) -> None:
        from smac.runhistory.dataclasses import TrialValue

        self.facade.tell(self.info, TrialValue(cost=cost))


class _Hebo:
    def __init__(self, space: Space, seed: int) -> None:
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO

        np.random.seed(seed)  # HEBO draws from the global generator
        kinds = {"log_float": {"type": "pow", "base": 10}, "float": {"type": "num"}}
        box = [{"name": d.name, "lb": d.low, "ub": d.high, **kinds[d.kind]} for d in space.dimensions]
        self.optimizer = HEBO(DesignSpace().parse(box), scramble_seed=seed)
        self.asked: Any = None

    def ask(self) -> Point:
        self.asked = self.optimizer.suggest(n_suggestions=1)
        return {name: float(value) for name, value in self.asked.iloc[0].items()}

    def tell(self, point: Point, cost: float) -> None:
        self.optimizer.observe(self.asked, np.array([[cost]]))


def _optuna(make: Callable[[int], Any]) -> Callable[[Space, int], Rival]:
    return lambda space, seed: _Optuna(space, make(seed))


def _from_centre(space: Space, seed: int) -> Rival:
    from optuna.samplers import TPESampler

    return _Optuna(space, TPESampler(seed=seed), centre(space))


def _cmaes(seed: int) -> Any:
    from optuna.samplers import CmaEsSampler

    return CmaEsSampler(seed=seed)


def _gp(seed: int) -> Any:
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed)


def _tpe(seed: int) -> Any:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed)


def _random(seed: int) -> Any:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


RIVALS: Mapping[str, Callable[[Space, int], Rival]] = {
    "random": _optuna(_random),
    "Optuna TPE": _optuna(_tpe),
    "Optuna TPE, first at the centre": _from_centre,
    "CMA-ES": _optuna(_cmaes),
    "Optuna GP": _optuna(_gp),
    "Ax": _Ax,
    "SMAC": _Smac,
    "HEBO": _Hebo,
}
"""Name -> what makes it for a space and a seed, all else at its defaults."""


def centre(space: Space) -> Point:
    """The middle of the box."""
    return {d.name: float(np.sqrt(d.low * d.high)) if d.is_log else (d.low + d.high) / 2 for d in space.dimensions}


def make_rival(name: str, space: Space, seed: int) -> Rival:
    """An optimizer by name.

    Raises:
        Missing: It is not installed in this interpreter.
    """
    warnings.filterwarnings("ignore")
    try:
        return RIVALS[name](space, seed)
    except ImportError as error:
        raise Missing(f"{name} is not installed here: {error}") from None
