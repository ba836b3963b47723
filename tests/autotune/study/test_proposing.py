"""A sweep can be repeated: proposals are functions of the study's seed and of what was measured."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from autotune.apply.select import pick
from autotune.search.sampler import Observation
from autotune.search.samplers import DEFAULT_SAMPLER, EXTRAS, SAMPLERS, make_sampler
from autotune.search.warm_start import task_prior_of
from autotune.space.command import CommandSpace
from autotune.space.objectives import Objective
from autotune.space.space import Dimension
from autotune.space.training import TrainingSpace
from autotune.study.assignment import Assignment
from autotune.study.study import Nothing, Study, load_snapshot
from autotune.study.study_file import read_study_file
from autotune.testing.samplers import bowl, plain_space, state_of
from engine.errors import UserError
from engine.outcome import Outcome

pytestmark = pytest.mark.unit

OpenStudy = Callable[..., Study]
MakeSpace = Callable[..., tuple[TrainingSpace, Any]]

NUM_TRIALS = 6


def asked(study: Study) -> Assignment:
    assignment = study.ask()
    assert isinstance(assignment, Assignment)
    return assignment


def outcome_of(assignment: Assignment) -> Outcome:
    """What a trainer would measure; high rates diverge."""
    rate = float(assignment.parameters["hyperparameters.learning_rate"] or 0)
    if rate > 7e-3:
        return Outcome(kind="diverged", detail="loss 9 above 4")
    speed = 1000.0 * int(assignment.parameters["plan.micro_batch_size"] or 1)
    return Outcome(kind="ok", tokens_per_second=speed, held_out_loss=2.0 + abs(rate - 1e-3) * 100, corpus_hash="text")


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in EXTRAS])
def test_one_worker_repeats_a_sweep_exactly_also_when_it_is_cut_in_two(
    open_study: OpenStudy, make_space: MakeSpace, sampler: str
) -> None:
    """Equal candidates and seeds in one go and over a restart in the middle of a trial; not with another seed of the
    study."""
    prior = task_prior_of(make_space()[0])

    def swept(name: str, *sessions: int, seed: int = 3) -> list[tuple[dict[str, Any], int]]:
        told = []
        for num_more in sessions:
            study = open_study(name, sampler=sampler, num_trials=NUM_TRIALS, seed=seed, task_prior=prior)
            for _ in range(num_more):
                assignment = asked(study)
                study.tell(assignment, outcome_of(assignment))
                told.append((dict(assignment.parameters), assignment.seed))
            if num_more < NUM_TRIALS and len(told) < NUM_TRIALS:
                study.release(asked(study))  # stopped in a trial
            study.close()
        return told

    whole = swept("whole", NUM_TRIALS)
    assert swept("cut", 4, NUM_TRIALS - 4) == whole
    assert [seed for _, seed in swept("other", 4, seed=4)] != [seed for _, seed in whole[:4]]


def test_values_as_measured_are_kept(open_study: OpenStudy) -> None:
    """What samplers see is capped, what people see is not."""
    study = open_study(num_trials=1)
    study.tell(asked(study), Outcome(kind="ok", tokens_per_second=1.0, held_out_loss=1e6, corpus_hash="text"))
    (row,) = load_snapshot(study.folder).trials
    assert row.values == {"speed": 1.0, "quality": 1e6}


def test_a_mesh_is_one_word_in_the_storage(open_study: OpenStudy) -> None:
    study = open_study(num_trials=1)
    asked(study)
    (trial,) = study._table.all()
    assert trial.params["plan.mesh"] in ("single", "dp2")


def test_a_sweep_ends_when_one_more_trial_is_not_expected_to_gain_enough(open_study: OpenStudy) -> None:
    """And does so again when it is continued with the same threshold, or goes on without it."""
    study = open_study(num_trials=200, enough=0.001)
    count = 0
    while isinstance(assignment := study.ask(), Assignment):
        count += 1
        study.tell(assignment, Outcome(kind="ok", tokens_per_second=100.0, held_out_loss=2.0, corpus_hash="text"))
    assert assignment is Nothing.ENOUGH
    assert count == 22, "two windows of ten, and patience"
    gain = study.expected_gain()
    assert gain is not None
    assert gain.ratio == 0.0
    study.close()
    again = open_study(num_trials=200, enough=0.001)
    assert again.ask() is Nothing.ENOUGH
    again.close()
    guess = {"plan.mesh": "single", "plan.micro_batch_size": 1, "hyperparameters.global_batch_size": 8}
    with_guess = open_study(
        num_trials=200, enough=0.001, guesses=[{**guess, "hyperparameters.learning_rate": 1.234e-3}]
    )
    assert asked(with_guess).parameters["hyperparameters.learning_rate"] == 1.234e-3, "asked for, whatever it may bring"
    assert isinstance(open_study(num_trials=200).ask(), Assignment)


def test_a_proposal_that_takes_long_is_given_up_when_the_sweep_is_to_end(
    open_study: OpenStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent learns for a minute first. Whoever goes on with the study finds no trial of it."""
    pytest.importorskip("stable_baselines3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    study = open_study(num_trials=2, sampler="rl")
    study.stop_proposing()
    assert study.ask() is Nothing.WAIT
    study.close()
    again = open_study(num_trials=2, sampler="random")
    assert asked(again).parameters
    assert len(again.snapshot().trials) == 1


def test_the_prior_is_that_of_the_run_that_is_searched(make_space: MakeSpace) -> None:
    space, _ = make_space()
    prior = task_prior_of(space)
    assert prior is not None
    assert prior.task.total_tokens == space.workload.total_tokens
    assert prior.task.sequence_length == space.workload.sequence_length
    assert task_prior_of(make_space("objectives=[speed, memory]")[0]) is None
    mup = "space.hyperparameters.parametrization=mup"
    base = "space.hyperparameters.base_hidden_size"
    assert task_prior_of(make_space(mup, f"{base}={space.model.hidden_size // 2}")[0]) is None
    assert task_prior_of(make_space(mup, f"{base}={space.model.hidden_size}")[0]) is not None


def test_a_users_program_has_a_prior_when_it_says_what_it_trains() -> None:
    rate = (Dimension("learning_rate", "log_float", low=1e-5, high=1e-1),)
    task = {"num_parameters": 10**8, "total_tokens": 2 * 10**9}
    loss = (Objective(name="loss"),)
    program = CommandSpace("program", loss, rate, {}, roles={"quality": "loss"}, task=task)
    prior = task_prior_of(program)
    assert prior is not None
    assert prior.task.num_parameters == 10**8
    assert task_prior_of(CommandSpace("program", loss, rate, {}, task=task)) is None, "none of it is called quality"
    assert task_prior_of(CommandSpace("program", loss, rate, {}, roles={"quality": "loss"})) is None
    with pytest.raises(UserError, match="num_parametrs"):
        task_prior_of(CommandSpace("p", loss, rate, {}, roles={"quality": "loss"}, task={"num_parametrs": 1}))
    with pytest.raises(UserError, match="learning_rte"):
        task_prior_of(CommandSpace("p", loss, rate, {}, roles={"quality": "loss", "learning_rte": "x"}, task=task))


def test_the_default_is_kept_with_the_study_and_may_change(open_study: OpenStudy, tmp_path: Path) -> None:
    study = open_study(num_trials=1, sampler=None)
    assert read_study_file(study.folder).sampler == DEFAULT_SAMPLER == "joint"
    study.close()
    open_study(num_trials=1, sampler="qmc")
    assert read_study_file(study.folder).sampler == "qmc"
    with pytest.raises(UserError, match="no sampler"):
        open_study(num_trials=1, sampler="joynt")


def test_remarks_say_how_far_the_prior_reaches(open_study: OpenStudy, make_space: MakeSpace) -> None:
    study = open_study(num_trials=1, task_prior=task_prior_of(make_space()[0]))
    assert any("prior" in remark for remark in study.remarks()), "a run of a few thousand tokens is outside"
    assert open_study("without", num_trials=1).remarks() == []


def test_values_that_are_not_finite_are_failures(open_study: OpenStudy) -> None:
    """An infinite loss is no point of the front, and a NaN is never the best, though it came first."""
    study = open_study(num_trials=3)
    losses = (math.nan, math.inf, 2.5)
    for loss in losses:
        study.tell(asked(study), Outcome(kind="ok", tokens_per_second=1e9, held_out_loss=loss, corpus_hash="text"))
    snapshot = load_snapshot(study.folder)
    assert [row.values is None for row in snapshot.trials] == [True, True, False]
    assert pick(snapshot, "knee").number == pick(snapshot, "fastest").number == 2
    for trial in study._table.all():
        assert trial.state == TrialState.COMPLETE, "never left running"
        assert all(map(math.isfinite, trial.values))


@pytest.mark.parametrize("sampler", ["joint", "tpe"])
def test_the_search_learns_where_trials_fail(sampler: str) -> None:
    """Two thirds of the space end in NaN: the last trials keep out of there."""
    space = plain_space()
    observations: list[Observation] = []
    for number in range(30):
        chosen = make_sampler(sampler).propose(state_of(space, observations, num_trials=30))
        assert chosen is not None
        fails = float(chosen["y"] or 0) > 1e-3
        values = None if fails else bowl(chosen)
        observations.append(Observation(number, "failed" if fails else "ok", chosen, values, "nan" if fails else ""))
    assert sum(o.state == "failed" for o in observations[-10:]) <= 4
