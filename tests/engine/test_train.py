"""One process from the run file to the outcome: resume, branches, evaluation, exit codes, signals, failures."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint_folders import MANIFEST_FILE
from engine.config import RunConfig, dump_run
from engine.context import open_context
from engine.data.corpus import prepare_corpus
from engine.outcome import read_outcome
from engine.signals import SignalWatch
from engine.step import Stepper, StepResult
from engine.train import main
from engine.trainer import Trainer
from tests.engine.runs import NUM_STEPS, events, outcome_of, steps, tiny_run, train, trajectory, write_corpus

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARETUNE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never disturbed, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARETUNE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        assert train(tiny_run(corpus, checkpoint={"every_steps": 1, "keep": 10}), folder, "--quiet") == 0
    return folder


@pytest.fixture
def seen_batches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tokens of every training step."""
    seen: list[torch.Tensor] = []
    plain = Stepper.train_step

    def train_step(self: Stepper, tokens: torch.Tensor, labels: torch.Tensor, rate: float) -> StepResult:
        seen.append(tokens.clone())
        return plain(self, tokens, labels, rate)

    monkeypatch.setattr(Stepper, "train_step", train_step)
    return seen


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Do something in the middle of a training step (counted from 1 in this process)."""
    plain, count = Stepper.train_step, iter(range(1, 1000))

    def train_step(self: Stepper, *args: Any) -> StepResult:
        if next(count) == step:
            action()
        return plain(self, *args)

    monkeypatch.setattr(Stepper, "train_step", train_step)


# ------------------------------------------------------------------------------------------------------- whole runs


def test_outcome_says_what_was_measured(whole: Path) -> None:
    outcome = outcome_of(whole)
    assert (outcome.kind, outcome.num_steps, outcome.num_tokens) == ("ok", NUM_STEPS, NUM_STEPS * 64)
    assert outcome.held_out_loss
    assert outcome.held_out_bits_per_byte
    assert outcome.train_loss
    assert outcome.tokens_per_second
    assert outcome.step_seconds
    assert outcome.cpu_seconds
    assert outcome.wall_seconds
    assert outcome.max_resident_bytes
    assert outcome.num_parameters
    assert outcome.corpus_hash
    assert outcome.environment["torch"] == torch.__version__
    assert [record.timed for _, record in sorted(steps(whole).items())] == [False, False, True, True, True, True]
    (start,), (end,) = events(whole, "start"), events(whole, "end")
    assert start.data["num_steps"] == NUM_STEPS
    assert start.data["resumed_from"] is None
    assert end.data["outcome"] == "ok"
    assert end.data["exit_code"] == 0


def test_memory_step_counts_the_state_and_changes_no_number(corpus: Path, whole: Path, tmp_path: Path) -> None:
    assert train(tiny_run(corpus, runtime={"measure_memory": True}), tmp_path, "--quiet") == 0
    outcome = outcome_of(tmp_path)
    assert outcome.num_parameters
    assert outcome.peak_memory_bytes
    # Weights, gradients and both moments, in fp64.
    assert outcome.peak_memory_bytes > 4 * 8 * outcome.num_parameters
    assert trajectory(tmp_path) == trajectory(whole)
    assert [step for step, record in steps(tmp_path).items() if record.timed] == [3, 4, 5, 6]


def test_evaluation_by_tokens(corpus: Path, tmp_path: Path) -> None:
    assert train(tiny_run(corpus, evaluation={"every_tokens": 100}), tmp_path, "--quiet") == 0
    assert [event.step for event in events(tmp_path, "evaluation")] == [2, 4, 5, 6]


@pytest.mark.parametrize(("every_tokens", "steps_done"), [(100, 2), (None, NUM_STEPS)])
def test_a_signal_during_an_evaluation_ends_the_run_at_a_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_tokens: int | None, steps_done: int
) -> None:
    config = tiny_run(corpus, evaluation={"every_tokens": every_tokens, "max_tokens": 10**6})
    signals = SignalWatch()
    whole_batch = Stepper.evaluate

    def evaluate(stepper: Stepper, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        signals.received = signal.SIGTERM
        return whole_batch(stepper, tokens, labels)

    monkeypatch.setattr(Stepper, "evaluate", evaluate)
    context = open_context(config.plan, config.runtime)
    outcome, exit_code = Trainer(config, context, tmp_path, signals=signals, report=print).run()
    assert (outcome.kind, outcome.num_steps, exit_code) == ("interrupted", steps_done, 143)
    assert (tmp_path / "checkpoints" / f"step-{steps_done:08d}" / "manifest.json").exists()
    assert not list(events(tmp_path, "evaluation"))


def test_held_out_loss_is_exact(corpus: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(corpus, hyperparameters={"dropout": 0.0}, evaluation={"max_tokens": 10**6})
    trainer = Trainer(
        config, open_context(config.plan, config.runtime), whole / "nowhere", signals=SignalWatch(), report=print
    )
    evaluation = trainer.evaluate()
    assert evaluation is not None
    sequences = prepare_corpus(config.workload.data).held_out.sequences(config.workload.sequence_length)
    stepper = Stepper.build(config, open_context(config.plan, config.runtime), 258)
    total, num_valid = 0.0, 0
    with torch.no_grad():
        for number in range(len(sequences)):
            batch = sequences.batch(np.array([number]))
            logits = stepper.parts[0](batch.tokens)
            losses = torch.nn.functional.cross_entropy(logits[0], batch.labels[0], ignore_index=-100, reduction="sum")
            total, num_valid = total + losses.item(), num_valid + int((batch.labels != -100).sum())
    trainer.close(None, 0)
    assert evaluation.num_tokens == num_valid
    assert evaluation.loss == pytest.approx(total / num_valid, rel=1e-12)
    num_bytes = sequences.num_bytes_predicted(np.arange(len(sequences)))
    assert evaluation.bits_per_byte == pytest.approx(total / math.log(2) / num_bytes, rel=1e-12)


# ------------------------------------------------------------------------------------------------------------- resume


def test_resume_repeats_the_uninterrupted_run(
    corpus: Path, whole: Path, tmp_path: Path, seen_batches: list[torch.Tensor]
) -> None:
    assert train(tiny_run(corpus), tmp_path / "again", "--quiet") == 0
    uninterrupted = seen_batches.copy()
    seen_batches.clear()
    config = tiny_run(corpus)
    assert train(config.changed(runtime=config.runtime.changed(stop_after_steps=3)), tmp_path / "cut", "--quiet") == 0
    assert outcome_of(tmp_path / "cut").num_steps == 3
    assert train(config, tmp_path / "cut", "--quiet") == 0
    assert trajectory(tmp_path / "cut") == trajectory(whole)
    assert len(seen_batches) == NUM_STEPS
    assert all(torch.equal(a, b) for a, b in zip(seen_batches, uninterrupted, strict=True))
    assert outcome_of(tmp_path / "cut").held_out_loss == outcome_of(whole).held_out_loss


def test_fresh_dropout_under_another_plan_is_said(corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus)
    assert train(config.changed(runtime=config.runtime.changed(stop_after_steps=3)), tmp_path, "--quiet") == 0
    assert train(config.changed(runtime=config.runtime.changed(stop_after_steps=4)), tmp_path, "--quiet") == 0
    assert not events(tmp_path, "note"), "the same plan draws on"
    assert train(tiny_run(corpus, plan={"micro_batch_size": 4}), tmp_path, "--quiet") == 0
    (note,) = events(tmp_path, "note")
    assert "fresh draws" in note.data["text"]
    assert "mb2" in note.data["text"]


def test_kill_dash_nine_loses_nothing_before_the_checkpoint(corpus: Path, whole: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, checkpoint={"every_steps": 3})
    slow = config.changed(runtime=config.runtime.changed(step_delay_seconds=0.3))
    (tmp_path / "run.yaml").write_text(dump_run(slow))
    process = subprocess.Popen([sys.executable, "-P", "-m", "engine.train", str(tmp_path / "run.yaml"), "--quiet"])
    try:
        deadline = time.monotonic() + 120
        while 4 not in steps(tmp_path) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert read_outcome(tmp_path) is None
    assert train(config, tmp_path, "--quiet") == 0
    assert trajectory(tmp_path) == trajectory(whole)
    assert events(tmp_path, "start")[-1].step == 3


def test_half_written_and_damaged_checkpoints_are_passed_over(corpus: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "telemetry.jsonl").unlink()
    newest, second, *_ = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    (newest / MANIFEST_FILE).unlink()
    next(second.glob("*.distcp")).write_bytes(b"torn")
    assert train(tiny_run(corpus), tmp_path, "--quiet") == 0
    assert events(tmp_path, "start")[0].step == NUM_STEPS - 2
    assert trajectory(tmp_path) == trajectory(whole)[-2:]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_finished_run_trains_nothing_and_keeps_its_measurements(corpus: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = outcome_of(tmp_path)
    assert train(tiny_run(corpus), tmp_path, "--quiet") == 0
    after = outcome_of(tmp_path)
    for name in ("held_out_loss", "tokens_per_second", "train_loss", "num_steps"):
        assert getattr(after, name) == getattr(before, name)


MEASURED = ("tokens_per_second", "step_seconds", "peak_memory_bytes", "train_loss")


def measured_run(corpus: Path, **sections: Any) -> RunConfig:
    checkpoint = {"every_steps": 1, "keep": 10}
    return tiny_run(corpus, checkpoint=checkpoint, runtime={"measure_memory": True}, **sections)


def cut_back(folder: Path, step: int) -> None:
    """What a machine leaves that dies soon after a checkpoint."""
    (folder / "outcome.json").unlink()
    for later in range(step + 1, NUM_STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / f"step-{later:08d}")


@pytest.mark.parametrize("step", [NUM_STEPS, NUM_STEPS - 1])
def test_a_process_started_at_the_end_tells_what_the_earlier_one_measured(
    corpus: Path, tmp_path: Path, step: int
) -> None:
    """Not the speed of the one step that it does itself, which is its first."""
    assert train(measured_run(corpus), tmp_path, "--quiet") == 0
    before, records = outcome_of(tmp_path), sorted(steps(tmp_path).items())
    cut_back(tmp_path, step)
    assert train(measured_run(corpus), tmp_path, "--quiet") == 0
    after = outcome_of(tmp_path)
    timed = [record.step_seconds for number, record in records if record.timed and number <= step]
    assert after.tokens_per_second == pytest.approx(len(timed) * 64 / sum(timed), rel=1e-9)
    assert (after.peak_memory_bytes, after.train_loss) == (before.peak_memory_bytes, before.train_loss)
    assert all(getattr(after, name) for name in MEASURED)


def test_another_plan_has_a_speed_and_a_memory_of_its_own(corpus: Path, tmp_path: Path) -> None:
    assert train(measured_run(corpus), tmp_path, "--quiet") == 0
    before = outcome_of(tmp_path)
    cut_back(tmp_path, 2)
    (tmp_path / "telemetry.jsonl").unlink()
    assert train(measured_run(corpus, plan={"micro_batch_size": 4}), tmp_path, "--quiet") == 0
    after = outcome_of(tmp_path)
    timed = [record.step_seconds for record in steps(tmp_path).values() if record.timed]
    assert len(timed) == NUM_STEPS - 4
    assert after.tokens_per_second == pytest.approx(len(timed) * 64 / sum(timed), rel=1e-9)
    assert after.peak_memory_bytes
    assert after.peak_memory_bytes != before.peak_memory_bytes


def test_what_another_plan_measured_stays_its_own_when_a_request_was_answered(corpus: Path, tmp_path: Path) -> None:
    """An answer writes the plan in force into the newest checkpoint, which the earlier plan may have made."""
    assert train(measured_run(corpus), tmp_path, "--quiet") == 0
    cut_back(tmp_path, 2)
    (tmp_path / "telemetry.jsonl").unlink()
    manifest = tmp_path / "checkpoints" / "step-00000002" / MANIFEST_FILE
    data = json.loads(manifest.read_text())
    data["plan"]["micro_batch_size"] = data["micro_batch_size"] = 4
    data["measured"] |= {"timed_seconds": 1e6, "timed_tokens": 64}
    manifest.write_text(json.dumps(data))
    assert train(measured_run(corpus, plan={"micro_batch_size": 4}), tmp_path, "--quiet") == 0
    timed = [record.step_seconds for record in steps(tmp_path).values() if record.timed]
    assert outcome_of(tmp_path).tokens_per_second == pytest.approx(len(timed) * 64 / sum(timed), rel=1e-9)


def test_checkpoint_of_another_run_is_refused_with_the_difference(
    corpus: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    other = tiny_run(corpus, hyperparameters={"weight_decay": 0.3}, model={"ffn_size": 48})
    assert train(other, tmp_path) == 2
    message = capsys.readouterr().err
    assert "hyperparameters.weight_decay is 0.1 there and 0.3 here" in message
    assert "model.ffn_size is 32 there and 48 here" in message
    assert "hint:" in message
    assert "Traceback" not in message
    outcome = outcome_of(tmp_path)
    assert train(tiny_run(corpus, model={"name": "renamed"}), tmp_path, "--quiet") == 0
    assert outcome.kind == "ok", "a refused start leaves a finished run's result alone"


# ----------------------------------------------------------------------------------------------------------- branches


def branch(corpus: Path, whole: Path, folder: Path, **options: Any) -> list[float]:
    """Fork ``whole`` at step 2; the learning rates used."""
    options = {"checkpoint": str(whole / "checkpoints" / "step-00000002"), "num_steps": 3, **options}
    config = tiny_run(corpus, branch=options, checkpoint={"at_end": False})
    assert train(config, folder, "--quiet") == 0
    return [record.learning_rate for _, record in sorted(steps(folder).items())]


def test_branch_at_scale_one_is_the_run_itself(corpus: Path, whole: Path, tmp_path: Path) -> None:
    branch(corpus, whole, tmp_path, learning_rate_scale=1.0)
    assert trajectory(tmp_path) == trajectory(whole)[2:5]
    outcome = outcome_of(tmp_path)
    assert outcome.kind == "ok"
    assert outcome.held_out_loss
    assert not (tmp_path / "checkpoints").exists()


def test_branch_sees_the_same_batches_at_another_rate_and_anneals(
    corpus: Path, whole: Path, tmp_path: Path, seen_batches: list[torch.Tensor]
) -> None:
    branch(corpus, whole, tmp_path / "one", learning_rate_scale=1.0)
    rates = branch(corpus, whole, tmp_path / "half", learning_rate_scale=0.5, anneal_steps=2)
    plain = [rate for _, _, rate, _ in trajectory(whole)[2:5]]
    floor = 0.01 * 0.1
    assert rates == pytest.approx([0.5 * plain[0], 0.25 * (plain[1] + floor), 0.5 * floor])
    assert all(torch.equal(seen_batches[i], seen_batches[i + 3]) for i in range(3))


# ------------------------------------------------------------------------------------------------ signals and failures


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_at_a_checkpoint(
    corpus: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), number))
        assert train(tiny_run(corpus), tmp_path, "--quiet") == code
    outcome = outcome_of(tmp_path)
    assert outcome.kind == "interrupted"
    assert outcome.num_steps == 2
    assert train(tiny_run(corpus), tmp_path, "--quiet") == 0
    assert trajectory(tmp_path) == trajectory(whole)


def test_second_signal_ends_at_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.signals._SAME_REQUEST_SECONDS", -1.0)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    at_step(monkeypatch, 2, twice)
    assert train(tiny_run(corpus), tmp_path, "--quiet") == 143
    outcome = outcome_of(tmp_path)
    assert outcome.kind == "interrupted"
    assert not (tmp_path / "checkpoints").exists()


def allocate_too_much() -> None:
    torch.empty(2**58)


def time_out() -> None:
    raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation")


@pytest.mark.parametrize(
    ("kind", "action"), [("oom", allocate_too_much), ("hang", time_out), ("infra", lambda: math.sqrt(-1))]
)
def test_failure_in_a_step_becomes_a_typed_outcome(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, action: Callable[[], None]
) -> None:
    at_step(monkeypatch, 2, action)
    assert train(tiny_run(corpus), tmp_path, "--quiet") == 1
    outcome = outcome_of(tmp_path)
    assert outcome.kind == kind
    assert outcome.detail
    assert outcome.num_steps == 1
    assert json.loads((tmp_path / "failures" / "rank0.json").read_text())["kind"] == kind
    assert events(tmp_path, "end")[0].data["outcome"] == kind


def test_weights_that_are_not_finite_end_as_nan(corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(
        corpus,
        hyperparameters={"learning_rate": 1e300, "schedule": "constant", "warmup_ratio": 0.0, "optimizer": "sgd"},
        runtime={"max_skipped_steps": 3},
    )
    assert train(config, tmp_path, "--quiet") == 1
    outcome = outcome_of(tmp_path)
    assert outcome.kind == "nan"
    assert outcome.num_skipped_steps == 3
    assert [record.skipped for _, record in sorted(steps(tmp_path).items())][-3:] == [True] * 3


def test_divergence_is_told_from_a_bad_start(corpus: Path, tmp_path: Path) -> None:
    wild = {"learning_rate": 3.0, "schedule": "constant", "warmup_ratio": 0.0, "clip_norm": None}
    config = tiny_run(corpus, hyperparameters=wild, workload={"total_tokens": 64 * 60})
    assert train(config, tmp_path, "--quiet") == 1
    outcome = outcome_of(tmp_path)
    assert outcome.kind == "diverged"
    assert outcome.num_steps < 60


# ----------------------------------------------------------------------------------------------------- command line


def test_called_with_nothing_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "RUN.yaml" in capsys.readouterr().err


def test_progress_and_json(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(corpus, model={"vocab_size": 100})
    assert train(config, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step ") for line in lines) == NUM_STEPS
    assert lines[-1].startswith("ok: 6 steps")
    assert sum("the vocabulary is enlarged from" in line for line in lines) == 1
    assert train(config, tmp_path, "--json", "--evaluate-only") == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["kind"] == "ok"
    assert outcome["num_steps"] == NUM_STEPS


def test_check_tells_what_a_start_would_find(
    corpus: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tiny_run(corpus, model={"vocab_size": 100}, runtime={"init_from": str(tmp_path / "hf")})
    assert train(small, tmp_path, "--check") == 2
    assert "there are no weights at" in capsys.readouterr().err
    small = small.changed(runtime=small.runtime.changed(init_from=None))
    assert train(small, tmp_path, "--check", "--init-from", str(tmp_path / "elsewhere")) == 2
    assert "elsewhere" in capsys.readouterr().err
    assert train(small, tmp_path, "--check", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["vocab_size"] == 257
    assert told["num_processes"] == 1
    assert told["notes"] == ["the vocabulary is enlarged from 100 to the tokenizer's 257"]
    assert told["num_parameters"] == outcome_of(whole).num_parameters - 2 * 16  # two rows of 16 fewer, and no more
    assert not (tmp_path / "outcome.json").exists()


def test_check_tells_processes_and_stages_and_reads_the_topology(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(corpus, plan={"pp": 2, "micro_batch_size": 1})
    assert train(config, tmp_path, "--check") == 0
    told = capsys.readouterr().out
    assert "num_processes: 2" in told
    assert "pipeline stages, layers and share of the work: 0 (" in told
    config = config.changed(runtime=config.runtime.changed(topology=str(tmp_path / "nowhere.json")))
    assert train(config, tmp_path, "--check") == 2
    assert "nowhere.json" in capsys.readouterr().err


def test_evaluate_only_writes_nothing(corpus: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "run.yaml"}
    assert train(tiny_run(corpus), tmp_path, "--evaluate-only", "--quiet") == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "run.yaml"} == before


def test_user_error_is_one_message_and_an_outcome(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tiny_run(tmp_path / "missing"), tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "hint:" in message
    assert "Traceback" not in message
    outcome = outcome_of(tmp_path / "run")
    assert outcome.kind == "user"
    assert main([str(tmp_path / "nothing.yaml")]) == 2
    assert train(tiny_run(corpus, plan={"micro_batch_size": 3}), tmp_path / "rule") == 2
    assert train(tiny_run(corpus, plan={"dp_shard": 2}), tmp_path / "world") == 2
    assert "needs 2 processes" in capsys.readouterr().err


@pytest.mark.parametrize(("local_rank", "speaks"), [("0", True), ("1", False)])
def test_one_process_of_each_node_tells_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str, speaks: bool
) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert main([str(tmp_path / "nothing.yaml")]) == 2
    assert ("file not found" in capsys.readouterr().err) == speaks


def test_two_processes_cannot_train_in_one_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    at_step(monkeypatch, 2, lambda: codes.append(train(tiny_run(corpus), tmp_path, "--quiet")))
    assert train(tiny_run(corpus), tmp_path, "--quiet") == 0
    assert codes == [2]
    assert not (tmp_path / "failures").exists()
    assert outcome_of(tmp_path).kind == "ok"
    assert "another process trains" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- weights in and out


def test_exported_weights_start_a_new_run_where_the_old_one_ended(corpus: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "old")
    assert (
        train(tiny_run(corpus), tmp_path / "old", "--quiet", "--evaluate-only", "--export", str(tmp_path / "hf")) == 0
    )
    assert (tmp_path / "hf" / "config.json").is_file()
    config = tiny_run(corpus, runtime={"init_from": str(tmp_path / "hf"), "stop_after_steps": 1})
    tiny_rate = {"learning_rate": 1e-30}
    config = config.changed(hyperparameters=config.hyperparameters.changed(**tiny_rate))
    assert train(config, tmp_path / "new", "--quiet") == 0
    assert outcome_of(tmp_path / "new").held_out_loss == pytest.approx(outcome_of(whole).held_out_loss, rel=1e-12)


def test_what_cannot_be_exported_is_refused_before_training(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(corpus, model={"family": "llama", "norm": "layernorm"})
    assert train(config, tmp_path, "--export", str(tmp_path / "hf")) == 2
    assert "hint:" in capsys.readouterr().err
    assert not events(tmp_path, "start")
