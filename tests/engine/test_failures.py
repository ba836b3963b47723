"""The kind of failure an exception means, evidence of several ranks, and the loss guard's verdicts."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from engine.failures import Interrupted, RunFailure, classify, communication_failure, describe, has_lost_peer
from engine.loss_guard import LossGuard
from engine.outcome import OutcomeKind, RankFailure, clear_failures, read_failures, write_failure

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 8 bytes"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), "oom"),
        (MemoryError(), "oom"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom"),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), "hang"),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), "hang"),
        (TimeoutError("store"), "hang"),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"), "infra"),
        (OSError(errno.ENOSPC, "No space left on device"), "infra"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "infra"),
        (UserError("wrong", hint="right"), "user"),
        (RunFailure("nan", "not finite"), "nan"),
        (Interrupted(15), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_classify(error: BaseException, kind: OutcomeKind) -> None:
    assert classify(error) == kind
    assert "\n" not in describe(error)


def test_classify_looks_at_the_cause() -> None:
    error = RuntimeError("a checkpoint could not be written")
    error.__cause__ = MemoryError()
    assert classify(error) == "oom"


def test_a_peer_that_is_late_is_told_from_one_that_is_gone() -> None:
    late = RuntimeError("the forward pass failed")
    late.__cause__ = RuntimeError("Timed out waiting 2000ms for recv operation to complete")
    assert communication_failure(late) == ("hang", f"RuntimeError: {late.__cause__}")
    assert not has_lost_peer(late)
    gone = RuntimeError(
        "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is typically"
        " caused by a remote worker."
    )
    failure = communication_failure(gone)
    assert failure == ("infra", describe(gone))
    assert "process of the run ended or cannot be reached (Read error [127.0.0.1]:1: Connection reset by" in failure[1]
    assert "[/build" not in failure[1]
    assert "typically" not in failure[1]
    assert has_lost_peer(gone)
    for other in (MemoryError(), RuntimeError("shapes cannot be multiplied"), RunFailure("hang", "told already")):
        assert communication_failure(other) is None


def test_the_cause_outweighs_its_effects_on_other_ranks(tmp_path: Path) -> None:
    kinds: list[OutcomeKind] = ["infra", "interrupted", "oom", "hang"]
    for rank, kind in enumerate(kinds):
        write_failure(tmp_path, RankFailure(kind=kind, rank=rank, time=float(rank)))
    (tmp_path / "failures" / "rank9.json").write_text("{torn")
    assert [failure.kind for failure in read_failures(tmp_path)] == ["oom", "hang", "infra", "interrupted"]
    clear_failures(tmp_path, 2, world_size=4)
    assert read_failures(tmp_path)[0].kind == "hang"
    clear_failures(tmp_path, 0, world_size=2)
    assert [failure.rank for failure in read_failures(tmp_path)] == [1]


def verdict(losses: list[float], diverged_above: float | None = None, guard: LossGuard | None = None) -> str | None:
    """The kind of failure that a series of losses ends in; None when it goes on."""
    guard = guard or LossGuard(diverged_above, max_skipped_steps=3)
    try:
        for loss in losses:
            finite = math.isfinite(loss)
            guard.check(loss if finite else None, not finite)
    except RunFailure as failure:
        return failure.kind
    return None


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ([5.0 - 0.01 * step for step in range(200)], None),
        ([5.0 + 0.1 * step for step in range(100)], "diverged"),
        ([5.0] * 3 + [9.0] * 100, "diverged"),
        ([5.0] * 20 + [40.0] + [5.0] * 20, None),  # one spike: the smoothed loss is high, but falls
        ([5.0, math.nan, math.nan] * 20, None),
        ([5.0, math.nan, math.inf, math.nan], "nan"),
        ([math.nan] * 3, "nan"),
    ],
)
def test_loss_guard(losses: list[float], kind: str | None) -> None:
    assert verdict(losses) == kind


def test_loss_guard_with_a_limit_of_the_user() -> None:
    assert verdict([5.0 - 0.05 * step for step in range(60)], diverged_above=3.0) is None
    assert verdict([5.0] * 60, diverged_above=4.0) == "diverged"
    assert verdict([5.0 + 0.1 * step for step in range(100)], diverged_above=100.0) is None


def test_loss_guard_goes_on_from_a_checkpoint() -> None:
    first, second = LossGuard(None, 3), LossGuard(None, 3)
    assert verdict([2.0] * 10, guard=first) is None
    second.history = type(first.history).model_validate_json(first.history.model_dump_json())
    assert verdict([3.5] * 30, guard=second) == "diverged"
