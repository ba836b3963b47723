"""Named random streams."""

from __future__ import annotations

import pytest
import torch

from engine.rng import Generators, derive_seed

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def draw(generators: Generators, name: str = "dropout", *ranks: int) -> list[float]:
    """Some draws of one use of a stream."""
    with generators.stream(name, *ranks):
        return torch.rand(4).tolist()


def test_draws_follow_from_seed_name_use_and_ranks() -> None:
    first = draw(Generators(1, CPU))
    assert first == draw(Generators(1, CPU))
    assert first != draw(Generators(2, CPU))
    assert first != draw(Generators(1, CPU), "other")
    assert first != draw(Generators(1, CPU), "dropout", 1)
    generators = Generators(1, CPU)
    assert draw(generators) == first
    assert draw(generators) != first


def test_state_resumes() -> None:
    generators, resumed = Generators(1, CPU), Generators(1, CPU)
    draw(generators)
    resumed.load_state_dict(generators.state_dict())
    assert draw(resumed) == draw(generators)


def test_seeds_fit_torch() -> None:
    seeds = {derive_seed(0, "a", index) for index in range(200)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
