"""Every model of the reference data planned on six kinds of devices: no crash, plausible, explained."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from engine.hf_config import load_model

pytestmark = pytest.mark.unit

PINS = (
    "dp_replicate=1", "cp=1", "schedule=interleaved_1f1b,1f1b", "virtual_stages=1,2", "layers_per_stage=even",
    "micro_batch_size=1", "rank_order=tp-cp-dp-pp", "zero_stage=1,3", "recompute=none,full", "overlap_tp=true",
)  # fmt: skip
"""A narrow space: the benchmark of the same name searches a larger one."""


@pytest.fixture(scope="module")
def everything(repo_root: Path) -> ModuleType:
    """``benchmarks/plan_everything.py``."""
    path = repo_root / "benchmarks" / "plan_everything.py"
    spec = importlib.util.spec_from_file_location("plan_everything", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_everything"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_model_on_every_machine(everything: ModuleType, shared_data: Path) -> None:
    models = [load_model(path) for path in sorted((shared_data / "model_configs").glob("*.json"))]
    assert len(models) >= 10
    # Every other size in turns; the benchmark takes all of them.
    found = [
        case
        for (i, model), (j, kind) in itertools.product(enumerate(models), enumerate(everything.DEVICES))
        for case in everything.cases([model], [kind], everything.NUM_DEVICES[(i + j) % 2 :: 2], PINS, advise=False)
    ]
    assert {case.name: everything.faults(case) for case in found if everything.faults(case)} == {}
    kinds = Counter(case.kind for case in found)
    assert len(found) == len(models) * 12
    assert kinds["planned"] > 0.7 * len(found)
    assert kinds["refused"] == 0
