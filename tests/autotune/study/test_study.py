"""A study counts every trial once, whoever asks, fails or dies."""

import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.specs import machine
from autotune.study.lease import Lease
from autotune.study.record import record_of
from autotune.study.study import (
    MAX_ATTEMPTS,
    Assignment,
    CorpusChanged,
    Nothing,
    Study,
    load_snapshot,
    request_stop,
)
from autotune.study.study_file import differences
from engine.errors import UserError
from engine.outcome import Outcome, write_outcome

pytestmark = pytest.mark.unit

OpenStudy = Callable[..., Study]


def ok(quality: float = 3.0, **changes: Any) -> Outcome:
    data = {"kind": "ok", "tokens_per_second": 100.0, "held_out_loss": quality, "corpus_hash": "text"}
    return Outcome(**data | changes)


def asked(study: Study) -> Assignment:
    assignment = study.ask()
    assert isinstance(assignment, Assignment)
    return assignment


def forget(study: Study) -> None:
    """What a killed driver leaves: its leases stay in the storage, with an owner that is gone."""
    for number, lease in list(study._held.leases.items()):
        gone = Lease(lease.attempt, lease.owner.__class__(lease.owner.machine, lease.owner.pid, -1.0), lease.expires)
        study._table.write_lease(number, gone)
    study._held.leases.clear()
    study.close()


def taken_over(open_study: OpenStudy, late: Study, assignment: Assignment) -> tuple[Study, Assignment]:
    """Who took a trial over from a driver that was stopped for too long, and the trial as it has it."""
    lease = late._held.leases[assignment.number]
    late._table.write_lease(assignment.number, Lease(1, lease.owner, 0.0, released=True))
    taker = open_study(num_trials=1)
    return taker, asked(taker)


def numbers_of(study: Study) -> list[optuna.trial.FrozenTrial]:
    return study._table.all()


def test_exactly_the_asked_trials(open_study: OpenStudy) -> None:
    study = open_study(num_trials=12)
    for _ in range(12):
        study.tell(asked(study), ok())
    assert study.ask() is Nothing.DONE
    assert len(study.snapshot().trials) == 12
    more = open_study(num_trials=14)
    for _ in range(2):
        more.tell(asked(more), ok())
    assert more.ask() is Nothing.DONE
    assert load_snapshot(study.folder).num_trials_asked == 14


def test_failures_are_told_with_finite_values_and_a_constraint(open_study: OpenStudy) -> None:
    study = open_study(num_trials=8)
    kinds = ("oom", "hang", "nan", "diverged", "user", "interrupted", "infra")
    for kind in kinds:
        study.tell(asked(study), Outcome(kind=kind, held_out_loss=None))
    study.tell(asked(study), ok())
    trials = numbers_of(study)
    for trial in trials[: len(kinds)]:
        assert trial.state == TrialState.COMPLETE
        assert trial.values is not None
        assert all(map(math.isfinite, trial.values))
        assert trial.constraints == {"failed": 1.0}
    assert trials[7].constraints == {"failed": 0.0}
    snapshot = load_snapshot(study.folder)
    assert [row.outcome.kind for row in snapshot.trials if row.outcome] == [*kinds, "ok"]
    assert [row.feasible for row in snapshot.trials] == [False] * 7 + [True]


def test_an_objective_that_was_not_measured_is_no_value(open_study: OpenStudy) -> None:
    study = open_study(num_trials=1)
    study.tell(asked(study), ok(held_out_loss=None))
    (row,) = study.snapshot().trials
    assert row.values is None
    assert numbers_of(study)[0].constraints == {"failed": 1.0}


def test_bounds_are_constraints(open_study: OpenStudy) -> None:
    study = open_study("bounded", "objectives=[{name: quality, bound: 2.0}, speed]", num_trials=2)
    study.tell(asked(study), ok(3.0))
    study.tell(asked(study), ok(1.0))
    assert [trial.constraints["quality"] for trial in numbers_of(study)] == [0.5, -0.5]
    assert [row.feasible for row in study.snapshot().trials] == [False, True]


def test_seeds_come_from_study_and_number(open_study: OpenStudy) -> None:
    def seeds(name: str, **options: int) -> list[int]:
        study = open_study(name, num_trials=4, **options)
        return [asked(study).config.runtime.seed for _ in range(4)]

    first = seeds("a", seed=1)
    assert len(set(first)) == 4
    assert seeds("b", seed=1) == first
    assert not set(seeds("c", seed=2)) & set(first)


def test_a_continued_study_proposes_what_it_would_have_proposed(open_study: OpenStudy) -> None:
    """And never its first proposals again, as one seed for a sampler that is made anew would."""

    def chosen(name: str, *sessions: int) -> list[dict[str, Any]]:
        result = []
        for total in sessions:
            study = open_study(name, num_trials=24)
            for _ in range(total):
                assignment = asked(study)
                study.tell(assignment, ok(assignment.config.hyperparameters.learning_rate))
                result.append(dict(assignment.parameters))
            study.close()
        return result

    in_one_go = chosen("a", 14)
    assert chosen("b", 5, 2, 7) == in_one_go
    assert len({tuple(parameters.items()) for parameters in in_one_go}) == 14


DISCRETE = """
use: [tiny_llama]
cluster: cpu:1
objectives: [speed]
space:
  plan: {micro_batch_size: [1, 2, 4], recompute: [none, full]}
  hyperparameters: {global_batch_size: [8, 16]}
"""


def test_duplicates_come_from_the_cache_and_a_small_space_is_used_up(open_study: OpenStudy) -> None:
    study = open_study("discrete", text=DISCRETE, num_trials=100)
    keys = set()
    while isinstance(assignment := study.ask(), Assignment):
        keys.add(tuple(assignment.parameters.items()))
        study.tell(assignment, ok(tokens_per_second=float(len(keys))))
    assert assignment is Nothing.EXHAUSTED
    assert len(keys) == 3 * 2 * 2
    assert len(study.snapshot().trials) == len(keys)
    for trial in numbers_of(study):
        record = record_of(trial)
        assert record is not None
        if record.role == "cached" and trial.state == TrialState.COMPLETE:
            assert record.of is not None
            assert trial.values == numbers_of(study)[record.of].values


def test_refused_proposals_teach_and_do_not_count(open_study: OpenStudy) -> None:
    rule = "space.constraints=['hyperparameters.learning_rate * plan.micro_batch_size < 2e-3']"
    study = open_study("refusing", rule, num_trials=16)
    for _ in range(16):
        assignment = asked(study)
        assert assignment.config.hyperparameters.learning_rate * assignment.config.plan.micro_batch_size < 2e-3
        study.tell(assignment, ok())
    snapshot = study.snapshot()
    refused = [trial for trial in numbers_of(study) if (record := record_of(trial)) and record.role == "refused"]
    assert snapshot.num_refused == ({"constraint": len(refused)} if refused else {})
    assert len(snapshot.trials) == 16
    assert all(trial.constraints == {"failed": 1.0} for trial in refused)


def test_changed_space_is_refused_with_the_difference(open_study: OpenStudy) -> None:
    open_study(num_trials=4)
    with pytest.raises(UserError) as raised:
        open_study(
            "s", "space.hyperparameters.weight_decay=0.2", "workload.total_tokens=300k", "evaluation.max_tokens=1"
        )
    message = raised.value.message
    assert "added    space.hyperparameters.weight_decay: 0.2" in message
    assert re.search(r"changed  workload.total_tokens: \d+ -> 300000", message)
    assert "--study" in (raised.value.hint or "")
    with pytest.raises(UserError, match="seed: 0 -> 5"):
        open_study(seed=5)
    open_study("s", "budget.trials=9", "limits.time=7s", num_trials=9)


def test_memory_that_a_reboot_changes_a_little_is_no_change(
    open_study: OpenStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 64 * 2**30)
    open_study(num_trials=4)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 64 * 2**30 - 300 * 2**20)
    open_study(num_trials=4)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 32 * 2**30)
    with pytest.raises(UserError, match=r"changed  cluster\.memory_bytes"):
        open_study(num_trials=4)


def test_an_interrupted_trial_keeps_number_parameters_and_seed(open_study: OpenStudy) -> None:
    study = open_study(num_trials=3)
    study.tell(asked(study), ok())
    lost = asked(study)
    forget(study)
    assert [row.state for row in load_snapshot(study.folder).trials] == ["finished", "waiting"]
    again = asked(open_study(num_trials=3))
    assert (again.number, again.config) == (lost.number, lost.config)
    assert again.attempt == 2


def test_an_interrupted_trial_with_evidence_is_told_and_not_run_again(open_study: OpenStudy) -> None:
    study = open_study(num_trials=2)
    lost = asked(study)
    lost.folder.mkdir(parents=True)
    from engine.config import dump_run

    (lost.folder / "run.yaml").write_text(dump_run(lost.config))
    write_outcome(lost.folder, ok(2.5))
    forget(study)
    study = open_study(num_trials=2)
    assert asked(study).number != lost.number
    row = study.snapshot().trials[0]
    assert row.values == {"speed": 100.0, "quality": 2.5}


@pytest.mark.parametrize("num_writes", [1, 2])
def test_a_telling_that_was_cut_short_is_finished(open_study: OpenStudy, num_writes: int) -> None:
    """Killed after the outcome was written, or after the constraint: the same outcome counts, without a second run."""
    study = open_study(num_trials=2)
    lost = asked(study)
    study._table._write(lost.number, "outcome", Outcome(kind="oom").model_dump_json())
    if num_writes == 2:
        optuna.Trial(study._table._study, study._table._id(lost.number)).set_constraint("failed", 1.0)
    forget(study)
    study = open_study(num_trials=2)
    assert asked(study).number != lost.number
    row = study.snapshot().trials[0]
    assert row.outcome is not None
    assert row.outcome.kind == "oom"


def test_a_driver_killed_while_choosing_costs_no_trial(open_study: OpenStudy) -> None:
    study = open_study(num_trials=2)
    number = study._table.create(Lease.new(1))
    study._held.leases[number] = Lease.new(1)
    forget(study)
    study = open_study(num_trials=2)
    for _ in range(2):
        study.tell(asked(study), ok())
    assert study.ask() is Nothing.DONE
    assert [row.state for row in study.snapshot().trials] == ["finished", "finished"]


def test_a_lapsed_lease_has_exactly_one_taker(open_study: OpenStudy) -> None:
    study = open_study(num_trials=1)
    lost = asked(study)
    forget(study)
    takers = [open_study(num_trials=1) for _ in range(4)]
    results: list[Assignment | Nothing] = []
    barrier = threading.Barrier(len(takers))

    def take(study: Study) -> None:
        barrier.wait()
        results.append(study.ask())

    threads = [threading.Thread(target=take, args=(taker,)) for taker in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assignments = [result for result in results if isinstance(result, Assignment)]
    assert [assignment.number for assignment in assignments] == [lost.number]
    assert results.count(Nothing.WAIT) == 3


def test_two_studies_on_one_journal_never_double_a_trial(open_study: OpenStudy) -> None:
    drivers = [open_study(num_trials=15) for _ in range(3)]
    ran: list[tuple[int, str]] = []

    def work(study: Study) -> None:
        while (assignment := study.ask()) is not Nothing.DONE:
            if isinstance(assignment, Assignment):
                ran.append((assignment.number, str(assignment.parameters)))
                study.tell(assignment, ok())

    threads = [threading.Thread(target=work, args=(driver,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran) == 15
    assert len(dict(ran)) == 15
    assert len({parameters for _, parameters in ran}) == 15
    assert len(load_snapshot(drivers[0].folder).trials) == 15


def test_a_late_owner_neither_crashes_nor_overwrites(open_study: OpenStudy) -> None:
    """Its lease was taken over while it was stopped; when it goes on, the taker's outcome stays."""
    late = open_study(num_trials=1)
    assignment = asked(late)
    taker, again = taken_over(open_study, late, assignment)
    assert not late.tell(assignment, ok(9.0))
    assert taker.tell(again, ok(1.0))
    assert not late.tell(assignment, ok(9.0))
    (row,) = late.snapshot().trials
    assert row.values == {"speed": 100.0, "quality": 1.0}
    assert row.attempts == 2


def test_a_trial_that_ends_its_driver_again_and_again_is_given_up(open_study: OpenStudy) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        study = open_study(num_trials=1)
        assert asked(study).attempt == attempt
        forget(study)
    study = open_study(num_trials=1)
    assert study.ask() is Nothing.DONE
    (row,) = study.snapshot().trials
    assert row.outcome is not None
    assert row.outcome.kind == "infra"


def test_a_trial_that_is_given_back_again_and_again_is_not_given_up(open_study: OpenStudy) -> None:
    study = open_study(num_trials=1)
    for attempt in range(1, MAX_ATTEMPTS + 3):
        assignment = asked(study)
        assert assignment.attempt == attempt
        study.release(assignment)


def test_a_trial_that_was_taken_over_is_not_retried(open_study: OpenStudy) -> None:
    late = open_study(num_trials=1)
    assignment = asked(late)
    taker, again = taken_over(open_study, late, assignment)
    assert late.retry(assignment) is None
    assert taker.tell(again, ok(1.0))
    assert late.retry(assignment) is None


def test_a_released_trial_is_taken_at_once(open_study: OpenStudy) -> None:
    study = open_study(num_trials=1)
    first = asked(study)
    study.release(first)
    again = asked(open_study(num_trials=1))
    assert (again.number, again.attempt) == (first.number, 2)


def test_repeats_have_other_seeds_and_do_not_count(open_study: OpenStudy) -> None:
    study = open_study(num_trials=2)
    originals = [asked(study), asked(study)]
    for assignment in originals:
        study.tell(assignment, ok())
    study.plan_repeats(originals[1].number, 3)
    seeds = {originals[1].config.runtime.seed}
    for _ in range(3):
        repeat = asked(study)
        assert repeat.config.plan == originals[1].config.plan
        assert repeat.config.hyperparameters == originals[1].config.hyperparameters
        seeds.add(repeat.config.runtime.seed)
        study.tell(repeat, ok())
    assert len(seeds) == 4
    assert study.ask() is Nothing.DONE
    rows = load_snapshot(study.folder).trials
    assert [row.repeat_of for row in rows] == [None, None, 1, 1, 1]
    more = open_study(num_trials=3)
    more.tell(asked(more), ok())
    assert more.ask() is Nothing.DONE


def test_repeats_come_alone_when_only_a_time_was_given(open_study: OpenStudy) -> None:
    study = open_study()
    study.tell(asked(study), ok())
    study.plan_repeats(0, 1)
    repeat = asked(study)
    assert repeat.repeat_of == 0
    study.tell(repeat, ok())
    assert study.ask() is Nothing.DONE


def test_other_text_than_before_ends_the_sweep(open_study: OpenStudy) -> None:
    study = open_study(num_trials=2)
    study.tell(asked(study), ok())
    changed = asked(study)
    with pytest.raises(CorpusChanged):
        study.tell(changed, ok(corpus_hash="other text"))
    assert study.snapshot().corpus_hash == "text"
    again = asked(study)
    assert again.number == changed.number
    assert study.tell(again, ok())


def test_all_of_it_works_in_a_database_too(open_study: OpenStudy, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    study = open_study(num_trials=3, storage_url=url)
    study.tell(asked(study), ok())
    lost = asked(study)
    forget(study)
    study = open_study(num_trials=3)  # where it lives stands in study.yaml
    again = asked(study)
    assert (again.number, again.config, again.attempt) == (lost.number, lost.config, 2)
    study.tell(again, Outcome(kind="nan"))
    study.tell(asked(study), ok())
    assert study.ask() is Nothing.DONE
    rows = load_snapshot(study.folder).trials
    assert [row.outcome.kind for row in rows if row.outcome] == ["ok", "nan", "ok"]


def test_a_database_holds_one_search_of_a_name(open_study: OpenStudy, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    study = open_study("here/s", num_trials=3, storage_url=url)
    study.tell(asked(study), ok())
    with pytest.raises(UserError, match=r"changed  workload\.total_tokens"):
        open_study("there/s", "workload.total_tokens=300k", num_trials=3, storage_url=url)
    assert not (tmp_path / "studies" / "there" / "s" / "study.yaml").exists()
    other = open_study("there/s", num_trials=3, storage_url=url)  # the same search goes on from another folder
    assert asked(other).number == 1


def test_unknown_study_names_those_that_exist(open_study: OpenStudy, tmp_path: Path) -> None:
    open_study("known")
    with pytest.raises(UserError, match="no study 'unknown'") as raised:
        load_snapshot(tmp_path / "studies" / "unknown")
    assert "known" in (raised.value.hint or "")


def test_stop_is_for_drivers_that_run(open_study: OpenStudy) -> None:
    study = open_study()
    assert not study.stop_requested()
    request_stop(study.folder)
    assert study.stop_requested()
    assert not open_study().stop_requested()


def test_a_machine_that_was_profiled_anew_is_the_same_machine() -> None:
    old = {"cluster": {"name": "local", "links": [], "figures": {"launch_us": 4.0}, "memory_bytes": 10**9}}
    new = {"cluster": {"name": "local", "links": [{"latency_us": 9.0}], "figures": None, "memory_bytes": 10**9}}
    assert differences(old, new) == []
    assert differences(old, {"cluster": {**new["cluster"], "name": "other"}}) != []
