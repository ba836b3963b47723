"""Means and intervals of repeats."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.space.objectives import Objective
from autotune.study.repeats import repeated_values
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.outcome import Outcome

pytestmark = pytest.mark.unit


def row(number: int, loss: float | None, repeat_of: int | None) -> TrialRow:
    values = None if loss is None else {"quality": loss}
    return TrialRow(number, "finished", {}, Outcome(kind="ok"), values, loss is not None, repeat_of=repeat_of)


def snapshot(*rows: TrialRow) -> StudySnapshot:
    return StudySnapshot("s", Path(), (Objective(name="quality"),), rows)


def test_t_interval_of_the_repeats_alone() -> None:
    rows = [row(0, 1.0, None), row(1, 2.0, 0), row(2, 3.0, 0), row(3, 4.0, 0), row(4, None, 0), row(5, 9.0, 7)]
    (value,) = repeated_values(snapshot(*rows), 0)
    assert value.num_repeats == 3
    assert value.mean == 3.0
    assert value.half_width == pytest.approx(2.4841, abs=1e-4)  # 4.3027 * 1 / sqrt(3)
    assert value.text == "3 nats/token ± 2.484 nats/token"


def test_one_repeat_has_no_interval() -> None:
    (value,) = repeated_values(snapshot(row(0, 1.0, None), row(1, 2.0, 0)), 0)
    assert value.half_width is None
    assert value.text == "2 nats/token"


def test_a_part_of_a_training_is_no_repeat() -> None:
    part = replace(row(2, 9.0, 0), share=0.25)
    (value,) = repeated_values(snapshot(row(0, 1.0, None), row(1, 2.0, 0), part), 0)
    assert (value.num_repeats, value.mean) == (1, 2.0)


def test_no_repeat_no_value() -> None:
    assert repeated_values(snapshot(row(0, 1.0, None), row(1, None, 0)), 0) == []
