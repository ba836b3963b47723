"""What a training job shows: a live line on a terminal, a line now and then elsewhere, and a summary at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from autotune.retune.ledger import STORY_KINDS, Ledger
from engine.config import RunConfig
from engine.telemetry import AckRecord, EventRecord, StepRecord
from engine.units import format_bytes, format_count, format_duration

LINES_PER_RUN = 20


class TrainView:
    """Follows one job.

    Args:
        config: The job's configuration.
        folder: The job's folder, with its ledger.
        silent: Show nothing.
    """

    def __init__(self, config: RunConfig, folder: Path, *, silent: bool) -> None:
        self._console = Console(highlight=False, quiet=silent)
        self._config = config
        self._ledger = Ledger(folder)
        self._num_told = len(self._ledger.entries())
        self._live = self._console.is_terminal and not silent
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task: TaskID | None = None
        self._next_line = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show progress while entered."""
        with self._progress:
            self._task = self._progress.add_task("", total=self._config.num_steps, told="starting")
            yield

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(escape(text), soft_wrap=True)

    def update(self, records: Sequence[StepRecord | EventRecord | AckRecord]) -> None:
        """Take in new telemetry, and what the retuner wrote meanwhile."""
        steps = [record for record in records if isinstance(record, StepRecord)]
        for record in records:
            if isinstance(record, EventRecord) and record.kind == "evaluation":
                self.say(f"step {record.step}: held-out loss {_number(record.data.get('held_out_loss'))} nats/token")
        if steps:
            self._show(steps[-1])
        entries = self._ledger.entries()
        for entry in entries[self._num_told :]:
            if entry.kind in STORY_KINDS:
                self.say(f"retuner: {entry.text}")
        self._num_told = len(entries)

    def _show(self, step: StepRecord) -> None:
        speed = self._config.tokens_per_step / step.step_seconds if step.step_seconds > 0 else 0.0
        loss = "not finite" if step.loss is None else f"{step.loss:.4f}"
        rate = f"lr {step.learning_rate:.3g} (x{step.learning_rate_scale:.3g})"
        told = f"loss {loss}  {rate}  {format_count(speed)} tokens/s"
        if self._task is not None:
            self._progress.update(self._task, completed=step.step, told=told)
        every = max(1, self._config.num_steps // LINES_PER_RUN)
        # A rollback brings the step down: its first line comes at once.
        is_due = not self._next_line - every <= step.step < self._next_line
        if not self._live and (is_due or step.step == self._config.num_steps):
            self.say(f"step {step.step}/{self._config.num_steps}  {told}")
            self._next_line = step.step + every

    def summary(self, result: Mapping[str, Any]) -> None:
        """What came of it, what the retuner did, where everything is, and what to type next."""
        outcome, folder = result["outcome"], Path(result["folder"])
        self._console.print()
        self.say(_told(outcome, folder))
        if result["retuned"]:
            self._tell_retuning(result)
        self.say("")
        self.say(f"  telemetry    {folder / 'telemetry.jsonl'}")
        self.say(f"  checkpoints  {folder / 'checkpoints'}")
        if result["retuned"]:
            self.say(f"  ledger       {folder / 'ledger.jsonl'}")
        self.say(f"  output       {folder / 'stdout.log'}")
        self.say("")
        self.say("Next:")
        for line in result["next"]:
            self.say(f"  {line}")

    def _tell_retuning(self, result: Mapping[str, Any]) -> None:
        decisions, cost = result["decisions"], result["costs"]
        self.say("")
        self.say("What the retuner did:" if decisions else "The retuner changed nothing and tried nothing.")
        for entry in decisions:
            self.say(f"  step {entry['step']}: {entry['text']}")
        self.say(
            f"It took {cost['retuner_cpu_seconds']:.1f} CPU seconds itself; {cost['num_canaries']} canaries took"
            f" {cost['canary_cpu_seconds']:.1f} CPU seconds ({format_duration(cost['canary_wall_seconds'])})."
        )


def _told(outcome: Mapping[str, Any] | None, folder: Path) -> str:
    if outcome is None:
        return f"The job ended without an outcome; {folder / 'stdout.log'} has its output."
    if outcome["kind"] != "ok":
        return f"Ended as {outcome['kind']}: {outcome['detail'] or folder / 'stdout.log'}"
    bits = _number(outcome["held_out_bits_per_byte"])
    parts = [f"Done: held-out loss {_number(outcome['held_out_loss'])} nats/token, {bits} bits/byte"]
    if outcome["tokens_per_second"] is not None:
        parts.append(f"{format_count(outcome['tokens_per_second'])} tokens/s")
    if outcome["peak_memory_bytes"] is not None:
        parts.append(f"peak memory {format_bytes(outcome['peak_memory_bytes'])}")
    return ", ".join(parts)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
