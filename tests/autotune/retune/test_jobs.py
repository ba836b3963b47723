"""Whole jobs with the supervisor, the retuner and forks as real processes, around an emulated training loop."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autotune.retune.ledger import Entry, Ledger
from engine.atomic import write_text
from engine.config import RunConfig, dump_run
from engine.control import ChangeRequest, Stop, send_request
from engine.outcome import Outcome, read_outcome
from engine.telemetry import AckRecord, EventRecord, StepRecord, read_telemetry

FAKE_TRAINER = (sys.executable, "-P", str(Path(__file__).with_name("fake_trainer.py")))

MakeConfig = Callable[..., RunConfig]
RunJob = Callable[..., int]


def entries(job: Path, kind: str) -> list[Entry]:
    return [entry for entry in Ledger(job).entries() if entry.kind == kind]


def outcome(job: Path) -> Outcome:
    found = read_outcome(job)
    assert found is not None
    return found


def steps(job: Path) -> list[StepRecord]:
    return [record for record in read_telemetry(job) if isinstance(record, StepRecord)]


def acks(job: Path) -> dict[str, AckRecord]:
    return {record.change_id: record for record in read_telemetry(job) if isinstance(record, AckRecord)}


def test_a_start_that_is_too_fast_is_made_good(make_config: MakeConfig, run_job: RunJob, job: Path) -> None:
    """The run goes on from the end of a slower start, and its rate from there on in allowed steps."""
    assert run_job(make_config(scale=8.0)) == 0
    assert 0.4 <= steps(job)[-1].learning_rate_scale <= 4.5
    commits = entries(job, "commit")
    for entry in commits:
        ack = acks(job)[entry.data["change_id"]]
        assert ack.accepted
        assert ack.step == entry.data["ack_step"]
    assert commits[0].data["change"]["kind"] == "roll_back"
    proposal = entries(job, "proposal")[0]
    assert proposal.data["forecasts"][0]["low"] < proposal.data["forecasts"][0]["high"]
    canary = entries(job, "canary")[0]
    assert canary.data["cpu_seconds"] > 0
    assert sum(entry.data["cpu_seconds"] for entry in entries(job, "cost")) > 0


def test_a_change_that_harms_the_live_run_is_rolled_back(make_config: MakeConfig, run_job: RunJob, job: Path) -> None:
    """Forks did not show it: the live run alone gets worse above scale 0.3."""
    assert run_job(make_config(scale=0.125, live_penalty_above=0.3)) == 0
    scales = [0.125, *(entry.data["change"]["scale"] for entry in entries(job, "commit")[:8])]
    assert all(0.69 < after / before < 1.41 for before, after in pairwise(scales))
    rolled_back = entries(job, "roll_back")
    assert rolled_back
    assert rolled_back[0].data["accepted"]
    assert rolled_back[0].data["change"]["scale"] == pytest.approx(0.125)
    # What it does much later, with new evidence, is another matter: it may be trying again when the run ends.
    records = list(read_telemetry(job))
    answered = next(i for i, r in enumerate(records) if isinstance(r, AckRecord) and "to_step" in r.data)
    following = [record for record in records[answered:] if isinstance(record, StepRecord)]
    assert all(record.learning_rate_scale == pytest.approx(0.125) for record in following[:5])
    assert outcome(job).kind == "ok"


def test_a_start_that_diverges_is_rolled_back_to_an_early_checkpoint(
    make_config: MakeConfig, run_job: RunJob, job: Path
) -> None:
    """The emulated engine ends as diverged, as the real one does; the job is started again at a lower rate."""
    assert run_job(make_config(800, scale=16.0, best_rate=3e-4, wait_for="")) == 0
    rolled_back = entries(job, "roll_back")
    assert rolled_back
    assert rolled_back[0].data["change"]["scale"] < 16 * 0.3
    assert steps(job)[-1].learning_rate_scale < 4
    assert outcome(job).held_out_loss is not None


def test_a_killed_retuner_leaves_training_alone_and_comes_back(
    make_config: MakeConfig, run_job: RunJob, job: Path
) -> None:
    def kill_it() -> None:
        wait_until(lambda: bool(entries(job, "checkpoint")))
        for pid in processes_of(job, b"autotune.retune.controller"):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    assert run_job(make_config(1200, wait_for="checkpoint"), every="5000steps") == 0
    killer.join()
    assert len(entries(job, "start")) == 2
    numbers = [record.step for record in steps(job)]
    assert numbers == list(range(1, 1201))
    assert len([r for r in read_telemetry(job) if isinstance(r, EventRecord) and r.kind == "start"]) == 1


def test_a_planned_stop_is_started_again(make_config: MakeConfig, run_job: RunJob, job: Path) -> None:
    job.mkdir()
    request = ChangeRequest(change=Stop())
    sent = []

    def stop_once(records: Any) -> None:
        if not sent and any(isinstance(record, StepRecord) for record in records):
            sent.append(send_request(job, request))

    assert run_job(make_config(600, wait_for=""), every=None, on_records=stop_once) == 0
    assert Ledger(job).entries() == []  # without retuning nobody meddles
    assert list(acks(job)) == [request.change_id]
    assert [record.step for record in steps(job)] == list(range(1, 601))
    starts = [r for r in read_telemetry(job) if isinstance(r, EventRecord) and r.kind == "start"]
    assert len(starts) == 2


def test_a_micro_batch_that_needs_too_much_memory_is_taken_back(
    make_config: MakeConfig, run_job: RunJob, job: Path
) -> None:
    """The run dies of it; it is started again with the micro-batch it had, and the larger one is not tried again."""
    assert run_job(make_config(oom_above=4)) == 0
    decisions = [entry for entry in entries(job, "decision") if entry.data["action"] == "micro_batch"]
    assert [entry.data["accepted"] for entry in decisions if entry.data["micro_batch_size"] == 8] == [False]
    assert outcome(job).num_steps == 1000


def test_signals_reach_the_engine(make_config: MakeConfig, run_job: RunJob, job: Path) -> None:
    sent = []

    def interrupt(records: Any) -> None:
        if not sent and any(isinstance(record, StepRecord) for record in records):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_job(make_config(5000, wait_for=""), every=None, on_records=interrupt) == 128 + signal.SIGTERM
    assert outcome(job).kind == "interrupted"
    state = json.loads(max(job.glob("checkpoints/*/state.json")).read_text())
    assert 0 < state["step"] < 5000


def test_everything_ends_with_the_supervisor(make_config: MakeConfig, job: Path) -> None:
    job.mkdir()
    write_text(job / "run.yaml", dump_run(make_config(100_000, wait_for="")))
    code = (
        "import sys; from pathlib import Path; from autotune.retune.supervisor import Supervisor;"
        " Supervisor(Path(sys.argv[1]), every='5000steps', engine=sys.argv[2:], branches=sys.argv[2:]).run()"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(job), *FAKE_TRAINER])
    wait_until(lambda: bool(entries(job, "checkpoint")))
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not processes_of(job))
    assert outcome(job).kind == "interrupted"  # the engine had time for a checkpoint
    assert list(job.glob("checkpoints/step-*"))


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(job: Path, program: bytes = b"") -> list[int]:
    """Running processes that have the job's folder and ``program`` among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if str(job).encode() in arguments and program in arguments:
            found.append(int(path.name))
    return found
