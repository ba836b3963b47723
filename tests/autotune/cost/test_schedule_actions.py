"""Action lists of pipeline schedules: equal to torch's."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import create_autospec

import pytest

from autotune.cost.schedule_actions import Action, Pair, schedule_actions, stage_rank
from engine.errors import UserError

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
VIRTUAL_STAGES = {"interleaved_1f1b": (2, 3), "interleaved_zero_bubble": (2, 3), "zbv": (2,), "dualpipev": (2,)}


def cases() -> list[tuple[str, int, int, int]]:
    """(schedule, pp, virtual stages, micro-batches), those that torch runs."""
    return [
        (schedule, pp, virtual_stages, m)
        for schedule in TORCH_NAMES
        for pp in (2, 4, 8)
        for virtual_stages in VIRTUAL_STAGES.get(schedule, (1,))
        for m in ((7, 8, 16, 24) if pp == 8 else (1, pp - 1, pp, pp + pp // 2, 2 * pp, 2 * pp + 1, 3 * pp))
        if m > 0
        and (schedule != "1f1b" or m >= pp)
        and (schedule != "dualpipev" or m >= 2 * pp)
        and ("interleaved" not in schedule or m % max(1, m // pp) == 0)
    ]


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore")
def test_lists_are_torchs() -> None:
    compared = 0
    for schedule, pp, virtual_stages, m in cases():
        ours = schedule_actions(schedule, pp, virtual_stages, m)
        theirs = _recorded(schedule, pp, m) if virtual_stages == 1 else _planned(schedule, pp, virtual_stages, m)
        for rank in range(pp):
            assert [str(a) for a in ours[rank]] == theirs[rank], (schedule, pp, virtual_stages, m, rank)
        compared += 1
    assert compared > 70


def _planned(schedule: str, pp: int, virtual_stages: int, m: int) -> list[list[str]]:
    """The lists that torch's schedules of several stages per rank are run from, in our words."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    def word(action: Any) -> str:
        pair = action.sub_actions
        return f"({pair[0]};{pair[1]})" if pair else str(action)

    ranks = get_schedule_ops(TORCH_NAMES[schedule], pp, m, virtual_stages)
    return [[word(a) for a in actions if a is not None] for actions in ranks]


def _recorded(schedule: str, pp: int, m: int) -> list[list[str]]:
    """What torch's schedules of one stage per rank do when they are run (their lists are for pictures)."""
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.distributed.pipelining.stage import PipelineStage

    stage = create_autospec(PipelineStage, instance=True)
    ranks = []
    for rank in range(pp):
        done: list[str] = []
        stage.configure_mock(submod=None, num_stages=pp, stage_index=rank, group_rank=rank, group_size=pp)
        for recv_or_send in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, recv_or_send).return_value = []
        stage.forward_one_chunk.side_effect = lambda i, *_, done=done, rank=rank, **__: done.append(f"{rank}F{i}")
        stage.backward_one_chunk.side_effect = lambda i, *_, done=done, rank=rank, **__: done.append(f"{rank}B{i}")
        run = get_schedule_class(TORCH_NAMES[schedule])(stage, m)
        run._initialize_stage = lambda *_: None
        run._step_microbatches([()] * m)
        ranks.append(done)
    return ranks


@pytest.mark.unit
def test_every_pass_once_and_on_its_rank() -> None:
    for schedule, pp, virtual_stages, m in [*cases(), ("1f1b", 8, 1, 3), ("gpipe", 1, 1, 2)]:
        seen: Counter[Action] = Counter()
        for rank, actions in enumerate(schedule_actions(schedule, pp, virtual_stages, m)):
            for action in actions:
                for one in action if isinstance(action, Pair) else (action,):
                    assert stage_rank(schedule, pp, one.stage) == rank
                    # A whole backward pass is both of its parts.
                    for kind in "IW" if one.kind == "B" else one.kind:
                        seen[Action(one.stage, kind, one.micro_batch)] += 1
        stages = pp * virtual_stages
        wanted = {Action(stage, kind, i) for stage in range(stages) for kind in "FIW" for i in range(m)}
        assert set(seen) == wanted
        assert set(seen.values()) == {1}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "m", "says"),
    [
        ("1f1b", 2, 8, "one stage per rank"),
        ("zbv", 3, 8, "two stages per rank"),
        ("dualpipev", 2, 7, "needs 8 micro-batches"),
        ("interleaved_1f1b", 2, 9, "whole rounds"),
    ],
)
def test_numbers_that_a_schedule_cannot_run(schedule: str, virtual_stages: int, m: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        schedule_actions(schedule, 4, virtual_stages, m)
