"""A table of plans in the form that the formulas take: numbers only, one array a field.

Words become codes (their index in the list of allowed words) once, so that formulas compare integers, and a search
may build the columns itself without making a word or a Plan per row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np

from engine.plan import Plan, PlanTable

IntColumn = np.ndarray[tuple[int], np.dtype[np.int64]]
"""[n] int64."""
FloatColumn = np.ndarray[tuple[int], np.dtype[np.float64]]
"""[n] float64."""


def words_of(field: str) -> tuple[str, ...]:
    """The allowed words of a field of Plan; a word's code is its index."""
    return get_args(Plan.model_fields[field].annotation)


def code(field: str, word: str) -> int:
    """The code of a word."""
    return words_of(field).index(word)


WORD_FIELDS = tuple(
    name for name in Plan.model_fields if words_of(name) and all(isinstance(word, str) for word in words_of(name))
)
"""Fields of Plan whose values are words."""


@dataclass(frozen=True)
class PlanColumns:
    """``n`` plans with their batches; every field is ``[n]`` (or a scalar that stands for all rows)."""

    tp: IntColumn
    pp: IntColumn
    dp_replicate: IntColumn
    dp_shard: IntColumn
    cp: IntColumn
    ep: IntColumn
    etp: IntColumn
    schedule: IntColumn
    """Code."""
    virtual_stages: IntColumn
    first_stage_layers: IntColumn
    """Layers of the first stage, which also holds the embedding."""
    last_stage_layers: IntColumn
    """Layers of the last stage, which also holds the head."""
    largest_stage_layers: IntColumn
    """Most layers of any stage."""
    micro_batch_size: IntColumn
    zero_stage: IntColumn
    sequence_parallel: IntColumn
    vocab_parallel: IntColumn
    recompute: IntColumn
    """Code."""
    recompute_period: IntColumn
    offload_parameters_ratio: FloatColumn
    offload_optimizer_ratio: FloatColumn
    offload_activations_ratio: FloatColumn
    precision: IntColumn
    """Code."""
    gradient_compression: IntColumn
    """Code."""
    overlap_dp: IntColumn
    overlap_tp: IntColumn
    overlap_pp: IntColumn
    cp_attention: IntColumn
    """Code."""
    rank_order: IntColumn
    """Code."""
    global_batch_size: IntColumn
    sequence_length: IntColumn

    @property
    def dp(self) -> IntColumn:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> IntColumn:
        """Ranks over which ZeRO shards: context ranks hold the same parameters as data-parallel ones."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> IntColumn:
        """Devices."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def edp(self) -> IntColumn:
        """Expert data-parallel degree."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def num_micro_batches(self) -> IntColumn:
        """Micro-batches per data-parallel rank and step."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    def __len__(self) -> int:
        return next((len(column) for column in vars(self).values() if np.ndim(column)), 1)

    def take(self, rows: np.ndarray) -> PlanColumns:
        """Some of the rows. ``rows``: ``[m]`` indices or ``[n]`` bools."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return PlanColumns(**{name: v[rows] if np.ndim(v) else v for name, v in values.items()})


def encode(table: PlanTable, num_layers: int | np.ndarray) -> PlanColumns:
    """Columns of a table of plans.

    Args:
        table: As made by ``engine.plan.plan_table``.
        num_layers: Layers of the model, for stages that are split evenly; one per row where the models differ.
    """
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(PlanColumns)):
        if name.endswith("_stage_layers"):
            continue
        column = np.asarray(table[name])
        if name in WORD_FIELDS:
            codes = np.zeros(column.shape, dtype=np.int64)
            for index, word in enumerate(words_of(name)):
                codes[column == word] = index
            values[name] = codes
        else:
            values[name] = column.astype(np.float64 if name.endswith("_ratio") else np.int64)
    stages = values["pp"] * values["virtual_stages"]
    layers = np.broadcast_to(np.asarray(num_layers), stages.shape)
    whole, rest = layers // stages, layers % stages
    first, last, largest = whole + (rest > 0), whole.copy(), whole + (rest > 0)
    for row, sizes in enumerate(table["layers_per_stage"]):
        if sizes is not None:
            first[row], last[row], largest[row] = sizes[0], sizes[-1], max(sizes)
    return PlanColumns(**values, first_stage_layers=first, last_stage_layers=last, largest_stage_layers=largest)
