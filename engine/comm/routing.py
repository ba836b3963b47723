"""Routes in force: sums gradients along them, watches how long that takes, chooses others when a link degrades."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm.all_reduce import all_reduce, moves_of
from engine.comm.transport import Transport
from engine.context import ParallelContext
from engine.probe_pairs import measure_pairs, pair_rounds, probe_edges, probe_pair
from engine.route_choice import size_class
from engine.route_plan import SLOW_RATIO, RoutePlan
from engine.topology import PROBED_BYTES, Edge, Links, fit_links


class Router:
    """The routes of one group; all its members make it and call it together.

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
        self._transport = transport
        self._device = device
        self._probed_bytes = probed_bytes
        self._pairs = [pair for pairs in pair_rounds(transport.size) for pair in pairs] if refreshes else []
        self._num_steps = 0
        plan = RoutePlan(links)
        if not self._all_chose(plan):
            box = [plan.choices]
            dist.broadcast_object_list(box, group=transport.group, group_src=0, device=torch.device("cpu"))
            plan = RoutePlan(links, box[0])
        self._follow(plan)

    def all_reduce(self, values: Tensor) -> None:
        """Sum a flat, contiguous tensor in place over the group."""
        index = size_class(values.nbytes)
        start = self._transport.clock()
        all_reduce(values, self.plan.choices[index].route, self._moves[index], self._transport)
        self.plan.observe(values.nbytes, self._transport.clock() - start)

    def end_step(self) -> str | None:
        """Look at the step's times with all ranks; choose other routes when a link has degraded.

        Returns:
            What was done, in words; None for nothing. Equal on all ranks.
        """
        pair = self._pairs[self._num_steps % len(self._pairs)] if self._pairs else None
        self._num_steps += 1
        edges = [pair, pair[::-1]] if pair else []
        mine = fit_links(probe_pair(self._transport, pair, self._device, self._probed_bytes)) if pair else {}
        # A rank that came early has waited for the others: the least time of all ranks is that of the sum alone.
        told = [*self.plan.end_step(), *(value for edge in edges for value in mine.get(edge, (math.inf, math.inf)))]
        agreed = torch.tensor(told, dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._transport.group)
        num_classes = len(self.plan.choices)
        ratios, values = agreed[:num_classes].tolist(), agreed[num_classes:].view(-1, 2).tolist()
        suspected = self.plan.suspected(ratios)
        if suspected:
            samples = probe_edges(self._transport, self._device, suspected, self._probed_bytes)
            return self._revise(fit_links(samples), "sums are slow")
        refreshed = {edge: (latency, bandwidth) for edge, (latency, bandwidth) in zip(edges, values, strict=True)}
        if refreshed and abs(math.log(self.plan.slowdown(refreshed)[1])) > math.log(SLOW_RATIO):
            before = self.plan.id
            note = self._revise(refreshed, "links changed")
            return note if self.plan.id != before else None
        return None

    def _revise(self, figures: Mapping[Edge, tuple[float, float]], reason: str) -> str:
        """Take over new figures of some links, and the routes that suit them if all ranks find the same."""
        (source, target), slowdown = self.plan.slowdown(figures)
        told = f"{reason}: messages from rank {source} to {target} of the group take {slowdown:.3g} times as long"
        before, links = self.plan, self.plan.links.updated(figures)
        found = before.revised(links)
        agree = self._all_chose(found)
        self._follow(found if agree else before.kept(links))
        if not agree:
            return f"{told}; the routes stay, for ranks chose different ones"
        changes = before.changes(found)
        return f"{told}; new routes: {changes} (plan {found.id})" if changes else f"{told}; the routes stay"

    def _follow(self, plan: RoutePlan) -> None:
        self.plan = plan
        self._moves = [moves_of(choice.route, self._transport.rank) for choice in plan.choices]

    def _all_chose(self, plan: RoutePlan) -> bool:
        """Whether the plan is the same on all ranks."""
        ids: list[str] = [""] * self._transport.size
        dist.all_gather_object(ids, plan.id, group=self._transport.group)
        return len(set(ids)) == 1


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
