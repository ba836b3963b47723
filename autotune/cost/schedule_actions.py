"""The action lists of pipeline schedules: what each rank does, in its order.

The generators make the lists that torch 2.13 runs (``torch.distributed.pipelining.schedules``), without its idle
placeholders and without torch; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.errors import UserError

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""Kinds of action, by torch's letters. ``B`` is a whole backward pass, ``I`` and ``W`` are its two parts: gradients of
the inputs, which the stage before waits for, and of the weights, which nobody waits for."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Pair(NamedTuple):
    """A forward and a backward pass of two micro-batches, run together (DualPipe's F&B)."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


RankActions = list[Action | Pair]
"""What one rank does, in order."""


def schedule_actions(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> list[RankActions]:
    """The actions of every rank.

    Args:
        schedule: A word of ``Plan.schedule``.
        pp: Pipeline ranks.
        virtual_stages: Stages per rank.
        num_micro_batches: Per step.

    Raises:
        UserError: The schedule can't run these numbers.
    """
    make, legal = _SCHEDULES[schedule]
    refusal = legal(pp, virtual_stages, num_micro_batches)
    if refusal:
        raise UserError(f"the schedule {schedule} {refusal}", hint="choose a legal number of stages and micro-batches")
    return [make(rank, pp, virtual_stages, num_micro_batches) for rank in range(pp)]


def stage_rank(schedule: str, pp: int, stage: int) -> int:
    """The rank that holds a stage: round and round, or down and up again for the V-shaped schedules."""
    if schedule in V_SHAPED:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose first and last stage lie on the same rank."""


def _gpipe(rank: int, pp: int, virtual_stages: int, m: int) -> RankActions:
    """All forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965)."""
    return [Action(rank, kind, i) for kind in (FORWARD, BACKWARD) for i in range(m)]


def _one_f_one_b(rank: int, pp: int, virtual_stages: int, m: int) -> RankActions:
    """A forward pass a hop ahead of the last rank, then one forward, one backward (Narayanan et al. 2019, PipeDream;
    with the flush of arXiv 2006.09503)."""
    warm_up = min(pp - 1 - rank, m)
    actions: RankActions = [Action(rank, FORWARD, i) for i in range(warm_up)]
    for i in range(m - warm_up):
        actions += [Action(rank, FORWARD, warm_up + i), Action(rank, BACKWARD, i)]
    return actions + [Action(rank, BACKWARD, i) for i in range(m - warm_up, m)]


def _interleaved(rank: int, pp: int, virtual_stages: int, m: int) -> RankActions:
    """Interleaved 1F1B, in rounds of micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    per_round = micro_batches_per_round(pp, m)
    warm_up = min((virtual_stages - 1) * per_round + 2 * (pp - 1 - rank), virtual_stages * m)
    return _alternate(rank, pp, virtual_stages, m, warm_up, weight_delay=None)


def _interleaved_zero_bubble(rank: int, pp: int, virtual_stages: int, m: int) -> RankActions:
    """ZB-H1 with virtual stages: gradients of weights fill the gaps, and wait until the rank has run as many backward
    passes as its number says (Qi et al. 2024, arXiv 2401.10241, section 3.1)."""
    per_round = micro_batches_per_round(pp, m)
    warm_up = min((virtual_stages - 1) * per_round + pp - 1 - rank, virtual_stages * m)
    return _alternate(rank, pp, virtual_stages, m, warm_up, weight_delay=rank)


def micro_batches_per_round(pp: int, num_micro_batches: int) -> int:
    """Micro-batches that interleaved schedules run through one stage before they turn to the next."""
    return num_micro_batches // max(1, num_micro_batches // pp)


def _alternate(
    rank: int, pp: int, virtual_stages: int, m: int, warm_up: int, *, weight_delay: int | None
) -> RankActions:
    """Forward passes of a warm-up, then forward and backward in turns, then backward.

    Args:
        rank: Of the pipeline.
        pp: Its ranks.
        virtual_stages: Stages per rank.
        m: Micro-batches.
        warm_up: Forward passes before the first backward pass.
        weight_delay: Backward passes before the first gradient of weights; None does not split backward passes.
    """
    forwards = list(_in_rounds(range(rank, pp * virtual_stages, pp), pp, m))
    backwards = list(_in_rounds(range(rank, pp * virtual_stages, pp)[::-1], pp, m))
    kind = BACKWARD if weight_delay is None else BACKWARD_INPUT
    actions: RankActions = [Action(stage, FORWARD, i) for stage, i in forwards[:warm_up]]
    num_weights = 0
    for number, (stage, i) in enumerate(backwards):
        if warm_up + number < len(forwards):
            ahead, j = forwards[warm_up + number]
            actions.append(Action(ahead, FORWARD, j))
        actions.append(Action(stage, kind, i))
        if weight_delay is not None and number >= weight_delay:
            actions.append(Action(backwards[num_weights][0], BACKWARD_WEIGHT, backwards[num_weights][1]))
            num_weights += 1
    if weight_delay is not None:
        actions += [Action(stage, BACKWARD_WEIGHT, i) for stage, i in backwards[num_weights:]]
    return actions


def _in_rounds(stages: range, pp: int, m: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch) in the order in which a rank runs them: a round through each stage, then the next round."""
    per_round = micro_batches_per_round(pp, m)
    for start in range(0, m, per_round):
        for stage in stages:
            for i in range(start, start + per_round):
                yield stage, i


def _zbv(rank: int, pp: int, virtual_stages: int, m: int) -> RankActions:
    """ZB-V, by hand for equal F, I and W (Qi et al. 2024, arXiv 2401.10241, section 6)."""
    run = _Counted(rank, 2 * pp - 1 - rank)
    num = max(2 * pp - 1, m)
    run.many(2 * (pp - rank) - 1, "F0")
    run.many(rank, "F1 F0")
    run.many(pp - rank, "F1 I1 W1")
    while run.count["F1"] < run.count["F0"] or run.count["F0"] < num:
        if run.count["F0"] < num:
            run.many(1, "F0")
        run.many(1, "I0 W0 F1 I1 W1")
    run.many(rank, "I0 I1")
    run.many(pp - rank, "I0 W0")
    run.many(run.count["I1"] - run.count["W1"], "W1")
    run.many(run.count["I0"] - run.count["W0"], "W0")
    # The pattern is that of a full pipeline: with fewer micro-batches the surplus is left out.
    return [a for a in run.actions if isinstance(a, Action) and a.micro_batch < m]


def _dualpipev(rank: int, pp: int, virtual_stages: int, m: int) -> RankActions:
    """DualPipeV: DualPipe's halves on half the ranks (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, and the
    published code, github.com/deepseek-ai/DualPipe)."""
    run = _Counted(rank, 2 * pp - 1 - rank)
    ahead = pp - rank - 1
    run.many(2 * ahead, "F0")
    run.many(rank + 1, "F0 F1")
    run.many(ahead, "I1 w F1")
    for number in range(m - 2 * pp + rank + 1):
        # The first pair of the last rank is run apart: its backward pass needs its forward pass.
        run.many(1, "F0 B1" if number == 0 and rank == pp - 1 else "F0&B1")
        run.many(1, "F1&B0")
    run.many(ahead, "B1 F1&B0")
    num_split = (rank + 1) // 2  # of the last backward passes, the second half is split
    for number in range(rank + 1):
        split_1 = number > num_split or (number == num_split and rank % 2 == 1)
        split_0 = number >= num_split
        run.many(1, f"{'I' if split_1 else 'B'}1 {'I' if split_0 else 'B'}0")
    run.many(ahead, "w I0")
    run.many(rank + 1, "w")
    return run.actions


class _Counted:
    """Actions of a V-shaped schedule's rank, whose two stages are called 0 and 1, with micro-batches counted."""

    def __init__(self, first_stage: int, second_stage: int) -> None:
        self.actions: RankActions = []
        self.count = {f"{kind}{chunk}": 0 for kind in "FIW" for chunk in "01"}
        self._stages = {"0": first_stage, "1": second_stage}
        self._waiting: list[tuple[str, int]] = []

    def many(self, times: int, pattern: str) -> None:
        """Append a pattern so many times.

        Args:
            times: How often.
            pattern: Words such as ``F0`` (a kind and which stage), ``F0&B1`` for a pair, and ``w`` for the oldest
                gradient of weights that waits, if any does.
        """
        for word in pattern.split() * times:
            if word == "w":
                if self._waiting:
                    chunk, micro_batch = self._waiting.pop(0)
                    self.actions.append(Action(self._stages[chunk], BACKWARD_WEIGHT, micro_batch))
            elif "&" in word:
                forward, backward = word.split("&")
                self.actions.append(Pair(self._next(forward), self._next(backward)))
            else:
                self.actions.append(self._next(word))

    def _next(self, word: str) -> Action:
        kind, chunk = word[0], word[1]
        if kind == BACKWARD:
            micro_batch = self.count[f"I{chunk}"]
            self.count[f"I{chunk}"] += 1
            self.count[f"W{chunk}"] += 1
        else:
            micro_batch = self.count[word]
            self.count[word] += 1
            if kind == BACKWARD_INPUT:
                self._waiting.append((chunk, micro_batch))
        return Action(self._stages[chunk], kind, micro_batch)


def _single(pp: int, virtual_stages: int, m: int) -> str | None:
    return None if virtual_stages == 1 else f"has one stage per rank, not {virtual_stages}"


def _rounds(pp: int, virtual_stages: int, m: int) -> str | None:
    return f"can't split {m} micro-batches into whole rounds over {pp} ranks" if m % max(1, m // pp) else None


def _two(pp: int, virtual_stages: int, m: int) -> str | None:
    return None if virtual_stages == 2 else f"has two stages per rank, not {virtual_stages}"


def _two_full(pp: int, virtual_stages: int, m: int) -> str | None:
    return _two(pp, virtual_stages, m) or (f"needs {2 * pp} micro-batches, not {m}" if m < 2 * pp else None)


_SCHEDULES: dict[str, tuple[Callable[[int, int, int, int], RankActions], Callable[[int, int, int], str | None]]] = {
    "gpipe": (_gpipe, _single),
    "1f1b": (_one_f_one_b, _single),
    "interleaved_1f1b": (_interleaved, _rounds),
    "interleaved_zero_bubble": (_interleaved_zero_bubble, _rounds),
    "zbv": (_zbv, _two),
    "dualpipev": (_dualpipev, _two_full),
}
