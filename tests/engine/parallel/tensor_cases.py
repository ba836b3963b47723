"""What the tests of tensor parallelism run on every rank."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import RunConfig
from engine.parallel.shards import local, split_axes
from tests.engine.parallel.cases import LEARNING_RATE, NUM_STEPS, batch, build


def repeated(config: RunConfig) -> dict[str, Any]:
    """Names of the parameters that all tensor-parallel ranks hold whole, and whether each is bitwise equal on all ranks
    after some steps; whether torch's own generator was left alone."""
    stepper = build(config)
    context = stepper.context
    untouched = torch.get_rng_state()
    for step in range(NUM_STEPS):
        stepper.train_step(*batch(step, context), LEARNING_RATE)
    whole = {
        fqn: parameter.detach()
        for part in stepper.parts
        for fqn, parameter in part.named_parameters()
        if "tp" not in split_axes(parameter)
    }
    mine = torch.cat([local(tensor).flatten() for tensor in whole.values()])
    everyone = context.gather(mine)
    return {
        "names": sorted(whole),
        "equal": all(torch.equal(mine, other) for other in everyone),
        "generator_untouched": context.all_agree(torch.equal(untouched, torch.get_rng_state())),
    }


def resumed_draws(config: RunConfig) -> dict[str, Any]:
    """Each rank's loss of two steps without updates, and of the second in a stepper that got the first one's state."""
    losses = []
    stepper = build(config)
    context = stepper.context
    for step in range(2):
        losses.append(stepper.train_step(*batch(step, context), 0.0).loss)
        if step == 0:
            uses = stepper.generators.state_dict()
    other = build(config)
    other.generators.load_state_dict(uses)
    return {"went_on": losses[1], "resumed": other.train_step(*batch(1, context), 0.0).loss, "uses": uses}
