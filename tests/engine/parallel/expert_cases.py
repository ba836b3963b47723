"""What the tests of experts apart run on every rank."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import RunConfig
from engine.parallel.experts import mixtures_of
from engine.step import Stepper
from engine.trace_collectives import CollectiveCounter
from tests.engine.parallel import cases


def balance(config: RunConfig) -> dict[str, Any]:
    """Train two steps with evaluations between; what ranks say of losses and loads, and the loads of all layers."""
    stepper = cases.build(config)
    context, told = stepper.context, []
    for step in range(2):
        stepper.evaluate(*cases.batch(99, context))
        result = stepper.train_step(*cases.batch(step, context), cases.LEARNING_RATE)
        told += [result.auxiliary_loss, result.expert_load_ratio]
    loads = {name: layer.previous_load.tolist() for part in stepper.parts for name, layer in mixtures_of(part).items()}
    everyone = context.gather({"told": told, "loads": loads})
    return {
        "told": torch.tensor([one["told"] for one in everyone], dtype=torch.float64),
        "loads": {name: load for one in everyone for name, load in one["loads"].items()},
        "same": all(
            load == other["loads"].get(name, load)
            for one in everyone
            for other in everyone
            for name, load in one["loads"].items()
        ),
    }


def idle_expert(config: RunConfig) -> dict[str, Any]:
    """As ``cases.train``, with an expert that no token is sent to and tensors full of NaN where nothing was written."""
    initialise = Stepper._initialise

    def without_one(stepper: Stepper) -> None:
        initialise(stepper)
        for part in stepper.parts:
            for layer in mixtures_of(part).values():
                assert layer.selection_bias is not None
                layer.selection_bias[1] = -100.0

    before = torch.are_deterministic_algorithms_enabled()
    Stepper._initialise = without_one  # type: ignore[method-assign]
    torch.use_deterministic_algorithms(True)
    try:
        return cases.train(config)
    finally:
        torch.use_deterministic_algorithms(before)
        Stepper._initialise = initialise  # type: ignore[method-assign]


def exchanged(config: RunConfig) -> dict[str, Any]:
    """All-to-alls of a step after the first: calls and message bytes of each rank."""
    stepper = cases.build(config)
    batch = cases.batch(0, stepper.context)
    stepper.train_step(*batch, 0.0)
    with CollectiveCounter(stepper.context) as counter:
        stepper.train_step(*batch, 0.0)
    found = [count for (_, operation, _), count in counter.counts().items() if operation == "all_to_all"]
    return {"ranks": stepper.context.gather(found)}
