"""Dry runs as the tuner asks for them: a child process, once per content. What they show is tested with the engine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.cost.trace import cross_check, trace_rank
from engine.config import RunConfig
from engine.errors import UserError
from engine.schema import parse

pytestmark = pytest.mark.unit

RUN: dict[str, Any] = {
    "model": {
        "num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 32,
        "vocab_size": 64,
    },
    "workload": {"data": {"paths": ["none"]}, "sequence_length": 16, "total_tokens": 1000},
    "hyperparameters": {"global_batch_size": 2},
    "plan": {"dp_shard": 2},
}  # fmt: skip


def test_a_dry_run_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(RunConfig, RUN)
    first = trace_rank(config, 1, cache=tmp_path)
    assert (first.rank, first.world_size) == (1, 2)
    assert {check.name for check in cross_check(config, first)} == {"dp", "memory"}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    renamed = config.changed(name="other", runtime=config.runtime.changed(seed=5))
    assert trace_rank(renamed, 1, cache=tmp_path) == first
    with pytest.raises(AssertionError, match="child process"):
        trace_rank(config, 0, cache=tmp_path)


def test_what_the_engine_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 2, stdout="", stderr="error: the plan dp2 has no rank 7\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match="dry run of rank 7 failed: error: the plan dp2 has no rank 7"):
        trace_rank(parse(RunConfig, RUN), 7, cache=tmp_path)
    assert not list(tmp_path.iterdir())
