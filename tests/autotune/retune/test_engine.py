"""With the real engine: the protocol end to end, and the commands ``train`` and ``monitor``."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from autotune import cli
from autotune.retune.ledger import Ledger
from autotune.retune.supervisor import Supervisor
from engine.config import EvaluationOptions, RunConfig, RuntimeOptions, dump_run
from engine.outcome import read_outcome
from engine.plan import Plan
from engine.spec import DataSpec, Hyperparameters, ModelSpec, Workload
from engine.telemetry import AckRecord, StepRecord, read_telemetry


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token cache of its own."""
    monkeypatch.setenv("PARETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of documents that are easy to learn."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(60):
        sentence = f"Sentence {index} of a text that is easy to learn, because it says nearly the same again. "
        (folder / f"{index}.txt").write_text(sentence * 40, encoding="utf-8")
    return folder


def tiny_run(text: Path, num_steps: int, **runtime: Any) -> RunConfig:
    """A run of a very small model."""
    return RunConfig(
        name="tiny",
        model=ModelSpec(
            num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=257
        ),
        workload=Workload(data=DataSpec(paths=(str(text),)), sequence_length=32, total_tokens=num_steps * 8 * 32),
        hyperparameters=Hyperparameters(
            global_batch_size=8, learning_rate=1e-2, schedule="constant", warmup_ratio=0.01
        ),
        plan=Plan(micro_batch_size=8),
        runtime=RuntimeOptions(measure_memory=False, **runtime),
        evaluation=EvaluationOptions(max_tokens=2048),
    )


def test_a_slow_start_is_made_faster(text: Path, tmp_path: Path) -> None:
    """The run would be long; it is ended as soon as the change has been watched."""
    job = tmp_path / "job"
    job.mkdir()
    (job / "run.yaml").write_text(dump_run(tiny_run(text, 3000, step_delay_seconds=0.03, learning_rate_scale=0.0625)))
    asked = []

    def end_when_watched(_: Any) -> None:
        if not asked and any(entry.kind == "watch" for entry in Ledger(job).entries()):
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    code = Supervisor(job, every="10steps", on_records=end_when_watched).run()
    assert code == 128 + signal.SIGTERM
    entries = Ledger(job).entries()
    commits = [entry for entry in entries if entry.kind == "commit"]
    acks = {record.change_id: record for record in read_telemetry(job) if isinstance(record, AckRecord)}
    assert commits
    assert all(acks[entry.data["change_id"]].step == entry.data["ack_step"] for entry in commits)
    steps = [record for record in read_telemetry(job) if isinstance(record, StepRecord)]
    assert steps[-1].learning_rate_scale == pytest.approx(commits[-1].data["change"]["scale"])
    assert steps[-1].learning_rate_scale > 0.2
    assert next(entry for entry in entries if entry.kind == "canary").data["cpu_seconds"] > 0
    outcome = read_outcome(job)
    assert outcome is not None
    assert outcome.kind == "interrupted"


def test_train_and_monitor(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, runs, empty = tmp_path / "run.yaml", tmp_path / "runs", tmp_path / "empty"
    arguments = ["train", str(run), "--runs-dir", str(runs)]
    empty.mkdir()
    run.write_text(dump_run(tiny_run(empty, 12)))
    assert cli.main(arguments) == 2
    assert str(empty) in capsys.readouterr().err

    # A job that never began takes a corrected run file.
    run.write_text(dump_run(tiny_run(text, 12)))
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["outcome"]["kind"] == "ok"
    assert result["decisions"] == []

    # The same command again: there is nothing left to do, and nothing is lost.
    before = read_outcome(runs / "jobs" / "tiny")
    assert cli.main(arguments) == 0
    assert "has been trained to its end already" in capsys.readouterr().out
    assert read_outcome(runs / "jobs" / "tiny") == before

    # Another configuration under the same name is refused with the difference.
    assert cli.main([*arguments, "--start-lr-scale", "0.5"]) == 2
    assert "runtime.learning_rate_scale: 1.0 -> 0.5" in capsys.readouterr().err

    assert cli.main(["monitor", "tiny", "--runs-dir", str(runs), "--once"]) == 0
    assert "step 12/12" in capsys.readouterr().out
    assert cli.main(["monitor", "tiny", "--runs-dir", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"]["kind"] == "ok"
    assert cli.main(["monitor", "tinny", "--runs-dir", str(runs)]) == 2
    assert "did you mean tiny?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2"], "needs --node-rank and --rdzv-endpoint"),
        (["--node-rank", "1"], "is for several machines"),
        (["--nproc-per-node", "2"], "the plan needs 1 ranks"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"], "must be below --nnodes"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a"], "must be HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1"], "2 machines"),
        (["--start-lr-scale", "17"], "must lie between 0.0625 and 16"),
        (["--retune-every", "often"], "an interval is needed"),
        (["--name", "../x"], "is not allowed"),
    ],
)
def test_options_that_do_not_fit_are_told(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(dump_run(tiny_run(text, 12)))
    assert cli.main(["train", str(run), "--runs-dir", str(tmp_path / "runs"), *options]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "hint:" in told
    assert not (tmp_path / "runs").exists()
