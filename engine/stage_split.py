"""Which rank holds a pipeline stage, and layers of each stage by what they cost, embedding, head and loss counted.

A step through a pipeline takes as long as its busiest rank, so that rank's cost is made as small as it can be. Costs
are FLOPs of training on one token (``engine.flops``), with what recompute adds. Embedding and loss have no matrix
products; they count with one FLOP for each element that is added or goes through a function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import comb

import numpy as np

from engine.flops import attention_flops_per_token, head_flops_per_token, layer_flops_per_token
from engine.plan import Plan
from engine.spec import ModelSpec

V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose micro-batches go down the ranks and come back up: the first rank holds the last stage too."""

BY_COST = "by_cost"
"""What a run file says for ``plan.layers_per_stage`` to have the layers split here."""

_FEW = 20_000
"""Splits that are all tried."""


def rank_stages(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """Stages of a pipeline rank, ascending: one in each round over the ranks, every second round backwards where the
    schedule is V-shaped."""
    rounds = range(plan.virtual_stages)
    back = plan.pp - 1 - pp_rank if plan.schedule in V_SHAPED else pp_rank
    return tuple(number * plan.pp + (back if number % 2 else pp_rank) for number in rounds)


def stage_rank(plan: Plan, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    number, place = divmod(stage, plan.pp)
    return plan.pp - 1 - place if number % 2 and plan.schedule in V_SHAPED else place


def layer_costs(spec: ModelSpec, plan: Plan, sequence_length: int) -> list[float]:
    """Cost of each layer, FLOPs per token; the first with the embedding, the last with the last norm, head and loss.

    A head that tensor parallelism does not split costs each of its ranks the whole.
    """
    costs = []
    for layer in range(spec.num_layers):
        cost = layer_flops_per_token(spec, layer, sequence_length)
        if plan.recompute == "selective":
            cost += attention_flops_per_token(spec, layer, sequence_length) / 3
        elif plan.recomputes(layer):
            cost += cost / 3
        costs.append(cost)
    copies = 1 if plan.vocab_parallel else plan.tp
    lookup = spec.hidden_size * (2 if spec.positions == "learned" else 1)  # rows added to in the backward pass
    loss = 4 * spec.vocab_size  # exponential, sum, division, difference
    costs[0] += lookup
    costs[-1] += copies * (head_flops_per_token(spec) + loss)
    return costs


def split_by_cost(spec: ModelSpec, plan: Plan, sequence_length: int) -> tuple[int, ...]:
    """Layers of each stage, in stage order.

    With one stage a rank, the largest cost of a stage is the smallest possible (dynamic programming). Where a rank
    holds several, all splits are tried if they are few. Else layers are moved between stages, from that split and an
    even one, as long as a move makes the busiest rank less busy, or as busy with a smaller largest stage: close to the
    best, but not proven.

    Args:
        spec: The architecture, with at least as many layers as the plan has stages.
        plan: Degrees, schedule, recompute; its own ``layers_per_stage`` is not looked at.
        sequence_length: Tokens per sequence.
    """
    costs = layer_costs(spec, plan, sequence_length)
    assert len(costs) >= plan.num_stages, "every stage needs a layer"
    ranks = [stage_rank(plan, stage) for stage in range(plan.num_stages)]
    stages, layers = plan.num_stages, spec.num_layers
    if plan.virtual_stages > 1 and comb(layers - 1, stages - 1) <= _FEW:
        inner = combinations(range(1, layers), stages - 1)
        splits = [tuple(np.diff([0, *some, layers]).tolist()) for some in inner]
    else:
        even = tuple(len(some) for some in plan.changed(layers_per_stage=None).stage_layers(layers))
        starts = (_smallest_largest_stage(costs, stages), even)
        splits = [_improved(costs, start, ranks) for start in starts]
    return min(splits, key=lambda sizes: _judge(costs, sizes, ranks))


def _improved(costs: Sequence[float], sizes: tuple[int, ...], ranks: Sequence[int]) -> tuple[int, ...]:
    """Sizes from which no move of one layer from a stage to another is better."""
    best = _judge(costs, sizes, ranks)
    found = True
    while found:
        found = False
        for moved in _moves(sizes):
            judged = _judge(costs, moved, ranks)
            if judged < best:
                sizes, best, found = moved, judged, True
                break
    return sizes


def _moves(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for source, target in permutations(range(len(sizes)), 2):
        if sizes[source] > 1:
            moved = list(sizes)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def stage_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Cost of each stage, from ``layer_costs``."""
    ends = np.cumsum(sizes).tolist()
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def describe_split(spec: ModelSpec, plan: Plan, sequence_length: int) -> str:
    """The plan's stages for people: layers of each and its share of the work."""
    layers = plan.stage_layers(spec.num_layers)
    shares = stage_costs(layer_costs(spec, plan, sequence_length), [len(some) for some in layers])
    told = ", ".join(
        f"{_span(some)} ({share / sum(shares) * 100:.1f} %)" for some, share in zip(layers, shares, strict=True)
    )
    return f"pipeline stages, layers and share of the work: {told}"


def _span(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"


def _judge(costs: Sequence[float], sizes: Sequence[int], ranks: Sequence[int]) -> tuple[float, ...]:
    """Costs of the ranks from the largest, then the largest stage's: smaller is better. Rounded, so that equal sums
    taken in another order are equal."""
    stages = stage_costs(costs, sizes)
    of_ranks = [0.0] * (max(ranks) + 1)
    for rank, cost in zip(ranks, stages, strict=True):
        of_ranks[rank] += cost
    scale = sum(costs)
    return tuple(round(cost / scale, 12) for cost in (*sorted(of_ranks, reverse=True), max(stages)))


def _smallest_largest_stage(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Sizes of stages, one layer each at least, whose largest cost is as small as possible."""
    num_layers = len(costs)
    before = np.concatenate(([0.0], np.cumsum(costs)))
    # [i, j] the cost of layers i to j - 1, infinite without one.
    between = np.where(np.arange(num_layers + 1) > np.arange(num_layers + 1)[:, None], before - before[:, None], np.inf)
    largest = between[0]
    starts = []
    for _ in range(num_stages - 1):
        options = np.maximum(largest[:, None], between)
        starts.append(options.argmin(axis=0))
        largest = options.min(axis=0)
    ends = [num_layers]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return tuple(np.diff([0, *reversed(ends)]).tolist())
