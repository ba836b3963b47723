"""What is picked from a study, and what people are told when nothing can be."""

from dataclasses import replace

import pytest

from autotune.apply.select import concessions, explain, front_trials, knee_trial, pick
from autotune.space.objectives import Objective
from engine.errors import UserError
from tests.reports.synthetic import GIB, make_snapshot, make_trial

pytestmark = pytest.mark.unit


@pytest.fixture
def study():
    """Trial 1 is the bend, 0 and 2 the extremes, 3 dominated, 4 failed, 5 running, 6 a lucky repeat of 3."""
    base = make_snapshot(0)
    running = replace(make_trial(5), state="running", outcome=None, values=None, feasible=False)
    trials = (
        make_trial(0, speed=1000, memory=8 * GIB, loss=2.0),
        make_trial(1, speed=900, memory=2 * GIB, loss=2.1),
        make_trial(2, speed=300, memory=1 * GIB, loss=3.0),
        make_trial(3, speed=200, memory=4 * GIB, loss=3.1),
        make_trial(4, kind="oom", detail="rank 1 needed 9.00 GiB"),
        running,
        make_trial(6, speed=5000, memory=GIB / 2, loss=1.0, repeat_of=3),
    )
    return replace(base, trials=trials)


def number(trial):
    return trial.number


def test_front_leaves_out_dominated_failed_and_repeated_trials(study):
    assert list(map(number, front_trials(study))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("how", "expected"), [("knee", 1), ("fastest", 0), ("smallest", 2), ("best", 0), ("3", 3), ("6", 6)]
)
def test_pick(study, how, expected):
    assert pick(study, how).number == expected


@pytest.mark.parametrize(
    ("how", "bound", "expected"),
    [
        ("fastest", Objective(name="memory", bound=2.0 * GIB), 1),
        ("smallest", Objective(name="speed", bound=900.0), 1),
        ("best", Objective(name="memory", bound=1.5 * GIB), 2),
        ("knee", Objective(name="quality", bound=2.05), 0),
    ],
)
def test_bounds_narrow_the_choice(study, how, bound, expected):
    assert pick(study, how, [bound]).number == expected


def test_bounds_need_not_be_objectives():
    """Speed alone was optimised, memory was measured all the same."""
    objectives = (Objective(name="speed"),)
    trials = tuple(make_trial(n, speed=100 - n, memory=GIB * (3 - n), objectives=objectives) for n in range(3))
    study = replace(make_snapshot(0), objectives=objectives, trials=trials)
    assert pick(study, "knee").number == 0
    assert pick(study, "fastest", [Objective(name="memory", bound=2.0 * GIB)]).number == 1


def test_ties_go_to_the_better_in_everything_else(study):
    trials = (
        make_trial(0, speed=1000, memory=8 * GIB, loss=2.0),
        make_trial(1, speed=1000, memory=3 * GIB, loss=2.1),
        make_trial(2, speed=100, memory=1 * GIB, loss=2.2),
    )
    assert pick(replace(study, trials=trials), "fastest").number == 1


def refusal(study, how, bounds=()):
    with pytest.raises(UserError) as caught:
        pick(study, how, bounds)
    return f"{caught.value.message} | {caught.value.hint}"


def test_nothing_fits_names_the_nearest_and_by_how_much(study):
    text = refusal(study, "knee", [Objective(name="memory", bound=0.5 * GIB)])
    assert "nothing fits peak memory at most 0.50 GiB" in text
    assert "trial 2" in text
    assert "100 % above" in text


def test_a_limit_on_what_no_trial_measured_is_no_matter_of_loosening(study):
    text = refusal(study, "knee", [Objective(name="latency", direction="minimize", bound=1.0)])
    assert "no trial of study" in text
    assert "can't be limited" in text
    assert "the objectives are speed, memory, quality" in text


def test_a_study_of_parts_alone_has_nothing_to_apply_yet(study):
    parts = tuple(replace(trial, share=0.25, feasible=False) for trial in study.trials[:3])
    assert "trained in full yet, 3 are in part" in refusal(replace(study, trials=parts), "knee")


def test_nothing_feasible_names_the_least_violated():
    study = make_snapshot(10, bounds={"memory": 1000.0}, failure_ratio=0)
    text = refusal(study, "knee")
    smallest = min(study.trials, key=lambda trial: trial.values["memory"])
    assert "the study's own bounds" in text
    assert f"trial {smallest.number}" in text
    assert pick(study, str(smallest.number)) is smallest
    assert any("beyond the study's own bounds" in line for line in explain(study, smallest, str(smallest.number)))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kne", ["did you mean knee"]),
        ("-1", ["allowed are knee"]),
        ("99", ["no trial 99", "0, 1, 2, 3"]),
        ("4", ["failed (oom)", "rank 1 needed 9.00 GiB"]),
        ("5", ["running", "no result yet"]),
    ],
)
def test_refusals_are_for_people(study, how, words):
    text = refusal(study, how)
    assert all(word in text for word in words), text


def test_a_number_must_fit_the_bounds_given_with_it(study):
    assert "trial 0 does not fit" in refusal(study, "0", [Objective(name="memory", bound=float(GIB))])


def test_no_successful_trial_says_what_happened():
    study = make_snapshot(6, failure_ratio=1.0, num_pending=2)
    text = refusal(study, "best")
    assert "no successful trial" in text
    assert "2 without an outcome yet" in text


def test_an_objective_that_was_not_optimised_has_no_extreme():
    text = refusal(make_snapshot(5, names=("speed",), failure_ratio=0), "smallest")
    assert "did not optimise memory" in text
    assert "knee, fastest" in text


def test_concessions_are_measured_against_the_extremes(study):
    front = front_trials(study)
    knee = knee_trial(study, front)
    given_up = {c.objective.name: (c.extreme.number, round(c.ratio, 3)) for c in concessions(study, knee, front)}
    assert given_up == {"speed": (0, 0.1), "memory": (2, 1.0), "quality": (0, 0.05)}
    reasons = " ".join(explain(study, knee, "knee"))
    assert "10 % slower than the fastest (trial 0, 1k tokens/s)" in reasons


def test_the_only_candidate_gives_up_nothing():
    study = make_snapshot(1, failure_ratio=0)
    assert "no other candidate is better" in explain(study, pick(study, "knee"), "knee")[-1]
    bound = Objective(name="memory", bound=1e15)
    assert (
        "no other candidate within peak memory at most"
        in explain(study, pick(study, "knee", [bound]), "knee", [bound])[-1]
    )


def test_trials_to_pick_from_are_named_in_order():
    """Of many those of the front, of few all of them."""
    study = make_snapshot(12, failure_ratio=0)
    named = refusal(study, "99").partition("trials with a result: ")[2].partition(", ...")[0]
    numbers = list(map(int, named.split(", ")))
    assert numbers == sorted(numbers)
    assert {trial.number for trial in front_trials(study)[:8]} <= set(numbers)
