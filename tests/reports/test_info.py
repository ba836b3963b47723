"""What the page shows, as plain data, for studies of every size and misfortune."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.apply.select import front_trials
from autotune.search.pareto import front
from engine.outcome import FAILURE_KINDS
from reports import info
from reports.importance import get_importance
from reports.plots import plot_importance
from tests.reports.synthetic import ALL, GIB, HOSTILE, make_snapshot, make_trial

pytestmark = pytest.mark.unit


def test_every_trial_has_one_status():
    snapshot = make_snapshot(60, bounds={"memory": 1.5 * GIB}, num_pending=3, num_repeats=2)
    unmeasured = replace(make_trial(65), values=None, feasible=False)
    snapshot = replace(snapshot, trials=(*snapshot.trials, unmeasured))
    statuses = info.get_statuses(snapshot)
    assert list(statuses) == [trial.number for trial in snapshot.trials]
    assert set(statuses.values()) <= set(info.STATUSES)
    assert list(statuses.values()).count("knee") == 1
    assert {statuses[60], statuses[61]} == {"repeat"}
    assert (statuses[62], statuses[63], statuses[65]) == ("running", "waiting", "incomplete")
    assert {n for n, status in statuses.items() if status in ("knee", "front")} == {
        trial.number for trial in front_trials(snapshot)
    }


@pytest.mark.parametrize(("names", "expected"), [(("quality",), 1), (("speed", "memory"), 1), (None, 3)])
def test_pairs_cover_every_two_objectives(names, expected):
    snapshot = make_snapshot(30, **({"names": names} if names else {}))
    pairs = info.get_pairs(info.get_cloud(snapshot))
    assert len(pairs) == expected
    for pair in pairs:
        feasible = np.vstack([g.values for g in pair.groups if g.status in ("dominated", "front", "knee")])
        directions = ["maximize" if axis.higher_is_better else "minimize" for axis in (pair.x, pair.y)]
        assert front(pair.edge, directions).all()
        assert len(pair.edge) == len(np.unique(feasible[front(feasible, directions)], axis=0))


def test_ranges_keep_the_front_and_leave_far_points_out():
    trials = tuple(make_trial(n, speed=1000 + n, memory=GIB * (1 + n / 100), loss=2 + n / 100) for n in range(20))
    lost = make_trial(20, speed=900, memory=2 * GIB, loss=90.0)
    pairs = info.get_pairs(info.get_cloud(replace(make_snapshot(0), trials=(*trials, lost))))
    assert [pair.num_outside for pair in pairs] == [1, 1, 1]
    for pair in pairs:
        on_front = np.vstack([group.values for group in pair.groups if group.status in ("front", "knee")])
        assert (on_front[:, 1] >= pair.y_range[0]).all()
        assert (on_front[:, 1] <= pair.y_range[1]).all()


def test_memory_is_shown_in_the_unit_that_fits():
    small = replace(make_snapshot(0), trials=(make_trial(0, memory=3 * 2**20),))
    assert [axis.unit for axis in info.get_axes(small)] == ["tokens/s", "MiB", "nats/token"]
    assert info.get_axes(make_snapshot(3, failure_ratio=0))[1].unit == "GiB"


def test_history_rises_and_ends_at_the_hypervolume():
    history = info.get_history(make_snapshot(50))
    assert (np.diff(history.shares) >= 0).all()
    assert 0 < history.shares[-1] <= 1
    assert len(history.reference) == 3


def test_the_reference_point_is_told_in_values():
    """1.1 times the front's range from the best: also where that is a speed below zero."""
    trials = (make_trial(0, speed=1000, loss=3.0), make_trial(1, speed=10, loss=2.0))
    history = info.get_history(replace(make_snapshot(0), trials=trials))
    assert (history.reference[0], history.reference[2]) == ("-89 tokens/s", "3.1 nats/token")


def test_failures_by_kind_with_the_first_detail():
    trials = (
        make_trial(0, kind="oom"),
        make_trial(1, kind="oom", detail="rank 0 needed 3 GiB", folder=Path("t/1")),
        make_trial(2, kind="nan", detail="loss"),
        make_trial(3),
    )
    failures = info.get_failures(replace(make_snapshot(0), trials=trials))
    assert [(f.kind, f.num_trials, f.ratio, f.first_trial) for f in failures] == [
        ("oom", 2, 0.5, 1),
        ("nan", 1, 0.25, 2),
    ]
    assert failures[0].first_detail == "rank 0 needed 3 GiB"
    assert failures[0].log == "t/1/stdout.log"


def test_there_is_advice_for_every_kind_of_failure():
    assert set(info.TRAINING_ADVICE) == set(info.PROGRAM_ADVICE) == set(FAILURE_KINDS)


def test_advice_fits_what_is_tuned():
    trials = [make_trial(0), *(make_trial(n, kind=kind, detail="x") for n, kind in enumerate(FAILURE_KINDS, 1))]
    training = replace(make_snapshot(0), trials=trials)
    program = replace(training, space={"objectives": [], "space": {"x": [1, 2]}})
    words = {name: " ".join(f.advice for f in info.get_failures(s)) for name, s in (("t", training), ("p", program))}
    assert all(word in words["t"] for word in ("micro-batch", "rank", "bf16"))
    assert not any(word in words["p"] for word in ("micro-batch", "rank", "bf16", "warm-up", "configuration"))
    assert all("goes on where it was" not in text for text in words.values())  # a trial that counts is not run again


def test_table_has_a_row_for_every_trial_and_a_cell_for_every_column():
    snapshot = make_snapshot(30, num_pending=2, hostile=True)
    table = info.get_table(snapshot)
    assert len(table.rows) == 32
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert table.columns[0].key == "trial"
    for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True):
        if column.numeric:
            assert all(cell is None or (isinstance(cell, int | float) and np.isfinite(cell)) for cell in cells)


def test_columns_are_told_apart_whatever_a_users_values_are_called():
    parameters = dict.fromkeys(("trial", "status", "plan", "seconds", "detail", "speed", "value.speed"), 1)
    keys = [
        column.key
        for column in info.get_table(replace(make_snapshot(0), trials=(make_trial(0, parameters=parameters),))).columns
    ]
    assert len(set(keys)) == len(keys)


def test_parallel_coordinates_thin_out_but_keep_the_front():
    snapshot = make_snapshot(400)
    parallel = info.get_parallel(snapshot, max_lines=100)
    num_feasible = sum(trial.feasible for trial in snapshot.trials)
    assert len(parallel.ranks) == max(100, len(front_trials(snapshot)))
    assert parallel.num_left_out == num_feasible - len(parallel.ranks)
    for column in parallel.columns:
        assert np.isfinite(column.positions).all(), column.label
        assert column.tick_positions == tuple(sorted(column.tick_positions))
        assert len(column.tick_positions) == len(column.tick_texts)


def test_parallel_coordinates_place_absent_and_mixed_values():
    values = [None, 0.5, True, "every_k", 1]
    trials = tuple(
        make_trial(n, speed=1 + n, parameters={} if v is None else {"plan.x": v}) for n, v in enumerate(values)
    )
    parallel = info.get_parallel(replace(make_snapshot(0), trials=trials))
    assert parallel.columns[0].tick_texts == ("–", "0.5", "1", "true", "every_k")
    assert parallel.columns[0].positions.tolist() == [0, 1, 3, 4, 2]


def test_parallel_coordinates_use_a_log_axis_where_values_spread():
    rates = np.geomspace(1e-4, 1e-1, 12).tolist()
    trials = tuple(
        make_trial(n, speed=1 + n, parameters={"hyperparameters.learning_rate": rate} if n else {})
        for n, rate in enumerate(rates)
    )
    column = info.get_parallel(replace(make_snapshot(0), trials=trials)).columns[0]
    assert np.diff(column.positions[1:]) == pytest.approx(3 / 11)
    assert column.tick_texts[0] == "–"
    assert column.positions[0] < column.positions[1:].min()


def test_summary_recommends_the_knee_and_shows_the_extremes():
    summary = info.get_summary(make_snapshot(40, num_repeats=2))
    assert [choice.title for choice in summary.choices] == [
        "Recommended: the knee",
        "The fastest",
        "The smallest",
        "The best loss",
    ]
    assert sum(summary.counts.values()) == summary.num_trials == 42
    assert summary.empty_reason == ""


def test_five_objectives_have_columns_pairs_and_extremes_like_three():
    """Nothing of a report takes for granted that there are three."""
    names = (*ALL, "cost", "energy")
    snapshot = make_snapshot(60, names=names, failure_ratio=0)
    keys = [column.key for column in info.get_table(snapshot).columns]
    assert {f"value.{name}" for name in names} <= set(keys)
    assert len(info.get_pairs(info.get_cloud(snapshot))) == 10
    titles = {choice.title for choice in info.get_summary(snapshot).choices}
    assert {"The cheapest", "The thriftiest"} <= titles
    reasons = " ".join(reason for choice in info.get_summary(snapshot).choices for reason in choice.reasons)
    assert "cost" in reasons
    figure = plot_importance(get_importance(snapshot))
    assert [bar.name for bar in figure.data] == ["Energy", "Cost", "Held-out loss", "Peak memory", "Training speed"]


def test_summary_names_the_trial_nearest_to_the_bounds():
    """Ten trials that all break a bound are not the same as none."""
    snapshot = make_snapshot(10, bounds={"memory": 1000.0}, failure_ratio=0)
    smallest = min(snapshot.trials, key=lambda trial: trial.values["memory"])
    reason = info.get_summary(snapshot).empty_reason
    assert f"The nearest is trial {smallest.number}: peak memory" in reason
    assert "above 1.0 KiB" in reason


def test_summary_tells_what_repeats_gave():
    trials = (make_trial(0), make_trial(1, loss=2.6, repeat_of=0), make_trial(2, loss=2.7, repeat_of=0))
    (choice,) = info.get_summary(replace(make_snapshot(0), trials=trials)).choices
    assert "2 other seeds" in choice.repeats
    assert "held-out loss 2.65 nats/token ±" in choice.repeats


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (make_snapshot(0), "No trial has run"),
        (make_snapshot(0, num_pending=2), "No trial has ended"),
        (make_snapshot(5, failure_ratio=1), "No trial has succeeded"),
        (make_snapshot(5, failure_ratio=0, bounds={"memory": 1.0}), "none is within"),
        (replace(make_snapshot(0), trials=(make_trial(0, share=0.25, feasible=False),)), "trained in full"),
    ],
)
def test_summary_says_why_there_is_nothing_to_choose(snapshot, words):
    summary = info.get_summary(snapshot)
    assert summary.choices == ()
    assert words in summary.empty_reason
    assert info.get_history(snapshot) is None
    assert info.get_parallel(snapshot) is None


def test_the_command_is_safe_to_paste():
    snapshot = make_snapshot(3, hostile=True, folder=Path("my runs/studies/x"))
    assert shlex.split(info.apply_command(snapshot, 2)) == [
        "autotune", "apply", HOSTILE, "--pick", "2", "-o", "run.yaml", "--runs-dir", "my runs",
    ]  # fmt: skip
    assert info.apply_command(make_snapshot(1), "knee") == "autotune apply tiny --pick knee -o run.yaml"
