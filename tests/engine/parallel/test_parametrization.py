"""muP follows from names and the architecture alone, so every plan trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.engine.parallel.cases import run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

pytestmark = pytest.mark.dist

ADAMW = {"parametrization": "mup", "base_hidden_size": 8, "base_num_layers": 1, "weight_decay": 0.1, "eps": 1e-3}
"""An epsilon that matters: without one Adam hides factors on gradients, and enlarges rounding of the smallest."""
SGD = {"parametrization": "mup", "base_hidden_size": 8, "optimizer": "sgd", "clip_norm": 0.05, "weight_decay": 0.1}
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "tp2-sp": ({"tp": 2, "sequence_parallel": True}, "llama"),
    "tp2-tied": ({"tp": 2}, "gpt2"),
    "pp2-tied": ({"pp": 2}, "llama-tied"),
    "zbv-tied": ({"pp": 2, "schedule": "zbv", "virtual_stages": 2}, "matrix-dense"),
    "zero1": ({"dp_shard": 2, "zero_stage": 1}, "one-kv"),
    "zero3-latent": ({"dp_shard": 2, "zero_stage": 3}, "latent"),
    "replicas": ({"dp_replicate": 2, "zero_stage": 0}, "windows"),
    "cp2": ({"cp": 2}, "llama-tied"),
    "ep2": ({"dp_shard": 2, "ep": 2, "zero_stage": 2}, "moe-biased"),
    "tp2-etp2": ({"tp": 2, "etp": 2}, "moe-biased"),
}
CASES = [
    Case(f"{name}-{optimizer}", plan, model, hyperparameters=hyper)
    for name, (plan, model) in PLANS.items()
    for optimizer, hyper in (("adamw", ADAMW), ("sgd", SGD))
    if optimizer == "adamw" or name in ("tp2-tied", "zbv-tied", "zero1", "ep2")
]
Results = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each case gave; all run before the first is looked at."""
    folder = tmp_path_factory.mktemp("parametrization")
    run_cases(CASES, 2, folder)
    return lambda case: result(case, folder)


@cache
def reference(model: str, hyperparameters: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """What one process gives."""
    return train(run_config(model, {}, dict(hyperparameters)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plan_equals_one_process(case: Case, results: Results) -> None:
    expected = reference(case.model, tuple(case.hyperparameters.items()))
    difference = largest_difference(results(case), expected, EVERYTHING)
    assert difference.ratio <= 1e-10, difference
