"""Canaries accept what helps and, over a whole run, hardly ever what does nothing."""

import numpy as np
import pytest

from autotune.retune.canary import (
    ERROR_BUDGET,
    ArmResult,
    best_of,
    error_share,
    is_catching_up,
    judge,
    judge_blocks,
    turns,
)

pytestmark = pytest.mark.unit

NUM_STEPS = 32


def arm(
    factor: float, effect: float, random: np.random.Generator, *, shared: np.ndarray, correlation: float = 0.6
) -> ArmResult:
    """A fork whose final loss differs by ``effect``; its training losses share the batches' noise and have their own,
    correlated in time as two slowly separating runs are."""
    own = np.zeros(NUM_STEPS)
    for step in range(1, NUM_STEPS):
        own[step] = correlation * own[step - 1] + random.normal(0, 0.01)
    drift = np.linspace(0, effect, NUM_STEPS)
    losses = 3.0 + shared + own + drift
    # The held-out loss sees the same separation of the two runs as the last training losses do.
    held_out = 3.1 + effect + float(own[-4:].mean()) / 2 + random.normal(0, 0.003)
    return ArmResult(factor=factor, outcome="ok", held_out_loss=held_out, losses=tuple(losses.tolist()))


def trial(random: np.random.Generator, index: int, effects: dict[float, float]) -> float | None:
    """The factor that one simulated trial accepts."""
    shared = random.normal(0, 0.1, NUM_STEPS)
    results = [arm(factor, effect, random, shared=shared) for factor, effect in ({1.0: 0.0} | effects).items()]
    won = best_of(judge(results, judged_steps=16, index=index, handicaps={}))
    return won.factor if won else None


def test_trials_without_effect_are_hardly_ever_accepted() -> None:
    """A/A: of 100 runs with 12 null trials of two arms each, about the error budget may accept anything at all."""
    random = np.random.default_rng(0)
    false_runs = sum(
        any(trial(random, index, {0.49: 0.0, 1.96: 0.0}) is not None for index in range(12)) for _ in range(100)
    )
    assert false_runs <= 2 * ERROR_BUDGET * 100


def test_a_clear_gain_is_accepted_late_too() -> None:
    random = np.random.default_rng(1)
    found = [trial(random, index, {0.24: 0.1, 3.84: -0.3}) for index in range(20)]
    assert found.count(3.84) >= 19
    assert 0.24 not in found


def test_the_best_of_several_good_arms_wins() -> None:
    random = np.random.default_rng(2)
    assert trial(random, 0, {3.84: -0.3, 14.8: -0.6}) == 14.8


def test_a_fork_that_is_near_and_gaining_is_catching_up() -> None:
    reference = ArmResult(factor=1.0, outcome="ok", losses=(3.0,) * 40)

    def behind(first: float, last: float) -> ArmResult:
        return ArmResult(factor=0.2, outcome="ok", losses=tuple((3.0 + np.linspace(first, last, 40)).tolist()))

    def behind_by(first: float, last: float) -> bool:
        return is_catching_up(reference, behind(first, last), judged_steps=10)

    assert behind_by(0.3, -0.02)
    assert not behind_by(0.6, 0.3)
    assert not behind_by(-0.1, 0.01)


def test_shares_of_the_budget_add_up_to_it() -> None:
    assert sum(error_share(index) for index in range(10_000)) == pytest.approx(ERROR_BUDGET, rel=1e-3)


def test_progress_that_a_slow_arm_loses_counts_against_it() -> None:
    random = np.random.default_rng(3)
    shared = random.normal(0, 0.1, NUM_STEPS)
    results = [arm(1.0, 0.0, random, shared=shared), arm(0.24, -0.1, random, shared=shared)]
    accepted, refused = (
        judge(results, judged_steps=16, index=0, handicaps={0.24: handicap})[0] for handicap in (0.0, 0.2)
    )
    assert accepted.accepted
    assert not refused.accepted
    assert refused.handicap == 0.2


@pytest.mark.parametrize("failed", [0, 1])
def test_a_fork_that_failed_proves_nothing(failed: int) -> None:
    random = np.random.default_rng(4)
    shared = random.normal(0, 0.1, NUM_STEPS)
    results = [arm(1.0, 0.0, random, shared=shared), arm(3.84, -0.5, random, shared=shared)]
    results[failed] = ArmResult(factor=results[failed].factor, outcome="oom")
    assert [one.accepted for one in judge(results, judged_steps=16, index=0, handicaps={})] == [False]


def test_steps_that_were_not_finite_are_left_out() -> None:
    random = np.random.default_rng(5)
    shared = random.normal(0, 0.1, NUM_STEPS)
    good = arm(3.84, -0.5, random, shared=shared)
    good = good.changed(losses=(*good.losses[:20], None, *good.losses[21:]))
    results = [arm(1.0, 0.0, random, shared=shared), good]
    assert judge(results, judged_steps=16, index=0, handicaps={})[0].accepted


def test_turns_alternate_so_that_drift_cancels() -> None:
    assert "".join("AB"[is_new] for is_new in turns(8)) == "ABBAABBA"


def test_a_faster_setting_is_accepted_under_drift() -> None:
    drift = np.linspace(1.0, 1.3, 8)
    fast = [(is_new, 0.1 * slow * (0.8 if is_new else 1.0)) for is_new, slow in zip(turns(8), drift, strict=True)]
    assert judge_blocks(fast).accepted
    equal = [(is_new, 0.1 * slow) for is_new, slow in zip(turns(8), drift, strict=True)]
    assert not judge_blocks(equal).accepted
