"""What the pipeline's tests run on every rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from engine.config import RunConfig
from engine.failures import RunFailure
from engine.parallel.shards import local
from engine.step import Stepper
from tests.engine.parallel.cases import LEARNING_RATE, batch, build

NUM_STEPS = 10


def tied_copies(config: RunConfig, *, save: str) -> dict[str, Any]:
    """Train ten steps, and the last five of them again from a checkpoint.

    Returns:
        The number of steps after which the embedding and its copy differed in a bit, in the weights or the optimizer's
        states, counted over all ranks; the same of the resumed run; whether both runs end in the same weights.
    """
    stepper = build(config)
    differing = 0
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            dcp.save(stepper.state_dict(), checkpoint_id=save)
        stepper.train_step(*batch(step, stepper.context), LEARNING_RATE)
        differing += _copies_differ(stepper)
    resumed, differing_resumed = build(config), 0
    state = resumed.state_dict()
    dcp.load(state, checkpoint_id=save)
    resumed.load_state_dict(state)
    for step in range(NUM_STEPS // 2, NUM_STEPS):
        differing_resumed += _copies_differ(resumed)
        resumed.train_step(*batch(step, resumed.context), LEARNING_RATE)
    ends = [_embeddings(one)[-1] for one in (stepper, resumed) if _embeddings(one)]
    same = all(torch.equal(first, end) for first in ends[:1] for end in ends)
    return {
        "differing": sum(stepper.context.gather(differing)),
        "differing_resumed": sum(stepper.context.gather(differing_resumed)),
        "holders": sum(stepper.context.gather(len(_embeddings(stepper)))),
        "same_end": stepper.context.all_agree(same),
    }


def _embeddings(stepper: Stepper) -> list[Tensor]:
    """For each stage here that holds the embedding, this rank's part of it and of its optimizer states, flat."""
    found = []
    for name, tensor in stepper._shards.tensors.items():
        if name.endswith("embedding.weight"):
            states = [local(value).flatten() for value in stepper.optimizer.state[tensor].values()]
            found.append(torch.cat([local(stepper._parameters[name]).detach().flatten(), *states]))
    return found


def _copies_differ(stepper: Stepper) -> bool:
    """Whether this rank's parts of the embedding are not those of the other end, or of the other stage on this rank."""
    held = _embeddings(stepper)
    if len(held) == 1:
        group = stepper.context.group("ends")
        both = [torch.empty_like(held[0]) for _ in range(2)]
        dist.all_gather(both, held[0].contiguous(), group=group)
        held = both
    return len(held) == 2 and not torch.equal(*held)


def changed_micro_batch(config: RunConfig, *, sizes: list[int]) -> dict[str, Any]:
    """Train a step with each of some micro-batch sizes; what ``cases.train`` tells of it, without the gradients, and
    whether every rank was told the same."""
    stepper = build(config)
    results = []
    for step, size in enumerate(sizes):
        stepper.set_micro_batch(size)
        results.append(stepper.train_step(*batch(step, stepper.context), LEARNING_RATE))
        stepper.evaluate(*batch(99, stepper.context))
    told = stepper.context.gather([(r.loss, r.grad_norm, r.grad_norms, r.num_valid_tokens) for r in results])
    return {
        "told_alike": all(one == told[0] for one in told),
        "losses": torch.tensor([result.loss for result in results], dtype=torch.float64),
        "grad_norms": torch.tensor([result.grad_norm for result in results], dtype=torch.float64),
        "parameters": stepper.full_weights(),
    }


def sleeping(config: RunConfig, *, stage: int, evaluation: bool = False) -> dict[str, Any]:
    """Let a stage sleep beyond the time limit at its second micro-batch.

    Returns:
        What each rank's error was: kind and detail.
    """
    config = config.changed(runtime=config.runtime.changed(hang_timeout_seconds=1.0))
    stepper = build(config)
    seen = []

    def sleep(*_: Any) -> None:
        seen.append(True)
        if len(seen) == 2:
            time.sleep(2.5)

    for part in stepper.parts:
        if part.stage == stage:
            part.register_forward_pre_hook(sleep)
    tokens, labels = batch(0, stepper.context)
    told = ("", "")
    try:
        stepper.evaluate(tokens, labels) if evaluation else stepper.train_step(tokens, labels, LEARNING_RATE)
    except RunFailure as failure:
        told = (failure.kind, str(failure))
    return {"told": stepper.context.gather(told)}
