"""The user's first guesses: every key and value is checked, and each is run once, first, whoever asks."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space
from autotune.space.training import TrainingSpace
from autotune.study.assignment import Assignment
from autotune.study.guesses import guess_of, read_guesses
from autotune.study.study import Nothing, Study, load_snapshot
from engine.config import dump_run
from engine.errors import UserError
from engine.outcome import Outcome
from engine.yaml_file import dump_yaml

pytestmark = pytest.mark.unit

MakeSpace = Callable[..., tuple[TrainingSpace, Any]]
OpenStudy = Callable[..., Study]

GUESS = {
    "plan": {"dp_shard": 2, "micro_batch_size": 2},
    "hyperparameters": {"global_batch_size": 16, "learning_rate": 2e-3},
}
CHOSEN = {
    "plan.mesh": "dp2",
    "plan.micro_batch_size": 2,
    "hyperparameters.global_batch_size": 16,
    "hyperparameters.learning_rate": 2e-3,
}


def ok() -> Outcome:
    return Outcome(kind="ok", tokens_per_second=100.0, held_out_loss=3.0, corpus_hash="text")


def asked(study: Study) -> Assignment:
    assignment = study.ask()
    assert isinstance(assignment, Assignment)
    return assignment


def guess(learning_rate: float) -> dict[str, Any]:
    return {**CHOSEN, "hyperparameters.learning_rate": learning_rate}


def test_sections_and_dotted_names_say_the_same(make_space: MakeSpace) -> None:
    space, _ = make_space()
    assert guess_of(GUESS, space) == CHOSEN
    assert guess_of(CHOSEN, space) == CHOSEN
    assert list(guess_of(dict(reversed(CHOSEN.items())), space)) == [d.name for d in space.dimensions]


def test_what_is_left_out_has_its_default_where_that_is_in_the_space(make_space: MakeSpace) -> None:
    space, _ = make_space()
    chosen = guess_of({"hyperparameters.global_batch_size": 8}, space)
    assert chosen["plan.mesh"] == "single"
    assert chosen["hyperparameters.learning_rate"] == space.base_run().hyperparameters.learning_rate
    narrow, _ = make_space("space.hyperparameters.learning_rate={log_float: [5e-3, 1e-2]}")
    assert guess_of({"hyperparameters.global_batch_size": 8}, narrow)["hyperparameters.learning_rate"] == 5e-3


def test_what_is_left_out_is_completed_to_a_legal_candidate(make_space: MakeSpace) -> None:
    """The values of the space nearest to the defaults, and others where these are not legal together."""
    space, _ = make_space(
        "space.plan.micro_batch_size=[2, 4]", "space.constraints=['plan.dp * plan.micro_batch_size == 4']"
    )
    chosen = guess_of({"hyperparameters.learning_rate": 1e-3}, space)
    assert (chosen["plan.mesh"], chosen["plan.micro_batch_size"]) in (("single", 4), ("dp2", 2))
    assert guess_of({"plan": {"dp_shard": 2}}, space)["plan.micro_batch_size"] == 2
    with pytest.raises(UserError, match=r"does not hold: plan\.dp \* plan\.micro_batch_size == 4") as raised:
        guess_of({"plan": {"dp_shard": 1, "micro_batch_size": 2}}, space)
    assert "hyperparameters.global_batch_size = " in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("guess", "message"),
    [
        ({"hyperparameters": {"learning_rate": "fast"}}, "hyperparameters.learning_rate = 'fast'"),
        ({"hyperparameters": {"learning_rate": 0.5}}, "hyperparameters.learning_rate = 0.5"),
        ({"plan": {"tp": 2}}, "degrees are tp2"),
    ],
)
def test_the_real_mistake_is_told_and_not_what_is_left_out(
    make_space: MakeSpace, guess: dict[str, Any], message: str
) -> None:
    space, _ = make_space("space.plan.micro_batch_size=[2, 4]")
    with pytest.raises(UserError) as raised:
        guess_of(guess, space)
    assert message in raised.value.message


def test_a_condition_that_a_guess_needs_is_chosen_for_it(make_space: MakeSpace) -> None:
    space, _ = make_space(
        "space.hyperparameters.schedule=[cosine, wsd]", "space.hyperparameters.decay_ratio=[0.3, 0.4]"
    )
    assert guess_of({"hyperparameters.decay_ratio": 0.4}, space)["hyperparameters.schedule"] == "wsd"


def test_what_apply_wrote_is_a_guess(tmp_path: Path) -> None:
    space = Space(
        "plain", (Objective(name="loss"),), (Dimension("lr", "log_float", low=1e-4, high=1.0),), {"mode": "a"}
    )
    choice = {"study": "plain", "trial": 3, "picked": "knee", "values": {"mode": "a", "lr": 0.01}, "measured": {}}
    (tmp_path / "best.yaml").write_text(dump_yaml(choice))
    assert read_guesses([tmp_path / "best.yaml"], space) == [{"lr": 0.01}]


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"hyperparameters.learning_rte": 1e-3}, "learning_rte", "did you mean hyperparameters.learning_rate"),
        ({"learning_rate": 1e-3}, "'learning_rate'", "did you mean hyperparameters.learning_rate"),
        ({"hyperparameters.learning_rate": 5.0}, "0.0001 to 0.01", "nearest is 0.01"),
        ({"hyperparameters.learning_rate": float("nan")}, "not in the space", ""),
        ({"hyperparameters.learning_rate": "3e-4 "}, "not in the space", ""),
        ({"plan.micro_batch_size": 3}, "1, 2, 4, 8", "nearest is 2"),
        ({"plan.micro_batch_size": 2.0}, "1, 2, 4, 8", ""),
        ({"plan.mesh": "dp3"}, "dp3", "did you mean dp2"),
        ({"plan.precision": "bf16"}, "plan.precision = 'bf16', the space has 'fp32'", "search it"),
        ({"hyperparameters.weight_decay": 0.5}, "weight_decay", "leave hyperparameters.weight_decay out"),
        ({"model.hidden_size": 7}, "model.hidden_size", "leave model.hidden_size out"),
        ({"plan.micro_batch_size": 8, "hyperparameters.global_batch_size": 8}, "not legal", ""),
    ],
)
def test_warm_start_validates_every_point(
    make_space: MakeSpace, changes: dict[str, Any], message: str, hint: str
) -> None:
    """Misspelt, out of range, unknown category, fixed otherwise, refused by a rule: told, with what to change."""
    space, _ = make_space()
    with pytest.raises(UserError) as raised:
        guess_of({**CHOSEN, **changes}, space, where="guess.yaml")
    assert message in raised.value.message
    assert hint in (raised.value.hint or "")
    assert raised.value.where == "guess.yaml"


def test_degrees_that_are_not_in_the_space_are_told_with_those_that_are(make_space: MakeSpace) -> None:
    space, _ = make_space()
    with pytest.raises(UserError, match="degrees are tp2") as raised:
        guess_of({"plan": {"tp": 2}, "hyperparameters.global_batch_size": 8}, space)
    assert "single, dp2" in (raised.value.hint or "")


def test_a_value_without_effect_is_told(make_space: MakeSpace) -> None:
    space, _ = make_space(
        "space.hyperparameters.schedule=[cosine, wsd]", "space.hyperparameters.decay_ratio=[0.3, 0.4]"
    )
    with_decay = {**CHOSEN, "hyperparameters.schedule": "wsd", "hyperparameters.decay_ratio": 0.3}
    assert guess_of(with_decay, space)["hyperparameters.decay_ratio"] == 0.3
    with pytest.raises(UserError, match="no effect"):
        guess_of({**with_decay, "hyperparameters.schedule": "cosine"}, space)


def test_a_run_file_is_a_guess(make_space: MakeSpace, tmp_path: Path) -> None:
    space, _ = make_space()
    run = space.candidate(CHOSEN).run
    assert run is not None
    longer = run.changed(workload=run.workload.changed(total_tokens=10**9))  # the production run: trials are shorter
    (tmp_path / "run.yaml").write_text(dump_run(longer))
    (tmp_path / "values.yaml").write_text("- {hyperparameters: {learning_rate: 1e-3, global_batch_size: 8}}\n")
    from_run, from_values = read_guesses([tmp_path / "run.yaml", tmp_path / "values.yaml"], space)
    assert from_run == CHOSEN
    assert from_values["hyperparameters.learning_rate"] == 1e-3
    other = run.changed(plan=run.plan.changed(precision="bf16"))
    (tmp_path / "run.yaml").write_text(dump_run(other))
    with pytest.raises(UserError, match=r"plan\.precision = 'bf16'"):
        read_guesses([tmp_path / "run.yaml"], space)
    (tmp_path / "list.yaml").write_text("- 3\n")
    with pytest.raises(UserError, match="run file or a mapping"):
        read_guesses([tmp_path / "list.yaml"], space)


def test_a_space_of_plain_values_takes_whole_numbers_for_real_ones() -> None:
    dimensions = (Dimension("rate", "float", low=0.0, high=4.0), Dimension("only", "categorical", ("a",)))
    space = Space("plain", (Objective(name="loss"),), dimensions, {"fixed": 1})
    assert guess_of({"rate": 3}, space) == {"rate": 3.0, "only": "a"}
    with pytest.raises(UserError, match="fixed = 2, the space has 1"):
        guess_of({"rate": 3, "fixed": 2}, space)


@pytest.mark.parametrize("kind", ["int", "log_int"])
def test_long_ranges_of_whole_numbers_are_never_listed(kind: Any) -> None:
    dimensions = (Dimension("steps", kind, low=1, high=2**50), Dimension("x", "float", low=0.0, high=1.0))
    space = Space("long", (Objective(name="loss"),), dimensions, {})
    middle = 2**25 if kind == "log_int" else 2**49 + 1
    assert guess_of({"x": 0.5}, space) == {"steps": middle, "x": 0.5}
    with pytest.raises(UserError) as error:
        guess_of({"steps": 0}, space)
    assert "the nearest is 1;" in str(error.value)
    with pytest.raises(UserError, match="not in the space"):
        guess_of({"steps": float("inf")}, space)


def test_guesses_run_first_and_are_marked(open_study: OpenStudy) -> None:
    study = open_study(num_trials=6, guesses=[guess(1e-3), guess(2e-3)])
    for _ in range(6):
        study.tell(asked(study), ok())
    assert study.ask() is Nothing.DONE
    rows = load_snapshot(study.folder).trials
    assert [row.is_guess for row in rows] == [True, True, *[False] * 4]
    assert [row.parameters for row in rows[:2]] == [guess(1e-3), guess(2e-3)]
    assert guess(1e-3) not in [row.parameters for row in rows[2:]]


def test_guesses_given_again_are_not_run_again(open_study: OpenStudy) -> None:
    """Neither on a restart with the same command nor on one without it, nor by a study opened with more of them."""
    study = open_study(num_trials=8, guesses=[guess(1e-3), guess(2e-3), guess(3e-3)])
    study.tell(asked(study), ok())
    study.close()
    study = open_study(num_trials=8)  # without them: those that are left still come first
    study.tell(asked(study), ok())
    study.close()
    study = open_study(num_trials=8, guesses=[guess(4e-3), guess(1e-3), guess(2e-3)])
    for _ in range(6):
        study.tell(asked(study), ok())
    rows = load_snapshot(study.folder).trials
    rates = [row.parameters["hyperparameters.learning_rate"] for row in rows if row.is_guess]
    assert rates == [1e-3, 2e-3, 3e-3, 4e-3]
    assert len(rows) == 8


def test_a_guess_is_run_once_by_many_drivers(open_study: OpenStudy) -> None:
    """Four workers that were all started with the same eight guesses."""
    guesses = [guess(1e-3 + 1e-4 * index) for index in range(8)]
    drivers = [open_study(num_trials=8, guesses=guesses) for _ in range(4)]
    ran: list[Any] = []

    def work(study: Study) -> None:
        while (assignment := study.ask()) is not Nothing.DONE:
            if isinstance(assignment, Assignment):
                ran.append(assignment.parameters["hyperparameters.learning_rate"])
                study.tell(assignment, ok())

    threads = [threading.Thread(target=work, args=(driver,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == [g["hyperparameters.learning_rate"] for g in guesses]


def test_a_guess_that_another_driver_is_choosing_holds_nobody_up(open_study: OpenStudy) -> None:
    """It may be held up itself, or be gone; in that case the guess comes later."""
    guesses = [guess(1e-3), guess(2e-3)]
    other = open_study(num_trials=3, guesses=guesses)
    study = open_study(num_trials=3, guesses=guesses)
    number = other._table.create(other._held.new_lease(1), parameters=guesses[0])
    assert asked(study).parameters == guesses[1]
    other._table.write_lease(number, replace(other._held.new_lease(1), released=True))
    assert asked(study).parameters == guesses[0]


def test_a_guess_that_estimates_rule_out_is_run_all_the_same(open_study: OpenStudy) -> None:
    """What the cost model thinks little of is what a user's own guess is there to try."""

    class Refusing:
        enumeration, ranks = None, None

        def refusal(self, run: Any) -> str:
            return "estimate.dominated"

        def of(self, run: Any) -> dict[str, Any]:
            return {}

    study = open_study(num_trials=1, guesses=[CHOSEN])
    study._forecast = Refusing()  # type: ignore[assignment]
    assert asked(study).parameters == CHOSEN
