"""The retuner: a process beside a job that proposes, tries, commits, watches and takes back changes.

``python -P -m autotune.retune.controller JOB_FOLDER --every 10m``. It talks to the job through files alone: if it dies,
training goes on; started again, it goes on from its ledger.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from autotune.retune.actions import Proposal, Recover, TryLearningRate, TryMicroBatch, ladder
from autotune.retune.canary import best_of, judge, judge_blocks, turns
from autotune.retune.forks import ENGINE, ForkRunner
from autotune.retune.ledger import EntryKind, Ledger, Memory, remember
from autotune.retune.live import LiveRun, RunEndedError, RunSickError, held_checkpoints, hold_checkpoint
from autotune.retune.policy import NUM_BLOCKS, choose_recovery, is_due, propose, trial_steps
from autotune.twin.robust import median_and_sigma
from engine.config import RunConfig, load_run
from engine.control import Change, RollBack, SetLearningRateScale, SetMicroBatch, TakeCheckpoint
from engine.errors import USER_ERROR_EXIT_CODE, UserError
from engine.telemetry import AckRecord
from engine.units import Interval, format_duration, parse_interval

WATCH_SIGMAS = 4.0
"""A change is taken back when the loss after it is higher than before by so many standard errors ..."""
WATCH_RATIO = 0.03
"""... and by this share."""
LONGEST_NAP_SECONDS = 2.0


class Controller:
    """Retunes one job until it ends.

    Args:
        folder: The job's folder.
        interval: How often the job is looked at.
        engine: The program that trains, for forks.
    """

    def __init__(self, folder: Path, interval: Interval, *, engine: Sequence[str] = ENGINE) -> None:
        self.config: RunConfig = load_run(folder / "run.yaml")[0]
        self.memory = Memory()
        self._folder = folder
        self._interval = interval
        self._ledger = Ledger(folder)
        self._live = LiveRun(folder, self.config)
        self._forks = ForkRunner(folder, self.config, engine)
        self._device_memory_bytes: int | None = None
        self._cost_so_far = (0.0, time.monotonic())

    def run(self) -> None:
        """Follow the job to its end."""
        for entry in self._ledger.entries():
            self.memory = remember(self.memory, entry)
        self._write("start", "retuner started")
        try:
            self._live.wait(lambda: self._live.step >= 1)
            self._close_open_proposal()
            self._hold_early_checkpoint()
            while True:
                try:
                    self._look()
                except RunSickError as sick:
                    self._recover(sick)
        except RunEndedError:
            pass
        finally:
            self._write_cost()

    # ------------------------------------------------------------------------------------------------------- one look

    def _look(self) -> None:
        """Wait one interval, assess the run, and try what the policy proposes."""
        if self.memory.watched is not None:  # of a retuner that was killed
            self._watch()
        self._pause()
        findings = self._live.twin.findings()
        for finding in findings:
            self._write("finding", finding.describe(), **finding.to_data())
        if not is_due(self.memory, self._interval, time.time(), self._live.step):
            return
        proposal = propose(self._live.twin, self.memory, findings, device_memory_bytes=self._memory_of_a_device())
        if proposal is None:
            return
        self._write("proposal", proposal.reason, proposal.proposal_id, **proposal.to_data())
        if isinstance(proposal.action, TryLearningRate):
            self._try_learning_rate(proposal, proposal.action)
        elif isinstance(proposal.action, TryMicroBatch):
            self._try_micro_batch(proposal, proposal.action)
        self._write_cost()

    def _pause(self) -> None:
        seconds, num_steps = self._interval.seconds, self._interval.num_steps
        nap = LONGEST_NAP_SECONDS if seconds is None else min(LONGEST_NAP_SECONDS, seconds / 2)
        if seconds is not None:
            until = time.monotonic() + seconds
            self._live.wait(lambda: time.monotonic() >= until, poll_seconds=nap)
        else:
            assert num_steps is not None
            next_step = self._live.step + num_steps
            # A rollback brings the step down: then the look is due as well.
            first = self._live.step
            self._live.wait(lambda: not first <= self._live.step < next_step, poll_seconds=nap)

    # -------------------------------------------------------------------------------------------------- learning rate

    def _try_learning_rate(self, proposal: Proposal, action: TryLearningRate) -> None:
        ack = self._request(TakeCheckpoint(), f"to try learning rates: {proposal.reason}")
        if ack is None or not ack.accepted:
            self._hold(proposal, "learning_rate", "no checkpoint to fork from: " + (ack.reason if ack else "no answer"))
            return
        held = hold_checkpoint(self._folder, ack.data["path"])
        began = time.time()
        speed = self._live.twin.step_time()
        try:
            results, cost = self._forks.run(
                action,
                scale=proposal.scale,
                checkpoint=held.path,
                step_seconds=speed.seconds if speed else 1.0,
                wait=self._live.wait,
            )
        finally:
            self._live.twin.disturbed(began, time.time())
        twin = self._live.twin
        handicaps = {factor: twin.progress_lost(factor, action.num_steps) for factor in action.factors}
        comparisons = judge(results, index=self.memory.num_canaries, handicaps=handicaps)
        won = best_of(comparisons)
        told = ", ".join(
            f"x{c.factor:.3g} {'failed' if c.difference is None else format(c.difference, '+.4f')}" for c in comparisons
        )
        self._write(
            "canary",
            f"forks of {action.num_steps} steps against the present rate: {told} nats"
            f" ({cost.cpu_seconds:.1f} CPU seconds, {format_duration(cost.wall_seconds)})",
            proposal.proposal_id,
            action="learning_rate",
            num_steps=action.num_steps * len(results),
            results=[result.to_data() for result in results],
            comparisons=[comparison.to_data() for comparison in comparisons],
            cpu_seconds=cost.cpu_seconds,
            wall_seconds=cost.wall_seconds,
        )
        if won is None:
            self._hold(proposal, "learning_rate", "no rate was better by more than noise")
            return
        scales = ladder(proposal.scale, won.factor * proposal.scale)
        self._write(
            "decision",
            f"learning-rate scale {proposal.scale:.4g} -> {scales[-1]:.4g} in {len(scales)} steps",
            proposal.proposal_id,
            action="learning_rate",
            accepted=True,
            rungs=len(scales) if won.factor > 1 else -len(scales),
            from_scale=proposal.scale,
            to_scale=scales[-1],
            checkpoint=held.path,
        )
        for scale in scales:
            self._commit(proposal, SetLearningRateScale(scale=scale))
        self._watch()

    def _hold(self, proposal: Proposal, action: str, why: str, **data: Any) -> None:
        text = f"left as it is: {why}"
        self._write("decision", text, proposal.proposal_id, action=action, accepted=False, **data)

    def _commit(self, proposal: Proposal, change: Change) -> bool:
        ack = self._request(change, proposal.reason)
        answer = "no answer" if ack is None else "acknowledged" if ack.accepted else f"refused: {ack.reason}"
        settings = {name: value for name, value in change.to_data().items() if name != "kind"}
        told = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in settings.items())
        step = ack.step if ack else self._live.step
        self._write(
            "commit",
            f"{told}: {answer} by the trainer at step {step}",
            proposal.proposal_id,
            change=change.to_data(),
            accepted=ack is not None and ack.accepted,
            change_id=ack.change_id if ack else None,
            ack_step=step,
        )
        return ack is not None and ack.accepted

    def _watch(self) -> None:
        """Follow an accepted learning rate for one trial's length and take it back when the loss rises."""
        decision = self.memory.watched
        assert decision is not None
        length = trial_steps(self.config.num_steps)
        first = self._live.step
        before = self._losses(first - length, first)
        self._live.wait(lambda: self._live.step >= first + length)
        after = self._losses(first + length // 2, first + length)
        # The runs before and after the change are compared by their medians: a spike is no reason to go back.
        (level_before, sigma), (level_after, _) = median_and_sigma(before), median_and_sigma(after)
        error = 1.2533 * float(sigma) * (1 / max(len(before), 1) + 1 / max(len(after), 1)) ** 0.5
        limit = float(level_before) + max(WATCH_SIGMAS * error, WATCH_RATIO * float(level_before))
        numbers = {"loss_before": float(level_before), "loss_after": float(level_after), "limit": limit}
        if numbers["loss_after"] <= limit:
            text = f"kept: loss {level_before:.4f} before, {level_after:.4f} after"
            self._write("watch", text, decision.proposal_id, kept=True, **numbers)
            return
        undo = Recover(checkpoint=decision.data["checkpoint"], scale=decision.data["from_scale"])
        self._roll_back(undo, "watch", f"loss {level_before:.4f} before the change, {level_after:.4f} after", **numbers)

    def _losses(self, after: int, upto: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        history = self._live.twin.history
        losses = history.loss[(history.step > after) & (history.step <= upto)]
        return losses[np.isfinite(losses)]

    # ---------------------------------------------------------------------------------------------------- micro-batch

    def _try_micro_batch(self, proposal: Proposal, action: TryMicroBatch) -> None:
        """Turns of the present and the new micro-batch on the live run. The trainer has the last word at every turn."""
        history = self._live.twin.history
        present, new = action.present_size, action.micro_batch_size
        blocks: list[tuple[bool, float]] = []
        began = time.time()
        in_force = present
        try:
            for is_new in turns(NUM_BLOCKS):
                wanted = new if is_new else present
                if wanted != in_force:
                    if not self._commit(proposal, SetMicroBatch(micro_batch_size=wanted)):
                        self._hold(proposal, "micro_batch", "the trainer refused", micro_batch_size=new)
                        return
                    in_force = wanted
                # The first step under a setting allocates: it does not count.
                first = self._live.step + 1
                self._live.wait(lambda first=first: self._live.step >= first + action.block_steps)  # type: ignore[misc]
                counts = (history.step > first) & (history.micro_batch_size == wanted)
                blocks.append((is_new, float(np.median(history.step_seconds[counts][: action.block_steps]))))
        finally:
            self._live.twin.disturbed(began, time.time())
        verdict = judge_blocks(blocks)
        self._write(
            "canary",
            f"micro-batch {new} against {present} in {len(blocks)} turns: {100 * verdict.speed_up:+.1f} % speed",
            proposal.proposal_id,
            action="micro_batch",
            blocks=blocks,
            wall_seconds=time.time() - began,
            cpu_seconds=0.0,
            **verdict.to_data(),
        )
        if not verdict.accepted:
            if in_force != present:
                self._commit(proposal, SetMicroBatch(micro_batch_size=present))
            self._hold(proposal, "micro_batch", "not faster by more than noise", micro_batch_size=new)
            return
        if in_force != new:
            self._commit(proposal, SetMicroBatch(micro_batch_size=new))
        self._write(
            "decision",
            f"micro-batch {present} -> {new}",
            proposal.proposal_id,
            action="micro_batch",
            accepted=True,
            micro_batch_size=new,
        )

    def _memory_of_a_device(self) -> int | None:
        if self._device_memory_bytes is None:
            from autotune.specs.cluster import probe_cluster

            self._device_memory_bytes = probe_cluster().memory_bytes
        return self._device_memory_bytes

    # ------------------------------------------------------------------------------------------------------- recovery

    def _recover(self, sick: RunSickError) -> None:
        """Bring back a run that went wrong, or hand it over."""
        finding = sick.finding
        self._write("finding", finding.describe(), **finding.to_data())
        if self.memory.is_handed_over:
            self._live.acknowledge_sickness()
            return
        recovery = choose_recovery(
            self.memory,
            finding.kind,
            scale=self._live.twin.scale,
            step=self._live.step,
            since_step=finding.since_step,
            held=held_checkpoints(self._folder),
        )
        if recovery is None:
            self._write("hand_over", f"{finding.describe()}: nothing is left to try, please look at the run")
            self._live.acknowledge_sickness()
            return
        self._roll_back(recovery, finding.kind, finding.describe())

    def _roll_back(self, recovery: Recover, cause: str, why: str, **data: Any) -> None:
        change = RollBack(checkpoint=recovery.checkpoint, scale=recovery.scale, skip_steps=recovery.skip_steps)
        ack = self._request(change, why)
        accepted = ack is not None and ack.accepted
        answer = "acknowledged" if accepted else f"refused: {ack.reason}" if ack else "no answer"
        place = f" to step {ack.data['to_step']}" if ack and accepted else ""
        step = ack.step if ack else self._live.step
        self._write(
            "roll_back",
            f"{why}: back{place}, learning-rate scale {recovery.scale:.4g}, {answer} by the trainer at step {step}",
            self.memory.watched.proposal_id if self.memory.watched else None,
            cause=cause,
            accepted=accepted,
            change=change.to_data(),
            ack_step=step,
            **data,
        )
        if not accepted:
            self._write("hand_over", "the trainer did not roll back, please look at the run")
        self._live.acknowledge_sickness()

    # ---------------------------------------------------------------------------------------------------------- parts

    def _close_open_proposal(self) -> None:
        """A proposal that a killed retuner left counts as a trial without effect, so that none is tried for ever."""
        entry = self.memory.open_proposal
        if entry is None:
            return
        proposal = Proposal.model_validate(entry.data)
        why = "the retuner was started again meanwhile"
        if isinstance(proposal.action, TryMicroBatch):
            self._commit(proposal, SetMicroBatch(micro_batch_size=proposal.action.present_size))
            self._hold(proposal, "micro_batch", why, micro_batch_size=proposal.action.micro_batch_size)
        else:
            self._hold(proposal, "learning_rate", why)

    def _hold_early_checkpoint(self) -> None:
        """Put a checkpoint of the very start aside, for a start that diverges."""
        if held_checkpoints(self._folder):
            return
        ack = self._request(TakeCheckpoint(), "to return to, should the start diverge")
        if ack is not None and ack.accepted:
            held = hold_checkpoint(self._folder, ack.data["path"])
            self._write("checkpoint", f"checkpoint of step {held.step} put aside", path=held.path)

    def _request(self, change: Change, reason: str) -> AckRecord | None:
        return self._live.request(change, reason)

    def _write(self, kind: EntryKind, text: str, proposal_id: str | None = None, **data: Any) -> None:
        entry = self._ledger.append(kind, self._live.step, text, proposal_id=proposal_id, **data)
        self.memory = remember(self.memory, entry)

    def _write_cost(self) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        self._write(
            "cost",
            f"retuner itself: {cpu - self._cost_so_far[0]:.2f} CPU seconds",
            cpu_seconds=cpu - self._cost_so_far[0],
            wall_seconds=wall - self._cost_so_far[1],
        )
        self._cost_so_far = cpu, wall


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; the exit code."""
    parser = argparse.ArgumentParser(prog="autotune.retune.controller", description=__doc__)
    parser.add_argument("folder", type=Path, help="the job's folder, which holds run.yaml")
    parser.add_argument("--every", default="10m", help="how often to look: 10m, 30s or 200steps (default: 10m)")
    parser.add_argument("--engine", default=shlex.join(ENGINE), help="command that trains forks of the job")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        Controller(given.folder.absolute(), parse_interval(given.every), engine=shlex.split(given.engine)).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
