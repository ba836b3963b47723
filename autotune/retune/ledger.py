"""What the retuner did and why: an append-only file beside the run, and what a restarted retuner takes from it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from engine.atomic import append_line, read_lines
from engine.schema import Schema

LEDGER_FILE = "ledger.jsonl"
Direction = Literal["both", "up", "down"]
FIRST_SPAN = 4
"""Rungs (steps of x1.4 or x0.7) of the first trial's nearer arms; its farther arms are twice as far."""
NEXT_SPAN = 2
"""Rungs of the arms after that."""

EntryKind = Literal[
    "start", "checkpoint", "finding", "proposal", "canary", "decision", "commit", "watch", "roll_back", "hand_over",
    "cost",
]  # fmt: skip


class Entry(Schema):
    """One line of the ledger."""

    kind: EntryKind
    """``start`` of a retuner; ``checkpoint`` put aside to go back to; ``finding`` about the run's health; ``proposal``
    with its forecasts; ``canary`` results with their cost; ``decision``; ``commit`` of one change, with the trainer's
    answer; ``watch`` after it; ``roll_back``; ``hand_over`` to people; ``cost`` of the retuner itself since its last
    such line."""
    time: float
    """Unix time."""
    step: int
    """Steps the run had done."""
    proposal_id: str | None = None
    """The proposal it belongs to."""
    text: str
    """One line for people."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Numbers, by kind."""


class Ledger:
    """The ledger of one job.

    Args:
        folder: The job's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / LEDGER_FILE

    def append(
        self,
        kind: EntryKind,
        step: int,
        text: str,
        data: Mapping[str, Any] | None = None,
        *,
        proposal_id: str | None = None,
    ) -> Entry:
        """Write one entry; on disk when this returns."""
        entry = Entry(kind=kind, time=time.time(), step=step, text=text, proposal_id=proposal_id, data=dict(data or {}))
        append_line(self._path, entry.to_data(), sync=True)
        return entry

    def entries(self) -> list[Entry]:
        """All whole entries, oldest first; torn and foreign lines are passed over."""
        found = []
        for data in read_lines(self._path):
            try:
                found.append(Entry.model_validate(data))
            except ValidationError:
                continue
        return found


@dataclass(frozen=True)
class Memory:
    """What past entries mean for what to do next."""

    num_canaries: int = 0
    """Learning-rate trials judged: the index of the next share of the error budget."""
    num_trial_steps: int = 0
    """Steps of all their forks."""
    span: int = FIRST_SPAN
    """Rungs that the next trial reaches."""
    direction: Direction = "both"
    """Where the next trial looks."""
    num_starts: int = 0
    """Trials of a slower start."""
    slower_start: str | None = None
    """Last checkpoint of a slower start that was catching up when its trial ended."""
    num_changes: int = 0
    """Learning rates accepted, and rollbacks."""
    num_holds: int = 0
    """Trials in a row that changed nothing."""
    last_time: float = 0.0
    """Unix time of the last decision."""
    last_step: int = 0
    """Steps done at the last decision."""
    micro_batches: frozenset[int] = frozenset()
    """Micro-batches tried."""
    recoveries: dict[str, int] = field(default_factory=dict)
    """Rollbacks by the kind of finding that caused them."""
    open_proposal: Entry | None = None
    """Proposal without a decision."""
    watched: Entry | None = None
    """Accepted decision whose watch has not ended."""
    is_handed_over: bool = False
    """Whether people were asked to take over."""

    @property
    def num_recoveries(self) -> int:
        """Rollbacks because the run went wrong."""
        return sum(self.recoveries.values())


def recall(entries: Iterable[Entry]) -> Memory:
    """Fold the ledger's entries into what to remember."""
    memory = Memory()
    for entry in entries:
        memory = remember(memory, entry)
    return memory


def remember(memory: Memory, entry: Entry) -> Memory:
    """What is remembered after one more entry."""
    data = entry.data
    if entry.kind == "proposal":
        from_start = data["action"].get("origin") == "start"
        return replace(memory, open_proposal=entry, num_starts=memory.num_starts + from_start, slower_start=None)
    if entry.kind == "canary" and data["action"] == "learning_rate":
        return replace(
            memory,
            num_canaries=memory.num_canaries + 1,
            num_trial_steps=memory.num_trial_steps + data["num_steps"],
        )
    if entry.kind == "decision":
        memory = replace(memory, open_proposal=None, last_time=entry.time, last_step=entry.step)
        if data["action"] == "micro_batch":
            return replace(memory, micro_batches=memory.micro_batches | {data["micro_batch_size"]})
        if data["accepted"]:
            changed = replace(memory, watched=entry, num_changes=memory.num_changes + 1)
            return _after_accepted(changed, data["rungs"])
        # A trial of slower starts says nothing of how near the best rate is.
        held = _after_held(memory)
        if data.get("origin") != "start":
            return held
        return replace(held, span=NEXT_SPAN, slower_start=data.get("slower_start"))
    if entry.kind == "watch":
        return replace(memory, watched=None)
    if entry.kind == "roll_back":
        memory = replace(memory, num_changes=memory.num_changes + 1)
        if memory.watched is not None:  # what had been accepted was wrong: look closer, and less often
            rungs = memory.watched.data["rungs"]
            return replace(
                _after_held(memory),
                watched=None,
                span=max(1, abs(rungs) // 2),
                last_time=entry.time,
                last_step=entry.step,
            )
        cause = data["cause"]
        recoveries = memory.recoveries | {cause: memory.recoveries.get(cause, 0) + 1}
        return replace(memory, recoveries=recoveries, last_time=entry.time, last_step=entry.step)
    if entry.kind == "hand_over":
        return replace(memory, is_handed_over=True)
    return memory


def _after_accepted(memory: Memory, rungs: int) -> Memory:
    """After a long way look closer, to both sides; after a short one go on in the same direction."""
    if abs(rungs) > NEXT_SPAN:
        return replace(memory, direction="both", span=NEXT_SPAN, num_holds=0)
    return replace(memory, direction="up" if rungs > 0 else "down", num_holds=0)


def _after_held(memory: Memory) -> Memory:
    span = NEXT_SPAN if memory.span > NEXT_SPAN else 1
    return replace(memory, direction="both", span=span, num_holds=memory.num_holds + 1)


STORY_KINDS: frozenset[EntryKind] = frozenset({"canary", "decision", "commit", "watch", "roll_back", "hand_over"})
"""Entries that people want to read: what was tried, decided and done."""


@dataclass(frozen=True)
class Costs:
    """What retuning took so far."""

    retuner_cpu_seconds: float
    """The retuner's own process."""
    retuner_wall_seconds: float
    canary_cpu_seconds: float
    """Forks, all processes."""
    canary_wall_seconds: float
    num_canaries: int


def costs(entries: Sequence[Entry]) -> Costs:
    """Sum the costs that the entries tell of."""
    own = [entry.data for entry in entries if entry.kind == "cost"]
    canaries = [entry.data for entry in entries if entry.kind == "canary"]
    return Costs(
        retuner_cpu_seconds=sum(data["cpu_seconds"] for data in own),
        retuner_wall_seconds=sum(data["wall_seconds"] for data in own),
        canary_cpu_seconds=sum(data["cpu_seconds"] for data in canaries),
        canary_wall_seconds=sum(data["wall_seconds"] for data in canaries),
        num_canaries=len(canaries),
    )
