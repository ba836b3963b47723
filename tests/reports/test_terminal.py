"""The front as a table of text."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from reports.terminal import front_table, status_line
from tests.reports.synthetic import HOSTILE, make_snapshot

pytestmark = pytest.mark.unit


def printed(snapshot, width=120, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(front_table(snapshot, width=width, **options))
    return console.file.getvalue()


def test_knee_units_and_settings_are_shown():
    text = printed(make_snapshot(40))
    assert text.count("★") == 2  # its row, and what it means
    assert all(word in text for word in ("tokens/s", "GiB", "nats/token", "learning_rate=", "tp2 mb8 fp32"))


def test_three_objectives_fit_into_80_columns():
    lines = printed(make_snapshot(40), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_long_plans_leave_room_for_the_last_objective():
    snapshot = make_snapshot(9)
    settings = {f"hyperparameters.{name}": 0.0003412 for name in ("global_batch_size", "learning_rate", "warmup_ratio")}
    trials = [replace(trial, plan="dp2 mb16 bf16 ac-full z3", parameters=settings) for trial in snapshot.trials]
    lines = printed(replace(snapshot, trials=trials), width=80).splitlines()
    assert any(line.rstrip().endswith("nats/token") for line in lines)
    assert any("dp2 mb16 bf16" in line for line in lines)


def test_four_objectives_and_any_plan_fit_into_80_columns():
    snapshot = make_snapshot(40, names=("speed", "memory", "quality", "cost"))
    plan = "dp_shard2-tp2-pp2 mb16 recompute=full bf16"
    trials = [replace(trial, plan=plan) for trial in snapshot.trials]
    for study in (snapshot, replace(snapshot, trials=trials)):
        lines = printed(study, width=80).splitlines()
        assert max(map(len, lines)) <= 80
        header = " ".join(" ".join(lines[:8]).split())
        assert all(word in header for word in ("tokens/s", "GiB", "nats/token", "$ per"))
        first = next(trial for trial in study.trials if trial.number == 31)
        (row,) = [line.split() for line in lines if line.split()[:1] == ["31"]]
        assert float(row[-1]) == pytest.approx(first.values["cost"], rel=1e-2)
    assert plan in printed(replace(snapshot, trials=trials), width=160)


def test_a_small_value_beside_large_ones_keeps_its_digits():
    snapshot = make_snapshot(2, names=("quality",), failure_ratio=0)
    losses = zip(snapshot.trials, (7.7e-9, 2.5), strict=True)
    trials = [replace(trial, values={"quality": loss}) for trial, loss in losses]
    text = printed(replace(snapshot, trials=trials))
    assert "7.7e-09" in text
    assert "0.0000" not in text


def test_long_names_of_settings_are_broken_after_an_underscore():
    snapshot = make_snapshot(9)
    name = "hyperparameters.router_aux_loss_coefficient"
    trials = [replace(trial, parameters=trial.parameters | {name: 0.01}) for trial in snapshot.trials]
    lines = printed(replace(snapshot, trials=trials), width=80).splitlines()
    assert any("router_aux_loss_ " in line for line in lines)
    assert any("coefficient=0.01" in line for line in lines)


def test_a_long_front_is_cut_but_keeps_the_knee():
    snapshot = make_snapshot(300)
    text = printed(snapshot, most=6)
    rows = [line for line in text.splitlines() if "fp32" in line]
    assert len(rows) <= 6
    assert sum("★" in row for row in rows) == 1
    assert "more in the report" in text


def test_words_of_a_study_are_not_markup():
    assert HOSTILE[:12] in printed(make_snapshot(9, hostile=True), width=300)
    assert "[red]" in printed(make_snapshot(9, hostile=True), width=300)


@pytest.mark.parametrize("snapshot", [make_snapshot(0), make_snapshot(5, failure_ratio=1)])
def test_no_front_says_why(snapshot):
    assert "No trial has" in printed(snapshot)


def test_status_line():
    assert status_line(make_snapshot(0)) == "no trials yet"
    assert status_line(make_snapshot(1, failure_ratio=0, num_pending=1)) == "2 trials: 1 knee, 1 running"
