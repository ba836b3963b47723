"""Wherever experts are computed, training is that of one process: each parameter, gradient and optimizer state has one
home, and copies are slots that nothing else knows of."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.engine.parallel.cases import run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
"""Of the largest reference value."""
SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}
AUXILIARY = SGD | {"router_aux_loss_coefficient": 0.05, "router_z_loss_coefficient": 0.01}
ADAMW = {"clip_norm": 0.5, "weight_decay": 0.1}
EACH_STEP = {"expert_placement_steps": 1}
ZBV = {"pp": 2, "virtual_stages": 2, "schedule": "zbv"}
"""Weights' gradients come later than those of activations."""


def placed(name: str, plan: dict[str, Any], model: str = "moe", **more: Any) -> Case:
    """A plan with experts computed away from home, placed anew after each step."""
    return Case(name, EACH_STEP | plan, model, "placement_cases:train_placed", **{"hyperparameters": AUXILIARY, **more})


EQUAL_TWO = [
    placed("placed", {"dp_replicate": 2, "ep": 2}),
    placed("replicas", {"dp_shard": 2, "zero_stage": 1, "ep": 2, "expert_replicas": 2}),
    placed("replicas-zero3-recompute", {"dp_shard": 2, "ep": 2, "expert_replicas": 4, "recompute": "full"}),
    placed("groups-biases", {"dp_replicate": 2, "ep": 2, "expert_replicas": 2}, "moe-deepseek"),
    placed("expert-biases", {"dp_replicate": 2, "ep": 2, "expert_replicas": 2}, "moe-gpt-oss"),
    placed("cp", {"cp": 2, "ep": 2, "expert_replicas": 2}),
    placed("tp", {"tp": 2, "ep": 2, "sequence_parallel": True, "expert_replicas": 2}),
]
EQUAL_FOUR = [
    placed("ep4", {"dp_replicate": 4, "ep": 4, "expert_replicas": 4, "micro_batch_size": 1}),
    placed("efsdp", {"dp_shard": 4, "ep": 2, "expert_replicas": 2, "micro_batch_size": 1}),
    placed("etp", {"dp_shard": 2, "tp": 2, "etp": 2, "ep": 2, "expert_replicas": 2}, "moe-gpt-oss"),
    placed("zbv", ZBV | {"dp_shard": 2, "ep": 2, "expert_replicas": 2, "micro_batch_size": 1}, "matrix-moe"),
]
STATES = placed("adamw", {"dp_replicate": 2, "ep": 2, "expert_replicas": 2}, hyperparameters=ADAMW)
EVERY_TWO = {"dp_shard": 2, "ep": 2, "expert_replicas": 2, "expert_placement_steps": 2}
RESUMED = Case("resumed", EVERY_TWO, "moe", "placement_cases:resume", hyperparameters=ADAMW, options={"save": "placed"})
OTHER_PLAN = Case(
    "other-plan", {"dp_shard": 2}, "moe", hyperparameters=ADAMW, options={"first_step": 3, "load": "placed"}
)
ROWS = Case(
    "rows", {"dp_replicate": 2, "ep": 2, "expert_replicas": 2} | EACH_STEP, "moe", "placement_cases:rows_by_rank"
)
WORLDS = {2: [*EQUAL_TWO, STATES, RESUMED, ROWS], 4: EQUAL_FOUR}

Results = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each case gave; all run before the first is looked at."""
    folder = tmp_path_factory.mktemp("placed")
    for world_size, cases in WORLDS.items():
        run_cases(cases, world_size, folder)
    return lambda case: result(case, folder)


@cache
def reference(model: str, hyperparameters: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """What one process gives on whole batches."""
    return train(run_config(model, {}, dict(hyperparameters)))


@pytest.mark.parametrize("case", [*EQUAL_TWO, *EQUAL_FOUR], ids=lambda case: case.name)
def test_experts_computed_elsewhere_and_twice_train_as_one_process(case: Case, results: Results) -> None:
    given = results(case)
    expected = reference(case.model, tuple(case.hyperparameters.items()))
    difference = largest_difference(given, expected, EVERYTHING)
    assert difference.ratio <= TOLERANCE, difference
    assert given["num_changes"] > 0, "the steps brought another placement than the first"


def test_optimizer_states_stay_with_their_expert(results: Results) -> None:
    difference = largest_difference(results(STATES), reference("moe", tuple(ADAMW.items())), EVERYTHING)
    assert difference.ratio <= 1e-8, difference


def test_resumed_run_places_experts_as_the_run_itself_did(results: Results) -> None:
    given = results(RESUMED)
    assert given.pop("num_placements") > 2
    assert given == {"same_bits": True, "begins_alike": True, "ends_alike": True}


def test_rows_are_dealt_out_evenly_to_copies(results: Results) -> None:
    given = results(ROWS)
    # Two ranks deal two experts' rows of three micro-batches out, each to within half a row for each copy.
    assert float((given["rows"] - given["expected"]).abs().max()) <= 2 * 2 * 3 / 2
    assert float(given["rows"].sum()) == float(given["expected"].sum())
