"""Replay of a pipeline schedule: the ranks' action lists with durations, to a makespan, a timeline and peaks.

Each rank runs its list in order; an action starts when its rank is free and its input has arrived. The result is exact
for any durations, which the closed form (``autotune.cost.pipeline``) is only for equal stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.schedule_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Pair,
    RankActions,
    schedule_actions,
    stage_rank,
)


@dataclass(frozen=True)
class StageSeconds:
    """What one micro-batch costs each stage, in stage order: ``[pp * virtual_stages]`` seconds each."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    """The part of the backward pass that the stage before waits for, recompute included."""
    backward_weight: Sequence[float]
    send: float = 0.0
    """From a rank to its neighbour: activations, or their gradients."""
    overlap: bool = True
    """Whether sends run beside compute. If not, the sender does nothing else meanwhile."""


@dataclass(frozen=True)
class Replay:
    """What a replay shows."""

    makespan: float
    """Seconds from the first action's start to the last one's end."""
    busy: np.ndarray
    """[pp] seconds of compute."""
    sending: np.ndarray
    """[pp] seconds in sends that hold the rank up."""
    actions: list[RankActions]
    start: list[list[float]]
    """When each action of each rank starts."""
    end: list[list[float]]
    """When it ends, without its send."""

    @property
    def idle(self) -> np.ndarray:
        """[pp] seconds without compute or a send of its own."""
        idle: np.ndarray = self.makespan - self.busy - self.sending
        return idle


class DeadlockError(RuntimeError):
    """Actions wait for each other. The message says which waits for what."""


def replay(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int, seconds: StageSeconds) -> Replay:
    """Replay one of our schedules; see ``replay_actions``.

    Raises:
        UserError: The schedule can't run these numbers.
    """
    actions = schedule_actions(schedule, pp, virtual_stages, num_micro_batches)
    ranks = [stage_rank(schedule, pp, stage) for stage in range(pp * virtual_stages)]
    return replay_actions(actions, ranks, seconds)


def replay_actions(actions: list[RankActions], stage_ranks: Sequence[int], seconds: StageSeconds) -> Replay:
    """Replay action lists.

    A pair starts when both its inputs have arrived and hands both outputs on when both passes are done.

    Args:
        actions: Of every rank, in order.
        stage_ranks: The rank that holds each stage.
        seconds: Durations.

    Raises:
        DeadlockError: The lists wait for each other in a circle, or for a pass that nobody makes.
    """
    run = _Run(actions, stage_ranks, seconds)
    waiting = {}
    ready = list(range(len(actions)))
    while ready:
        rank = ready.pop()
        needed = run.advance(rank)
        if needed is not None:
            waiting[needed] = rank
        for made in run.take_made():
            other = waiting.pop(made, None)
            if other is not None:
                ready.append(other)
    if waiting:
        raise DeadlockError(_circle(actions, run.position, {rank: needed for needed, rank in waiting.items()}))
    makespan = max(run.free)
    return Replay(makespan, np.array(run.busy), np.array(run.sending), actions, run.start, run.end)


def peak_in_flight(
    actions: RankActions, stage_bytes: Sequence[float] | None = None, weight_ratio: float = 1.0
) -> float:
    """The most activations that a rank holds at once. Depends on its order alone, not on durations.

    Args:
        actions: Of the rank.
        stage_bytes: Activations of one micro-batch, by stage; by default 1 each, so that the answer is a number of
            (stage, micro-batch) sets.
        weight_ratio: Share of a set that is held on from the gradients of the inputs to those of the weights.
    """
    held, peak = 0.0, 0.0
    for action in actions:
        for one in action if isinstance(action, Pair) else (action,):
            size = 1.0 if stage_bytes is None else stage_bytes[one.stage]
            if one.kind == FORWARD:
                held += size
                peak = max(peak, held)
            elif one.kind == BACKWARD:
                held -= size
            elif one.kind == BACKWARD_INPUT:
                held -= size * (1 - weight_ratio)
            else:
                held -= size * weight_ratio
    return peak


Made = tuple[str, int, int]
"""An output that another pass waits for: F or I (a backward pass's gradient of its input), stage, micro-batch."""


class _Run:
    """The state of a replay."""

    def __init__(self, actions: list[RankActions], stage_ranks: Sequence[int], seconds: StageSeconds) -> None:
        self.free = [0.0] * len(actions)
        self.busy = [0.0] * len(actions)
        self.sending = [0.0] * len(actions)
        self.position = [0] * len(actions)
        self.start: list[list[float]] = [[] for _ in actions]
        self.end: list[list[float]] = [[] for _ in actions]
        self._actions = actions
        self._ranks = stage_ranks
        self._last_stage = len(stage_ranks) - 1
        self._send, self._overlap = seconds.send, seconds.overlap
        whole = [i + w for i, w in zip(seconds.backward_input, seconds.backward_weight, strict=True)]
        self._seconds = {
            FORWARD: seconds.forward,
            BACKWARD: whole,
            BACKWARD_INPUT: seconds.backward_input,
            BACKWARD_WEIGHT: seconds.backward_weight,
        }
        self._arrival: dict[Made, float] = {}
        self._link_free: dict[tuple[int, int], float] = {}
        self._made: list[Made] = []

    def advance(self, rank: int) -> Made | None:
        """Run a rank as far as its inputs go. Returns what it waits for, or None at its end."""
        actions = self._actions[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            parts = (action,) if isinstance(action, Action) else tuple(action)
            begin, duration = self.free[rank], 0.0
            for part in parts:
                needed = self._needs(part)
                if needed is not None:
                    if needed not in self._arrival:
                        return needed
                    begin = max(begin, self._arrival[needed])
                duration += self._seconds[part.kind][part.stage]
            self.start[rank].append(begin)
            self.end[rank].append(begin + duration)
            self.busy[rank] += duration
            self.free[rank] = begin + duration
            for part in parts:
                self._hand_on(part, rank)
            self.position[rank] += 1
        return None

    def take_made(self) -> list[Made]:
        """Outputs made since the last call."""
        made, self._made = self._made, []
        return made

    def _needs(self, action: Action) -> Made | None:
        stage, kind, micro_batch = action
        if kind == FORWARD:
            return (FORWARD, stage - 1, micro_batch) if stage else None
        if kind == BACKWARD_WEIGHT:
            return None
        return (BACKWARD_INPUT, stage + 1, micro_batch) if stage < self._last_stage else None

    def _hand_on(self, action: Action, rank: int) -> None:
        """Give the output to the stage that needs it, over the link where that is another rank's."""
        stage, kind, micro_batch = action
        if kind == BACKWARD_WEIGHT:
            return
        target = stage + 1 if kind == FORWARD else stage - 1
        if not 0 <= target <= self._last_stage:
            return
        made = (FORWARD if kind == FORWARD else BACKWARD_INPUT, stage, micro_batch)
        other, arrival = self._ranks[target], self.free[rank]
        if other != rank and self._send:
            if self._overlap:
                arrival = max(arrival, self._link_free.get((rank, other), 0.0)) + self._send
                self._link_free[rank, other] = arrival
            else:
                arrival += self._send
                self.free[rank] = arrival
                self.sending[rank] += self._send
        self._arrival[made] = arrival
        self._made.append(made)


def _circle(actions: list[RankActions], position: list[int], waits: dict[int, Made]) -> str:
    """Who waits for what, one line a rank."""
    kinds = {FORWARD: "the forward pass", BACKWARD_INPUT: "the backward pass"}
    lines = [
        f"rank {rank} at {actions[rank][position[rank]]} waits for {kinds[kind]} of micro-batch {micro_batch}"
        f" on stage {stage}"
        for rank, (kind, stage, micro_batch) in sorted(waits.items())
    ]
    return "the schedule does not end: " + "; ".join(lines)
