"""Rungs: what people write, what it costs, and what is told when it makes no sense."""

from typing import Any

import pytest

from autotune.space.fidelity import Fidelity, parse_words
from engine.errors import UserError
from engine.schema import parse

pytestmark = pytest.mark.unit


def read(words: Any) -> Fidelity:
    return parse(Fidelity, parse_words(words))


def test_a_least_share_and_a_factor_make_the_rungs() -> None:
    assert read({"min": 0.1, "eta": 3}).rungs == pytest.approx((1 / 9, 1 / 3, 1.0))
    assert read("on") == read({}) == read({"min": 0.1, "eta": 3.0})
    assert read({"min": 0.25, "eta": 2}).rungs == (0.25, 0.5, 1.0)
    assert read([0.25, 1]).rungs == (0.25, 1.0)
    assert parse_words("off") is None
    assert parse_words(None) is None


def test_round_trip() -> None:
    written = read({"rungs": [0.2, 0.2, 1], "widths": [0.5, 1, 1], "eta": 4})
    assert parse(Fidelity, written.to_data()) == written


def test_parts_of_one_width_cost_a_full_training_together() -> None:
    assert read({"min": 0.1}).cost_from(0) == pytest.approx(1.0)
    narrow = read({"rungs": [0.5, 0.5, 1], "widths": [0.5, 1, 1]})
    assert [narrow.cost(rung) for rung in range(3)] == [0.125, 0.5, 0.5]
    assert [narrow.continues(rung) for rung in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "words",
    [
        [0.5],
        [1.0, 0.5],
        [0.5, 0.5, 1.0],
        [0.0, 1.0],
        {"eta": 1},
        {"min": 1.0},
        {"min": "a"},
        {"rungs": [0.5, 1], "min": 0.1},
        {"rungs": [0.5, 1], "widths": [1]},
        {"rungs": [0.5, 1], "widths": [1, 0.5]},
        {"rungs": [0.5, 0.5, 1], "widths": [0.5, 0.5, 1]},
        {"rung": [0.5, 1]},
        0.5,
    ],
)
def test_what_makes_no_sense_is_told(words: Any) -> None:
    with pytest.raises(UserError):
        read(words)
