"""Lower bounds on the step time and the memory of every plan of a block, from few of its plans.

They rest on what holds for any sensible cost model, and on nothing else:

* more overlap never makes a step longer, apart from the parts of ``NOT_BOUNDED``, which are left out of the bound (they
  are at least 0);
* those parts alone depend on the ZeRO stage, on the overlap of data-parallel communication and on offload; stragglers
  are a share of the rest that all plans of a block have alike;
* splitting the sequence over the tensor-parallel ranks, and offload, never take more memory.

A search checks every plan that it estimates against its block's bounds, and does without them if one is broken.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from autotune.cost.estimate import Estimator
from autotune.search.blocks import Blocks, Columns

NOT_BOUNDED = ("dp", "optimizer", "offload")
"""Parts of the step time that the bound takes as 0."""
SLACK = 1e-9
"""Relative room for rounding."""


@dataclass(frozen=True)
class BlockBounds:
    """No plan of a block takes less; each ``[b]``."""

    step_seconds: np.ndarray
    memory_bytes: np.ndarray
    memory_bytes_high: np.ndarray
    """Of the high end of the interval, which decides whether a plan fits."""


def block_bounds(estimator: Estimator, blocks: Blocks, chunk_rows: int) -> BlockBounds:
    """Bounds of every block.

    Args:
        estimator: The cost model.
        blocks: The blocks.
        chunk_rows: Plans estimated at once.
    """
    n = len(blocks)
    seconds, held, high = np.zeros(n), np.zeros(n), np.zeros(n)
    for kind, rows in enumerate(blocks.classes):
        members = np.flatnonzero(blocks.kind == kind)
        fastest = rows[fastest_rows(blocks.inner, rows)]
        for some in _pieces(members, len(fastest), chunk_rows):
            chunk = blocks.plans(some, fastest)
            parts = dict(estimator.step_time(chunk.plans, same_work=chunk.same_work).parts)
            straggler = parts.pop("straggler")
            total = np.sum(list(parts.values()), axis=0)
            bounded = total - np.sum([parts[name] for name in NOT_BOUNDED], axis=0)
            seconds[some] = _least(bounded * (1 + straggler / total), len(some))
        smallest = rows[smallest_rows(blocks.inner, rows)]
        for some in _pieces(members, len(smallest), chunk_rows):
            same = blocks.plans(some, smallest).same_memory
            table = estimator.memory(same.plans)
            held[some] = _least(table.memory_bytes[same.of_row], len(some))
            high[some] = _least(table.high_bytes[same.of_row], len(some))
    return BlockBounds(seconds * (1 - SLACK), held * (1 - SLACK), high * (1 - SLACK))


def bounds_of(blocks: Blocks, bounds: BlockBounds, numbers: np.ndarray) -> BlockBounds:
    """The bounds that plans, by their numbers ``[n]``, have from their blocks; each ``[n]``."""
    block = np.searchsorted(blocks.index, numbers // blocks.num_inner)
    return BlockBounds(*(getattr(bounds, f.name)[block] for f in fields(bounds)))


def fastest_rows(inner: Columns, rows: np.ndarray) -> np.ndarray:
    """Which of a block's inner ``rows`` bound its step time: those that no other overlaps more than."""
    waits = np.stack([1 - inner[name][rows] for name in ("overlap_tp", "overlap_pp")])
    return _minimal(waits, np.stack([inner[name][rows] for name in ("sequence_parallel", "vocab_parallel")]))


def smallest_rows(inner: Columns, rows: np.ndarray) -> np.ndarray:
    """Which of a block's inner ``rows`` bound its memory."""
    names = ("offload_parameters_ratio", "offload_optimizer_ratio", "offload_activations_ratio", "sequence_parallel")
    whole = np.stack([1 - inner[name][rows] for name in names])
    return _minimal(whole, np.stack([inner[name][rows] for name in ("vocab_parallel", "zero_stage")]))


def _minimal(measures: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Indices of the columns of ``measures`` ``[a, r]`` that no other is at most equal to in all, among columns that
    agree in ``same`` ``[b, r]``; of equal ones the first."""
    below = (measures[:, :, None] <= measures[:, None, :]).all(axis=0)
    below &= (same[:, :, None] == same[:, None, :]).all(axis=0)
    order = np.arange(measures.shape[1])
    strictly = below & (~below.T | (order[:, None] < order[None, :]))
    return np.flatnonzero(~strictly.any(axis=0))


def _pieces(members: np.ndarray, rows_each: int, chunk_rows: int) -> list[np.ndarray]:
    step = max(1, chunk_rows // max(1, rows_each))
    return [members[start : start + step] for start in range(0, len(members), step)]


def _least(values: np.ndarray, num_blocks: int) -> np.ndarray:
    least: np.ndarray = values.reshape(num_blocks, -1).min(axis=1)
    return least
