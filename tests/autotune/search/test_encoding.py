"""Values to coordinates and back, and what a model sees of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.search.encoding import Axis, Encoding
from autotune.space.expression import parse_expression
from autotune.space.space import Dimension

pytestmark = pytest.mark.unit

DIMENSIONS = (
    Dimension("rate", "log_float", low=1e-5, high=1e-2),
    Dimension("decay", "float", low=0.0, high=0.3),
    Dimension("layers", "int", low=2, high=11, step=3),
    Dimension("batch", "categorical", values=(8, 16, 32, 64)),
    Dimension("word", "categorical", values=("a", "b", "c")),
    Dimension("flag", "categorical", values=(True, False)),
    Dimension("odd", "categorical", values=(None, 1, 2.5)),
    Dimension("steps", "log_int", low=1, high=3000),
)


def draw(dimension):
    choices = dimension.choices()
    if choices is not None:
        return st.sampled_from(choices)
    return st.floats(dimension.low, dimension.high)


ROWS = st.lists(st.fixed_dictionaries({d.name: draw(d) for d in DIMENSIONS}), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_values_come_back(rows):
    encoding = Encoding.of(DIMENSIONS)
    coordinates = encoding.coordinates(rows)
    assert ((coordinates >= 0) & (coordinates <= 1)).all()
    for row, place in zip(rows, encoding.snapped(coordinates), strict=True):
        values = encoding.values(place)
        numbers = [values["rate"], values["decay"]]
        assert numbers == pytest.approx([row["rate"], row["decay"]], rel=1e-9, abs=1e-12)
        assert [repr(values[d.name]) for d in DIMENSIONS[2:]] == [repr(row[d.name]) for d in DIMENSIONS[2:]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=len(DIMENSIONS), max_size=len(DIMENSIONS)))
def test_every_coordinate_is_a_value_of_the_dimension(place):
    encoding = Encoding.of(DIMENSIONS)
    values = encoding.values(np.array(place))
    assert all(dimension.contains(values[dimension.name]) for dimension in DIMENSIONS)
    again = encoding.coordinates([values])
    assert encoding.snapped(np.array([place])) == pytest.approx(again, abs=1e-9)


def test_proposed_numbers_are_short_to_read():
    axis = Axis.of(Dimension("rate", "log_float", low=1e-6, high=1.0))
    assert repr(axis.value(0.5)) == "0.001"
    assert [axis.value(0.0), axis.value(1.0)] == [1e-6, 1.0]


def test_numbers_listed_as_choices_lie_in_order_and_by_magnitude():
    assert Axis.of(DIMENSIONS[3]).places == pytest.approx((0, 1 / 3, 2 / 3, 1))
    assert Axis.of(Dimension("b", "categorical", values=(4, 1, 2))).places == pytest.approx((1, 0, 1 / 3))


def test_words_are_equally_far_apart():
    encoding = Encoding.of(DIMENSIONS[4:5])
    inputs = encoding.columns(encoding.coordinates([{"word": word} for word in "abc"]))
    distances = np.linalg.norm(inputs.x[:, None] - inputs.x, axis=2)
    assert distances == pytest.approx(1 - np.eye(3))
    assert inputs.groups.tolist() == [0, 0, 0]


def test_an_absent_dimension_says_so_and_lies_at_one_place():
    condition = parse_expression("word == 'a'", frozenset({"word"}))
    momentum = Dimension("momentum", "float", low=0.0, high=1.0, when=condition)
    encoding = Encoding.of((momentum,))
    inputs = encoding.columns(encoding.coordinates([{"momentum": 0.5}, {}, {}]))
    assert inputs.x[1].tolist() == inputs.x[2].tolist()
    assert inputs.x[0].tolist() != inputs.x[1].tolist()
    assert encoding.values(np.array([math.nan])) == {}


def test_whole_numbers_are_as_far_apart_as_their_logarithms():
    axis = Axis.of(DIMENSIONS[-1])
    places = [axis.coordinate(value) for value in (1, 10, 100, 1000)]
    assert np.diff(places) == pytest.approx(math.log(10) / math.log(3000))
    neighbours = axis.spacing(np.array(places))
    assert neighbours == pytest.approx([math.log1p(1 / value) / math.log(3000) for value in (1, 10, 100, 1000)])
