"""Checkpoints that an earlier version wrote still load, or are refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from engine.checkpoint.store import Checkpoint, Manifest, check_identity, identity_of, load_tensors
from engine.config import RunConfig
from engine.context import open_context
from engine.errors import UserError
from engine.plan import Plan
from engine.schema import parse

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

CONFIG = parse(
    RunConfig,
    {
        "model": {
            "num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 8,
            "vocab_size": 16, "moe": {"num_experts": 2, "experts_per_token": 1, "ffn_size": 8},
        },
        "workload": {"sequence_length": 8, "total_tokens": 64},
    },
)  # fmt: skip


def checkpoint_at(path: Path, identity: dict[str, Any]) -> Checkpoint:
    """A checkpoint of whatever lies in the folder."""
    manifest = Manifest(
        step=1, tokens=1, position=1, learning_rate_scale=1.0, micro_batch_size=1, identity=identity, plan=Plan(),
        world_size=1,
    )  # fmt: skip
    return Checkpoint(path, manifest)


def test_fields_that_came_later_have_their_defaults(tmp_path: Path) -> None:
    identity = identity_of(CONFIG, "corpus")
    older = {**identity, "model": dict(identity["model"]), "hyperparameters": dict(identity["hyperparameters"])}
    older["model"]["moe"] = {key: value for key, value in older["model"]["moe"].items() if key != "expert_bias"}
    del older["hyperparameters"]["router_aux_loss_coefficient"], older["model"]["attention_sinks"]
    check_identity(checkpoint_at(tmp_path, older), identity)
    changed = CONFIG.changed(hyperparameters=CONFIG.hyperparameters.changed(router_aux_loss_coefficient=0.1))
    with pytest.raises(UserError, match=r"router_aux_loss_coefficient is 0\.0 there and 0\.1 here"):
        check_identity(checkpoint_at(tmp_path, older), identity_of(changed, "corpus"))


def test_loads_of_experts_are_zero_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    save({"model": {"weight": torch.full((3,), 5.0)}}, checkpoint_id=tmp_path, no_dist=True)
    names = ("layers.0.moe.previous_load", "layers.0.moe.load_forecast", "load_forecast.num_steps")
    state = {"model": {"weight": torch.zeros(3)} | {name: torch.ones(2) for name in names}}
    load_tensors(checkpoint_at(tmp_path, {}), state, open_context(Plan(), CONFIG.runtime))
    assert torch.equal(state["model"]["weight"], torch.full((3,), 5.0))
    assert not any(state["model"][name].any() for name in names)


def test_a_checkpoint_without_a_weight_is_refused_by_name(tmp_path: Path) -> None:
    save({"model": {"weight": torch.zeros(3)}}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": {"weight": torch.zeros(3), "bias": torch.zeros(3)}}
    with pytest.raises(UserError, match="lacks 1 tensors of this model, the first is bias"):
        load_tensors(checkpoint_at(tmp_path, {}), state, open_context(Plan(), CONFIG.runtime))
