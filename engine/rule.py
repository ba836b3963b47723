"""What a legality rule is, and the words its explanations share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np

from engine.plan import PlanTable
from engine.spec import ModelSpec

Scope = Literal["universal", "engine"]


@dataclass(frozen=True)
class RuleContext:
    """What a plan is judged against.

    Args:
        model: The architecture, with the vocabulary it is trained with.
        num_devices: Devices there are; None when unknown.
    """

    model: ModelSpec
    num_devices: int | None = None


Violated = Callable[[RuleContext, PlanTable], "np.ndarray | bool"]
Explain = Callable[[RuleContext, SimpleNamespace], tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    """One legality rule.

    Args:
        id: Its name in messages, counts and tests.
        scope: ``universal`` (no stack could run it) or ``engine`` (this one does not).
        summary: What must hold, one line.
        violated: Which rows of a table break it: ``[n]`` bools, or one bool for all rows.
        explain: Message with the numbers, and hint with the nearest legal values, for a row that breaks it.
    """

    id: str
    scope: Scope
    summary: str
    violated: Violated
    explain: Explain


def near(legal: Collection[int], given: int) -> str:
    """The nearest legal values below and above ``given``, as words."""
    below = [value for value in legal if value < given]
    above = [value for value in legal if value > given]
    return " or ".join(str(value) for value in ([max(below)] if below else []) + ([min(above)] if above else []))


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def near_divisor(number: int, given: int) -> str:
    return near(divisors(number), given)


def near_multiple(step: int, given: int) -> str:
    below = given // step * step
    return near([value for value in (below, below + step) if value > 0], given)


def kv_heads(model: ModelSpec) -> int:
    """Key and value heads that tensor parallelism splits; latent attention makes one pair per query head."""
    return model.num_heads if model.latent_attention else model.num_kv_heads


def has_dense_layers(model: ModelSpec) -> bool:
    """Whether any layer has a dense feed-forward."""
    return not all(model.is_moe_layer(layer) for layer in range(model.num_layers))


def explain_few_micro_batches(c: RuleContext, r: SimpleNamespace, needed: int) -> tuple[str, str]:
    """Message and hint for a pipeline with fewer than ``needed`` micro-batches."""
    return (
        f"the schedule {r.schedule} with pp {r.pp} needs {needed} or more micro-batches per step, global_batch_size"
        f" {r.global_batch_size} makes {r.num_micro_batches} on each data-parallel rank",
        f"set global_batch_size to {needed * r.batch_unit} or more, or lower pp, dp or micro_batch_size",
    )
