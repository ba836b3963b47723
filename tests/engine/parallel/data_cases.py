"""What the tests of data parallelism run on every rank."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from engine.config import RunConfig
from engine.parallel.shards import gather, local
from engine.step import Stepper
from tests.engine.parallel.cases import LEARNING_RATE, NUM_STEPS, batch, build

HELD = 2
"""Steps that are held in a checkpoint."""


def replicas(config: RunConfig) -> dict[str, Any]:
    """After each step, how many different versions of the weights there are among ranks, bit for bit; the elements of
    the first optimizer state that each rank has, and of the gathered ones."""
    stepper = build(config)
    context = stepper.context
    versions = []
    for step in range(NUM_STEPS):
        stepper.train_step(*batch(step, context), LEARNING_RATE)
        versions.append(len(set(context.gather(_fingerprint(stepper)))))
    states = [state for name, state in stepper.state_dict()["optimizer"].items() if name.endswith(".exp_avg")]
    return {
        "versions": versions,
        "elements": context.gather(sum(local(state).numel() for state in states)),
        "whole": sum(state.numel() for state in states),
    }


def _fingerprint(stepper: Stepper) -> str:
    digest = hashlib.sha256()
    for part in stepper.parts:
        for parameter in part.parameters():
            digest.update(gather(parameter).detach().numpy().tobytes())
    return digest.hexdigest()


def infinite_gradient(config: RunConfig, *, parameter: str) -> dict[str, Any]:
    """Let the last rank alone find a gradient of infinity, and tell whether every rank skipped that step, kept every
    bit of its state and goes on afterwards."""
    stepper = build(config)
    context = stepper.context
    stepper.train_step(*batch(0, context), LEARNING_RATE)
    before = _state(stepper)
    reduce = stepper._reducer.reduce_gradients

    def reduce_and_spoil() -> None:
        reduce()
        if context.rank == context.world_size - 1:
            named = dict(item for part in stepper.parts for item in part.named_parameters())
            gradient = named[parameter].grad
            assert gradient is not None
            local(gradient).view(-1)[:1] = float("inf")

    stepper._reducer.reduce_gradients = reduce_and_spoil  # type: ignore[method-assign]
    result = stepper.train_step(*batch(1, context), LEARNING_RATE)
    stepper._reducer.reduce_gradients = reduce  # type: ignore[method-assign]
    same = all(torch.equal(tensor, before[name]) for name, tensor in _state(stepper).items())
    return {
        "skipped": context.all_agree(result.skipped and result.grad_norm is None),
        "unchanged": context.all_agree(same),
        "goes_on": context.all_agree(not stepper.train_step(*batch(1, context), LEARNING_RATE).skipped),
    }


def _state(stepper: Stepper) -> dict[str, Tensor]:
    state = stepper.state_dict()
    return {f"{section}.{name}": local(t).clone() for section in state for name, t in state[section].items()}


def changed_order(config: RunConfig) -> dict[str, Any]:
    """Read a state into a stepper whose optimizer has its groups, and the parameters within them, in another order,
    and tell whether a further step gives the same weights in every bit."""
    first, second = build(config), build(config)
    groups = second.optimizer.param_groups
    groups.reverse()
    for group in groups:
        group["params"].reverse()
    for step in range(HELD):
        first.train_step(*batch(step, first.context), LEARNING_RATE)
    second.load_state_dict(first.state_dict())
    for stepper in (first, second):
        stepper.train_step(*batch(HELD, stepper.context), LEARNING_RATE)
    same = _fingerprint(first) == _fingerprint(second)
    return {"same": first.context.all_agree(same)}
