"""The groups of ranks that a plan's collectives run over, and what a collective over each costs.

Which devices form a group follows from ``rank_order``: tensor ranks are consecutive, context, data and pipeline ranks
strided; expert ranks are spread over the tensor, context and data ranks of one pipeline stage, tensor first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from autotune.cost.columns import PlanColumns, words_of
from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import links_of
from engine import collective_cost
from engine.collective_cost import Group, Link, Number
from engine.errors import UserError


@dataclass(frozen=True)
class LinkColumns:
    """The levels of the network, from the closest devices outwards, as numbers or columns."""

    levels: tuple[Link, ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Self:
        """The levels of one cluster.

        Raises:
            UserError: The cluster says nothing of its links.
        """
        return cls(_levels(cluster))

    @classmethod
    def rows(cls, clusters: Sequence[ClusterSpec], index: np.ndarray) -> Self:
        """One network per row of a table.

        Args:
            clusters: The machines that occur.
            index: ``[n]``: which of them each row has.
        """
        tables = [_levels(cluster) for cluster in clusters]
        depth = max(map(len, tables))
        padded = [(*levels, *[levels[-1]] * (depth - len(levels))) for levels in tables]
        names = Link.__dataclass_fields__
        return cls(
            tuple(
                Link(**{name: np.array([getattr(levels[i], name) for levels in padded])[index] for name in names})
                for i in range(depth)
            )
        )


def _levels(cluster: ClusterSpec) -> tuple[Link, ...]:
    if not cluster.links:
        raise UserError(
            f"the cluster {cluster.name} says nothing of its links",
            hint="add 'links' to its file, run autotune profile on it, or name a device of the catalogue",
        )
    return links_of(cluster.links, cluster.devices_per_node)


@dataclass(frozen=True)
class Cost:
    """Seconds, and the bytes that one rank sends."""

    seconds: Number = 0.0
    bytes: Number = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes)

    def __mul__(self, factor: Number) -> Cost:
        return Cost(self.seconds * factor, self.bytes * factor)

    def rows(self, index: np.ndarray) -> Cost:
        """One of these for each row of a table. ``index``: ``[n]`` which."""
        return Cost(_rows(self.seconds, index), _rows(self.bytes, index))

    def where(self, condition: Number, other: Cost) -> Cost:
        """This where the condition holds, else the other."""
        return Cost(np.where(condition, self.seconds, other.seconds), np.where(condition, self.bytes, other.bytes))


NOTHING = Cost()


def _rows(value: Number, index: np.ndarray) -> Number:
    if np.ndim(value) == 0:
        return value
    rows: np.ndarray = np.asarray(value)[index]
    return rows


class Groups:
    """The groups of a table of plans, and what collectives over them cost. Each is worked out when first asked for."""

    def __init__(self, links: LinkColumns, c: PlanColumns) -> None:
        self._levels = links.levels
        self._c = c
        orders = words_of("rank_order")
        # Ranks of one pipeline stage, counted tensor first: up to `near` they are consecutive, beyond they lie pp times
        # as far apart (the pipeline axis varies faster than the rest).
        self._near = np.select(
            [c.rank_order == orders.index("tp-cp-dp-pp"), c.rank_order == orders.index("tp-cp-pp-dp")],
            [c.tp * c.cp * c.dp, c.tp * c.cp],
            c.tp,
        )

    @cached_property
    def tp(self) -> Group:
        """Tensor ranks."""
        return self._in_stage(self._c.tp, 1)

    @cached_property
    def cp(self) -> Group:
        """Context ranks."""
        return self._in_stage(self._c.cp, self._c.tp)

    @cached_property
    def cp_neighbours(self) -> Group:
        """Two neighbours on the ring of context ranks, at its slowest hop."""
        return self._farthest_pair(self.cp)

    @cached_property
    def dp(self) -> Group:
        """Ranks with the same parameters outside the experts."""
        return self._in_stage(self._c.cp * self._c.dp, self._c.tp)

    @cached_property
    def shard(self) -> Group:
        """Of those, the ranks that share one set of parameters and states."""
        return self._in_stage(self._c.cp * self._c.dp_shard, self._c.tp)

    @cached_property
    def replicate(self) -> Group:
        """Of those, the ranks with the same shard."""
        return self._in_stage(self._c.dp_replicate, self._c.tp * self._c.cp * self._c.dp_shard)

    @cached_property
    def ep(self) -> Group:
        """Ranks that hold the experts of a layer."""
        return self._in_stage(self._c.ep, self._c.etp)

    @cached_property
    def etp(self) -> Group:
        """Ranks that hold slices of the same experts."""
        return self._in_stage(self._c.etp, 1)

    @cached_property
    def edp(self) -> Group:
        """Ranks with the same experts."""
        return self._in_stage(self._c.edp, self._c.ep * self._c.etp)

    @cached_property
    def edp_shard(self) -> Group:
        """As ``shard``, for the experts."""
        return self._in_stage(self._edp_shard, self._c.ep * self._c.etp)

    @cached_property
    def edp_replicate(self) -> Group:
        """As ``replicate``, for the experts."""
        size = self._edp_shard
        return self._in_stage(self._c.edp // size, self._c.ep * self._c.etp * size)

    @cached_property
    def pp(self) -> Group:
        """Two neighbouring stages at the farthest boundary of the pipeline."""
        return self._farthest_pair(Group.along(self._levels, self._c.world_size, (self._c.pp, self._near)))

    @property
    def _edp_shard(self) -> Number:
        size: Number = np.maximum(self._c.edp // self._c.dp_replicate, 1)
        return size

    def _in_stage(self, size: Number, stride: Number) -> Group:
        """A group among the ranks of one stage, ``stride`` apart in the order tensor, context, data."""
        inner = np.clip(self._near // stride, 1, size)
        outer_stride = np.maximum(stride, self._near) * self._c.pp
        axes = ((inner, stride), (size // inner, outer_stride))
        return Group.along(self._levels, self._c.world_size, *axes)

    @staticmethod
    def _farthest_pair(whole: Group) -> Group:
        """Two neighbours where the group crosses its outermost level."""
        size = np.asarray(whole.size)
        pair = [np.where(members >= size, np.minimum(size, 2), 1.0) for members in whole.members[:-1]]
        return Group((*pair, np.minimum(size, 2)))

    def all_reduce(self, group: Group, num_bytes: Number) -> Cost:
        """See ``engine.collective_cost``."""
        sent = 2 * (group.size - 1) / group.size * num_bytes
        return Cost(collective_cost.all_reduce(num_bytes, group, self._levels), sent)

    def all_gather(self, group: Group, num_bytes: Number) -> Cost:
        """See ``engine.collective_cost``; ``num_bytes``: of the whole."""
        sent = (group.size - 1) / group.size * num_bytes
        return Cost(collective_cost.all_gather(num_bytes, group, self._levels), sent)

    def reduce_scatter(self, group: Group, num_bytes: Number) -> Cost:
        """See ``engine.collective_cost``; ``num_bytes``: of the whole."""
        sent = (group.size - 1) / group.size * num_bytes
        return Cost(collective_cost.reduce_scatter(num_bytes, group, self._levels), sent)

    def all_to_all(self, group: Group, num_bytes: Number, outside_ratio: Number = 1.0) -> Cost:
        """See ``engine.collective_cost``."""
        inside = (group.members[0] - 1) / group.size
        outside = (group.size - group.members[0]) / group.size * outside_ratio
        seconds = collective_cost.all_to_all(num_bytes, group, self._levels, outside_ratio=outside_ratio)
        return Cost(seconds, (inside + outside) * num_bytes)

    def send(self, pair: Group, num_bytes: Number) -> Cost:
        """To the other of a pair."""
        sent = np.where(np.asarray(pair.size) > 1, num_bytes, 0.0)
        return Cost(collective_cost.send(num_bytes, pair, self._levels), sent)
