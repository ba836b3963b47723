"""Front, hypervolume and knee against definitions written out in full."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autotune.search.pareto import REFERENCE_MARGIN, front, front_box, hypervolume, hypervolume_history, knee

pytestmark = pytest.mark.unit

# Few distinct values, so that ties, duplicates and degenerate fronts are common.
POINTS = st.integers(1, 4).flatmap(
    lambda k: st.tuples(
        arrays(np.float64, st.tuples(st.integers(1, 12), st.just(k)), elements=st.integers(-4, 4).map(float)),
        st.lists(st.sampled_from(["maximize", "minimize"]), min_size=k, max_size=k),
    )
)


def costs(values, directions):
    return [[-x if d == "maximize" else x for x, d in zip(row, directions, strict=True)] for row in values.tolist()]


def brute_front(values, directions):
    rows = costs(values, directions)

    def dominates(a, b):
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [not any(dominates(other, row) for other in rows) for row in rows]


@settings(max_examples=150, deadline=None)
@given(POINTS)
def test_front_is_what_nothing_dominates(points):
    values, directions = points
    assert front(values, directions).tolist() == brute_front(values, directions)


@settings(max_examples=60, deadline=None)
@given(POINTS)
def test_hypervolume_is_the_share_of_cells_dominated(points):
    """On a grid through all coordinates every cell is dominated as a whole or not at all, so the sum is exact."""
    values, directions = points
    box = front_box(values, directions)
    scaled = np.clip(box.scale(np.array(costs(values, directions))), 0, REFERENCE_MARGIN)
    edges = [np.unique([0.0, *column, REFERENCE_MARGIN]) for column in scaled.T]
    corners = np.meshgrid(*[e[:-1] for e in edges], indexing="ij")
    sizes = np.meshgrid(*[np.diff(e) for e in edges], indexing="ij")
    lower = np.stack([c.ravel() for c in corners], axis=1)
    dominated = (scaled[None, :, :] <= lower[:, None, :]).all(axis=2).any(axis=1)
    volume = (np.prod([s.ravel() for s in sizes], axis=0) * dominated).sum()
    assert hypervolume(values, directions) == pytest.approx(volume / REFERENCE_MARGIN ** len(directions))


@settings(max_examples=60, deadline=None)
@given(POINTS)
def test_history_is_the_hypervolume_of_each_prefix(points):
    values, directions = points
    box = front_box(values, directions)
    expected = [hypervolume(values[: n + 1], directions, box) for n in range(len(values))]
    assert hypervolume_history(values, directions) == pytest.approx(np.array(expected))


@settings(max_examples=100, deadline=None)
@given(POINTS)
def test_knee_is_on_the_front_and_nearest_to_the_ideal_point(points):
    values, directions = points
    row = knee(values, directions)
    mask = np.array(brute_front(values, directions))
    scaled = front_box(values, directions).scale(np.array(costs(values, directions)))
    distances = np.linalg.norm(scaled, axis=1)
    assert row is not None
    assert mask[row]
    assert distances[row] == pytest.approx(distances[mask].min())


@settings(max_examples=60, deadline=None)
@given(POINTS, st.sampled_from([1e-9, 0.5, 1024.0, 1e12]), st.integers(-3, 3))
def test_knee_does_not_depend_on_units(points, scale, shift):
    values, directions = points
    if np.ptp(values, axis=0).min() == 0:
        shift = 0  # a column without extent is scaled by its own size, which a shift changes
    assert knee((values + shift) * scale, directions) == knee(values, directions)


def test_knee_of_a_bent_front_is_the_bend():
    values = np.array([[100.0, 10.0], [95.0, 3.0], [50.0, 1.0], [40.0, 9.0]])
    assert knee(values, ["maximize", "minimize"]) == 1


def test_knee_of_few_or_equal_points():
    assert knee(np.array([[5.0, 1.0]]), ["maximize", "minimize"]) == 0
    assert knee(np.array([[1.0, 2.0], [2.0, 1.0]]), ["minimize", "minimize"]) == 0
    assert knee(np.full((4, 3), 7.0), ["minimize"] * 3) == 0
    assert knee(np.empty((0, 2)), ["minimize", "minimize"]) is None


def test_a_value_that_is_not_finite_is_no_point():
    values = np.array([[np.nan, 0.0], [np.inf, 5.0], [2.0, 2.0], [1.0, -np.inf]])
    directions = ["maximize", "minimize"]
    assert front(values, directions).tolist() == [False, False, True, False]
    assert knee(values, directions) == 2
    assert hypervolume(values, directions) == 1.0
    assert hypervolume_history(values, directions).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert hypervolume(np.full((2, 2), np.nan), directions) == 0.0


def test_empty_fronts():
    assert front(np.empty((0, 3)), ["minimize"] * 3).shape == (0,)
    assert hypervolume_history(np.empty((0, 2)), ["minimize"] * 2).shape == (0,)


def test_a_front_of_one_point_keeps_a_scale_from_the_rest():
    """A single winner must not make everything before it worthless."""
    values = np.array([[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]])
    history = hypervolume_history(values, ["minimize", "minimize"])
    assert 0 < history[0] < history[1] < history[2] == 1.0
