"""Routes in force: sums gradients along them, watches how long that takes, chooses others when a link degrades."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm.all_reduce import Move, all_reduce, moves_of
from engine.comm.transport import Transport
from engine.context import ParallelContext
from engine.probe_pairs import measure_pairs, pair_rounds, probe_edges, probe_pair
from engine.route_choice import SIZE_CLASSES, Choice, choose, plan_id, size_class
from engine.routes import replay
from engine.topology import PROBED_BYTES, Edge, Links, fit_links

HYSTERESIS = 0.05
"""Share of its time that another route must save to be taken."""
SLOW_RATIO = 1.5
"""Time over its usual from which a step's sums count as slow."""
PATIENCE = 2
"""Slow steps in a row after which the links in use are measured again."""
USUAL_STEPS = 3
"""Steps after a choice whose median time is the usual one."""


@dataclass
class Watch:
    """How long the sums of one size class take, relative to what their route should take."""

    observed: float = 0.0
    """Seconds of this step so far."""
    expected: float = 0.0
    """The same by the links."""
    first: list[float] = field(default_factory=list)
    """Ratios of the first steps."""
    num_slow: int = 0
    """Slow steps in a row."""

    def ratio(self) -> float:
        """Observed over expected of the step that ends; infinite without sums."""
        ratio = self.observed / self.expected if self.expected else math.inf
        self.observed = self.expected = 0.0
        return ratio

    def is_slow(self, ratio: float) -> bool:
        """Take the ratio that all ranks agree on. Whether it has been slow for long enough."""
        if math.isinf(ratio):
            return False
        if len(self.first) < USUAL_STEPS:
            self.first.append(ratio)
            return False
        self.num_slow = self.num_slow + 1 if ratio > SLOW_RATIO * median(self.first) else 0
        return self.num_slow >= PATIENCE


class Router:
    """The routes of one group, one for each size class; all its members make it and call it together.

    Args:
        links: Between the members; the same on all of them.
        transport: Between them.
        device: Of the tensors.
        probed_bytes: Sizes of messages when links are measured again.
        refreshes: Measure one pair after every step, round robin, and heed what changed.
    """

    def __init__(
        self,
        links: Links,
        transport: Transport,
        device: torch.device,
        *,
        probed_bytes: Sequence[int] = PROBED_BYTES,
        refreshes: bool = False,
    ) -> None:
        self.links = links
        self._transport = transport
        self._device = device
        self._probed_bytes = probed_bytes
        self._pairs = [pair for pairs in pair_rounds(transport.size) for pair in pairs] if refreshes else []
        self._num_steps = 0
        self.choices: list[Choice] = []
        self._follow([choose(links, num_bytes) for num_bytes in SIZE_CLASSES])

    @property
    def plan_id(self) -> str:
        """Names the routes in force; equal on all ranks."""
        return plan_id(self.choices)

    def all_reduce(self, values: Tensor) -> None:
        """Sum a flat, contiguous tensor in place over the group."""
        index = size_class(values.nbytes)
        start = self._transport.clock()
        all_reduce(values, self.choices[index].route, self._moves[index], self._transport)
        watch = self._watches[index]
        watch.observed += self._transport.clock() - start
        watch.expected += self._expected(index, values.nbytes)

    def end_step(self) -> str | None:
        """Look at the step's times with all ranks; choose other routes when a link has degraded.

        Returns:
            What was done, in words; None for nothing. Equal on all ranks.
        """
        # A rank that came early has waited for the others: the least time of all ranks is that of the sum alone.
        ratios = [watch.ratio() for watch in self._watches]
        pair = self._pairs[self._num_steps % len(self._pairs)] if self._pairs else None
        self._num_steps += 1
        figures = self._refreshed(pair) if pair else {}
        edges = [pair, pair[::-1]] if pair else []
        told = [*ratios, *(value for edge in edges for value in figures.get(edge, (math.inf, math.inf)))]
        agreed = torch.tensor(told, dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._transport.group)
        values = agreed.tolist()
        slow = [index for index, watch in enumerate(self._watches) if watch.is_slow(values[index])]
        if slow:
            suspected = sorted({edge for index in slow for edge in self.choices[index].route.edges})
            samples = probe_edges(self._transport, self._device, suspected, self._probed_bytes)
            return self._adopt(fit_links(samples), "sums are slow")
        refreshed = values[len(self._watches) :]
        found = {edge: (refreshed[2 * place], refreshed[2 * place + 1]) for place, edge in enumerate(edges)}
        return self._adopt(found, "links changed") if self._differ(found) else None

    def _refreshed(self, pair: Edge) -> dict[Edge, tuple[float, float]]:
        return fit_links(probe_pair(self._transport, pair, self._device, self._probed_bytes))

    def _differ(self, figures: Mapping[Edge, tuple[float, float]]) -> bool:
        """Whether a message takes much longer or shorter than with the figures in use."""
        size = self._probed_bytes[-1]
        new = self.links.updated(figures).seconds(size)
        old = self.links.seconds(size)
        return any(max(new[edge] / old[edge], old[edge] / new[edge]) > SLOW_RATIO for edge in figures)

    def _adopt(self, figures: Mapping[Edge, tuple[float, float]], reason: str) -> str:
        """Take over new figures of some links; choose anew with them, keep routes that are nearly as good."""
        size = self._probed_bytes[-1]
        before = self.links
        self.links = before.updated(figures)
        slower = self.links.seconds(size) / before.seconds(size).clip(1e-30)
        worst = max(figures, key=lambda edge: max(slower[edge], 1 / slower[edge]))
        found = []
        for choice in self.choices:
            other, kept = choose(self.links, choice.num_bytes), choice.seconds_over(self.links)
            is_better = other.seconds < (1 - HYSTERESIS) * kept
            found.append(other if is_better else Choice(choice.num_bytes, choice.route, kept))
        old = list(self.choices)
        told = f"{reason}: link {worst[0]} to {worst[1]} takes {slower[worst]:.3g} times as long"
        if not self._follow(found):
            return f"{told}; the routes stay, ranks chose different ones"
        changes = [
            f"{int(new.num_bytes) // 2**10} KiB {one.route.kind} to {new.route.kind}"
            for one, new in zip(old, found, strict=True)
            if new.route != one.route
        ]
        return f"{told}; new routes: {', '.join(changes)}; plan {self.plan_id}" if changes else f"{told}; routes stay"

    def _follow(self, choices: list[Choice]) -> bool:
        """Use these routes from now on if all ranks chose the same; else those in force, at first the first rank's.

        Returns:
            Whether all ranks chose the same.
        """
        group = self._transport.group
        ids: list[str] = [""] * self._transport.size
        dist.all_gather_object(ids, plan_id(choices), group=group)
        agree = len(set(ids)) == 1
        if not agree:
            box = [self.choices or choices]
            dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
            choices = box[0]
        self.choices = choices
        self._moves: list[list[Move]] = [moves_of(choice.route, self._transport.rank) for choice in choices]
        self._watches = [Watch() for _ in choices]
        self._known: dict[tuple[int, int], float] = {}
        return agree

    def _expected(self, index: int, num_bytes: int) -> float:
        if (index, num_bytes) not in self._known:
            self._known[index, num_bytes] = float(replay(self.choices[index].route, self.links, num_bytes)[0])
        return self._known[index, num_bytes]


class RoutedSums:
    """Sums of gradients along routes, beside the backward pass: a ``engine.parallel.replicated.SumOver``.

    One thread of each rank makes them, in the order in which they were asked for.

    Args:
        routers: By axis; axes with the same members share one.
    """

    def __init__(self, routers: Mapping[str, Router]) -> None:
        self.routers = routers
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sums")

    @classmethod
    def along(cls, axes: Sequence[str], context: ParallelContext, *, refreshes: bool = False) -> RoutedSums:
        """For those of ``axes`` that exist, over the context's links; without any, every pair is measured now."""
        groups = {axis: context.group(axis) for axis in axes if context.has_axis(axis)}
        links = context.links or measure_pairs(context).links()
        made: dict[dist.ProcessGroup, Router] = {}
        for group in groups.values():
            if group not in made:
                among = links.among(dist.get_process_group_ranks(group))
                made[group] = Router(among, Transport(group), context.device, refreshes=refreshes)
        return cls({axis: made[group] for axis, group in groups.items()})

    def __call__(self, values: Tensor, axis: str, context: ParallelContext) -> Pending:
        """Begin to sum a flat tensor over an axis of the context that the routers were made for."""
        event = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None
        return Pending(self._worker.submit(_sum, self.routers[axis], values, event))

    def end_step(self) -> list[str]:
        """To be called after every step by all ranks: what was done about links, in words."""
        notes = [router.end_step() for router in dict.fromkeys(self.routers.values())]
        return [note for note in notes if note]


@dataclass(frozen=True)
class Pending:
    """A sum under way."""

    future: Future[None]

    def wait(self) -> None:
        """Return when the values are summed."""
        self.future.result()


def _sum(router: Router, values: Tensor, event: torch.cuda.Event | None) -> None:
    if event is None:
        router.all_reduce(values)
        return
    # On a stream of its own, so that what the backward pass goes on with is not waited for, nor timed.
    with torch.cuda.device(values.device), torch.cuda.stream(torch.cuda.Stream()):
        event.synchronize()
        router.all_reduce(values)
        torch.cuda.current_stream().synchronize()
