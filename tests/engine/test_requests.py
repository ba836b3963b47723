"""Every kind of change request to a running job, with its acknowledgement and what a restart makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.store import open_checkpoint
from engine.control import CONTROL_FOLDER, RollBack, SetLearningRateScale, SetMicroBatch, Stop, TakeCheckpoint
from engine.step import Stepper, StepResult
from engine.telemetry import StepRecord, read_telemetry
from engine.train import main
from tests.engine.runs import NUM_STEPS, acks, ask, events, outcome_of, steps, tiny_run, train, trajectory, write_corpus

pytestmark = pytest.mark.unit

During = Callable[[dict[int, Callable[[], Any]]], None]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARETUNE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> During:
    """Do things in the middle of training steps, counted from 1 over this process."""

    def plan(actions: dict[int, Callable[[], Any]]) -> None:
        plain, count = Stepper.train_step, iter(range(1, 1000))

        def train_step(self: Stepper, *args: Any) -> StepResult:
            actions.get(next(count), lambda: None)()
            return plain(self, *args)

        monkeypatch.setattr(Stepper, "train_step", train_step)

    return plan


def rates(folder: Path) -> list[float]:
    return [rate for _, _, rate, _ in trajectory(folder)]


CONSTANT = {"schedule": "constant", "warmup_ratio": 0.0}


def test_learning_rate_scale_from_the_next_step_on_and_after_a_restart(
    corpus: Path, tmp_path: Path, during: During
) -> None:
    config = tiny_run(corpus, hyperparameters=CONSTANT, runtime={"stop_after_steps": 4})
    ids: list[str] = []
    during({2: lambda: ids.append(ask(tmp_path, SetLearningRateScale(scale=0.5)))})
    assert train(config, tmp_path, "--quiet") == 0
    assert rates(tmp_path) == [0.01, 0.01, 0.005, 0.005]
    (ack,) = acks(tmp_path).values()
    assert (ack.change_id, ack.accepted, ack.step, ack.data) == (ids[0], True, 2, {"learning_rate_scale": 0.5})
    assert not list((tmp_path / CONTROL_FOLDER).iterdir())
    assert train(tiny_run(corpus, hyperparameters=CONSTANT), tmp_path, "--quiet") == 0
    assert rates(tmp_path)[4:] == [0.005, 0.005]


def test_accepted_change_survives_a_kill_before_the_next_checkpoint(
    corpus: Path, tmp_path: Path, during: During
) -> None:
    config = tiny_run(corpus, hyperparameters=CONSTANT, checkpoint={"every_steps": 1000})

    def crash() -> None:
        raise KeyError("a bug")

    during({2: lambda: ask(tmp_path, SetLearningRateScale(scale=0.5)), 4: crash})
    assert train(config, tmp_path, "--quiet") == 1
    during({})
    assert train(config, tmp_path, "--quiet") == 0
    assert events(tmp_path, "start")[1].step == 2
    assert rates(tmp_path) == [0.01, 0.01, 0.005, 0.005, 0.005, 0.005]


def test_micro_batch_at_the_same_global_batch(corpus: Path, tmp_path: Path, during: During) -> None:
    config = tiny_run(corpus, hyperparameters={"dropout": 0.0})
    assert train(config, tmp_path / "plain", "--quiet") == 0
    folder = tmp_path / "changed"
    during(
        {
            2: lambda: ask(folder, SetMicroBatch(micro_batch_size=4)),
            4: lambda: ask(folder, SetMicroBatch(micro_batch_size=3)),
        }
    )
    assert train(config, folder, "--quiet") == 0
    assert [record.micro_batch_size for _, record in sorted(steps(folder).items())] == [2, 2, 4, 4, 4, 4]
    accepted, refused = acks(folder).values()
    assert accepted.accepted
    assert accepted.data == {"micro_batch_size": 4}
    assert not refused.accepted
    assert "3" in refused.reason
    for step, record in steps(folder).items():
        assert record.loss == pytest.approx(steps(tmp_path / "plain")[step].loss, rel=1e-12)


def test_checkpoint_on_request_is_kept_beside_the_newest(corpus: Path, tmp_path: Path, during: During) -> None:
    during({1: lambda: ask(tmp_path, TakeCheckpoint())})
    assert train(tiny_run(corpus, checkpoint={"every_steps": 1, "keep": 1}), tmp_path, "--quiet") == 0
    (ack,) = acks(tmp_path).values()
    path = Path(ack.data["path"])
    assert path.is_absolute()
    assert open_checkpoint(path).manifest.step == 1
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", f"step-{NUM_STEPS:08d}"]


def test_roll_back_repeats_history_at_another_rate(corpus: Path, tmp_path: Path, during: During) -> None:
    config = tiny_run(corpus, hyperparameters={"dropout": 0.3, **CONSTANT}, checkpoint={"every_steps": 2, "keep": 9})
    target = tmp_path / "checkpoints" / "step-00000002"
    during({5: lambda: ask(tmp_path, RollBack(checkpoint=str(target), scale=1.0))})
    assert train(config, tmp_path, "--quiet") == 0
    records = [record for record in read_telemetry(tmp_path) if isinstance(record, StepRecord)]
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert [r.loss for r in records[2:5]] == [r.loss for r in records[5:8]]
    (ack,) = acks(tmp_path).values()
    assert ack.accepted
    assert ack.data == {"from_step": 5, "to_step": 2}
    (note,) = events(tmp_path, "note")
    assert "rolled back from step 5 to 2" in note.data["text"]


def test_roll_back_leaves_out_batches_and_a_restart_does_too(corpus: Path, tmp_path: Path, during: During) -> None:
    config = tiny_run(corpus, hyperparameters=CONSTANT, checkpoint={"every_steps": 2, "keep": 9})
    plain, folder = tmp_path / "plain", tmp_path / "changed"
    positions: list[int] = []
    assert train(config, plain, "--quiet") == 0

    def crash() -> None:
        positions.extend(open_checkpoint(path).manifest.position for path in sorted((folder / "checkpoints").iterdir()))
        raise KeyError("a bug")

    target = folder / "checkpoints" / "step-00000002"
    during({5: lambda: ask(folder, RollBack(checkpoint=str(target), scale=0.25, skip_steps=3)), 6: crash})
    assert train(config, folder, "--quiet") == 1
    assert positions == [(2 + 3) * 4], "later checkpoints are gone, the target goes on behind the batches left out"
    during({})
    assert train(config, folder, "--quiet") == 0
    assert events(folder, "start")[1].step == 2
    assert rates(folder)[2:] == [0.0025] * 4
    assert steps(folder)[3].loss != steps(plain)[3].loss
    assert open_checkpoint(folder / "checkpoints" / f"step-{NUM_STEPS:08d}").manifest.position == (NUM_STEPS + 3) * 4


def test_run_takes_over_where_its_branch_ended(corpus: Path, tmp_path: Path, during: During) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "run"
    assert train(tiny_run(corpus, checkpoint={"every_steps": 2}), plain, "--quiet") == 0
    fork = {"checkpoint": str(plain / "checkpoints" / "step-00000002"), "num_steps": 2, "learning_rate_scale": 1.0}
    assert train(tiny_run(corpus, branch=fork), tmp_path / "branch", "--quiet") == 0
    ended = tmp_path / "branch" / "checkpoints" / "step-00000004"
    during({2: lambda: ask(folder, RollBack(checkpoint=str(ended), scale=1.0))})
    assert train(tiny_run(corpus), folder, "--quiet") == 0
    (ack,) = acks(folder).values()
    assert ack.data == {"from_step": 2, "to_step": 4}
    assert trajectory(folder) == trajectory(plain)[:2] + trajectory(plain)[4:]
    assert outcome_of(folder).held_out_loss == outcome_of(plain).held_out_loss


def test_impossible_roll_backs_are_refused(corpus: Path, tmp_path: Path, during: During) -> None:
    other = tmp_path / "other"
    assert train(tiny_run(corpus, hyperparameters={"weight_decay": 0.0}), other, "--quiet") == 0
    folder = tmp_path / "run"
    foreign = other / "checkpoints" / f"step-{NUM_STEPS:08d}"
    during({
        1: lambda: ask(folder, RollBack(checkpoint=str(tmp_path / "nowhere"), scale=1.0)),
        2: lambda: ask(folder, RollBack(checkpoint=str(foreign), scale=1.0)),
    })  # fmt: skip
    assert train(tiny_run(corpus), folder, "--quiet") == 0
    missing, mismatched = acks(folder).values()
    assert not missing.accepted
    assert "not a whole checkpoint" in missing.reason
    assert not mismatched.accepted
    assert "weight_decay" in mismatched.reason
    assert len(trajectory(folder)) == NUM_STEPS


def test_stop_ends_at_a_checkpoint_and_the_same_command_goes_on(corpus: Path, tmp_path: Path, during: During) -> None:
    config = tiny_run(corpus)
    assert train(config, tmp_path / "plain", "--quiet") == 0
    folder = tmp_path / "stopped"
    during({3: lambda: ask(folder, Stop())})
    assert train(config, folder, "--quiet") == 75
    outcome = outcome_of(folder)
    assert outcome.kind == "interrupted"
    assert outcome.num_steps == 3
    assert events(folder, "end")[0].data["exit_code"] == 75
    assert train(config, folder, "--quiet") == 0
    assert trajectory(folder) == trajectory(tmp_path / "plain")


def test_request_answered_before_a_kill_is_not_applied_twice(
    corpus: Path, tmp_path: Path, during: During, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(corpus, hyperparameters=CONSTANT, checkpoint={"every_steps": 1})
    target = tmp_path / "checkpoints" / "step-00000001"

    def killed(*_: Any) -> None:
        raise KeyError("killed before the acknowledgement")

    during({3: lambda: ask(tmp_path, RollBack(checkpoint=str(target), scale=0.5, skip_steps=1))})
    with monkeypatch.context() as patch:
        patch.setattr("engine.trainer.Trainer.record_ack", killed)
        assert train(config, tmp_path, "--quiet") == 1
    assert not acks(tmp_path)
    assert train(config, tmp_path, "--quiet") == 0
    (ack,) = acks(tmp_path).values()
    assert ack.accepted
    assert ack.step == 1
    assert ack.data == {"repeated": True}
    assert len(events(tmp_path, "note")) == 1
    assert rates(tmp_path)[1:] == [0.005] * 5


@pytest.mark.parametrize(
    "text", ["", "{", '{"change": {"kind": "explode"}}', '{"change": {"kind": "stop", "x": 1}}', "\xff"]
)
def test_malformed_request_is_set_aside(corpus: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / CONTROL_FOLDER).mkdir()
    (tmp_path / CONTROL_FOLDER / "0-bad.json").write_bytes(text.encode("latin-1"))
    (tmp_path / CONTROL_FOLDER / "1-folder.json").mkdir()
    change_id = ask(tmp_path, SetLearningRateScale(scale=2.0))
    assert train(tiny_run(corpus), tmp_path, "--quiet") == 0
    assert acks(tmp_path)[change_id].accepted
    assert (tmp_path / CONTROL_FOLDER / "0-bad.bad").exists()


def test_evaluation_leaves_requests_alone(corpus: Path, tmp_path: Path) -> None:
    path = ask(tmp_path, Stop())
    assert train(tiny_run(corpus), tmp_path, "--evaluate-only", "--quiet") == 0
    assert any(path in file.name for file in (tmp_path / CONTROL_FOLDER).iterdir())
    assert main([str(tmp_path / "run.yaml"), "--quiet"]) == 75
