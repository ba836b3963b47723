"""The training program on two ranks: resume at the same and at another world size, requests, signals, failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import RunConfig, dump_run
from engine.control import SetLearningRateScale, SetMicroBatch, TakeCheckpoint
from engine.telemetry import AckRecord
from tests.engine.runs import NUM_STEPS, acks, ask, events, outcome_of, steps, tiny_run, train, trajectory, write_corpus

pytestmark = pytest.mark.dist

DP2 = {"dp_shard": 2, "micro_batch_size": 1}


class Job:
    """A run in a folder of its own, to be carried out by the worker."""

    def __init__(self, folder: Path, config: RunConfig, **how: Any) -> None:
        self.folder = folder
        self.how = {"folder": str(folder), **how}
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(dump_run(config))


def run_jobs(jobs: list[Job], folder: Path) -> tuple[list[list[int]], subprocess.CompletedProcess[str]]:
    """Carry out jobs on two ranks under torchrun; exit codes per rank, and how torchrun ended."""
    file = folder / "jobs.json"
    file.write_text(json.dumps([job.how for job in jobs]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.engine.train_worker", str(file)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    codes = [folder / f"codes{rank}.json" for rank in range(2)]
    return [json.loads(path.read_text()) if path.exists() else [] for path in codes], done


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _environment(base: Path, repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARETUNE_CACHE", str(base / "cache"))
        patch.chdir(repo_root)
        yield


@pytest.fixture(scope="module")
def asked() -> dict[str, str]:
    """Change ids of the requests laid into inboxes before the jobs began, by what they ask."""
    return {}


@pytest.fixture(scope="module")
def folders(base: Path, asked: dict[str, str]) -> dict[str, Path]:
    """All jobs that leave the process group whole, carried out in one."""
    corpus = base / "corpus"
    plain = {"hyperparameters": {"dropout": 0.0}}

    def config(plan: dict[str, Any], stop: int | None = None, **sections: Any) -> RunConfig:
        return tiny_run(corpus, plan=plan, runtime={"stop_after_steps": stop}, **sections)

    def other(name: str, run: RunConfig) -> str:
        file = base / f"{name}.yaml"
        file.write_text(dump_run(run))
        return str(file)

    faster = {"hyperparameters": {"learning_rate": 0.02}}
    jobs = {
        "dp2": (Job(base / "dp2", config(DP2)), 0),
        "dp2-cut": (Job(base / "dp2-cut", config(DP2, 3)), 0),
        "dp2-resumed": (Job(base / "dp2-resumed", config(DP2), copy_from=str(base / "dp2-cut")), 0),
        "dp2-half": (Job(base / "dp2-half", config(DP2, 3, **plain)), 0),
        "dp2-memory": (Job(base / "dp2-memory", tiny_run(corpus, plan=DP2, runtime={"measure_memory": True})), 0),
        "tp2": (Job(base / "tp2", config({"tp": 2}, **plain), copy_from=str(base / "dp2-half")), 0),
        "pp2": (Job(base / "pp2", config({"pp": 2}, **plain), copy_from=str(base / "dp2-half")), 0),
        "pp2-half": (Job(base / "pp2-half", config({"pp": 2}, 3, **plain)), 0),
        "tp2-half": (Job(base / "tp2-half", config({"tp": 2}, 3, **plain)), 0),
        "asked": (Job(base / "asked", config(DP2), at_step=2, at_rank=0, action="stop"), 75),
        "signal": (Job(base / "signal", config(DP2), at_step=2, at_rank=1, action="terminate"), 143),
        "shared": (Job(base / "shared", config(DP2), nodes="shared"), 0),
        "apart": (Job(base / "apart", config(DP2), nodes="apart"), 2),
        "gone": (Job(base / "gone", config(DP2), other=other("gone", tiny_run(base / "gone-corpus", plan=DP2))), 2),
        "differs": (Job(base / "differs", config(DP2), other=other("differs", config(DP2, **faster))), 2),
        "diverged": (Job(base / "diverged", _diverging(corpus)), 1),
    }
    asked["scale"] = ask(base / "asked", SetLearningRateScale(scale=0.5))
    asked["micro_batch"] = ask(base / "asked", SetMicroBatch(micro_batch_size=2))
    asked["too_large"] = ask(base / "asked", SetMicroBatch(micro_batch_size=4))
    asked["checkpoint"] = ask(base / "asked", TakeCheckpoint())
    asked["pipeline"] = ask(base / "pp2", SetMicroBatch(micro_batch_size=1))
    codes, done = run_jobs([job for job, _ in jobs.values()], base)
    wanted = [code for _, code in jobs.values()]
    assert codes == [wanted, wanted], done.stderr[-4000:]
    return {name: job.folder for name, (job, _) in jobs.items()}


def _diverging(corpus: Path) -> RunConfig:
    wild = {"learning_rate": 3.0, "schedule": "constant", "warmup_ratio": 0.0, "clip_norm": None}
    return tiny_run(corpus, plan=DP2, hyperparameters=wild, workload={"total_tokens": 64 * 60})


def assert_second_half_is_that_of(reference: Path, folder: Path) -> None:
    """Losses, learning rates and gradient norms up to the order of sums."""
    assert events(folder, "start")[-1].step == 3
    for given, wanted in zip(trajectory(folder)[-3:], trajectory(reference)[3:], strict=True):
        assert given == pytest.approx(wanted, rel=1e-10)
    assert outcome_of(folder).held_out_loss == pytest.approx(outcome_of(reference).held_out_loss, rel=1e-10)


def test_resume_repeats_the_uninterrupted_run(folders: dict[str, Path]) -> None:
    """At the same plan bit by bit, dropout's draws included."""
    assert len(trajectory(folders["dp2"])) == NUM_STEPS
    assert trajectory(folders["dp2-cut"]) + trajectory(folders["dp2-resumed"]) == trajectory(folders["dp2"])


def test_a_resumed_run_tells_the_speed_of_all_of_it(folders: dict[str, Path]) -> None:
    parts = [steps(folders[name]).values() for name in ("dp2-cut", "dp2-resumed")]
    timed = [[record.step_seconds for record in part if record.timed] for part in parts]
    assert all(timed)
    seconds = sum(map(sum, timed))
    outcome = outcome_of(folders["dp2-resumed"])
    assert outcome.tokens_per_second == pytest.approx(64 * sum(map(len, timed)) / seconds, rel=1e-9)


@pytest.fixture(scope="module")
def single(base: Path) -> Path:
    """The uninterrupted run on one rank, without dropout."""
    assert train(tiny_run(base / "corpus", hyperparameters={"dropout": 0.0}), base / "single", "--quiet") == 0
    return base / "single"


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_resume_under_another_plan(folders: dict[str, Path], single: Path, name: str) -> None:
    assert_second_half_is_that_of(single, folders[name])


@pytest.mark.parametrize("name", ["dp2-half", "tp2-half", "pp2-half"])
def test_resume_on_one_rank(folders: dict[str, Path], single: Path, base: Path, name: str) -> None:
    folder = base / f"{name}-single"
    shutil.copytree(folders[name], folder)
    assert train(tiny_run(base / "corpus", hyperparameters={"dropout": 0.0}), folder, "--quiet") == 0
    assert_second_half_is_that_of(single, folder)


def test_requests_are_applied_by_all_ranks(folders: dict[str, Path], asked: dict[str, str]) -> None:
    folder = folders["asked"]
    answers: dict[str, AckRecord] = acks(folder)
    assert answers[asked["scale"]].accepted
    assert answers[asked["micro_batch"]].accepted
    assert not answers[asked["too_large"]].accepted
    assert Path(answers[asked["checkpoint"]].data["path"]).is_dir()
    assert {(r.learning_rate_scale, r.micro_batch_size) for r in steps(folder).values()} == {(0.5, 2)}
    assert outcome_of(folder).num_steps == 2
    assert acks(folders["pp2"])[asked["pipeline"]].accepted


def test_signal_to_one_rank_ends_all_at_a_checkpoint(folders: dict[str, Path]) -> None:
    outcome = outcome_of(folders["signal"])
    assert (outcome.kind, outcome.num_steps) == ("interrupted", 2)
    assert [path.name for path in (folders["signal"] / "checkpoints").iterdir()] == ["step-00000002"]


def test_nodes_need_one_folder(folders: dict[str, Path]) -> None:
    assert outcome_of(folders["shared"]).kind == "ok"
    assert "is not shared by all nodes" in outcome_of(folders["apart"] / "node0").detail


def test_what_one_rank_lacks_is_told_by_all(folders: dict[str, Path]) -> None:
    outcome = outcome_of(folders["gone"])
    assert outcome.kind == "user"
    assert outcome.detail.startswith("rank 1: the corpus path")


def test_ranks_with_different_runs_are_refused(folders: dict[str, Path]) -> None:
    outcome = outcome_of(folders["differs"])
    assert outcome.kind == "user"
    assert "hyperparameters.learning_rate is 0.01 there and 0.02 here (there: rank 0, here: rank 1)" in outcome.detail


def test_divergence_is_the_same_decision_on_all_ranks(folders: dict[str, Path]) -> None:
    assert outcome_of(folders["diverged"]).kind == "diverged"


def test_resources_are_those_of_all_ranks(folders: dict[str, Path]) -> None:
    outcome = outcome_of(folders["dp2-memory"])
    assert outcome.peak_memory_bytes
    assert outcome.num_parameters
    # The larger rank has half of weights, gradients and both moments at least, in fp64.
    assert outcome.peak_memory_bytes > 2 * 8 * outcome.num_parameters
    assert trajectory(folders["dp2-memory"]) == trajectory(folders["dp2"])


@pytest.mark.parametrize(("action", "kind"), [("allocate", "oom"), ("kill", "infra")])
def test_failure_of_one_rank_is_the_outcome_of_the_job(base: Path, action: str, kind: str) -> None:
    folder = base / action
    _, done = run_jobs([Job(folder, tiny_run(base / "corpus", plan=DP2), at_step=2, at_rank=1, action=action)], folder)
    assert done.returncode != 0
    assert outcome_of(folder).kind == kind
    if action == "kill":
        assert "another process of the run ended or cannot be reached" in outcome_of(folder).detail
        assert "engine/train.py" not in done.stderr, "no traceback of what is no fault of this process"
