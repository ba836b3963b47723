"""What is proposed in which situation, and how a run that went wrong is brought back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autotune.retune.actions import TryLearningRate, TryMicroBatch
from autotune.retune.ledger import NEXT_SPAN, Entry, Memory
from autotune.retune.policy import HeldCheckpoint, choose_recovery, is_due, propose
from autotune.twin.health import LOSS_SPIKE, Finding
from autotune.twin.twin import Twin
from engine.config import RunConfig
from engine.units import Interval
from tests.engine.records import step_record

pytestmark = pytest.mark.unit

MakeConfig = Callable[..., RunConfig]
HELD = [HeldCheckpoint(5, "/held/step-00000005"), HeldCheckpoint(90, "/held/step-00000090")]


def twin_at(config: RunConfig, num_steps: int, *, scale: float = 1.0) -> Twin:
    """A twin that has seen so many healthy steps."""
    twin = Twin(config)
    losses = (1.8 + 4.0 * (1 + np.arange(num_steps) / 20) ** -0.5) * np.exp(
        np.random.default_rng(0).normal(0, 0.02, num_steps)
    )
    twin.update(
        step_record(
            step + 1,
            float(loss),
            time=1000.0 + step,
            tokens=(step + 1) * config.tokens_per_step,
            learning_rate=1e-3 * scale,
            learning_rate_scale=scale,
            memory_bytes=1000,
            micro_batch_size=4,
        )
        for step, loss in enumerate(losses)
    )
    return twin


def proposed_rates(twin: Twin, memory: Memory, **options: Any) -> TryLearningRate:
    proposal = propose(twin, memory, [], **options)
    assert proposal is not None
    assert isinstance(proposal.action, TryLearningRate)
    assert all(forecast.low < forecast.loss < forecast.high for forecast in proposal.forecasts)
    return proposal.action


def test_first_the_rate_is_tried_far_up(make_config: MakeConfig) -> None:
    action = proposed_rates(twin_at(make_config(), 100), Memory(), early=HELD[0])
    assert action.origin == "here"
    assert action.factors == pytest.approx((1.4**4, 1.4**8))
    assert 0 < action.anneal_steps < action.num_steps


def test_then_a_slower_start_while_the_run_is_young(make_config: MakeConfig) -> None:
    memory = Memory(num_holds=1, span=NEXT_SPAN)
    young, old = twin_at(make_config(), 160), twin_at(make_config(), 600)
    action = proposed_rates(young, memory, early=HELD[0])
    assert (action.origin, action.num_steps, action.anneal_steps) == ("start", 150, 0)
    assert action.factors == pytest.approx((0.7**5,))
    assert propose(twin_at(make_config(), 150), memory, [], early=HELD[0]) is None  # not far enough to tell yet
    later = propose(old, memory, [], early=HELD[0])
    assert later is not None
    assert not (isinstance(later.action, TryLearningRate) and later.action.origin == "start")


def test_a_slower_start_that_catches_up_is_gone_on_with(make_config: MakeConfig) -> None:
    memory = Memory(num_holds=1, num_starts=1, span=NEXT_SPAN, slower_start="/slower/step-00000155")
    action = proposed_rates(twin_at(make_config(), 310), memory, early=HELD[0])
    assert (action.origin, action.checkpoint, action.num_steps) == ("start", "/slower/step-00000155", 150)
    assert propose(twin_at(make_config(), 300), memory, [], early=HELD[0]) is None
    often = Memory(num_holds=0, num_starts=3, span=NEXT_SPAN, slower_start="/slower/step-00000155")
    assert proposed_rates(twin_at(make_config(), 310), often).origin == "here"


def test_a_rate_at_the_upper_limit_is_tried_by_a_slower_start_at_once(make_config: MakeConfig) -> None:
    assert proposed_rates(twin_at(make_config(), 160, scale=8.0), Memory(), early=HELD[0]).origin == "start"


def test_spikes_speak_against_faster_rates(make_config: MakeConfig) -> None:
    spike = Finding(kind="spike", step=90, quantity=LOSS_SPIKE, value=9.0, threshold=6.0, since_step=90)
    memory = Memory(span=NEXT_SPAN, num_starts=1)
    proposal = propose(twin_at(make_config(), 100), memory, [spike] * 3)
    assert proposal is not None
    assert isinstance(proposal.action, TryLearningRate)
    assert max(proposal.action.factors) < 1


def test_a_micro_batch_follows_when_the_rate_is_settled(make_config: MakeConfig) -> None:
    twin, memory = twin_at(make_config(), 100), Memory(num_holds=1, span=NEXT_SPAN, num_starts=1)
    proposal = propose(twin, memory, [], device_memory_bytes=10**6)
    assert proposal is not None
    assert isinstance(proposal.action, TryMicroBatch)
    assert proposal.action.micro_batch_size == 8
    tight = propose(twin, memory, [], device_memory_bytes=1500)
    assert tight is not None
    assert isinstance(tight.action, TryMicroBatch)
    assert tight.action.micro_batch_size == 2


def test_a_run_is_left_alone_in_warm_up_near_its_end_over_budget_and_handed_over(make_config: MakeConfig) -> None:
    config = make_config()
    assert propose(twin_at(config, 20), Memory(), []) is None
    assert propose(twin_at(config, 900), Memory(), []) is None
    assert propose(twin_at(config, 100), Memory(num_trial_steps=450), []) is None
    assert propose(twin_at(config, 100), Memory(is_handed_over=True), []) is None


def test_no_rate_beyond_the_limits_is_proposed(make_config: MakeConfig) -> None:
    memory = Memory(span=NEXT_SPAN, num_starts=1)
    assert max(proposed_rates(twin_at(make_config(), 100, scale=16.0), memory).factors) < 1
    assert min(proposed_rates(twin_at(make_config(), 100, scale=1 / 16), memory).factors) > 1


def test_waits_double_with_every_trial_that_changed_nothing() -> None:
    interval = Interval(num_steps=100)
    due = [is_due(Memory(num_holds=holds, last_step=0), interval, 0.0, 200) for holds in range(5)]
    assert due == [True, True, True, False, False]
    assert is_due(Memory(num_holds=2, last_time=50.0), Interval(seconds=10.0), 71.0, 0)
    assert not is_due(Memory(num_holds=2, last_time=50.0), Interval(seconds=10.0), 69.0, 0)


def test_a_divergence_goes_back_before_it_began_and_lowers_the_rate() -> None:
    recovery = choose_recovery(Memory(), "divergence", scale=8.0, step=120, since_step=60, held=HELD)
    assert recovery is not None
    assert recovery.checkpoint == HELD[0].path
    assert recovery.scale == pytest.approx(8 * 0.7**4)


def test_a_spike_of_a_settled_run_is_passed_round_then_slowed() -> None:
    settled = Memory(num_holds=2)
    first = choose_recovery(settled, "persistent_spike", scale=1.0, step=130, since_step=100, held=HELD)
    assert first is not None
    assert (first.checkpoint, first.scale, first.skip_steps) == (HELD[1].path, 1.0, 40)
    again = Memory(num_holds=2, recoveries={"persistent_spike": 1})
    second = choose_recovery(again, "persistent_spike", scale=1.0, step=130, since_step=100, held=HELD)
    assert second is not None
    assert second.scale == pytest.approx(0.7)


def test_a_change_under_watch_is_undone_first() -> None:
    data = {"checkpoint": "/held/step-00000090", "from_scale": 0.5, "rungs": 2}
    watched = Entry(kind="decision", time=0.0, step=95, text="", data=data)
    recovery = choose_recovery(Memory(watched=watched), "divergence", scale=1.0, step=110, since_step=96, held=HELD)
    assert recovery is not None
    assert (recovery.checkpoint, recovery.scale) == ("/held/step-00000090", 0.5)


def test_after_several_rollbacks_people_take_over() -> None:
    tried = Memory(recoveries={"divergence": 4})
    assert choose_recovery(tried, "divergence", scale=1.0, step=100, since_step=50, held=HELD) is None
    assert choose_recovery(Memory(), "divergence", scale=1.0, step=100, since_step=50, held=[]) is None
