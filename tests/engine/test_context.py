"""A process's place in a plan, where no other process is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.config import RuntimeOptions
from engine.context import open_context
from engine.errors import UserError
from engine.plan import Plan

pytestmark = pytest.mark.unit


def test_one_process_needs_no_group() -> None:
    context = open_context(Plan(), RuntimeOptions())
    assert (context.world_size, context.rank, context.dp_rank, context.tp_rank, context.pp_rank) == (1, 0, 0, 0, 0)
    assert context.is_main
    assert context.broadcast({"a": 1}) == {"a": 1}
    assert context.all_agree(True)
    assert not context.all_agree(False)
    assert context.sum_over_batch(torch.tensor(3)).item() == 3


def test_wrong_number_of_processes_is_told() -> None:
    with pytest.raises(UserError, match="dp2-tp4 needs 8 processes, 1 were started") as error:
        open_context(Plan(dp_shard=2, tp=4), RuntimeOptions())
    assert "torchrun" in str(error.value.hint)


def test_absent_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"runtime\.device is cuda"):
        open_context(Plan(), RuntimeOptions(device="cuda"))


def test_every_process_of_a_node_with_too_few_gpus_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one that speaks for the node would wait for the others without a word."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="needs 2 GPUs, torch sees 1"):
        open_context(Plan(), RuntimeOptions(device="cuda"))


def test_refusal_of_one_is_told_with_its_hint() -> None:
    def refuse() -> None:
        raise UserError("no text", hint="write some", where="run.yaml:3")

    context = open_context(Plan(), RuntimeOptions())
    assert context.on_main(lambda: 3) == context.together(lambda: 3) == 3
    for everywhere in (context.on_main, context.together):
        with pytest.raises(UserError) as error:
            everywhere(refuse)
        assert (error.value.message, error.value.hint, error.value.where) == ("no text", "write some", "run.yaml:3")


@pytest.mark.parametrize("rank", [0, 1000])
def test_a_rank_makes_its_own_groups_alone(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each axis of other ranks, at the first pipeline rank and in the middle alike; not one for each of the
    thousands of groups that a large world has."""
    made: list[list[int]] = []
    new_group: Any = dist.new_group

    def counted(ranks: list[int], **settings: Any) -> Any:
        made.append(ranks)
        return new_group(ranks, **settings)

    monkeypatch.setattr(dist, "new_group", counted)
    plan = Plan(pp=8, dp_shard=64, tp=8, zero_stage=2)
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size)
    try:
        context = open_context(plan, RuntimeOptions())
        assert sorted(map(len, made)) == sorted([8, 8, 64, 512, 2 if rank == 0 else 1])
        assert all(rank in ranks for ranks in made)
        assert context.has_axis("ends") == (rank == 0)
        assert (context.pp_rank, context.dp_rank, context.tp_rank) == (rank // 512, rank % 512 // 8, rank % 8)
        assert context.submesh("fsdp", "tp") is not None
        made.clear()
        context = open_context(plan, RuntimeOptions(), has_experts=False)
        assert 512 not in map(len, made)
        assert context.submesh("efsdp", "ep") is None
    finally:
        dist.destroy_process_group()
