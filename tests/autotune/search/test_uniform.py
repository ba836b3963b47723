"""Proposals: legal from the start, reproducible, and never again the same from one seed."""

import itertools
from pathlib import Path

import optuna
import pytest

from autotune.search.optuna_samplers import distribution_of, num_startup_trials
from autotune.search.seeds import derive_seed
from autotune.search.uniform import uniform_draws
from autotune.space.enumerate import Enumeration
from autotune.space.grammar import load_space
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space
from autotune.space.training import MESH, TrainingSpace

pytestmark = pytest.mark.unit

MIXED = """
use: [tiny_llama]
cluster: cpu:2
space:
  plan: {dp_shard: [1, 2], tp: [1, 2], micro_batch_size: [1, 2, 4], zero_stage: [2, 3]}
  hyperparameters:
    global_batch_size: [8, 16]
    schedule: [cosine, wsd]
    decay_ratio: {float: [0.1, 0.5]}
    learning_rate: {log_float: [1e-4, 1e-2]}
"""

DISCRETE = """
use: [tiny_llama]
cluster: cpu:2
space:
  plan: {dp_shard: [1, 2], zero_stage: [2, 3]}
  hyperparameters: {global_batch_size: [8, 16], warmup_ratio: [0.0, 0.1]}
"""


def load(folder: Path, text: str) -> tuple[TrainingSpace, Enumeration]:
    path = folder / "space.yaml"
    path.write_text(text)
    return load_space(path)


def test_derived_seeds_are_stable_and_differ() -> None:
    assert derive_seed(0, "trial", 7) == 681317022  # the same on every machine and Python
    seeds = {
        derive_seed(seed, word, number) for seed in (0, 1) for word in ("trial", "sampler") for number in range(99)
    }
    assert len(seeds) == 2 * 2 * 99
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_uniform_draws_are_legal_and_reproducible(tmp_path: Path) -> None:
    space, enumeration = load(tmp_path, MIXED)
    draws = list(itertools.islice(uniform_draws(space, enumeration, 3), 60))
    assert draws == list(itertools.islice(uniform_draws(space, enumeration, 3), 60))
    assert draws != list(itertools.islice(uniform_draws(space, enumeration, 4), 60))
    for chosen in draws:
        assert space.candidate(chosen).run is not None
        assert ("plan.zero_stage" in chosen) == (chosen[MESH] == "dp2")
        assert ("hyperparameters.decay_ratio" in chosen) == (chosen["hyperparameters.schedule"] == "wsd")
    assert {chosen[MESH] for chosen in draws} == {"single", "dp2", "tp2"}


def test_a_small_discrete_space_is_gone_through_once(tmp_path: Path) -> None:
    space, enumeration = load(tmp_path, DISCRETE)
    draws = [tuple(chosen.items()) for chosen in uniform_draws(space, enumeration, 0)]
    # One process, or two with one of two ZeRO stages; times batches; times warm-ups.
    assert len(draws) == len(set(draws)) == (1 + 2) * 2 * 2


def test_an_int_range_ends_on_its_last_step() -> None:
    dimension = Dimension("plan.micro_batch_size", "int", low=1, high=8, step=3)
    distribution = distribution_of(dimension)
    assert isinstance(distribution, optuna.distributions.IntDistribution)
    assert (distribution.low, distribution.high, distribution.step) == (1, 7, 3)


@pytest.mark.parametrize(("num_trials", "startup"), [(None, 10), (4, 5), (24, 6), (1000, 20)])
def test_startup_is_a_share_of_the_budget(num_trials: int | None, startup: int) -> None:
    assert num_startup_trials(num_trials) == startup


def test_a_log_int_range_is_drawn_by_its_logarithm() -> None:
    """Also where the space is small enough to be gone through without repeats."""
    for high in (1000, 1_000_000):
        space = Space("s", (Objective(name="loss"),), (Dimension("n", "log_int", low=1, high=high),), {})
        drawn = [chosen["n"] for chosen in itertools.islice(uniform_draws(space, None, 0), 150)]
        below = sum(number * number < high for number in drawn) / len(drawn)  # half of them without repeats
        assert 0.1 < below < 0.65
        assert all(type(number) is int and 1 <= number <= high for number in drawn)
        distribution = distribution_of(space.dimensions[0])
        assert isinstance(distribution, optuna.distributions.IntDistribution)
        assert distribution.log


def test_plans_with_a_log_int_batch_are_drawn_by_its_logarithm(tmp_path: Path) -> None:
    text = DISCRETE.replace("[8, 16]", "{log_int: [1, 512]}").replace("[0.0, 0.1]", "{float: [0.0, 0.1]}")
    space, enumeration = load(tmp_path, text)
    drawn = [
        chosen["hyperparameters.global_batch_size"]
        for chosen in itertools.islice(uniform_draws(space, enumeration, 0), 300)
    ]
    assert 0.4 < sum(int(batch) <= 22 for batch in drawn) / len(drawn) < 0.6


def test_a_log_int_value_that_is_not_searched_everywhere_leaves_the_draws_alone(tmp_path: Path) -> None:
    """Where it is not searched it has its default, which may be none of its values."""
    text = MIXED.replace("[2, 3]", "{log_int: [1, 2]}").replace("tp: [1, 2], micro_batch_size: [1, 2, 4], ", "")
    space, enumeration = load(tmp_path, text)
    drawn = list(itertools.islice(uniform_draws(space, enumeration, 0), 300))
    pairs = [(chosen[MESH], chosen.get("plan.zero_stage")) for chosen in drawn]
    assert set(pairs) == {("single", None), ("dp2", 1), ("dp2", 2)}
    assert 0.3 < sum(mesh == "single" for mesh, _ in pairs) / len(pairs) < 0.7
