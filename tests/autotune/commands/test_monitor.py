"""What `autotune monitor` shows of a run that trains, one that died, and one that ended."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.cli import main
from engine.config import RunConfig, dump_run
from engine.outcome import Outcome, write_outcome
from engine.plan import Plan
from engine.spec import ModelSpec, Workload
from engine.telemetry import EventRecord, TelemetryWriter
from tests.engine.records import step_record

pytestmark = pytest.mark.unit


@pytest.fixture
def job(tmp_path: Path) -> Path:
    model = ModelSpec(num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=8, vocab_size=260)
    config = RunConfig(name="mine", model=model, workload=Workload(sequence_length=8, total_tokens=25600), plan=Plan())
    (tmp_path / "run.yaml").write_text(dump_run(config))
    return tmp_path


def write_telemetry(folder: Path, pid: int, *, ago: float) -> None:
    begin = time.time() - ago - 40
    writer = TelemetryWriter(folder)
    writer.write(EventRecord(kind="start", time=begin, step=0, tokens=0, data={"pid": pid}))
    for step in range(1, 41):
        record = step_record(
            step, 5.0 / step**0.1, time=begin + step, tokens=256 * step, step_seconds=1.0, memory_bytes=2**20
        )
        writer.write(record)
    writer.flush()


def ended_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["monitor", str(folder), *options]) == 0
    return capsys.readouterr().out


def test_a_live_run_has_a_forecast_and_time_left(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_telemetry(job, os.getpid(), ago=60)
    look = json.loads(shown(job, capsys, "--json"))
    assert look["is_alive"]
    assert look["step"] == 40
    assert look["seconds_left"] == pytest.approx(60.0)
    assert "nothing trains it" not in shown(job, capsys, "--once")


def test_a_dead_run_says_how_to_go_on(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_telemetry(job, ended_pid(), ago=60)
    text = shown(job, capsys, "--once")
    assert "nothing trains it now" in text
    assert "time left" not in text


def test_a_run_that_ended_says_how(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_telemetry(job, ended_pid(), ago=60)
    write_outcome(job, Outcome(kind="ok", held_out_loss=2.5))
    text = shown(job, capsys)
    assert "2.5000 nats/token" in text
    assert "nothing trains it" not in text
