"""Trains the agent on imagined studies: stable-baselines3's PPO on a gymnasium environment. Needs the extra ``rl``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from autotune.search.agent import CLIP, Policy, view_size
from autotune.search.sampler import SearchStopped
from autotune.search.simulation import Imagined, World

NUM_WORLDS = 8
"""Imagined studies side by side."""
MAX_ROLLOUT = 256
"""Trials of each between two updates, at most."""
HIDDEN = (64, 64)


class StudyEnvironment(gymnasium.Env[np.ndarray, np.ndarray]):
    """One imagined study after the other."""

    metadata: dict[str, Any] = {}  # noqa: RUF012  as gymnasium declares it

    def __init__(self, world: World) -> None:
        size = view_size(world.num_dimensions, world.num_objectives)
        self.observation_space = gymnasium.spaces.Box(-CLIP, CLIP, (size,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (world.num_dimensions,), np.float32)
        self._world = world
        self._study: Imagined | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin another study."""
        super().reset(seed=seed)
        self._study = self._world.imagine(self.np_random)
        return self._study.begin().features, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One trial."""
        assert self._study is not None, "reset comes first"
        view, reward, has_ended = self._study.step(action)
        return view.features, reward, has_ended, False, {}


class _Watch(BaseCallback):
    """Ends the training when asked to."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        super().__init__()
        self._should_stop = should_stop

    def _on_step(self) -> bool:
        if self._should_stop():
            raise SearchStopped
        return True


def train(world: World, *, num_steps: int, seed: int, should_stop: Callable[[], bool] = bool) -> Policy:
    """An agent that tunes in ``world``.

    Args:
        world: What is known of the space before any trial.
        num_steps: Imagined trials to learn from.
        seed: Of weights, studies and actions.
        should_stop: Asked at every step.

    Raises:
        SearchStopped: It was true.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is tiny; and the order of sums stays the same everywhere
    try:
        rollout = min(MAX_ROLLOUT, max(8, num_steps // NUM_WORLDS))
        environments = DummyVecEnv([lambda: StudyEnvironment(world)] * NUM_WORLDS)
        model = PPO(
            "MlpPolicy", environments, n_steps=rollout, batch_size=2 * rollout, n_epochs=8, gamma=0.95, ent_coef=0.002,
            learning_rate=5e-4, seed=seed, device="cpu",
            policy_kwargs={"net_arch": list(HIDDEN), "log_std_init": -0.5},
        )  # fmt: skip
        model.learn(num_steps, callback=_Watch(should_stop))
    finally:
        torch.set_num_threads(threads)
    return _numbers(model)


def _numbers(model: PPO) -> Policy:
    """The policy's numbers without torch."""
    state = {name: tensor.detach().numpy().astype(np.float64) for name, tensor in model.policy.state_dict().items()}
    layers = sorted({name.rsplit(".", 1)[0] for name in state if name.startswith("mlp_extractor.policy_net.")})
    names = [*layers, "action_net"]
    return Policy(
        tuple(state[f"{name}.weight"] for name in names),
        tuple(state[f"{name}.bias"] for name in names),
        state["log_std"],
    )
