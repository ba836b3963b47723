"""The protocol end to end with the real engine: a job that starts far too slow is made faster by ``autotune train``."""

import json
from pathlib import Path

import pytest

from autotune import cli
from autotune.retune.ledger import Ledger
from engine.config import EvaluationOptions, RunConfig, RuntimeOptions, dump_run
from engine.outcome import read_outcome
from engine.plan import Plan
from engine.spec import DataSpec, Hyperparameters, ModelSpec, Workload
from engine.telemetry import AckRecord, StepRecord, read_telemetry


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(60):
        sentence = f"Sentence {index} of a text that is easy to learn, because it says nearly the same again. "
        (text / f"{index}.txt").write_text(sentence * 40, encoding="utf-8")
    config = RunConfig(
        name="tiny",
        model=ModelSpec(
            num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=257
        ),
        workload=Workload(data=DataSpec(paths=(str(text),)), sequence_length=32, total_tokens=300 * 8 * 32),
        hyperparameters=Hyperparameters(global_batch_size=8, learning_rate=1e-2, schedule="constant"),
        plan=Plan(micro_batch_size=8),
        # Slow enough for the retuner to keep up on a busy machine; forks do not wait.
        runtime=RuntimeOptions(measure_memory=False, step_delay_seconds=0.08),
        evaluation=EvaluationOptions(max_tokens=4096),
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(config))
    return path


def test_a_slow_start_is_made_faster(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARETUNE_CACHE", str(tmp_path / "cache"))
    runs = tmp_path / "runs"
    arguments = [
        "train",
        str(run_file),
        "--runs-dir",
        str(runs),
        "--start-lr-scale",
        "0.0625",
        "--retune-every",
        "10steps",
    ]
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    job = runs / "jobs" / "tiny"
    acks = {record.change_id: record for record in read_telemetry(job) if isinstance(record, AckRecord)}
    commits = [entry for entry in Ledger(job).entries() if entry.kind == "commit"]
    assert commits
    assert all(acks[entry.data["change_id"]].step == entry.data["ack_step"] for entry in commits)
    steps = [record for record in read_telemetry(job) if isinstance(record, StepRecord)]
    assert steps[-1].learning_rate_scale > 0.2
    assert result["outcome"]["kind"] == "ok"
    assert result["costs"]["canary_cpu_seconds"] > 0

    # The same command again: there is nothing left to do, and nothing is lost.
    before = read_outcome(job)
    assert cli.main(arguments) == 0
    told = capsys.readouterr().out
    assert "has been trained to its end already" in told
    assert "acknowledged by the trainer at step" in told
    assert read_outcome(job) == before

    # Another configuration under the same name is refused with the difference.
    assert cli.main(["train", str(run_file), "--runs-dir", str(runs)]) == 2
    assert "runtime.learning_rate_scale: 0.0625 -> 1.0" in capsys.readouterr().err

    assert cli.main(["monitor", "tiny", "--runs-dir", str(runs), "--once"]) == 0
    assert "acknowledged" in capsys.readouterr().out
    assert cli.main(["monitor", "tinny", "--runs-dir", str(runs)]) == 2
    assert "did you mean tiny?" in capsys.readouterr().err
