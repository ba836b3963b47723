"""What a dry run says a rank sends is what the rank sends in a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.parallel.cases import run_config
from tests.engine.parallel.launch import Case, result, run_cases

pytestmark = pytest.mark.dist

SP = {"sequence_parallel": True}
CASES = [
    Case(name, plan, model, function="collectives")
    for name, plan, model in (
        ("zero3-tp2", {"dp_shard": 2, "tp": 2}, "llama"),
        ("zero2-tp2-sp", {"dp_shard": 2, "tp": 2, "zero_stage": 2, **SP}, "llama-tied"),
        ("zero3-pp2", {"dp_shard": 2, "pp": 2, "recompute": "full"}, "llama"),
        ("tp2-sp-pp2", {"tp": 2, "pp": 2, **SP}, "llama"),
        ("zero3-cp2", {"dp_shard": 2, "cp": 2, "recompute": "full"}, "llama"),
        ("tp2-sp-cp2-gathered", {"tp": 2, "cp": 2, "cp_attention": "all_gather", **SP}, "llama"),
        ("zero3-of-4", {"dp_shard": 4, "micro_batch_size": 1}, "gpt2"),
    )
]
RANKS = 4


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of real runs."""
    folder = tmp_path_factory.mktemp("real")
    run_cases(CASES, RANKS, folder)
    return folder


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Dry runs of every rank of every case, from one child process."""
    path = tmp_path_factory.mktemp("dry") / "cases.json"
    wanted = [(case, rank) for case in CASES for rank in range(RANKS)]
    runs = [(run_config(case.model, case.plan, case.hyperparameters).to_data(), rank) for case, rank in wanted]
    path.write_text(json.dumps(runs))
    worker = Path(__file__).with_name("trace_worker.py")
    done = subprocess.run([sys.executable, str(worker), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    traces = json.loads(done.stdout.splitlines()[-1])
    return {case.name: traces[RANKS * i : RANKS * (i + 1)] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dry_run_counts_what_real_ranks_send(case: Case, real: Path, dry: dict[str, list[Any]]) -> None:
    for rank, counted in enumerate(result(case, real)["ranks"]):
        traced = {
            f"{use['axis']} {use['operation']} {use['group_size']}": (use["calls"], use["message_bytes"])
            for use in dry[case.name][rank]["collectives"]
        }
        assert traced == {kind: tuple(map(float, count)) for kind, count in counted.items()}, f"rank {rank}"
