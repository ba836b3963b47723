"""A run that ended because it diverged, or because a change under trial took too much memory, is brought back: the
request waits in its inbox when it is started again."""

from __future__ import annotations

from pathlib import Path

from autotune.retune.actions import MIN_SCALE, Proposal, TryMicroBatch, describe
from autotune.retune.ledger import Ledger, Memory, recall
from autotune.retune.live import held_checkpoints, hold_checkpoint
from autotune.retune.policy import MAX_RECOVERIES, RECOVERY_FACTOR, choose_recovery
from autotune.twin.health import best_step
from autotune.twin.twin import Twin
from engine.checkpoint_folders import checkpoint_folders
from engine.config import RunConfig
from engine.control import ChangeRequest, RollBack, SetLearningRateScale, SetMicroBatch, send_request
from engine.outcome import Outcome
from engine.telemetry import read_telemetry


def revive(folder: Path, config: RunConfig, outcome: Outcome) -> bool:
    """Ask for what may bring the run back.

    Args:
        folder: The job's folder, with its ledger.
        config: The job's configuration.
        outcome: How it ended.

    Returns:
        Whether it should be started again.
    """
    ledger = Ledger(folder)
    memory = recall(ledger.entries())
    if memory.is_handed_over:
        return False
    if outcome.kind == "oom" and memory.open_proposal is not None:
        proposal = Proposal.model_validate(memory.open_proposal.data)
        if not isinstance(proposal.action, TryMicroBatch):
            return False
        smaller = SetMicroBatch(micro_batch_size=proposal.action.present_size)
        send_request(folder, ChangeRequest(change=smaller, reason="out of memory"))
        ledger.append(
            "decision",
            outcome.num_steps,
            "left as it is: the run ran out of memory",
            {"action": "micro_batch", "accepted": False, "micro_batch_size": proposal.action.micro_batch_size},
            proposal_id=proposal.proposal_id,
        )
        return True
    if outcome.kind not in ("diverged", "nan"):
        return False
    twin = Twin(config)
    twin.update(read_telemetry(folder))
    change = _way_back(folder, twin, memory, outcome)
    if change is None:
        text = f"the run ended as {outcome.kind} and nothing is left to try, please look at it"
        ledger.append("hand_over", twin.step, text)
        return False
    request = ChangeRequest(change=change, reason=outcome.detail)
    send_request(folder, request)
    ledger.append(
        "roll_back",
        twin.step,
        f"{outcome.kind} at step {twin.step}: started again, {describe(change)}",
        {
            "cause": outcome.kind,
            "accepted": True,
            "change": change.to_data(),
            "change_id": request.change_id,
        },
        proposal_id=memory.watched.proposal_id if memory.watched else None,
    )
    return True


def _way_back(folder: Path, twin: Twin, memory: Memory, outcome: Outcome) -> RollBack | SetLearningRateScale | None:
    """Back to a checkpoint; from the beginning, at a lower rate, when the end came before there was any."""
    if not held_checkpoints(folder):  # the end came before the retuner had put one aside
        for path in checkpoint_folders(folder):
            hold_checkpoint(folder, str(path))
    held = held_checkpoints(folder)
    if not held and memory.num_recoveries < MAX_RECOVERIES:
        return SetLearningRateScale(scale=max(RECOVERY_FACTOR * twin.scale, MIN_SCALE))
    since = best_step(twin.history)
    chosen = choose_recovery(memory, outcome.kind, scale=twin.scale, step=twin.step, since_step=since, held=held)
    if chosen is None:
        return None
    return RollBack(checkpoint=chosen.checkpoint, scale=chosen.scale, skip_steps=chosen.skip_steps)
