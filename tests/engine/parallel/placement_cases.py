"""What the tests of expert placement run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from engine.config import RunConfig
from engine.moe import placer
from engine.moe.migration import ExpertSlots
from engine.moe.placement import Placement
from engine.parallel.experts import mixtures_of
from engine.parallel.shards import local
from engine.step import Stepper
from tests.engine.parallel import cases

NUM_STEPS = 6


def shuffled(num_experts: int, num_ranks: int, num_replicas: int = 0) -> Placement:
    """Experts anywhere, with copies of the first ones, some of them twice on a rank."""
    copies = np.concatenate([np.arange(num_experts), np.arange(num_replicas) % (num_experts - 1)])
    return Placement(np.sort(np.random.default_rng(5).permutation(copies).reshape(num_ranks, -1), axis=1))


@contextmanager
def placed_freely() -> Iterator[list[Placement]]:
    """Moves cost nothing, and experts begin away from home; gives all placements put in force."""
    put, seen = ExpertSlots.put, []

    def note(slots: ExpertSlots, placement: Placement) -> None:
        seen.append(placement)
        put(slots, placement)

    with (
        mock.patch.object(placer, "all_at_home", shuffled),
        mock.patch.dict(placer.EXPERT_FLOPS, {"cpu": 0.0}),
        mock.patch.object(ExpertSlots, "put", note),
    ):
        yield seen


def train_placed(config: RunConfig, **options: Any) -> dict[str, Any]:
    """``cases.train``, and how many placements other than the first the steps brought, over all ranks."""
    with placed_freely() as seen:
        result = cases.train(config, **options)
    changes = torch.tensor(len({placement.experts.tobytes() for placement in seen}) - 1)
    dist.all_reduce(changes)
    return {**result, "num_changes": int(changes)}


def resume(config: RunConfig, *, save: str) -> dict[str, Any]:
    """Train some steps, and the last half of them again from a checkpoint written on the way.

    Returns:
        Whether, on all ranks, both runs end in the same bits of weights and optimizer states; whether the resumed one
        begins with the placements of the checkpoint and ends with those of the other, and how often they changed.
    """
    with placed_freely() as seen:
        stepper = cases.build(config)
        context = stepper.context
        at_save: list[Placement] = []
        for step in range(NUM_STEPS):
            if step == NUM_STEPS // 2:
                dcp.save(stepper.state_dict(), checkpoint_id=save)
                at_save = placements(stepper)
            stepper.train_step(*cases.batch(step, context), cases.LEARNING_RATE)
        num_placements = len({placement.experts.tobytes() for placement in seen})
        resumed = cases.build(config)
        state = resumed.state_dict()
        dcp.load(state, checkpoint_id=save)
        resumed.load_state_dict(state)
        begins_alike = same_placements(placements(resumed), at_save)
        for step in range(NUM_STEPS // 2, NUM_STEPS):
            resumed.train_step(*cases.batch(step, context), cases.LEARNING_RATE)
    ours, theirs = stepper.state_dict(), resumed.state_dict()
    same_bits = all(
        torch.equal(local(value), local(theirs[section][name]))
        for section, values in ours.items()
        for name, value in values.items()
    )
    return {
        "same_bits": context.all_agree(same_bits),
        "begins_alike": context.all_agree(begins_alike),
        "ends_alike": context.all_agree(same_placements(placements(resumed), placements(stepper))),
        "num_placements": num_placements,
    }


def placements(stepper: Stepper) -> list[Placement]:
    """Those in force on this rank."""
    layers = [layer for part in stepper.parts for layer in mixtures_of(part).values()]
    slots = [layer.experts.dispatch.slots_of for layer in layers]
    return [one.placement for one in slots if isinstance(one, ExpertSlots)]


def same_placements(ours: list[Placement], theirs: list[Placement]) -> bool:
    """Whether all layers compute the same experts in the same slots."""
    return [one.experts.tolist() for one in ours] == [one.experts.tolist() for one in theirs]


def rows_by_rank(config: RunConfig) -> dict[str, Any]:
    """Rows that each rank's slots computed in a step, in all layers, against what the placement says of its loads."""
    with placed_freely():
        stepper = cases.build(config)
        context = stepper.context
        layers = [layer for part in stepper.parts for layer in mixtures_of(part).values()]
        rows = [0.0] * len(layers)
        for index, layer in enumerate(layers):
            layer.experts._compute = counting(layer.experts._compute, rows, index)  # type: ignore[method-assign]
        in_force = placements(stepper)
        stepper.train_step(*cases.batch(0, context), cases.LEARNING_RATE)
        expected = [
            one.rank_loads(layer.previous_load.numpy()).tolist() for one, layer in zip(in_force, layers, strict=True)
        ]
    return {"rows": torch.tensor(context.gather(rows)).T, "expected": torch.tensor(expected)}


def counting(compute: Any, rows: list[float], index: int) -> Any:
    """``compute``, with its rows added to ``rows[index]``."""

    def counted(tokens: torch.Tensor, loads: list[int]) -> torch.Tensor:
        rows[index] += sum(loads)
        output: torch.Tensor = compute(tokens, loads)
        return output

    return counted
