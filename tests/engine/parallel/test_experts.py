"""Experts apart: training equals one process, loads and losses are those of the whole batch, and what is exchanged is
what a formula says.

Two models: one as DeepSeek's (sigmoid scores, groups, selection bias, shared experts, a dense first layer), one as
gpt-oss (softmax over the chosen, biases everywhere, clamped SwiGLU). Both with the global auxiliary loss and the
z-loss, the first with loss-free balancing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine.parallel.cases import GLOBAL_BATCH, LENGTH, MODELS, run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.expert_cases import balance, idle_expert
from tests.engine.parallel.launch import Case, result, run_cases

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
"""Of the largest reference value."""
SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}
LOSSES = {"router_aux_loss_coefficient": 0.05, "router_z_loss_coefficient": 0.01}
DEEPSEEK, GPT_OSS, FOUR_LAYERS = "moe-deepseek", "moe-gpt-oss", "matrix-moe"
HYPERPARAMETERS = {
    DEEPSEEK: SGD | LOSSES | {"expert_bias_rate": 0.01}, GPT_OSS: SGD | LOSSES, FOUR_LAYERS: SGD | LOSSES,
}  # fmt: skip
SP = {"sequence_parallel": True}
FULL = {"recompute": "full"}
EP2 = {"dp_shard": 2, "ep": 2}
ETP2 = {"tp": 2, "etp": 2}


def experts(name: str, plan: dict[str, Any], model: str, function: str = "train", **options: Any) -> Case:
    return Case(name, plan, model, function, hyperparameters=HYPERPARAMETERS[model], options=options)


EQUAL_TWO = [
    experts("ep2-zero2-recompute", EP2 | {"zero_stage": 2, **FULL}, GPT_OSS),
    experts("etp2", ETP2, GPT_OSS),
    experts("ep2-in-tp2", {"tp": 2, "ep": 2}, DEEPSEEK),
    experts("tp2-whole-experts-sp", {"tp": 2, **SP}, GPT_OSS),
]
EQUAL_FOUR = [
    experts("ep4-recompute", {"dp_shard": 4, "ep": 4, "micro_batch_size": 1, **FULL}, DEEPSEEK),
    experts("ep2-etp2-sp-recompute", EP2 | ETP2 | SP | FULL, GPT_OSS),
    experts("ep2-tp2", EP2 | {"tp": 2}, DEEPSEEK),
    experts("ep4-tp2-sp", {"dp_shard": 2, "tp": 2, "ep": 4, **SP}, GPT_OSS),
    experts("ep2-cp2", {"dp_shard": 2, "cp": 2, "ep": 2, **FULL}, DEEPSEEK),
    experts(
        "ep2-split-backward",
        EP2 | {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "micro_batch_size": 1, **FULL},
        FOUR_LAYERS,
    ),
]
BALANCE = [
    experts("balance-ep2", EP2 | FULL, DEEPSEEK, "expert_cases:balance"),
    experts("balance-tp2", {"tp": 2, **SP, **FULL}, DEEPSEEK, "expert_cases:balance"),
]
BALANCE_FOUR = experts("balance-pp2-etp2", {"pp": 2, **ETP2}, DEEPSEEK, "expert_cases:balance")
IDLE = experts("idle", EP2, DEEPSEEK, "expert_cases:idle_expert")
EXCHANGED = [
    Case("exchanged", EP2, "moe-all", "expert_cases:exchanged", hyperparameters=SGD),
    Case("exchanged-recompute", EP2 | FULL, "moe-all", "expert_cases:exchanged", hyperparameters=SGD),
]
SAVED = experts("saved", EP2, DEEPSEEK, last_step=2, save="by-ep2")
RESUMED = [
    experts("resumed-by-etp2", ETP2, DEEPSEEK, first_step=2, load="by-ep2"),
    experts("resumed-by-ep4", {"dp_shard": 2, "tp": 2, "ep": 4}, DEEPSEEK, first_step=2, load="by-ep2"),
]
BF16 = experts("bf16", EP2 | {"precision": "bf16"}, DEEPSEEK)
WORLDS = {
    2: [*EQUAL_TWO, *BALANCE, IDLE, *EXCHANGED, SAVED, RESUMED[0], BF16],
    4: [*EQUAL_FOUR, BALANCE_FOUR, RESUMED[1]],
}

Results = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each case gave; all run before the first is looked at."""
    folder = tmp_path_factory.mktemp("experts")
    for world_size, cases in WORLDS.items():
        run_cases(cases, world_size, folder)
    return lambda case: result(case, folder)


@cache
def reference(
    model: str, hyperparameters: tuple[tuple[str, Any], ...], function: Callable[..., dict[str, Any]] = train
) -> dict[str, Any]:
    """What one process gives on whole batches."""
    return function(run_config(model, {}, dict(hyperparameters)))


def expected(case: Case, function: Callable[..., dict[str, Any]] = train) -> dict[str, Any]:
    return reference(case.model, tuple(case.hyperparameters.items()), function)


@pytest.mark.parametrize("case", [*EQUAL_TWO, *EQUAL_FOUR], ids=lambda case: case.name)
def test_experts_apart_equal_one_process(case: Case, results: Results) -> None:
    difference = largest_difference(results(case), expected(case), EVERYTHING)
    assert difference.ratio <= TOLERANCE, difference


@pytest.mark.parametrize("case", [*BALANCE, BALANCE_FOUR], ids=lambda case: case.name)
def test_loads_and_losses_are_those_of_the_whole_batch(case: Case, results: Results) -> None:
    given, whole = results(case), expected(case, balance)
    assert given["same"], "ranks that hold a layer know the same load"
    assert given["loads"] == whole["loads"]
    moe = MODELS[case.model].moe
    assert moe is not None
    assert {sum(load) for load in given["loads"].values()} == {GLOBAL_BATCH * LENGTH * moe.experts_per_token}
    for of_rank in given["told"]:  # on every pipeline stage, too
        torch.testing.assert_close(of_rank, whole["told"][0], rtol=1e-12, atol=0.0)


def test_an_expert_without_tokens_changes_nothing_elsewhere(results: Results) -> None:
    difference = largest_difference(results(IDLE), expected(IDLE, idle_expert), EVERYTHING)
    assert difference.ratio <= TOLERANCE, difference


@pytest.mark.parametrize("case", EXCHANGED, ids=lambda case: case.name)
def test_rows_cross_twice_in_each_direction(case: Case, results: Results) -> None:
    spec = MODELS[case.model]
    assert spec.moe is not None
    num_micro_batches, num_tokens = 3, GLOBAL_BATCH // 2 // 3 * LENGTH
    # Dispatch and combine, and their gradients; recomputed, dispatch and combine once more. Counts are exchanged once.
    crossings = 6 if "recompute" in case.plan else 4
    rows_bytes = num_tokens * spec.moe.experts_per_token * spec.hidden_size * 8
    calls = spec.num_layers * num_micro_batches * (crossings + 1)
    num_bytes = spec.num_layers * num_micro_batches * (crossings * rows_bytes + spec.moe.num_experts * 8)
    assert results(case)["ranks"] == [[(calls, num_bytes)]] * 2


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_experts_biases_and_loads_are_read_under_another_plan(case: Case, results: Results) -> None:
    difference = largest_difference(results(case), expected(case), ["losses", "grad_norms", "parameters", "evaluation"])
    assert difference.ratio <= 1e-9, difference


def test_bf16_rounds_alike(results: Results) -> None:
    whole = train(run_config(BF16.model, {"precision": "bf16"}, BF16.hyperparameters))
    assert largest_difference(results(BF16), whole, ["losses", "parameters"]).ratio <= 1e-2
