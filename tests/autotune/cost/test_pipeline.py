"""Pipelines in closed form, against the replay of the action lists."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from autotune.cost.columns import code
from autotune.cost.pipeline import bubble_seconds, in_flight, send_seconds
from autotune.cost.replay import StageSeconds, peak_in_flight, replay
from autotune.cost.schedule_actions import schedule_actions, stage_rank

VIRTUAL_STAGES = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3),
    "interleaved_zero_bubble": (2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
}
SCHEDULES = tuple(VIRTUAL_STAGES)


class Case(NamedTuple):
    """A schedule with its numbers."""

    schedule: str
    pp: int
    virtual_stages: int
    m: int

    def columns(self) -> tuple[np.ndarray, ...]:
        """One row for the closed form."""
        return tuple(np.array([value]) for value in (code("schedule", self.schedule), *self[1:]))

    @property
    def fills(self) -> bool:
        """Whether there are enough micro-batches for the closed form to be exact."""
        if self.schedule == "interleaved_zero_bubble":
            return self.m >= self.pp
        return self.schedule != "zbv" or not self.pp < self.m < 2 * self.pp - 1


def cases(schedule: str) -> list[Case]:
    """Legal numbers, few and many micro-batches."""
    found = []
    for pp in (2, 3, 4, 7):
        for virtual_stages in VIRTUAL_STAGES[schedule]:
            for m in (1, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 3 * pp, 4 * pp + 3):
                legal = m >= 2 * pp if schedule == "dualpipev" else True
                if "interleaved" in schedule:
                    legal = m % max(1, m // pp) == 0
                if m > 0 and legal:
                    found.append(Case(schedule, pp, virtual_stages, m))
    return found


def equal_stages(case: Case, f: float, i: float, w: float, send: float = 0.0, overlap: bool = True) -> StageSeconds:
    """Every stage alike; ``f``, ``i`` and ``w`` of one stage."""
    n = case.pp * case.virtual_stages
    return StageSeconds([f] * n, [i] * n, [w] * n, send, overlap)


def formula(case: Case, f: float, i: float, w: float, send: float = 0.0, overlap: bool = True) -> float:
    """Step time of equal stages in closed form."""
    v = case.virtual_stages
    forward, backward = np.array([v * f]), np.array([v * (i + w)])
    bubble = bubble_seconds(*case.columns(), forward, backward, forward, backward, w / (i + w))
    sends = send_seconds(*case.columns(), np.array([send]), overlap, stage_forward=f, stage_weight=w)
    return float((case.m * (forward + backward) + bubble + sends)[0])


@pytest.mark.unit
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_exactly(schedule: str) -> None:
    random = np.random.default_rng(0)
    for case in cases(schedule):
        for f, i, w in [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 0.0), *random.exponential(size=(3, 3))]:
            step = replay(*case, equal_stages(case, f, i, w)).makespan
            closed = formula(case, f, i, w)
            if case.fills:
                assert closed == pytest.approx(step, rel=1e-9), (case, f, i, w)
            else:
                # The longest of the chains that matter: never too slow, and close for the passes of real layers.
                assert closed <= step * (1 + 1e-9), (case, f, i, w)
                assert closed >= step * (0.96 if w < f < i else 0.75), (case, f, i, w)


@pytest.mark.unit
@pytest.mark.parametrize(("schedule", "tolerance"), [("gpipe", 1e-9), ("1f1b", 1e-9), ("interleaved_1f1b", 1e-9)])
def test_short_sends_beside_compute_exactly(schedule: str, tolerance: float) -> None:
    for case in cases(schedule):
        step = replay(*case, equal_stages(case, 1.0, 1.2, 0.8, 0.1)).makespan
        assert formula(case, 1.0, 1.2, 0.8, 0.1) == pytest.approx(step, rel=tolerance), case


@pytest.mark.unit
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sends_within_bounds(schedule: str, overlap: bool) -> None:
    for case in cases(schedule):
        for send, tolerance in ((0.05, 0.03), (0.3, 0.06)):
            step = replay(*case, equal_stages(case, 1.0, 1.2, 0.8, send, overlap)).makespan
            closed = formula(case, 1.0, 1.2, 0.8, send, overlap)
            assert closed == pytest.approx(step, rel=tolerance), (case, send)


@pytest.mark.unit
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unequal_stages_within_bounds(schedule: str) -> None:
    """The last stage with a head, and stages with a layer more: within 12 %, the mean within 5 %."""
    random = np.random.default_rng(1)
    errors = []
    for case in cases(schedule):
        if case.m < 2 * case.pp:
            continue
        n = case.pp * case.virtual_stages
        layers = np.full(n, 4.0)
        layers[: random.integers(0, n)] += 1
        layers[-1] += random.uniform(0, 2)
        forward, inputs, weights = layers, 1.2 * layers, 0.8 * layers
        step = replay(*case, StageSeconds(forward.tolist(), inputs.tolist(), weights.tolist())).makespan
        ranks = [stage_rank(schedule, case.pp, stage) for stage in range(n)]
        f, b = np.bincount(ranks, forward), np.bincount(ranks, inputs + weights)
        slow = int(np.argmax(f + b))
        numbers = [np.array([x]) for x in (f[slow], b[slow], f.mean(), b.mean())]
        closed = case.m * (f[slow] + b[slow]) + bubble_seconds(*case.columns(), *numbers, 0.4)[0]
        errors.append(closed / step - 1)
    assert np.max(np.abs(errors)) < 0.12
    assert np.mean(np.abs(errors)) < 0.05


@pytest.mark.unit
@pytest.mark.parametrize("head", [0.0, 2.0, 6.0])
def test_a_remainder_of_layers_on_the_first_ranks_of_1f1b_exactly(head: float) -> None:
    for case in cases("1f1b"):
        for num_heavy in range(1, case.pp):
            layers = np.array([3.0] * num_heavy + [2.0] * (case.pp - num_heavy))
            forward, backward = layers.copy(), 2 * layers
            forward[-1] += head / 3
            backward[-1] += head * 2 / 3
            half = (backward / 2).tolist()
            step = replay(*case, StageSeconds(forward.tolist(), half, half)).makespan
            slow = int(np.argmax(forward + backward))
            numbers = [np.array([x]) for x in (forward[slow], backward[slow], forward.mean(), backward.mean())]
            after = 0 if slow == case.pp - 1 else case.pp - num_heavy
            last = forward[-1] + backward[-1]
            bubble = bubble_seconds(*case.columns(), *numbers, num_after=after, last_seconds=last)
            closed = case.m * (forward[slow] + backward[slow]) + bubble[0]
            if case.m >= case.pp:
                assert closed == pytest.approx(step, rel=1e-9), (case, num_heavy)
            else:
                assert closed == pytest.approx(step, rel=0.1), (case, num_heavy)


@pytest.mark.unit
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_flight_is_the_peak_of_the_lists(schedule: str) -> None:
    for case in cases(schedule):
        for rank, actions in enumerate(schedule_actions(*case)):
            closed = in_flight(*case.columns(), np.array([rank]))[0]
            assert closed * case.virtual_stages == pytest.approx(peak_in_flight(actions)), (case, rank)


@pytest.mark.unit
def test_no_pipeline_no_bubble() -> None:
    case, ones = Case("1f1b", 1, 1, 4), np.ones(1)
    assert bubble_seconds(*case.columns(), ones, ones, ones, ones)[0] == 0
    assert send_seconds(*case.columns(), ones)[0] == 0
    assert in_flight(*case.columns(), np.zeros(1))[0] == 1


@pytest.mark.unit
def test_rows_of_several_schedules_equal_rows_apart() -> None:
    rows = [case for schedule in SCHEDULES for case in cases(schedule)[-3:]]
    together = [np.concatenate(column) for column in zip(*(row.columns() for row in rows), strict=True)]
    times = np.linspace(1, 2, len(rows))
    bubbles = bubble_seconds(*together, times, 2 * times, times, 2 * times)
    sends = send_seconds(*together, 0.1 * times)
    for n, row in enumerate(rows):
        t = times[n : n + 1]
        assert bubbles[n] == bubble_seconds(*row.columns(), t, 2 * t, t, 2 * t)[0]
        assert sends[n] == send_seconds(*row.columns(), 0.1 * t)[0]
