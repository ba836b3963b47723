"""The default search for several objectives: the trial that is expected to add most to the front.

In a training space candidates are composed of plans and hyperparameters (``composed``); in others every objective has a
Gaussian process over all dimensions (``black_box``). Both ask for the expected improvement of the front's hypervolume
over joint draws of all values, the measured ones included. One objective that no plan tells goes to ``single``.
"""

from __future__ import annotations

import numpy as np

from autotune.search.black_box import BlackBox
from autotune.search.composed import SPEED_FOLLOWERS, Composition, quality_dimensions
from autotune.search.front_model import restricted
from autotune.search.quality import QualityModel
from autotune.search.sampler import SearchState
from autotune.search.single import MAX_TAKEN, SurrogateSampler
from autotune.search.uniform import UniformSampler
from autotune.space.space import Scalar
from autotune.space.training import TrainingSpace

PLAN_OBJECTIVES = {"speed", "memory", *SPEED_FOLLOWERS}
"""What plans decide."""
MAX_MODELLED = 300
"""Trials beyond which Gaussian processes cost more than they give; tree-structured Parzen estimators go on."""
LEAST_KNOWN = 3
"""Trials within all bounds before it is said what one more may bring: fewer tell nothing of the front's range."""

CONTRADICTION = "the trials contradict the prior: the search goes on without it"


class JointSampler:
    """The default sampler, for any number of objectives."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``."""
        if len(state.tried) > MAX_MODELLED:
            from autotune.search.optuna_samplers import OptunaSampler, tree_parzen

            return OptunaSampler(tree_parzen).propose(state)
        if _is_alone(state):
            return SurrogateSampler().propose(state)
        front = _front_of(state)
        pool, _ = front.ranked()
        may_be_illegal = isinstance(front, BlackBox)
        seen = {tuple(observation.parameters.items()) for observation in state.observations}
        for index in range(min(len(pool), MAX_TAKEN)):
            chosen = front.chosen(pool, index)
            if tuple(chosen.items()) in seen or (may_be_illegal and not state.space.candidate(chosen).is_legal):
                continue
            return chosen
        return UniformSampler().propose(state)

    def expected_gain(self, state: SearchState) -> float | None:
        """See ``Foreseeing``. It costs as much as a proposal; None for one objective that no plan tells, too."""
        if _num_feasible(state) < LEAST_KNOWN or len(state.tried) > MAX_MODELLED or _is_alone(state):
            return None
        _, gain = _front_of(state).ranked()
        return float(gain[0]) if len(gain) and np.isfinite(gain[0]) else None

    def remarks(self, state: SearchState) -> list[str]:
        """See ``Remarking``: whether the trials contradict the prior."""
        quality = next((o for o in state.space.objectives if o.name == state.space.quality_name), None)
        if state.task_prior is None or quality is None or len(state.tried) > MAX_MODELLED:
            return []
        dimensions = state.space.dimensions
        if isinstance(state.space, TrainingSpace):
            dimensions = quality_dimensions(dimensions)
        is_contradicted = QualityModel.fit(restricted(state, dimensions), quality).is_contradicted
        return [CONTRADICTION] if is_contradicted else []


def _is_alone(state: SearchState) -> bool:
    """Whether there is one objective, and plans don't tell it."""
    objectives = state.space.objectives
    return len(objectives) == 1 and objectives[0].name not in PLAN_OBJECTIVES


def _num_feasible(state: SearchState) -> int:
    objectives = state.space.objectives
    measured = [o.values for o in state.tried if o.values is not None]
    return sum(all(objective.violation(values[objective.name]) <= 0 for objective in objectives) for values in measured)


def _front_of(state: SearchState) -> Composition | BlackBox:
    names = {objective.name for objective in state.space.objectives}
    if isinstance(state.space, TrainingSpace) and state.enumeration is not None and names & PLAN_OBJECTIVES:
        return Composition.of(state)
    return BlackBox.of(state)
