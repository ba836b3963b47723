"""Replay of pipeline schedules."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.cost.replay import DeadlockError, StageSeconds, peak_in_flight, replay, replay_actions
from autotune.cost.schedule_actions import Action, Pair, schedule_actions, stage_rank

UNIT = StageSeconds([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
"""Two stages; a forward pass of 1 s, a backward pass of 2 s."""


@pytest.mark.unit
def test_two_stages_by_hand() -> None:
    run = replay("1f1b", 2, 1, 2, UNIT)
    assert [str(action) for action in run.actions[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert run.start == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert run.end == [[1, 2, 6, 9], [2, 4, 5, 7]]
    assert run.makespan == 9
    assert run.busy.tolist() == [6, 6]
    assert run.idle.tolist() == [3, 3]


@pytest.mark.unit
def test_a_send_beside_compute_and_one_that_holds_the_sender_up() -> None:
    beside = replay("gpipe", 2, 1, 2, StageSeconds([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], send=0.5))
    assert beside.start[1][:2] == [1.5, 2.5]
    assert beside.start[0] == [0, 1, 6, 8]
    assert beside.sending.tolist() == [0, 0]
    waits = replay("gpipe", 2, 1, 2, StageSeconds([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], send=0.5, overlap=False))
    assert waits.start[0] == [0, 1.5, 6.5, 9]
    assert waits.sending.tolist() == [1, 1]


@pytest.mark.unit
def test_sends_take_turns_on_their_link() -> None:
    run = replay("gpipe", 2, 1, 3, StageSeconds([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], send=3.0))
    assert run.start[1][:3] == [4, 7, 10]


@pytest.mark.unit
def test_nothing_is_sent_where_both_stages_lie_on_one_rank() -> None:
    run = replay("zbv", 2, 2, 4, StageSeconds([1.0] * 4, [1.0] * 4, [1.0] * 4, send=0.5))
    assert stage_rank("zbv", 2, 1) == stage_rank("zbv", 2, 2) == 1
    first, second = run.actions[1].index(Action(1, "F", 0)), run.actions[1].index(Action(2, "F", 0))
    assert run.start[1][second] == run.end[1][first]


@pytest.mark.unit
def test_a_pair_waits_for_both_inputs_and_hands_both_outputs_on_at_its_end() -> None:
    actions = [
        [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 0), Pair(Action(1, "F", 1), Action(1, "B", 0)), Action(1, "B", 1)],
    ]
    run = replay_actions(actions, [0, 1], UNIT)
    assert run.start[1] == [1, 2, 5]
    assert run.start[0] == [0, 1, 5, 7]


@pytest.mark.unit
def test_deadlock_says_who_waits_for_what() -> None:
    actions = [
        [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
    ]
    with pytest.raises(DeadlockError) as caught:
        replay_actions(actions, [0, 1], UNIT)
    assert "rank 0 at 0B0 waits for the backward pass of micro-batch 0 on stage 1" in str(caught.value)
    assert "rank 1 at 1F1 waits for the forward pass of micro-batch 1 on stage 0" in str(caught.value)


@pytest.mark.unit
def test_peak_counts_bytes_of_the_stages_and_what_is_left_between_the_parts_of_a_backward_pass() -> None:
    actions = [Action(0, "F", 0), Action(3, "F", 0), Action(3, "I", 0), Action(0, "F", 1), Action(3, "W", 0)]
    assert peak_in_flight(actions) == 3
    assert peak_in_flight(actions, weight_ratio=0.25) == 2.25
    assert peak_in_flight(actions, stage_bytes=[10, 0, 0, 1]) == 21


@pytest.mark.unit
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_every_rank_is_busy_with_its_own_stages_and_keeps_order(schedule: str) -> None:
    pp, m, v = 4, 8, 1 if schedule == "1f1b" else 2
    random = np.random.default_rng(0)
    forward, inputs, weights = random.uniform(0.5, 2, (3, pp * v)).tolist()
    run = replay(schedule, pp, v, m, StageSeconds(forward, inputs, weights, send=0.1))
    assert run.actions == schedule_actions(schedule, pp, v, m)
    for rank in range(pp):
        mine = [stage for stage in range(pp * v) if stage_rank(schedule, pp, stage) == rank]
        assert run.busy[rank] == pytest.approx(m * sum(forward[s] + inputs[s] + weights[s] for s in mine))
        assert all(end <= start for end, start in zip(run.end[rank], run.start[rank][1:], strict=False))
    assert run.makespan == max(end[-1] for end in run.end)
