"""Every plan trains as one process does on the whole batch.

Equality: loss, every gradient, norms, parameters after three steps, in fp64 with plain SGD without clipping (Adam and
clipping hide faults of scale), uneven valid tokens and two or three micro-batches a step. All cases of one world size
run in one process group, started once. Here are models with a head of their own, learned positions and biases, and what
the sample of the matrix (``test_matrix``) lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from engine.config import RuntimeOptions
from tests.engine.parallel.cases import run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
"""Of the largest reference value."""

SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}
ADAMW = {"clip_norm": 0.5, "weight_decay": 0.1}
MOMENTUM = {"optimizer": "sgd", "beta1": 0.9, "weight_decay": 0.1, "clip_norm": 0.5}
SP = {"sequence_parallel": True}
FULL = {"recompute": "full"}


def equal(name: str, plan: dict[str, Any], model: str = "llama") -> Case:
    """A plan that must equal one process."""
    return Case(name, plan, model, hyperparameters=SGD)


EQUAL_TWO = [
    equal("dp2-zero3", {"dp_shard": 2}),
    equal("dp2-gpt2", {"dp_shard": 2, "zero_stage": 2}, "gpt2"),
    equal("dp2-moe-some", {"dp_shard": 2, "zero_stage": 2}, "moe-some"),
    equal("tp2-sp-recompute", {"tp": 2, **SP, **FULL}),
    equal("tp2-whole-vocabulary", {"tp": 2, "vocab_parallel": False}),
    equal("tp2-sp-whole-vocabulary-tied", {"tp": 2, **SP, "vocab_parallel": False}, "llama-tied"),
    equal("tp2-gpt2", {"tp": 2}, "gpt2"),
    equal("tp2-sp-gpt2", {"tp": 2, **SP}, "gpt2"),
    # The draws are those of one process where the micro-batch is, too: every rank drops the same of what all hold.
    Case("tp2-dropout", {"tp": 2, "micro_batch_size": 12, **FULL}, hyperparameters=SGD | {"dropout": 0.3}),
    equal("pp2-uneven-recompute", {"pp": 2, "layers_per_stage": [1, 2], "recompute": "every_k", "recompute_period": 2}),
    equal("pp2-gpt2", {"pp": 2, "micro_batch_size": 1}, "gpt2-untied"),
    equal("tp2-sp-moe-some", {"tp": 2, **SP, **FULL}, "moe-some"),
]
EQUAL_FOUR = [
    equal("dp2-tp2-sp-gpt2-recompute", {"dp_shard": 2, "tp": 2, **SP, **FULL}, "gpt2"),
    equal("dp2-tp2-moe", {"dp_shard": 2, "tp": 2}, "moe"),
    equal("dp2-pp2-zero2-order", {"dp_shard": 2, "pp": 2, "zero_stage": 2, "rank_order": "tp-cp-pp-dp"}),
    equal("dp2-pp2-other-order", {"dp_shard": 2, "pp": 2, "rank_order": "tp-pp-cp-dp"}),
]
CLIPPED = [
    Case("dp2-adamw", {"dp_shard": 2}, hyperparameters=ADAMW),
    Case("tp2-sp-adamw", {"tp": 2, **SP}, hyperparameters=ADAMW),
    Case("pp2-momentum", {"pp": 2}, hyperparameters=MOMENTUM),
]
SAVED = [
    Case("saved-by-dp2", {"dp_shard": 2}, hyperparameters=ADAMW, options={"last_step": 2, "save": "dp2"}),
    Case("saved-by-pp2", {"pp": 2}, hyperparameters=MOMENTUM, options={"last_step": 2, "save": "pp2"}),
]
FROM_DP2 = {"hyperparameters": ADAMW, "options": {"first_step": 2, "load": "dp2"}}
RESUMED = [
    Case("dp2-to-tp2-sp", {"tp": 2, **SP}, **FROM_DP2),
    Case("dp2-to-pp2", {"pp": 2}, **FROM_DP2),
    Case("dp2-to-zero2", {"dp_shard": 2, "zero_stage": 2}, **FROM_DP2),
    Case("pp2-to-dp2", {"dp_shard": 2}, hyperparameters=MOMENTUM, options={"first_step": 2, "load": "pp2"}),
]
RESUMED_FOUR = [Case("dp2-to-dp2-tp2", {"dp_shard": 2, "tp": 2}, **FROM_DP2)]
DROPOUT = [
    Case(f"dropout-{name}", plan, model, function="dropout_draws", hyperparameters={"dropout": 0.5})
    for name, plan, model in (
        ("dp2", {"dp_shard": 2}, "llama"),
        ("dp2-recompute", {"dp_shard": 2, **FULL}, "llama"),
        ("tp2-sp", {"tp": 2, **SP}, "llama"),
        ("ep2", {"dp_shard": 2, "ep": 2}, "moe"),
    )
]
TIME_LIMITS = Case("time-limits", {"dp_shard": 2, "tp": 2}, function="time_limits")
BF16 = [
    Case(f"bf16-{name}", {"precision": "bf16", **plan}, hyperparameters=SGD)
    for name, plan in (("dp2", {"dp_shard": 2}), ("tp2-sp", {"tp": 2, **SP}), ("pp2", {"pp": 2}))
]
FP32 = Case("fp32-pp2", {"precision": "fp32", "pp": 2}, hyperparameters=SGD | {"clip_norm": 0.5})
WORLDS = {
    2: [*EQUAL_TWO, *CLIPPED, *SAVED, *RESUMED, *DROPOUT, *BF16, FP32],
    4: [*EQUAL_FOUR, *RESUMED_FOUR, TIME_LIMITS],
}

Results = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each case gave; all run before the first is looked at."""
    folder = tmp_path_factory.mktemp("plans")
    for world_size, cases in WORLDS.items():
        run_cases(cases, world_size, folder)
    return lambda case: result(case, folder)


@cache
def reference(model: str, hyperparameters: tuple[tuple[str, Any], ...], precision: str = "fp64") -> dict[str, Any]:
    """What one process gives on whole batches, all three steps."""
    return train(run_config(model, {"precision": precision}, dict(hyperparameters)))


def assert_same(given: dict[str, Any], expected: dict[str, Any], keys: list[str], tolerance: float) -> None:
    """Each value equal to within ``tolerance`` of the largest expected value of its kind."""
    difference = largest_difference(given, expected, keys)
    assert difference.ratio <= tolerance, difference


AFTERWARDS = ["losses", "grad_norms", "parameters", "evaluation"]


@pytest.mark.parametrize("case", [*EQUAL_TWO, *EQUAL_FOUR], ids=lambda case: case.name)
def test_plan_equals_one_process(case: Case, results: Results) -> None:
    assert_same(results(case), reference(case.model, tuple(case.hyperparameters.items())), EVERYTHING, TOLERANCE)


@pytest.mark.parametrize("case", CLIPPED, ids=lambda case: case.name)
def test_clipping_uses_one_global_norm(case: Case, results: Results) -> None:
    expected = reference(case.model, tuple(case.hyperparameters.items()))
    assert float(expected["grad_norms"].min()) > case.hyperparameters["clip_norm"]
    # AdamW divides by the square root of tiny second moments, which magnifies the last bits.
    assert_same(results(case), expected, EVERYTHING, 1e-8)


@pytest.mark.parametrize("case", [*RESUMED, *RESUMED_FOUR], ids=lambda case: case.name)
def test_state_is_read_under_another_plan(case: Case, results: Results) -> None:
    expected = reference(case.model, tuple(case.hyperparameters.items()))
    assert_same(results(case), expected, AFTERWARDS, 1e-8)


@pytest.mark.parametrize("case", DROPOUT, ids=lambda case: case.name)
def test_dropout_draws_differ_over_data_and_steps_and_resume(case: Case, results: Results) -> None:
    draws = results(case)
    (first, second), (resumed,) = zip(*draws["all"], strict=True), zip(*draws["resumed"], strict=True)
    assert first != second, "each step draws anew"
    assert resumed == second, "a resumed run draws what the run itself would have"
    whole = case.plan.get("tp", 1) > 1
    assert math.isclose(*first, rel_tol=1e-12) == whole, "ranks draw alike only where they hold the same tokens"


def test_time_limit_holds_along_every_axis(results: Results) -> None:
    assert results(TIME_LIMITS) == dict.fromkeys(("dp", "tp"), RuntimeOptions().hang_timeout_seconds)


@pytest.mark.parametrize("case", BF16, ids=lambda case: case.name)
def test_bf16_rounds_alike_under_every_plan(case: Case, results: Results) -> None:
    expected = reference(case.model, tuple(case.hyperparameters.items()), "bf16")
    assert_same(results(case), expected, ["losses", "parameters"], 1e-2)
    assert_same(results(case), expected, ["gradients"], 0.05)


def test_fp32_differs_by_the_order_of_sums_alone(results: Results) -> None:
    expected = reference(FP32.model, tuple(FP32.hyperparameters.items()), "fp32")
    assert_same(results(FP32), expected, ["losses", "grad_norms", "gradients", "parameters"], 1e-5)
