"""A sampler that learned to tune: a policy-gradient agent (PPO, Schulman et al. 2017), trained on imagined studies of
the space before the first trial, that proposes changes of plan and hyperparameters.

First comes the prior's prediction. Where its outcome is as good as predicted, the search says so, and is at its end for
whoever asked to stop when it is enough. Else the agent goes on from the best trial.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from autotune.search.agent import Policy, changed, filled, look
from autotune.search.hygiene import costs_of, tells
from autotune.search.sampler import SearchState
from autotune.search.simulation import World
from autotune.search.uniform import UniformSampler
from autotune.space.space import Scalar

NUM_STEPS = 40_960
"""Imagined trials that an agent learns from."""
AGENT_VERSION = 1
"""Of what it sees and how it learns; agents of other versions are trained anew."""
MAX_TRIES = 20
"""Actions drawn until one leads to a new candidate."""
LEAST_BUDGET = 20
"""Trials that the agent believes it has where only time limits a sweep."""
GOOD_SDS = 2.0
"""A prediction is good enough when the loss measured is within so many standard deviations of it."""


@dataclass
class ReinforceSampler:
    """The agent. It is trained, or read from the cache, when it is first asked."""

    cache: Path | None = None
    """Folder of trained agents; None for the user's cache folder."""
    num_steps: int = NUM_STEPS
    should_stop: Callable[[], bool] = field(default=bool)
    """See ``Interruptible``: learning takes a minute."""
    _policies: dict[str, tuple[World, Policy]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import gymnasium  # noqa: F401  a missing extra is told now
        import stable_baselines3  # noqa: F401

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``."""
        if not state.space.dimensions:  # nothing to change
            return UniformSampler().propose(state)
        world, policy = self._trained(state)
        candidates = (state.space.candidate(o.parameters) for o in state.observations)
        known = {candidate.key for candidate in candidates if candidate.is_legal}
        rng = np.random.default_rng(state.seed)
        chosen = _standing(world, world.start)  # once, whatever the user's guesses were
        for _ in range(MAX_TRIES):
            candidate = state.space.candidate(chosen)
            if candidate.is_legal and candidate.key not in known:
                return chosen
            chosen = _standing(world, _wanted(world, policy, state, rng))
        return UniformSampler().propose(state)

    def remarks(self, state: SearchState) -> list[str]:
        """Whether the prediction was good enough."""
        start = _start_against_prediction(state)
        if start is None:
            return []
        loss, level, sd = start
        words = "as good as predicted" if _is_good(start) else "worse than predicted: the agent goes on"
        return [f"the predicted start reached {loss:.4g} nats/token, predicted {level:.4g} ± {sd:.2g}: {words}"]

    def expected_gain(self, state: SearchState) -> float | None:
        """See ``Foreseeing``: nothing more is looked for where quality alone counts and the prediction was good enough;
        else it is not known."""
        start = _start_against_prediction(state)
        return 0.0 if start is not None and len(state.space.objectives) == 1 and _is_good(start) else None

    def _trained(self, state: SearchState) -> tuple[World, Policy]:
        key = _key(state, self.num_steps)
        if key not in self._policies:
            world = World.of(replace(state, observations=()))
            path = (self.cache or _cache_folder()) / f"{key}.json"
            try:
                policy = Policy.load(path)
            except (OSError, ValueError, KeyError):  # none yet, or not whole
                from autotune.search.reinforce_training import train

                policy = train(world, num_steps=self.num_steps, seed=0, should_stop=self.should_stop)
                policy.save(path)
            self._policies[key] = world, policy
        return self._policies[key]


def _start_against_prediction(state: SearchState) -> tuple[float, float, float] | None:
    """The loss of the trial of what the prior predicts to be best, whatever was tried before it, and what was predicted
    with its standard deviation."""
    predicted = state.task_prior.loss_level() if state.task_prior is not None else None
    name = state.space.quality_name
    if predicted is None or not state.space.dimensions:
        return None
    world = World.of(replace(state, observations=()))
    start = state.space.candidate(_standing(world, world.start)).key
    for trial in state.tried:
        if trial.values is None or name not in trial.values or trial.noise.get(name):
            continue  # with noise it is a forecast, of a training that did not go to the end
        if (trial.key or state.space.candidate(trial.parameters).key) == start:
            return trial.values[name], *predicted
    return None


def _standing(world: World, wanted: np.ndarray) -> dict[str, Scalar]:
    """The values nearest to coordinates ``[k]``."""
    place, _ = world.ground.nearest(wanted)
    return world.state.space.active(world.ground.encoding.values(place))


def _is_good(start: tuple[float, float, float]) -> bool:
    loss, level, sd = start
    return loss <= level + GOOD_SDS * sd


def _wanted(world: World, policy: Policy, state: SearchState, rng: np.random.Generator) -> np.ndarray:
    """Coordinates ``[k]`` the agent would try next."""
    num_tried = len(state.tried)
    progress = min(num_tried / (state.num_trials or max(2 * num_tried, LEAST_BUDGET)), 1.0)
    ended = [o for o in state.tried if tells(o)]
    if not ended:  # several at once before any result: round the start
        return changed(world.start, rng.uniform(-1, 1, world.num_dimensions), progress)
    costs = costs_of(ended, state.space.objectives)
    failed = np.array([o.state == "failed" for o in ended])
    coordinates = filled(world.ground.encoding.coordinates([o.parameters for o in ended]))
    view = look(coordinates, costs, failed, rng.dirichlet(np.ones(world.num_objectives)), progress)
    return changed(view.incumbent, policy.act(view.features, rng), progress)


def _key(state: SearchState, num_steps: int) -> str:
    """Hash of all that an agent is trained on."""
    space = state.space
    facts = {
        "version": AGENT_VERSION,
        "num_steps": num_steps,
        "dimensions": [repr(dimension) for dimension in space.dimensions],
        "fixed": repr(sorted(space.fixed.items())),
        "objectives": [objective.to_data() for objective in space.objectives],
        "data": space.data,
        "prior": repr(state.task_prior.optimum()) if state.task_prior is not None else "",
        "num_legal": state.enumeration.num_legal if state.enumeration is not None else 0,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "paretune" / "agents"
