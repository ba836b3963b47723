"""Where a job that ended badly is sent back to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.retune.ledger import Ledger
from autotune.retune.live import held_checkpoints, hold_checkpoint
from autotune.retune.policy import RECOVERY_FACTOR
from autotune.retune.recovery import revive
from engine.checkpoint_folders import MANIFEST_FILE
from engine.config import RunConfig
from engine.control import Change, ControlInbox, RollBack, SetLearningRateScale
from engine.outcome import Outcome
from engine.telemetry import TelemetryWriter
from tests.engine.records import step_record

MakeConfig = Callable[..., RunConfig]
SCALE = 16.0


def diverge(job: Path, config: RunConfig) -> bool:
    """A job that went wrong from its first step on; whether it is to be started again."""
    writer = TelemetryWriter(job)
    for step in range(1, 14):
        tokens = step * config.tokens_per_step
        writer.write(step_record(step, 5.0 + 0.4 * step, tokens=tokens, learning_rate_scale=SCALE, micro_batch_size=4))
    writer.flush()
    return revive(job, config, Outcome(kind="diverged", num_steps=13))


def checkpoint(job: Path, step: int) -> Path:
    path = job / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / MANIFEST_FILE).write_text("{}")
    return path


def request(job: Path) -> Change:
    found = ControlInbox(job).next_request()
    assert found is not None
    return found.change


@pytest.fixture
def config(make_config: MakeConfig, job: Path) -> RunConfig:
    job.mkdir()
    return make_config(scale=SCALE)


def test_an_end_before_any_checkpoint_begins_again_at_a_lower_rate(config: RunConfig, job: Path) -> None:
    assert diverge(job, config)
    assert request(job) == SetLearningRateScale(scale=RECOVERY_FACTOR * SCALE)


def test_an_end_before_the_retuner_held_the_checkpoint_it_asked_for_goes_back_to_it(
    config: RunConfig, job: Path
) -> None:
    """The trainer took the checkpoint and ended before the retuner read its answer."""
    checkpoint(job, 10)
    assert diverge(job, config)
    change = request(job)
    assert isinstance(change, RollBack)
    assert change.scale == pytest.approx(RECOVERY_FACTOR * SCALE)
    assert change.checkpoint == held_checkpoints(job)[0].path  # where the trainer's pruning can't take it
    assert (Path(change.checkpoint) / MANIFEST_FILE).exists()


def test_a_half_written_checkpoint_is_none(config: RunConfig, job: Path) -> None:
    (checkpoint(job, 10) / MANIFEST_FILE).unlink()
    assert diverge(job, config)
    assert request(job) == SetLearningRateScale(scale=RECOVERY_FACTOR * SCALE)


def test_a_held_checkpoint_is_preferred_to_later_ones_of_the_run(config: RunConfig, job: Path) -> None:
    held = hold_checkpoint(job, str(checkpoint(job, 2)))
    checkpoint(job, 10)
    assert diverge(job, config)
    change = request(job)
    assert isinstance(change, RollBack)
    assert change.checkpoint == held.path


def test_a_job_that_was_handed_over_is_left_alone(config: RunConfig, job: Path) -> None:
    Ledger(job).append("hand_over", 5, "please look")
    assert not diverge(job, config)
