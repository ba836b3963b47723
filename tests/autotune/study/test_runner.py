"""A trial's end is told apart by kind, whatever ends it, and nothing of it is left running."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import Stop, end_recorded
from autotune.study.processes import MARK, marked_processes, new_mark, recorded_mark
from autotune.study.runner import CHECKPOINT_PATIENCE_SECONDS, _Watch, engine_command, evidence, run_trial
from autotune.study.study import Study
from engine.config import RunConfig
from engine.outcome import Outcome, OutcomeKind, read_outcome, write_outcome
from engine.plan import Plan
from engine.schema import parse
from engine.telemetry import TelemetryWriter
from tests.engine.records import step_record

FAKE = str(Path(__file__).with_name("fake_trainer.py"))

CONFIG = parse(
    RunConfig,
    {
        "model": {
            "num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 32,
            "vocab_size": 256,
        },
        "workload": {"sequence_length": 16, "total_tokens": 1024},
    },
)  # fmt: skip


def run(folder: Path, mode: str, **limits: float) -> Outcome:
    values = {"seconds": 50.0, "heartbeat_seconds": 40.0} | limits
    return run_trial(CONFIG, folder, limits=TrialLimits(**values), command=[sys.executable, FAKE, *mode.split()])


@pytest.mark.parametrize(
    ("mode", "kind", "detail"),
    [
        ("ok", "ok", ""),
        ("nan", "nan", "not finite"),
        ("diverged", "diverged", "above"),
        ("user", "user", "error: the corpus is empty"),
        ("rank-oom", "oom", "out of memory"),
        ("crash", "infra", "something broke"),
        ("killed", "infra", "SIGKILL"),
        ("abort", "user", "it crashed with SIGABRT"),
        ("rank-killed 11", "user", "a rank crashed with SIGSEGV"),
        ("rank-killed 6", "infra", "exitcode"),
        ("rank-killed 9", "infra", "exitcode"),
    ],
)
def test_ends_of_the_child_are_told_apart(tmp_path: Path, mode: str, kind: OutcomeKind, detail: str) -> None:
    outcome = run(tmp_path, mode)
    assert outcome.kind == kind
    assert detail in outcome.detail
    assert read_outcome(tmp_path) == outcome


def test_memory_limit_is_oom(tmp_path: Path) -> None:
    outcome = run(tmp_path, "memory", memory_bytes=300 * 2**20)
    assert outcome.kind == "oom"
    assert "0.29 GiB" in outcome.detail
    assert outcome.num_steps == 1


def test_silence_is_a_hang(tmp_path: Path) -> None:
    outcome = run(tmp_path, "hang", heartbeat_seconds=1.0)
    assert outcome.kind == "hang"


def test_the_time_limit_ends_it(tmp_path: Path) -> None:
    outcome = run(tmp_path, "slow", seconds=3.0)
    assert "time limit of 3.0s reached" in outcome.detail


@pytest.mark.parametrize(
    ("has_begun", "silent_seconds", "kind"),
    [(True, 1.0, "interrupted"), (True, 9.0, "hang"), (False, 1.0, "hang")],
)
def test_progress_until_the_time_limit_is_too_slow_and_silence_a_hang(
    tmp_path: Path, has_begun: bool, silent_seconds: float, kind: str
) -> None:
    watch = _Watch(tmp_path, TrialLimits(seconds=10.0))
    watch.has_begun = has_begun
    watch.started, watch.last_sign = time.monotonic() - 11.0, time.monotonic() - silent_seconds
    verdict = watch.verdict()
    assert verdict is not None
    assert verdict.kind == kind


def test_a_stopped_child_may_say_goodbye(tmp_path: Path) -> None:
    def stop() -> Stop:
        return Stop.SOON if (tmp_path / "telemetry.jsonl").exists() else Stop.NO

    outcome = run_trial(CONFIG, tmp_path, limits=TrialLimits(), stop=stop, command=[sys.executable, FAKE, "polite"])
    assert outcome.kind == "interrupted"
    assert (tmp_path / "said-goodbye").exists()


def test_the_whole_family_ends_also_in_other_sessions(tmp_path: Path) -> None:
    family: list[int] = []

    def stop() -> Stop:
        mark = recorded_mark(tmp_path)
        family[:] = [process.pid for process in marked_processes(mark or "")]
        return Stop.NOW if len(family) == 2 else Stop.NO

    run_trial(CONFIG, tmp_path, limits=TrialLimits(), stop=stop, command=[sys.executable, FAKE, "family"])
    assert len(family) == 2
    assert not marked_processes(recorded_mark(tmp_path) or "")


def test_the_child_dies_with_its_driver(tmp_path: Path) -> None:
    """Killed at once by the kernel, although the driver could not clean up."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "import test_runner as t; t.run(Path(sys.argv[1]), 'hang')"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    root = str(Path(__file__).resolve().parents[3])
    driver = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": root})
    wait_for(lambda: (tmp_path / "telemetry.jsonl").exists())
    mark = recorded_mark(tmp_path)
    assert mark is not None
    assert marked_processes(mark)
    driver.kill()
    driver.wait()
    wait_for(lambda: not marked_processes(mark))


def test_a_new_driver_ends_what_the_last_one_left(tmp_path: Path) -> None:
    mark = new_mark(tmp_path)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    orphan = subprocess.Popen(sleep, env=os.environ | {MARK: mark})
    stranger = subprocess.Popen(sleep, env=os.environ | {MARK: "0" * 32})
    try:
        wait_for(lambda: bool(marked_processes(mark)))
        assert end_recorded(tmp_path) == 1
        assert orphan.wait(10) == -signal.SIGKILL
        assert stranger.poll() is None
        assert end_recorded(tmp_path) == 0  # the number may belong to somebody else by now: only the mark counts
    finally:
        stranger.kill()
        stranger.wait()


def test_evidence_counts_only_for_its_own_configuration(tmp_path: Path) -> None:
    outcome = run(tmp_path, "ok")
    own = Assignment(number=0, attempt=2, folder=tmp_path, parameters={}, label="", seed=0, config=CONFIG)
    assert evidence(own) == outcome
    assert evidence(replace(own, config=CONFIG.changed(plan=Plan(micro_batch_size=2)))) is None
    write_outcome(tmp_path, Outcome(kind="interrupted"))
    assert evidence(own) is None


def test_an_earlier_outcome_is_no_outcome_of_the_next_attempt(tmp_path: Path) -> None:
    assert run(tmp_path, "ok").kind == "ok"
    assert run(tmp_path, "killed").kind == "infra"


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_trial_whose_machine_dies_goes_on_from_its_last_checkpoint(
    open_study: Callable[..., Study], tmp_path: Path
) -> None:
    changes = ("workload.total_tokens=16384", "workload.sequence_length=64", "evaluation.max_tokens=2048")
    changes += ("space.plan={micro_batch_size: [1, 2]}",)
    study = open_study("s", "limits.checkpoint=100ms", "runtime.step_delay_seconds=0.1", *changes, num_trials=1)
    assert study.space.limits.checkpoint_seconds == 0.1
    assignment = study.ask()
    assert isinstance(assignment, Assignment)
    assert assignment.config is not None

    def kill() -> Stop:
        if list(assignment.folder.glob("checkpoints/step-*/manifest.json")):
            for process in marked_processes(recorded_mark(assignment.folder) or ""):
                process.kill()
        return Stop.NO

    killed = run_trial(assignment.config, assignment.folder, limits=study.space.limits, stop=kill)
    assert killed.kind == "infra"
    limits = study.space.limits.changed(checkpoint_seconds=None)
    outcome = run_trial(assignment.config, assignment.folder, limits=limits)
    assert outcome.kind == "ok", outcome.detail
    assert "resumed at step" in (assignment.folder / "stdout.log").read_text()
    fast = assignment.config.changed(runtime=assignment.config.runtime.changed(step_delay_seconds=0.0))
    whole = run_trial(fast, tmp_path / "whole", limits=limits)
    assert (whole.held_out_loss, whole.num_steps) == (outcome.held_out_loss, outcome.num_steps)
    assert (whole.peak_memory_bytes, whole.train_loss) == (outcome.peak_memory_bytes, outcome.train_loss)
    study.tell(assignment, outcome)
    assert not (assignment.folder / "checkpoints").exists()


def a_step(folder: Path, step: int) -> None:
    """The trial tells of a step."""
    writer = TelemetryWriter(folder)
    writer.write(step_record(step))
    writer.flush()


def requests_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "control").glob("*.json"))


def test_a_large_checkpoint_is_no_hang_and_silence_before_it_is(tmp_path: Path) -> None:
    watch = _Watch(tmp_path, TrialLimits(seconds=1e6, heartbeat_seconds=5.0, checkpoint_seconds=10.0))
    watch.poll()
    assert not requests_in(tmp_path), "nothing to write before the first step"
    a_step(tmp_path, 1)
    watch.poll()
    watch._last_checkpoint = time.monotonic() - 12.0
    watch.last_sign = time.monotonic() - 6.0
    watch.poll()
    assert not requests_in(tmp_path)
    assert watch.verdict() is not None, "who is silent is not asked, and not pardoned"
    a_step(tmp_path, 2)
    watch.poll()
    (sent,) = requests_in(tmp_path)
    watch.last_sign -= 6.0
    assert watch.verdict() is None
    a_step(tmp_path, 3)
    watch.poll()
    assert requests_in(tmp_path) == [sent], "asked once"
    watch.last_sign -= CHECKPOINT_PATIENCE_SECONDS + 6.0
    verdict = watch.verdict()
    assert verdict is not None
    assert verdict.kind == "hang"


def test_a_checkpoint_that_is_never_answered_is_asked_for_again(tmp_path: Path) -> None:
    watch = _Watch(tmp_path, TrialLimits(checkpoint_seconds=10.0))
    a_step(tmp_path, 1)
    watch.poll()
    for asked in (1, 2):
        watch._last_checkpoint = time.monotonic() - 12.0
        a_step(tmp_path, 1 + asked)
        watch.poll()
        assert len(requests_in(tmp_path)) == asked
        watch._asked -= CHECKPOINT_PATIENCE_SECONDS + 1.0
        watch.poll()
        assert watch._awaited is None


def test_checkpoints_that_would_never_be_written_are_refused() -> None:
    with pytest.raises(ValueError, match="not below 'time'"):
        TrialLimits(seconds=60.0, checkpoint_seconds=60.0)


def test_runs_in_threads_at_the_same_time(tmp_path: Path) -> None:
    kinds: dict[str, str] = {}

    def work(mode: str) -> None:
        kinds[mode] = run(tmp_path / mode, mode).kind

    threads = [threading.Thread(target=work, args=(mode,)) for mode in ("ok", "nan", "killed")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == {"ok": "ok", "nan": "nan", "killed": "infra"}


def test_several_ranks_are_started_by_torchrun(tmp_path: Path) -> None:
    command = engine_command(CONFIG.changed(plan=Plan(dp_shard=2)), tmp_path)
    assert "--nproc-per-node=2" in command
    assert "--log-dir=/dev/null" in command  # leaves nothing in the temporary folder
    assert command[:3] == [sys.executable, "-P", "-m"]


def wait_for(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
