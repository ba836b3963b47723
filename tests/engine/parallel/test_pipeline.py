"""The pipeline beyond what the equality matrix shows: every schedule at its least number of micro-batches and over
uneven stages, copies of tied embeddings, which rank holds which stage, and what a hang says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from engine.errors import RuleError
from engine.layout import world_ranks
from engine.plan import Plan, Schedule
from engine.rules import check_run
from engine.rules_universal import VIRTUAL_STAGES
from engine.stage_split import rank_stages, stage_rank
from tests.engine.parallel.cases import run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}

SCHEDULES = {schedule: VIRTUAL_STAGES[schedule][0] for schedule in get_args(Schedule)}
"""Schedule -> stages per rank that it is tested with."""
LEAST = {"1f1b": 2, "dualpipev": 4}
"""The fewest micro-batches on two ranks, where it is not one."""


def on_two(schedule: str, **changes: Any) -> dict[str, Any]:
    """A plan of seven layers on two ranks, in uneven stages."""
    sizes = [2, 1, 3, 1] if SCHEDULES[schedule] == 2 else [4, 3]
    plan = {"pp": 2, "schedule": schedule, "virtual_stages": SCHEDULES[schedule], "layers_per_stage": sizes}
    return plan | changes


EQUAL = [
    *(Case(s, on_two(s, micro_batch_size=12 // LEAST.get(s, 1)), "seven-tied", hyperparameters=SGD) for s in SCHEDULES),
    # Stages with recomputed layers and one without.
    Case(
        "zbv-every-third-layer",
        on_two("zbv", micro_batch_size=3, recompute="every_k", recompute_period=3),
        "seven-tied",
        hyperparameters=SGD,
    ),
]
CHANGED = Case(
    "changed-micro-batch",
    on_two("zbv", micro_batch_size=3),
    "seven-tied",
    "pipeline_cases:changed_micro_batch",
    hyperparameters=SGD,
    options={"sizes": [3, 1, 4]},
)
ZBV = {"schedule": "zbv", "virtual_stages": 2}
TIED = [
    Case(
        f"tied-{name}",
        {"pp": 2, "micro_batch_size": 3, **plan},
        "seven-tied",
        "pipeline_cases:tied_copies",
        hyperparameters={"clip_norm": 0.5, "weight_decay": 0.1},
        options={"save": f"saved-{name}"},
    )
    for name, plan in {
        "replicated": {"dp_replicate": 2},
        "zero1": {"dp_shard": 2, "zero_stage": 1},
        "zero3": {"dp_shard": 2, "zero_stage": 3},
        "vocabulary-split": {"tp": 2, "sequence_parallel": True},
        "one-rank-zero1": {"dp_shard": 2, "zero_stage": 1, **ZBV},
        "one-rank-zero3": {"dp_shard": 2, "zero_stage": 3, **ZBV},
    }.items()
]
BESIDE = {"pp": 2, "dp_replicate": 2, "micro_batch_size": 1}


def hang(name: str, plan: dict[str, Any], **options: Any) -> Case:
    """A case in which a stage sleeps."""
    return Case(f"hang-{name}", BESIDE | plan, "seven-tied", "pipeline_cases:sleeping", options=options)


# Last: each ends the process groups of its plan.
HANGS = [
    (hang(name, plan, **options), told)
    for name, plan, options, told in (
        ("1f1b", {}, {"stage": 1}, "stage 0 waited for the backward of micro-batch 1 from stage 1 (pipeline rank 1)"),
        ("zbv", ZBV, {"stage": 2}, "stage 3 waited for the forward of micro-batch 1 from stage 2 (pipeline rank 1)"),
        ("gpipe", {"schedule": "gpipe"}, {"stage": 1}, "stage 0 waited for stage 1 (pipeline rank 1) to take what it"),
        ("evaluation", {}, {"stage": 0, "evaluation": True}, "stage 1 waited for the forward of micro-batch 1"),
    )
]
WORLDS = {2: [*EQUAL, CHANGED], 4: [*TIED, *(case for case, _ in HANGS)]}
Results = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each case gave; all run before the first is looked at."""
    folder: Path = tmp_path_factory.mktemp("pipeline")
    for world_size, cases in WORLDS.items():
        run_cases(cases, world_size, folder)
    return lambda case: result(case, folder)


@cache
def reference() -> dict[str, Any]:
    """What one process gives."""
    return train(run_config("seven-tied", {}, SGD))


@pytest.mark.dist
@pytest.mark.parametrize("case", EQUAL, ids=lambda case: case.name)
def test_schedule_over_uneven_stages_with_a_tied_head_equals_one_process(case: Case, results: Results) -> None:
    difference = largest_difference(results(case), reference(), EVERYTHING)
    assert difference.ratio <= 1e-10, difference.where


@pytest.mark.dist
def test_micro_batch_changes_while_a_pipeline_runs(results: Results) -> None:
    difference = largest_difference(results(CHANGED), reference(), ["losses", "grad_norms", "parameters"])
    assert difference.ratio <= 1e-10, difference.where
    assert results(CHANGED)["told_alike"], "ranks without a head know loss and norms, too"


@pytest.mark.dist
@pytest.mark.parametrize("case", TIED, ids=lambda case: case.name)
def test_copies_of_the_embedding_are_equal_to_the_last_bit_also_after_resume(case: Case, results: Results) -> None:
    assert results(case) == {"holders": 4, "differing": 0, "differing_resumed": 0, "same_end": True}


@pytest.mark.dist
@pytest.mark.parametrize(("case", "detail"), HANGS, ids=[case.name for case, _ in HANGS])
def test_a_hang_names_stage_action_and_micro_batch(case: Case, detail: str, results: Results) -> None:
    told = results(case)["told"]
    assert {kind for kind, _ in told} <= {"hang", "infra"}, "those that lose a peer say so, and outweigh nothing"
    assert any(kind == "hang" and said.startswith(detail) for kind, said in told), told


@pytest.mark.unit
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_each_stage_stands_on_one_rank(schedule: Schedule, pp: int) -> None:
    plan = Plan(pp=pp, schedule=schedule, virtual_stages=SCHEDULES[schedule])
    held = [rank_stages(plan, rank) for rank in range(pp)]
    assert sorted(stage for stages in held for stage in stages) == list(range(plan.num_stages))
    assert all(stage_rank(plan, stage) == rank for rank, stages in enumerate(held) for stage in stages)
    if schedule in ("zbv", "dualpipev"):
        assert held == [(rank, 2 * pp - 1 - rank) for rank in range(pp)], "stages s and 2 pp - 1 - s share a rank"


@pytest.mark.unit
def test_every_layer_stands_in_one_stage() -> None:
    plan = Plan(pp=2, schedule="interleaved_1f1b", virtual_stages=2)
    assert [layer for layers in plan.stage_layers(7) for layer in layers] == list(range(7))
    assert world_ranks(plan).shape[0] == 2
    with pytest.raises(RuleError, match=r"pp\.layers"):
        check_run(run_config("seven-tied", on_two("1f1b", layers_per_stage=[3, 3]), {}))


@pytest.mark.unit
@pytest.mark.parametrize(("schedule", "least"), LEAST.items())
def test_too_few_micro_batches_are_refused_with_the_least_number(schedule: str, least: int) -> None:
    plan = on_two(schedule, micro_batch_size=12 // (least - 1))
    with pytest.raises(RuleError, match=f"needs {least} or more micro-batches") as refused:
        check_run(run_config("seven-tied", plan, {}))
    assert f"set global_batch_size to {least * plan['micro_batch_size']} or more" in str(refused.value.hint)
