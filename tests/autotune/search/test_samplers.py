"""Every sampler keeps the contract; the genetic ones evolve, and names that do not exist are told."""

from collections.abc import Callable

import pytest

from autotune.search.sampler import Sampler
from autotune.search.samplers import SAMPLERS, make_sampler
from autotune.testing.samplers import CHECKS, check_learns

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", SAMPLERS)
def test_contract(name: str, check: Callable[[Sampler], None]) -> None:
    check(make_sampler(name))


@pytest.mark.parametrize(("name", "num_trials", "num_seeds"), [("tpe", 40, 3), ("gp", 10, 1)])
def test_better_than_random_search_on_a_convex_loss(name: str, num_trials: int, num_seeds: int) -> None:
    check_learns(make_sampler(name), num_trials=num_trials, num_seeds=num_seeds)
