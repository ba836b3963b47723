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
VPP = {"pp": 2, "virtual_stages": 2, "micro_batch_size": 1}
CASES = [
    Case(name, plan, model, function="collectives")
    for name, plan, model in (
        ("zero3-tp2", {"dp_shard": 2, "tp": 2}, "llama"),
        ("zero2-tp2-sp", {"dp_shard": 2, "tp": 2, "zero_stage": 2, **SP}, "llama-tied"),
        ("zero3-pp2", {"dp_shard": 2, "pp": 2, "recompute": "full"}, "llama"),
        ("tp2-sp-pp2", {"tp": 2, "pp": 2, **SP}, "llama"),
        ("zero3-cp2", {"dp_shard": 2, "cp": 2, "recompute": "full"}, "llama"),
        ("tp2-sp-cp2-gathered", {"tp": 2, "cp": 2, "cp_attention": "all_gather", **SP}, "llama"),
        ("zero3-ep2", {"dp_shard": 4, "ep": 2, "micro_batch_size": 1, "recompute": "full"}, "moe-all"),
        ("ep2-etp2", {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2, "zero_stage": 1}, "moe-all"),
        ("zero3-of-4", {"dp_shard": 4, "micro_batch_size": 1}, "gpt2"),
        ("zero1-tp2", {"dp_shard": 2, "tp": 2, "zero_stage": 1}, "llama"),
        ("hybrid", {"dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1}, "llama"),
        ("dp2-tied-pp2", {"dp_replicate": 2, "pp": 2, "schedule": "gpipe", "micro_batch_size": 2}, "llama-tied"),
        ("zero2-zbv", {"dp_shard": 2, "zero_stage": 2, "schedule": "zbv", **VPP}, "matrix-dense"),
        ("tp2-interleaved", {"tp": 2, "schedule": "interleaved_1f1b", **VPP}, "matrix-dense"),
        ("zero3-dualpipev", {"dp_shard": 2, "schedule": "dualpipev", **VPP}, "matrix-dense"),
        ("zero3-interleaved-zb", {"dp_shard": 2, "schedule": "interleaved_zero_bubble", **VPP}, "matrix-dense"),
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
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """Dry runs of the first and the last pipeline rank of every case, from one child process."""
    path = tmp_path_factory.mktemp("dry") / "cases.json"
    wanted = [(case, rank) for case in CASES for rank in ranks_of(case)]
    runs = [(run_config(case.model, case.plan, case.hyperparameters).to_data(), rank) for case, rank in wanted]
    path.write_text(json.dumps(runs))
    worker = Path(__file__).with_name("trace_worker.py")
    done = subprocess.run([sys.executable, str(worker), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    traces = json.loads(done.stdout.splitlines()[-1])
    return {(case.name, rank): trace for (case, rank), trace in zip(wanted, traces, strict=True)}


def ranks_of(case: Case) -> list[int]:
    """The ranks that are dry-run: those of one pipeline rank send alike."""
    return [0, RANKS - 1] if case.plan.get("pp", 1) > 1 else [RANKS - 1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dry_run_counts_what_real_ranks_send(case: Case, real: Path, dry: dict[tuple[str, int], Any]) -> None:
    counts = result(case, real)["ranks"]
    for rank in ranks_of(case):
        traced = {
            f"{use['axis']} {use['operation']} {use['group_size']}": (use["calls"], use["message_bytes"])
            for use in dry[case.name, rank]["collectives"]
        }
        real_counts = {kind: tuple(map(float, count)) for kind, count in counts[rank].items()}
        for kind in [kind for kind in traced if "all_to_all" in kind]:
            # How much goes to which expert is a matter of values: a dry run routes equally.
            (calls, size), (real_calls, real_size) = traced.pop(kind), real_counts.pop(kind)
            assert calls == real_calls
            assert size == pytest.approx(real_size, rel=0.5)
        assert traced == real_counts, f"rank {rank}"
