"""Steps, limits and choices of what may be proposed."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from autotune.retune.actions import is_allowed, ladder, micro_batch_choices, rung_factor
from engine.config import RunConfig

pytestmark = pytest.mark.unit

MakeConfig = Callable[..., RunConfig]


@pytest.mark.parametrize(("current", "target"), [(0.125, 1.0), (8.0, 0.5), (1.0, 1.4), (1.0, 0.7), (1.0, 1.05)])
def test_a_ladder_has_allowed_steps_and_ends_at_the_target(current: float, target: float) -> None:
    scales = [current, *ladder(current, target)]
    assert scales[-1] == target
    assert all(0.7 - 1e-9 <= after / before <= 1.4 + 1e-9 for before, after in pairwise(scales))


def test_rungs_are_whole_numbers_of_steps() -> None:
    assert len(ladder(1.0, rung_factor(4))) == 4
    assert len(ladder(1.0, rung_factor(-5))) == 5
    assert rung_factor(0) == 1.0


def test_the_total_stays_within_a_sixteenth_and_sixteen() -> None:
    assert is_allowed(16.0)
    assert is_allowed(1 / 16)
    assert not is_allowed(16.1)
    assert not is_allowed(0.06)


def test_micro_batches_divide_what_a_rank_has(make_config: MakeConfig) -> None:
    config = make_config()
    assert micro_batch_choices(config, 4) == [8, 2]
    assert micro_batch_choices(config, 8) == [4]
    assert micro_batch_choices(config, 1) == [2]
    two_ranks = config.changed(plan=config.plan.changed(dp_shard=2))
    assert micro_batch_choices(two_ranks, 4) == [2]
    pipeline = config.changed(plan=config.plan.changed(pp=2))
    assert micro_batch_choices(pipeline, 4) == []
