"""The combinations of a PlanSpace as blocks of numbers: what no rule refuses, and how many each rule removed.

A combination is numbered in the mixed radix of the space's axes (degrees first). Axes are added one after the other; a
rule removes combinations as soon as all fields that it reads are there, with everything that would have followed. So
each combination is counted once, under the first rule that it breaks, and no table of all of them is ever made.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.cost import distinct
from autotune.cost.columns import WORD_FIELDS, PlanColumns, words_of
from autotune.cost.estimate import Distinct
from autotune.search.plan_space import (
    DEGREES,
    FIELDS,
    INNER_FIELDS,
    LAYER_SPLITS,
    NOT_PRICED,
    OUTER_FIELDS,
    WHOLE_EXPERT_TENSOR,
    PlanSpace,
)
from autotune.space.expression import Expression, parse_expression
from autotune.space.grammar import IMPLICIT_CONDITIONS
from engine.plan import Plan
from engine.rule import Rule, RuleContext
from engine.rules import RULES, broken, fields_read
from engine.schema import parse

REDUNDANT = "redundant"
"""Counted for combinations that differ from another one only in a value that has no effect."""

EVEN_STAGES = "stack.even_stages"
"""Counted for combinations whose stages have numbers of layers that the training stack can't be given."""
_STACK_LIMITS = {"layers_per_stage": EVEN_STAGES, "recompute_period": "stack.recompute_period"}
"""Outer field -> what combinations are counted under that a training stack can't be told to run."""

_CONDITIONS = {
    name.removeprefix("plan."): text for name, text in IMPLICIT_CONDITIONS.items() if name.startswith("plan.")
} | {
    "zero_stage": "plan.dp_shard * plan.cp > 1",
    "overlap_tp": "plan.tp > 1",
    "overlap_pp": "plan.pp > 1",
    "overlap_dp": "plan.dp * plan.cp > 1",
}  # fmt: skip
"""Fields have an effect only where these hold."""

FEW_COMBINATIONS, MANY_COMBINATIONS = 6_000_000, 40_000_000
"""Combinations, legal or not, of a part of the space. Few in small spaces, so that there are parts for all processes
and what one finds is soon known to others; many in large ones, whose arrays are then long enough to be fast."""
ENOUGH_PARTS = 24
FEW_DEGREES = 8
"""Choices of degrees in a part, below which it is cut by another field."""
_SPLIT_FIELDS = ("global_batch_size", "sequence_length", "micro_batch_size", "ep", "schedule", "virtual_stages")
"""Fields by which parts are cut besides the degrees, in this order."""

Columns = dict[str, np.ndarray]


@dataclass
class Counts:
    """What became of the combinations; each is counted once."""

    combinations: int = 0
    redundant: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    """Rule id -> combinations it removed."""

    def add(self, name: str, number: int) -> None:
        """Count ``number`` combinations under a rule's id, or under ``redundant``."""
        if not number:
            return
        if name == REDUNDANT:
            self.redundant += number
        else:
            self.removed[name] = self.removed.get(name, 0) + number

    def merge(self, other: Counts) -> None:
        """Add the counts of another part of the space."""
        self.combinations += other.combinations
        self.redundant += other.redundant
        for name, number in other.removed.items():
            self.add(name, number)


@dataclass(frozen=True)
class Part:
    """A part of a space."""

    degrees: slice
    """Of the rows of ``PlanSpace.degrees``."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Outer field -> the index of the one value that it has here."""


@dataclass(frozen=True)
class Blocks:
    """Legal combinations: each of ``b`` blocks with the inner rows of its class."""

    outer: Columns
    """``[b]`` columns of the degrees and the outer fields, and of the layers of the first, last and largest stage."""
    index: np.ndarray
    """``[b]`` number of the block in the mixed radix of degrees and outer fields."""
    inner: Columns
    """``[i]`` columns of the inner fields: all combinations of their values."""
    kind: np.ndarray
    """``[b]`` class of the block."""
    classes: tuple[np.ndarray, ...]
    """The inner rows that are legal in the blocks of each class."""
    sizes: Mapping[str, int]
    """Values of each outer field: the digits of a block's number."""
    counts: Counts

    def __len__(self) -> int:
        return len(self.index)

    @functools.cached_property
    def num_plans(self) -> np.ndarray:
        """``[b]`` legal combinations of each block."""
        sizes = np.array([len(rows) for rows in self.classes], dtype=np.int64)
        return sizes[self.kind] if len(sizes) else np.zeros(0, dtype=np.int64)

    @property
    def num_inner(self) -> int:
        """Combinations of the inner fields, legal or not."""
        return len(next(iter(self.inner.values())))

    def columns(self) -> PlanColumns:
        """One plan of each block: the first inner row, legal or not."""
        first = {name: np.broadcast_to(column[0], (len(self),)) for name, column in self.inner.items()}
        return PlanColumns(**self.outer, **first)

    def chunks(self, which: np.ndarray, size: int) -> Iterator[tuple[Chunk, Distinct]]:
        """The plans of some blocks, about ``size`` at a time, and the distinct ones as far as memory goes.

        Args:
            which: Indices of blocks.
            size: Rows of a chunk (more only if one block has more).
        """
        for kind, rows in enumerate(self.classes):
            members = which[self.kind[which] == kind]
            step = max(1, size // max(1, len(rows)))
            for start in range(0, len(members), step):
                some = members[start : start + step]
                yield self.plans(some, rows), self.same_memory(some, rows)

    def plans(self, which: np.ndarray, rows: np.ndarray) -> Chunk:
        """Every one of the blocks ``which`` with every one of the inner ``rows``, blocks the slower axis."""
        numbers = self.index[which] * self.num_inner
        return Chunk(
            plans=self._columns(which, rows),
            numbers=(numbers[:, None] + rows[None, :]).ravel(),
            same_work=self._distinct(which, rows, _BESIDE_WORK),
        )

    def same_memory(self, which: np.ndarray, rows: np.ndarray) -> Distinct:
        """The distinct ones among such plans as far as memory goes."""
        return self._distinct(which, rows, _BESIDE_MEMORY)

    def _columns(self, which: np.ndarray, rows: np.ndarray) -> PlanColumns:
        columns = {name: np.repeat(column[which], len(rows)) for name, column in self.outer.items()}
        columns |= {name: np.tile(column[rows], len(which)) for name, column in self.inner.items()}
        return PlanColumns(**columns)

    def _distinct(self, which: np.ndarray, rows: np.ndarray, beside: frozenset[str]) -> Distinct:
        """The distinct ones among blocks and inner rows where the fields ``beside`` don't matter."""
        place, digits = 1, np.zeros(len(which), dtype=np.int64)
        for name in reversed(OUTER_FIELDS):
            size = self.sizes[name]
            if name in beside:
                digits += self.index[which] // place % size * place
            place *= size
        _, first, of_block = np.unique(self.index[which] - digits, return_index=True, return_inverse=True)
        columns = {name: column[rows] for name, column in self.inner.items() if name not in beside}
        for name in columns:
            if name.endswith("_ratio"):
                columns[name] = np.unique(columns[name], return_inverse=True)[1]
        first_row, of_row = distinct_columns(columns, len(rows))
        return Distinct(
            plans=self._columns(which[first], rows[first_row]),
            of_row=(of_block[:, None] * len(first_row) + of_row[None, :]).ravel(),
        )


_BESIDE_WORK = frozenset(name for name in FIELDS if name.startswith(("recompute", "overlap_", "offload_")))
"""Fields that neither blocks nor collectives depend on."""
_BESIDE_MEMORY = frozenset({"rank_order", "cp_attention", "overlap_dp", "overlap_tp", "overlap_pp"})
"""Fields that memory does not depend on."""


@dataclass(frozen=True)
class Chunk:
    """Some plans, with what the cost model need not compute for each of them."""

    plans: PlanColumns
    """``n`` plans."""
    numbers: np.ndarray
    """``[n]``: the number of each combination."""
    same_work: Distinct
    """The distinct ones as far as the work of blocks and collectives goes."""


class Expander:
    """Makes the blocks of a space, a part of the degrees at a time."""

    def __init__(self, space: PlanSpace, context: RuleContext) -> None:
        self.space, self.context = space, context
        # Fields with one value are known from the start; etp = tp is only when tp is.
        self.single = {n for n in (*OUTER_FIELDS, *INNER_FIELDS) if len(space.values[n]) == 1 and n != "etp"}
        limits = {"layers_per_stage": space.even_stages, "recompute_period": space.whole_periods}
        self._limited = [name for name, is_limited in limits.items() if is_limited]
        rules = [rule for rule in RULES if rule.scope in space.scopes]
        self._rules = [(rule, fields_read(rule, context)) for rule in rules]
        known = frozenset(f"plan.{name}" for name in (*Plan.model_fields, "dp"))
        fields = {*OUTER_FIELDS, *INNER_FIELDS}.intersection(_CONDITIONS)
        self._conditions = {name: parse_expression(_CONDITIONS[name], known) for name in sorted(fields)}
        sizes = [len(space.values[name]) for name in INNER_FIELDS]
        grid = np.indices(sizes).reshape(len(sizes), -1)
        self.inner = {name: space.codes[name][grid[i]] for i, name in enumerate(INNER_FIELDS)}
        self.num_inner = grid.shape[1]

    def parts(self) -> list[Part]:
        """Parts of the space, each small enough to be expanded at once.

        A part takes every so many of the degrees, so that all are alike. Where that would leave few to each, parts have
        one value of some outer fields too.
        """
        size, num_degrees = self.space.num_combinations, len(self.space.degrees)
        wanted = max(min(size // FEW_COMBINATIONS, ENOUGH_PARTS), size // MANY_COMBINATIONS)
        split: list[str] = []
        for name in _SPLIT_FIELDS:
            if wanted * FEW_DEGREES > num_degrees and len(self.space.values[name]) > 1:
                split.append(name)
                wanted = -(-wanted // len(self.space.values[name]))
        number = max(1, min(wanted, num_degrees))
        choices = itertools.product(*(range(len(self.space.values[name])) for name in split))
        fixed = [dict(zip(split, picked, strict=True)) for picked in choices]
        return [Part(slice(start, None, number), one) for start in range(number) for one in fixed]

    def size(self, part: Part) -> int:
        """Combinations of a part."""
        fixed = math.prod(len(self.space.values[name]) for name in part.fixed)
        return len(self.space.degrees[part.degrees]) * self.space.num_per_degrees // fixed

    def blocks(self, part: Part) -> Blocks:
        """The blocks of a part."""
        degrees = self.space.degrees[part.degrees]
        columns: Columns = {name: degrees[:, i] for i, name in enumerate(DEGREES)}
        index = np.arange(len(self.space.degrees), dtype=np.int64)[part.degrees]
        remaining = self.size(part) // max(1, len(degrees))
        counts = Counts(combinations=self.size(part))
        rules = list(self._rules)
        bound = {*DEGREES, *self.single, *NOT_PRICED}
        index, columns = self._filter(index, columns, bound, rules, counts, remaining)
        for name in OUTER_FIELDS:
            size = len(self.space.values[name])
            choices = np.array([part.fixed[name]]) if name in part.fixed else np.arange(size)
            remaining //= len(choices)
            choice = np.tile(choices, len(index))
            columns = {key: np.repeat(column, len(choices)) for key, column in columns.items()}
            index = np.repeat(index, len(choices)) * size + choice
            keep = ~self._redundant_choice(name, choice, columns)
            counts.add(REDUNDANT, int(np.count_nonzero(~keep)) * remaining)
            columns[name] = self._resolved(name, choice, columns)
            index, columns = index[keep], {key: column[keep] for key, column in columns.items()}
            bound.add(name)
            index, columns = self._filter(index, columns, bound, rules, counts, remaining)
            if name in self._limited:
                keep = self._is_built_by_stack(name, columns)
                counts.add(_STACK_LIMITS[name], int(np.count_nonzero(~keep)) * remaining)
                index, columns = index[keep], {key: column[keep] for key, column in columns.items()}
        kind, classes = self._classes(columns, rules, counts)
        some = np.array([len(rows) > 0 for rows in classes], dtype=bool)[kind] if len(classes) else kind > 0
        columns, index, kind = {key: column[some] for key, column in columns.items()}, index[some], kind[some]
        columns |= stage_layers(columns.pop("layers_per_stage"), self.context.model.num_layers, columns)
        sizes = {name: len(self.space.values[name]) for name in OUTER_FIELDS}
        return Blocks(columns, index, self.inner, kind, classes, sizes, counts)

    def columns(self, numbers: np.ndarray) -> PlanColumns:
        """The plans of combinations by their numbers ``[n]``."""
        values = self._decoded(numbers)
        layers = stage_layers(values.pop("layers_per_stage"), self.context.model.num_layers, values)
        return PlanColumns(**values, **layers)

    def first_numbers(self) -> np.ndarray:
        """The number of one combination, legal or not, for each choice of what the amount of work depends on: degrees,
        sequence length, batch, precision."""
        index = np.arange(len(self.space.degrees), dtype=np.int64)
        for name in OUTER_FIELDS:
            size = len(self.space.values[name])
            if name in ("sequence_length", "global_batch_size", "precision"):
                index = (index[:, None] * size + np.arange(size)).ravel()
            else:
                index = index * size
        return index * self.num_inner

    def keys(self, numbers: np.ndarray, fields: Sequence[str]) -> np.ndarray:
        """``[n, f]`` values of some fields (the numbers themselves where there are none)."""
        if not fields:
            return numbers[:, None]
        values = self._decoded(numbers)
        return np.stack([values[name] for name in fields], axis=1)

    def _decoded(self, numbers: np.ndarray) -> Columns:
        index, inner = np.divmod(numbers, self.num_inner)
        values: Columns = {name: column[inner] for name, column in self.inner.items()}
        choices: Columns = {}
        for name in reversed(OUTER_FIELDS):
            index, choices[name] = np.divmod(index, len(self.space.values[name]))
        values |= {name: self.space.degrees[index, i] for i, name in enumerate(DEGREES)}
        for name in OUTER_FIELDS:
            values[name] = self._resolved(name, choices[name], values)
        return values

    def _filter(
        self,
        index: np.ndarray,
        columns: Columns,
        bound: set[str],
        rules: list[tuple[Rule, frozenset[str]]],
        counts: Counts,
        remaining: int,
    ) -> tuple[np.ndarray, Columns]:
        """Apply the rules whose fields are all there, once; they are taken out of ``rules``."""
        ready = [entry for entry in rules if entry[1] <= bound]
        rules[:] = [entry for entry in rules if not entry[1] <= bound]
        for rule, fields in ready:
            table = {name: self._words(name, columns, len(index)) for name in fields}
            wrong = broken(rule, self.context, table, len(index))
            if wrong.any():
                counts.add(rule.id, int(np.count_nonzero(wrong)) * remaining)
                index, columns = index[~wrong], {key: column[~wrong] for key, column in columns.items()}
        return index, columns

    def _words(self, name: str, columns: Mapping[str, np.ndarray], num_rows: int) -> np.ndarray:
        """A column as rules and conditions take it: with words and bools."""
        if name in columns:
            codes = columns[name]
        elif name in self.space.codes:
            codes = np.broadcast_to(self.space.codes[name], (num_rows,))
        else:  # a setting that plans are not searched for
            return np.broadcast_to(np.array(Plan.model_fields[name].default), (num_rows,))
        if name == "layers_per_stage":
            return np.broadcast_to(np.array(None, dtype=object), (num_rows,))  # by construction, they sum to the layers
        return as_words(name, codes)

    def _is_built_by_stack(self, name: str, columns: Columns) -> np.ndarray:
        """``[n]`` bools. ``layers_per_stage``: all stages between the first and the last have as many layers as the
        largest one. ``recompute_period``: that one has a whole period."""
        num_layers = self.context.model.num_layers
        layers = stage_layers(columns["layers_per_stage"], num_layers, columns)
        largest = layers["largest_stage_layers"]
        if name == "recompute_period":
            periodic = columns["recompute"] == words_of("recompute").index("every_k")
            whole: np.ndarray = ~periodic | (columns["recompute_period"] <= largest)
            return whole
        stages = columns["pp"] * columns["virtual_stages"]
        filled = layers["first_stage_layers"] + layers["last_stage_layers"] + (stages - 2) * largest
        even: np.ndarray = (stages == 1) | (filled == num_layers)
        return even

    def _redundant_choice(self, name: str, choice: np.ndarray, columns: Columns) -> np.ndarray:
        """``[n]`` bools: the choice of an outer field says what another choice says too."""
        n, codes = len(choice), self.space.codes[name]
        if len(codes) == 1:
            return np.zeros(n, dtype=bool)
        if name == "rank_order":
            return _same_order_before(codes, choice, columns)
        if name == "etp":
            said: np.ndarray = np.zeros(n, dtype=bool)
            for i in np.flatnonzero(codes == WHOLE_EXPERT_TENSOR):
                said |= (choice == i) & np.isin(columns["tp"], np.delete(codes, i))
            return said
        if name == "layers_per_stage":
            return self._same_split_before(codes, choice, columns)
        condition = self._conditions.get(name)
        if condition is None:
            return np.zeros(n, dtype=bool)
        absent: np.ndarray = ~self._holds(condition, columns, n) & (choice != self._neutral(name))
        return absent

    def _same_split_before(self, codes: np.ndarray, choice: np.ndarray, columns: Columns) -> np.ndarray:
        layers = self.context.model.num_layers
        even, light = (
            stage_layers(np.full(len(choice), LAYER_SPLITS.index(word)), layers, columns) for word in LAYER_SPLITS
        )
        same = np.all([even[key] == light[key] for key in even], axis=0)
        said: np.ndarray = (codes[choice] == LAYER_SPLITS.index("light_ends")) & same
        return said

    def _neutral(self, name: str) -> int:
        """Index of the value that stands for all where a field has no effect: its default, else its first."""
        default = Plan.model_fields[name].default
        values = self.space.values[name]
        return values.index(default) if default in values else 0

    def _holds(self, condition: Expression, columns: Columns, num_rows: int) -> np.ndarray:
        values: dict[str, Any] = {}
        for dotted in condition.names:
            name = dotted.removeprefix("plan.")
            if name == "dp":
                values[dotted] = columns["dp_replicate"] * columns["dp_shard"]
            else:
                values[dotted] = self._words(name, columns, num_rows)
        return np.broadcast_to(np.asarray(condition(values), bool), (num_rows,))

    def _resolved(self, name: str, choice: np.ndarray, columns: Columns) -> np.ndarray:
        values: np.ndarray = self.space.codes[name][choice]
        if name == "etp":
            return np.where(values == WHOLE_EXPERT_TENSOR, columns["tp"], values)
        return values

    def _classes(
        self, columns: Columns, rules: list[tuple[Rule, frozenset[str]]], counts: Counts
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """The class of each block, and the legal inner rows of each class.

        What is legal inside a block depends on few of its values: the masks are made once for each distinct
        combination of those.
        """
        num_blocks, size = len(columns["tp"]), self.num_inner
        searched = [n for n in INNER_FIELDS if n not in self.single and n in self._conditions]
        reads = {f for _, fields in rules for f in fields}
        reads |= {n.removeprefix("plan.") for name in searched for n in self._conditions[name].names}
        if "dp" in reads:
            reads |= {"dp_replicate", "dp_shard"}
        outer = sorted(name for name in reads if name in columns)
        some, of_block = distinct_columns({name: columns[name] for name in outer}, num_blocks)
        num_keys = len(some)
        weight = np.bincount(of_block, minlength=num_keys)
        table = {name: np.repeat(columns[name][some], size) for name in outer}
        table |= {name: np.tile(column, num_keys) for name, column in self.inner.items()}
        legal = np.ones(num_keys * size, dtype=bool)

        def remove(name: str, wrong: np.ndarray) -> None:
            first = (wrong & legal).reshape(num_keys, size)
            counts.add(name, int(first.sum(axis=1) @ weight))
            legal[:] &= ~wrong

        for name in searched:
            absent = ~self._holds(self._conditions[name], table, len(legal))
            neutral = self.space.codes[name][self._neutral(name)]
            remove(REDUNDANT, absent & (table[name] != neutral))
        for rule, fields in rules:
            words = {name: self._words(name, table, len(legal)) for name in fields}
            remove(rule.id, broken(rule, self.context, words, len(legal)))
        masks, kinds = np.unique(legal.reshape(num_keys, size), axis=0, return_inverse=True)
        classes = tuple(np.flatnonzero(mask) for mask in masks)
        return kinds.reshape(-1)[of_block] if num_keys else np.zeros(0, np.int64), classes


def as_words(name: str, codes: np.ndarray) -> np.ndarray:
    """Codes of a field as rules take them: words, bools, or the numbers themselves."""
    if name in WORD_FIELDS:
        words: np.ndarray = np.array(words_of(name))[codes]
        return words
    if name in ("sequence_parallel", "vocab_parallel") or name.startswith("overlap_"):
        return codes.astype(bool)
    return codes


def stage_layers(split: np.ndarray, num_layers: int, columns: Mapping[str, np.ndarray]) -> Columns:
    """Layers of the first, the last and the largest stage.

    Args:
        split: ``[n]`` codes of ``LAYER_SPLITS``; where lighter ends would make another stage larger, the split is even.
        num_layers: Layers of the model.
        columns: ``pp`` and ``virtual_stages``.
    """
    stages = columns["pp"] * columns["virtual_stages"]
    whole, rest = num_layers // stages, num_layers % stages
    first, last, largest = whole + (rest > 0), whole, whole + (rest > 0)
    # A stage short of two layers in all: the largest size that two lighter ends leave room for.
    ends = -(-(num_layers + 2) // stages) - 1
    middle = num_layers - 2 * ends
    largest_middle = -(-middle // np.maximum(stages - 2, 1))
    light = (split == LAYER_SPLITS.index("light_ends")) & (stages >= 3) & (ends >= 1) & (ends < largest)
    light &= (middle >= stages - 2) & (np.maximum(ends, largest_middle) <= largest)
    return {
        "first_stage_layers": np.where(light, ends, first),
        "last_stage_layers": np.where(light, ends, last),
        "largest_stage_layers": np.where(light, largest_middle, largest),
    }


def plan_at(columns: PlanColumns, row: int, num_layers: int) -> tuple[Plan, int, int]:
    """Row ``row`` of a table as a Plan, its global batch and its sequence length."""
    values: dict[str, Any] = {}
    for name in FIELDS:
        if name in Plan.model_fields and name != "layers_per_stage":
            values[name] = as_words(name, np.atleast_1d(getattr(columns, name)))[row].item()
    stages = values["pp"] * values["virtual_stages"]
    first, last = int(columns.first_stage_layers[row]), int(columns.last_stage_layers[row])
    whole, rest = divmod(num_layers, stages)
    if stages >= 3 and first != whole + (rest > 0):
        each, more = divmod(num_layers - first - last, stages - 2)
        values["layers_per_stage"] = (first, *(each + (i < more) for i in range(stages - 2)), last)
    plan = parse(Plan, values)
    return plan, int(columns.global_batch_size[row]), int(columns.sequence_length[row])


def distinct_columns(columns: Columns, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """One row of each distinct combination of columns, and ``[n]`` which of them each row has."""
    if not columns or not num_rows:
        return np.zeros(min(num_rows, 1), dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    first, kind = distinct.Columns(columns).distinct(list(columns))
    return first, np.broadcast_to(kind, (num_rows,))


def _same_order_before(codes: np.ndarray, choice: np.ndarray, columns: Columns) -> np.ndarray:
    """Whether an order of the ranks places them as an earlier choice does: axes of degree 1 take no place."""
    degree = {"tp": columns["tp"], "cp": columns["cp"], "pp": columns["pp"]}
    degree["dp"] = columns["dp_replicate"] * columns["dp_shard"]
    orders = [words_of("rank_order")[code].split("-") for code in codes]
    said = np.zeros(len(choice), dtype=bool)
    for i, order in enumerate(orders):
        for before in orders[:i]:
            same = np.ones(len(choice), dtype=bool)
            for a in order:
                for b in order[order.index(a) + 1 :]:
                    if before.index(a) > before.index(b):
                        same &= (degree[a] == 1) | (degree[b] == 1)
            said |= (choice == i) & same
    return said
