"""Whole families (latent attention with yarn, sinks and windows, scaling by the sequence's length) train under plans as
one process trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.parallel.cases import run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

pytestmark = pytest.mark.dist

_HYPERPARAMETERS: dict[str, Any] = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0}
_BALANCED = _HYPERPARAMETERS | {"router_aux_loss_coefficient": 0.1, "router_z_loss_coefficient": 0.01}
_PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "cp2": {"cp": 2},
    "ep2": {"dp_shard": 2, "ep": 2},
    "pp2": {"pp": 2},
}
CASES = [
    Case(f"{model}-{plan}", _PLANS[plan], model, hyperparameters=hyperparameters)
    for model, plans, hyperparameters in [
        ("deepseek", ("tp2", "cp2", "ep2"), _BALANCED),
        ("gpt-oss", ("tp2", "cp2", "ep2"), _BALANCED),
        ("qwen3", ("tp2", "cp2", "pp2"), _HYPERPARAMETERS),
    ]
    for plan in plans
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks left the results of all cases."""
    path = tmp_path_factory.mktemp("families")
    run_cases(CASES, 2, path)
    return path


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """What one process gives of each model."""
    hyperparameters = {case.model: case.hyperparameters for case in CASES}
    return {model: train(run_config(model, {}, values)) for model, values in hyperparameters.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_family_trains_as_in_one_process(case: Case, folder: Path, references: dict[str, dict[str, Any]]) -> None:
    ratio, where = largest_difference(result(case, folder), references[case.model], EVERYTHING)
    assert ratio < 1e-10, where
