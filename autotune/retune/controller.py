"""The retuner: a process beside a job that proposes, tries, commits, watches and takes back changes.

``python -P -m autotune.retune.controller JOB_FOLDER --every 10m``. It talks to the job through files alone: if it dies,
training goes on; started again, it goes on from its ledger.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from autotune.prior.robust import Floats, median_and_sigma
from autotune.retune.actions import STEP_UP, Proposal, Recover, TryLearningRate, TryMicroBatch, describe, ladder
from autotune.retune.canary import ArmResult, Comparison, best_of, is_catching_up, judge, judge_blocks, turns
from autotune.retune.children import LOW_PRIORITY
from autotune.retune.forks import BRANCHES, ForkRunner
from autotune.retune.ledger import EntryKind, Ledger, Memory, remember
from autotune.retune.live import (
    SLOWER_FOLDER,
    LiveRun,
    RunEndedError,
    RunSickError,
    discard_held_after,
    held_checkpoints,
    hold_checkpoint,
    put_aside,
)
from autotune.retune.policy import NUM_BLOCKS, HeldCheckpoint, choose_recovery, is_due, propose, trial_steps
from autotune.twin.health import Finding, FindingKind
from engine.config import RunConfig, load_run
from engine.control import Change, RollBack, SetLearningRateScale, SetMicroBatch, TakeCheckpoint
from engine.errors import USER_ERROR_EXIT_CODE, UserError
from engine.telemetry import AckRecord
from engine.units import Interval, format_duration, parse_interval

WATCH_SIGMAS = 4.0
"""A change is taken back when the loss after it is higher than before by so many standard errors ..."""
WATCH_RATIO = 0.03
"""... and by this share."""
SHORTEST_NAP_SECONDS, LONGEST_NAP_SECONDS = 0.05, 2.0


class Controller:
    """Retunes one job until it ends.

    Args:
        folder: The job's folder.
        interval: How often the job is looked at.
        branches: The program that trains forks of the job.
    """

    def __init__(self, folder: Path, interval: Interval, *, branches: Sequence[str] = BRANCHES) -> None:
        self.config: RunConfig = load_run(folder / "run.yaml")[0]
        self.memory = Memory()
        self._folder = folder
        self._interval = interval
        self._ledger = Ledger(folder)
        self._live = LiveRun(folder, self.config)
        self._forks = ForkRunner(folder, self.config, branches)
        self._device_memory_bytes: int | None = None
        self._lasting: set[FindingKind] = set()
        self._cost_so_far = (0.0, time.monotonic())

    def run(self) -> None:
        """Follow the job to its end."""
        for entry in self._ledger.entries():
            self.memory = remember(self.memory, entry)
        self._write("start", "retuner started")
        try:
            self._guard(self._begin)
            while True:
                self._guard(self._look)
        except RunEndedError:
            if self._live.is_complete():
                discard_held_after(self._folder, -1)
                shutil.rmtree(self._folder / SLOWER_FOLDER, ignore_errors=True)
        finally:
            self._write_cost()

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something while the run is well; bring it back when it is not."""
        try:
            action()
        except RunSickError as sick:
            self._recover(sick.finding)

    def _begin(self) -> None:
        self._live.wait(lambda: self._live.step >= 1)
        self._close_open_proposal()
        self._hold_early_checkpoint()

    # ------------------------------------------------------------------------------------------------------- one look

    def _look(self) -> None:
        """Wait one interval, assess the run, and try what the policy proposes."""
        if self.memory.watched is not None:  # of a retuner that was killed
            self._watch()
        self._pause()
        findings = self._live.twin.findings()
        self._write_news(findings)
        if not is_due(self.memory, self._interval, time.time(), self._live.step):
            return
        held = held_checkpoints(self._folder)
        proposal = propose(
            self._live.twin,
            self.memory,
            findings,
            early=held[0] if held else None,
            device_memory_bytes=self._memory_of_a_device(),
        )
        if proposal is None:
            return
        self._write("proposal", proposal.reason, proposal.to_data(), proposal)
        if isinstance(proposal.action, TryLearningRate):
            self._try_learning_rate(proposal, proposal.action)
        elif isinstance(proposal.action, TryMicroBatch):
            self._try_micro_batch(proposal, proposal.action)
        self._write_cost()

    def _pause(self) -> None:
        """Wait one interval, looking at the run only now and then."""
        seconds, num_steps = self._interval.seconds, self._interval.num_steps
        if seconds is not None:
            until = time.monotonic() + seconds
            self._live.wait(lambda: time.monotonic() >= until, poll_seconds=min(LONGEST_NAP_SECONDS, seconds / 2))
            return
        assert num_steps is not None
        first = self._live.step
        speed = self._live.twin.step_time()
        nap = num_steps * speed.seconds / 4 if speed else LONGEST_NAP_SECONDS
        # A rollback brings the step down: then a look is due as well.
        self._live.wait(
            lambda: not first <= self._live.step < first + num_steps,
            poll_seconds=min(max(nap, SHORTEST_NAP_SECONDS), LONGEST_NAP_SECONDS),
        )

    # -------------------------------------------------------------------------------------------------- learning rate

    def _try_learning_rate(self, proposal: Proposal, action: TryLearningRate) -> None:
        checkpoint = self._fork_point(proposal, action)
        if checkpoint is None:
            why = "no checkpoint to fork from"
            self._hold(proposal, {"action": "learning_rate", "origin": action.origin}, why)
            return
        try:
            self._conclude(proposal, action, checkpoint)
        finally:
            self._forks.clear()

    def _conclude(self, proposal: Proposal, action: TryLearningRate, checkpoint: HeldCheckpoint) -> None:
        results, comparisons = self._compare(proposal, action, checkpoint)
        won = best_of(comparisons)
        if won is None:
            data = {"action": "learning_rate", "origin": action.origin}
            why = "no rate was better by more than noise"
            if action.origin == "start" and (ended_at := self._catching_up(action, results)):
                data["slower_start"] = ended_at
                why = "the slower start is near and catching up: to be gone on with"
            self._hold(proposal, data, why)
        elif action.origin == "here":
            self._raise_or_lower(proposal, checkpoint, won.factor * proposal.scale)
        else:
            self._adopt(proposal, action, won.factor)

    def _catching_up(self, action: TryLearningRate, results: Sequence[ArmResult]) -> str | None:
        """Where a slower start that may yet win ended, put aside; None when it won't."""
        reference, arm = results[0], results[-1]
        ended_at = self._forks.last_checkpoint(arm.factor)
        if ended_at is None or not is_catching_up(reference, arm, judged_steps=action.judged_steps):
            return None
        return put_aside(ended_at, self._folder / SLOWER_FOLDER).path

    def _fork_point(self, proposal: Proposal, action: TryLearningRate) -> HeldCheckpoint | None:
        """The checkpoint that forks leave from, put aside."""
        if action.checkpoint is not None:
            return HeldCheckpoint.at(action.checkpoint) if Path(action.checkpoint).is_dir() else None
        return self._hold_present(f"to try learning rates: {proposal.reason}")

    def _compare(
        self, proposal: Proposal, action: TryLearningRate, checkpoint: HeldCheckpoint
    ) -> tuple[list[ArmResult], list[Comparison]]:
        """Run the forks, judge them, and write down both with the cost."""
        twin = self._live.twin
        speed = twin.step_time()
        began = time.time()
        try:
            results, cost = self._forks.run(
                action,
                scale=proposal.scale,
                checkpoint=checkpoint.path,
                step_seconds=speed.seconds if speed else 1.0,
                priority=LOW_PRIORITY if self._live.shares_cores() else 0,
                wait=self._live.wait,
            )
        finally:
            twin.disturbed(began, time.time())
        if action.origin == "start":  # what the run itself did on the same batches
            losses = self._losses(checkpoint.step, checkpoint.step + action.num_steps)
            told = tuple(loss if np.isfinite(loss) else None for loss in losses.tolist())
            results = [ArmResult(factor=1.0, outcome="ok", losses=told), *results]
        # A slower start is not annealed, so nothing flatters it: at a rate that is right it falls far behind.
        forks_here = action.factors if action.origin == "here" else ()
        comparisons = judge(
            results,
            judged_steps=action.judged_steps,
            index=self.memory.num_canaries,
            handicaps={factor: twin.progress_lost(factor, action.num_steps) for factor in forks_here},
        )
        took = f"{cost.cpu_seconds:.1f} CPU seconds, {format_duration(cost.wall_seconds)}"
        self._write(
            "canary",
            f"forks of {action.num_steps} steps from step {checkpoint.step} against the present rate:"
            f" {_told(comparisons, results)} ({took})",
            {
                "action": "learning_rate",
                "num_steps": action.num_steps * (len(action.factors) + (action.origin == "here")),
                "results": [result.to_data() for result in results],
                "comparisons": [comparison.to_data() for comparison in comparisons],
                "cpu_seconds": cost.cpu_seconds,
                "wall_seconds": cost.wall_seconds,
            },
            proposal,
        )
        return results, comparisons

    def _raise_or_lower(self, proposal: Proposal, checkpoint: HeldCheckpoint, target: float) -> None:
        """Bring the live run to another rate in allowed steps, and watch it."""
        scales = ladder(proposal.scale, target)
        self._decide(
            proposal,
            f"learning-rate scale {proposal.scale:.4g} -> {target:.4g} in {len(scales)} steps",
            to_scale=target,
            rungs=len(scales) if target > proposal.scale else -len(scales),
            undo=checkpoint,
            before=self._losses(self._live.step - trial_steps(self.config.num_steps), self._live.step),
        )
        done = [self._commit(proposal, SetLearningRateScale(scale=scale)) for scale in scales]
        self._watch(applied=all(done))

    def _adopt(self, proposal: Proposal, action: TryLearningRate, factor: float) -> None:
        """Let the live run go on from the end of a slower start, and watch it."""
        undo = self._hold_present("to return to, should the slower start be worse after all")
        ended_at = self._forks.last_checkpoint(factor)
        if ended_at is None or undo is None:
            data = {"action": "learning_rate", "origin": "start"}
            self._hold(proposal, data, "a checkpoint is missing")
            return
        adopted = hold_checkpoint(self._folder, ended_at)
        scale = factor * proposal.scale
        length = trial_steps(self.config.num_steps)
        last = min(adopted.step + length, self._live.step)
        self._decide(
            proposal,
            f"the run goes on from a slower start, {max(self._live.step - adopted.step, 0)} steps back, at step"
            f" {adopted.step}: learning-rate scale {proposal.scale:.4g} -> {scale:.4g}",
            to_scale=scale,
            rungs=round(math.log(factor) / math.log(STEP_UP)),
            undo=undo,
            before=self._losses(last - length, last),
        )
        self._watch(applied=self._commit(proposal, RollBack(checkpoint=adopted.path, scale=scale)))

    def _decide(
        self, proposal: Proposal, text: str, *, to_scale: float, rungs: int, undo: HeldCheckpoint, before: Floats
    ) -> None:
        """Write down an accepted rate, with all that its watch needs. Its commits come after, so that a retuner that is
        killed in between finds it."""
        level, sigma = median_and_sigma(before) if len(before) else (math.inf, 0.0)
        self._write(
            "decision",
            text,
            {
                "action": "learning_rate",
                "accepted": True,
                "rungs": rungs,
                "from_scale": proposal.scale,
                "to_scale": to_scale,
                "checkpoint": undo.path,
                "loss_before": float(level) if math.isfinite(level) else None,
                # Standard error of a median is 1.2533 that of a mean.
                "error_before": 1.2533 * float(sigma) / math.sqrt(max(len(before), 1)),
            },
            proposal,
        )

    def _hold(self, proposal: Proposal, data: Mapping[str, Any], why: str) -> None:
        self._write("decision", f"left as it is: {why}", {"accepted": False, **data}, proposal)

    def _commit(self, proposal: Proposal, change: Change) -> bool:
        ack = self._live.request(change, proposal.reason)
        step = ack.step if ack else self._live.step
        self._write(
            "commit",
            f"{describe(change)}: {_answer(ack)} by the trainer at step {step}",
            {
                "change": change.to_data(),
                "accepted": ack is not None and ack.accepted,
                "change_id": ack.change_id if ack else None,
                "ack_step": step,
            },
            proposal,
        )
        return ack is not None and ack.accepted

    def _watch(self, *, applied: bool = True) -> None:
        """Follow an accepted learning rate for one trial's length, and take it back when the loss is higher."""
        decision = self.memory.watched
        assert decision is not None
        if not applied:
            self._write("watch", "not in force: the trainer did not accept every step", {"kept": False})
            return
        length = trial_steps(self.config.num_steps)
        first = self._live.step
        self._live.wait(lambda: self._live.step >= first + length)
        after = self._losses(first + length // 2, first + length)
        before = decision.data["loss_before"]
        if before is None or not len(after):
            self._write("watch", "kept: no losses to compare with", {"kept": True})
            return
        # Medians: a spike is no reason to go back.
        level, sigma = median_and_sigma(after)
        error = math.hypot(decision.data["error_before"], 1.2533 * float(sigma) / math.sqrt(len(after)))
        limit = before + max(WATCH_SIGMAS * error, WATCH_RATIO * before)
        numbers = {"loss_before": before, "loss_after": float(level), "limit": limit}
        if level <= limit:
            self._write("watch", f"kept: loss {before:.4f} before, {level:.4f} after", {"kept": True, **numbers})
            discard_held_after(self._folder, self._live.step)  # the way back from an adopted start
            return
        undo = Recover(checkpoint=decision.data["checkpoint"], scale=decision.data["from_scale"])
        self._roll_back(undo, "watch", f"loss {before:.4f} before the change, {level:.4f} after", numbers)

    def _losses(self, after: int, upto: int) -> Floats:
        """Training losses of the steps after ``after`` and up to ``upto``."""
        history = self._live.twin.history
        return history.loss[(history.step > after) & (history.step <= upto)].copy()

    # ---------------------------------------------------------------------------------------------------- micro-batch

    def _try_micro_batch(self, proposal: Proposal, action: TryMicroBatch) -> None:
        """Turns of the present and the new micro-batch on the live run. The trainer has the last word at every turn."""
        present, new = action.present_size, action.micro_batch_size
        data = {"action": "micro_batch", "micro_batch_size": new}
        began = time.time()
        blocks: list[tuple[bool, float]] = []
        in_force = present
        for is_new in turns(NUM_BLOCKS):
            wanted = new if is_new else present
            if wanted != in_force and not self._commit(proposal, SetMicroBatch(micro_batch_size=wanted)):
                self._hold(proposal, data, "the trainer refused")
                return
            in_force = wanted
            blocks.append((is_new, self._time_block(wanted, action.block_steps)))
        self._live.twin.disturbed(began, time.time())
        verdict = judge_blocks(blocks)
        self._write(
            "canary",
            f"micro-batch {new} against {present} in {len(blocks)} turns: {100 * verdict.speed_up:+.1f} % speed",
            {**data, "blocks": blocks, "wall_seconds": time.time() - began, "cpu_seconds": 0.0, **verdict.to_data()},
            proposal,
        )
        wanted = new if verdict.accepted else present
        if in_force != wanted:
            self._commit(proposal, SetMicroBatch(micro_batch_size=wanted))
        if verdict.accepted:
            self._write("decision", f"micro-batch {present} -> {new}", {**data, "accepted": True}, proposal)
        else:
            self._hold(proposal, data, "not faster by more than noise")

    def _time_block(self, micro_batch_size: int, num_steps: int) -> float:
        """Median time of the next steps. The first one under a setting allocates: it does not count."""
        first = self._live.step + 1
        self._live.wait(lambda: self._live.step >= first + num_steps)
        history = self._live.twin.history
        counts = (history.step > first) & (history.micro_batch_size == micro_batch_size)
        return float(np.median(history.step_seconds[counts][:num_steps]))

    def _memory_of_a_device(self) -> int | None:
        if self._device_memory_bytes is None:
            from autotune.specs.cluster import probe_cluster

            self._device_memory_bytes = probe_cluster().memory_bytes
        return self._device_memory_bytes

    # ------------------------------------------------------------------------------------------------------- recovery

    def _recover(self, finding: Finding) -> None:
        """Bring back a run that went wrong, or hand it over."""
        self._write("finding", finding.describe(), finding.to_data())
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

    def _roll_back(self, recovery: Recover, cause: str, why: str, numbers: Mapping[str, float] | None = None) -> None:
        change = RollBack(checkpoint=recovery.checkpoint, scale=recovery.scale, skip_steps=recovery.skip_steps)
        ack = self._live.request(change, why)
        step = ack.step if ack else self._live.step
        accepted = ack is not None and ack.accepted
        self._write(
            "roll_back",
            f"{why}: {describe(change)}, {_answer(ack)} by the trainer at step {step}",
            {"cause": cause, "accepted": accepted, "change": change.to_data(), "ack_step": step, **(numbers or {})},
        )
        if accepted:
            discard_held_after(self._folder, HeldCheckpoint.at(recovery.checkpoint).step)
        else:
            self._write("hand_over", "the trainer did not roll back, please look at the run")
        self._live.acknowledge_sickness()

    # ---------------------------------------------------------------------------------------------------------- parts

    def _close_open_proposal(self) -> None:
        """A proposal that a killed retuner left counts as a trial without effect, so that none is tried for ever."""
        entry = self.memory.open_proposal
        if entry is None:
            return
        proposal = Proposal.model_validate(entry.data)
        action = proposal.action
        why = "the retuner was started again meanwhile"
        if isinstance(action, TryMicroBatch):
            self._commit(proposal, SetMicroBatch(micro_batch_size=action.present_size))
            self._hold(proposal, {"action": "micro_batch", "micro_batch_size": action.micro_batch_size}, why)
        elif isinstance(action, TryLearningRate):
            self._hold(proposal, {"action": "learning_rate", "origin": action.origin}, why)

    def _hold_early_checkpoint(self) -> None:
        """Put a checkpoint of the very start aside, for a start that turns out too fast."""
        if held_checkpoints(self._folder):
            return
        held = self._hold_present("to return to, should the start turn out too fast")
        if held is not None:
            self._write("checkpoint", f"checkpoint of step {held.step} put aside", {"path": held.path})

    def _hold_present(self, reason: str) -> HeldCheckpoint | None:
        """Ask for a checkpoint and put it aside; None when the trainer gave none."""
        ack = self._live.request(TakeCheckpoint(), reason)
        return hold_checkpoint(self._folder, ack.data["path"]) if ack is not None and ack.accepted else None

    def _write(
        self, kind: EntryKind, text: str, data: Mapping[str, Any] | None = None, proposal: Proposal | None = None
    ) -> None:
        of = proposal.proposal_id if proposal else self.memory.watched.proposal_id if self.memory.watched else None
        entry = self._ledger.append(kind, self._live.step, text, data, proposal_id=of)
        self.memory = remember(self.memory, entry)

    def _write_news(self, findings: Sequence[Finding]) -> None:
        """Write findings down: spikes and non-finite steps one by one, a lasting state when it begins."""
        for finding in findings:
            if finding.kind in ("spike", "non_finite") or finding.kind not in self._lasting:
                self._write("finding", finding.describe(), finding.to_data())
        self._lasting = {finding.kind for finding in findings}

    def _write_cost(self) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        self._write(
            "cost",
            f"retuner itself: {cpu - self._cost_so_far[0]:.2f} CPU seconds",
            {"cpu_seconds": cpu - self._cost_so_far[0], "wall_seconds": wall - self._cost_so_far[1]},
        )
        self._cost_so_far = cpu, wall


def _told(comparisons: Sequence[Comparison], results: Sequence[ArmResult]) -> str:
    """Each arm's difference in loss and the one it needed, and why forks failed."""
    arms = []
    for one in comparisons:
        needed = "" if one.margin is None else f" (below {-one.margin - one.handicap:+.4f} wins)"
        told = "failed" if one.difference is None else f"{one.difference:+.4f} nats{needed}"
        arms.append(f"x{one.factor:.3g} {told}")
    reasons = dict.fromkeys(f"{one.outcome}: {one.detail}" for one in results if one.outcome != "ok")
    return "; ".join([", ".join(arms), *reasons])


def _answer(ack: AckRecord | None) -> str:
    if ack is None:
        return "not answered"
    return "acknowledged" if ack.accepted else f"refused ({ack.reason})"


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; the exit code."""
    parser = argparse.ArgumentParser(prog="autotune.retune.controller", description=__doc__)
    parser.add_argument("folder", type=Path, help="the job's folder, which holds run.yaml")
    parser.add_argument("--every", default="10m", help="how often to look: 10m, 30s or 200steps (default: 10m)")
    parser.add_argument("--branches", default=shlex.join(BRANCHES), help="command that trains forks of the job")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        Controller(given.folder.absolute(), parse_interval(given.every), branches=shlex.split(given.branches)).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
