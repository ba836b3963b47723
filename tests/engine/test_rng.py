"""Named random streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.plan import Plan
from engine.rng import Generators, derive_seed, draw_alike

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def draw(generators: Generators, name: str = "dropout", **place: int) -> list[float]:
    """Some draws of one use of a stream."""
    with generators.stream(name, **place):
        return torch.rand(4).tolist()


def test_draws_follow_from_seed_name_use_and_ranks() -> None:
    first = draw(Generators(1, CPU))
    assert first == draw(Generators(1, CPU))
    assert first != draw(Generators(2, CPU))
    assert first != draw(Generators(1, CPU), "other")
    others = [{"tp": 1}, {"tp": 2}, {"dp": 1}, {"cp": 1}, {"dp": 1, "cp": 1}, {"dp": 11}]
    places = [first] + [draw(Generators(1, CPU), "dropout", **place) for place in others]
    assert len({tuple(draws) for draws in places}) == len(places), "every place along an axis has its own draws"
    assert first == draw(Generators(1, CPU), "dropout", dp=0, tp=0), "the first rank draws as one process does"
    generators = Generators(1, CPU)
    assert draw(generators) == first
    assert draw(generators) != first


def test_state_resumes() -> None:
    generators, resumed = Generators(1, CPU), Generators(1, CPU)
    draw(generators)
    resumed.load_state_dict(generators.state_dict())
    assert draw(resumed) == draw(generators)


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"zero_stage": 2, "recompute": "full", "precision": "bf16"}, True),
        ({"dp_replicate": 2, "dp_shard": 1}, True),
        ({"tp": 2}, True),
        ({"tp": 2, "sequence_parallel": True}, False),
        ({"dp_shard": 4}, False),
        ({"cp": 2}, False),
        ({"pp": 2}, False),
        ({"micro_batch_size": 2}, False),
    ],
)
def test_what_dropout_draws_depends_on_who_holds_which_tokens(changes: dict[str, Any], alike: bool) -> None:
    assert draw_alike(Plan(dp_shard=2), Plan(**{"dp_shard": 2, **changes})) == alike


def test_seeds_fit_torch() -> None:
    seeds = {derive_seed(0, "a", index) for index in range(200)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
