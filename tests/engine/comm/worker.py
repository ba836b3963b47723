"""One rank of the tests of ``engine.comm``, started by ``tests/engine/parallel/launch.py``.

Every rank writes what it found into ``FOLDER/<rank>.pt``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.comm.all_reduce import all_reduce, moves_of
from engine.comm.routing import RoutedSums, Router
from engine.comm.transport import EmulatedTransport, Message, Transport, VirtualTransport
from engine.config import RuntimeOptions
from engine.context import ParallelContext, open_context
from engine.plan import Plan
from engine.probe_pairs import probe_edges
from engine.route_choice import size_class
from engine.routes import Route, halving_doubling, ring, tree, two_level
from engine.topology import Links, fit_links
from tests.engine.parallel import cases

SIZE = 4
CPU = torch.device("cpu")
ROUTES: dict[str, Route] = {
    "ring": ring(SIZE).reordered([2, 0, 3, 1]),
    "halving-doubling": halving_doubling(SIZE).reordered([1, 3, 0, 2]),
    "tree": tree(SIZE, [(3, 1), (1, 0), (2, 0)], [(0, 2), (0, 1), (1, 3)]),
    "two-level 2+2": two_level([2, 2]).reordered([0, 2, 3, 1]),
    "two-level 3+1": two_level([3, 1]),
    "two-level 2+1+1": two_level([2, 1, 1]),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LENGTHS = (1, 3, 1000, 4099)
SENT_BYTES = 2**20
"""Buffers that the watched sums add up."""
SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}
FAULT_AT = 6
"""Step from which a link is ten times slower."""


def inputs(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Everybody's buffer, [ranks, length]."""
    return torch.randn(SIZE, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64).to(dtype)


def emulated_links() -> Links:
    """Pairs 0, 2 and 1, 3 are close; one link is slower in one direction."""
    close = np.equal.outer(np.arange(SIZE) % 2, np.arange(SIZE) % 2)
    latency, bandwidth = np.where(close, 2e-6, 1e-5), np.where(close, 50e9, 10e9)
    bandwidth[1, 3] = 5e9
    return Links(latency, bandwidth)


def sums(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The sum of every kind of buffer along every route."""
    found = {}
    transport = Transport(group)
    for name, route in ROUTES.items():
        moves = moves_of(route, transport.rank)
        for dtype in DTYPES:
            for length in LENGTHS:
                values = inputs(dtype, length)[transport.rank].clone()
                all_reduce(values, route, moves, transport)
                found[f"{name} {dtype} {length}"] = values
    return found


def rerouting(group: dist.ProcessGroup) -> dict[str, Any]:
    """Sums step by step; after some, a link in use becomes ten times slower, later an unused one too."""
    links = emulated_links()
    transport = VirtualTransport(group, links)
    router = Router(links, transport, CPU)
    index = size_class(SENT_BYTES)
    edge = next(edge for edge in router.plan.choices[index].route.edges)
    seconds, ids, notes, exact, uses = [], [], [], [], []
    for step in range(12):
        if step == FAULT_AT:
            latency, bandwidth = float(links.latency[edge]), float(links.bandwidth[edge])
            transport.links = links.updated({edge: (10 * latency, bandwidth / 10)})
        uses.append(edge in router.plan.choices[index].route.edges)
        values = torch.ones(SENT_BYTES // 4)
        start = transport.now
        router.all_reduce(values)
        seconds.append(transport.now - start)
        exact.append(bool((values == SIZE).all()))
        notes.append(router.end_step())
        ids.append(router.plan.id)
    return {"notes": notes, "uses": uses, "ids": ids, "exact": exact, "seconds": seconds}


def refreshing(group: dist.ProcessGroup) -> dict[str, Any]:
    """A link changes that no sum goes over; one pair is measured a step, so every pair after as many steps."""
    links = emulated_links()
    transport = VirtualTransport(group, links)
    router = Router(links, transport, CPU, refreshes=True)
    transport.links = links.updated({(1, 3): (2e-6, 50e9)})
    notes = [router.end_step() for _ in range(SIZE * (SIZE - 1) // 2)]
    return {"notes": notes, "bandwidth": float(router.plan.links.bandwidth[1, 3])}


def disagreeing(group: dist.ProcessGroup) -> dict[str, Any]:
    """Ranks that know different links, at the start and at a change, and a sum after each."""
    rank = dist.get_rank(group)
    links = emulated_links()
    own = Links(links.latency, links.bandwidth[np.ix_(*2 * [np.roll(np.arange(SIZE), rank)])])
    router = Router(own, VirtualTransport(group, links), CPU)
    ids, notes = [], []
    for _ in range(2):
        values = torch.ones(1000)
        router.all_reduce(values)
        assert bool((values == SIZE).all())
        ids.append(router.plan.id)
        notes.append(router._revise({(0, 1): (1e-5, 1e6 if rank else 1e12)}, "links changed"))
    return {"ids": ids, "notes": notes}


def timed(group: dist.ProcessGroup) -> dict[str, float]:
    """Seconds of every route in virtual time, of a buffer that all pieces divide."""
    found = {}
    for name, route in ROUTES.items():
        transport = VirtualTransport(group, emulated_links())
        all_reduce(torch.ones(48 * 256), route, moves_of(route, transport.rank), transport)
        found[name] = transport.now
    return found


def slept(group: dist.ProcessGroup) -> float:
    """Real seconds of one message of 1000 bytes around a ring of links that take 30 ms for it."""
    links = Links(np.full((SIZE, SIZE), 0.01), np.full((SIZE, SIZE), 5e4))
    transport = EmulatedTransport(group, links)
    start = transport.clock()
    sent, received = Message(torch.zeros(250), (transport.rank + 1) % SIZE), torch.zeros(250)
    transport.exchange(sent, Message(received, (transport.rank - 1) % SIZE))
    return transport.clock() - start


def trained() -> dict[str, Any]:
    """A small run whose gradients are summed by the backend, and along routes."""
    plan = {"dp_replicate": 4, "zero_stage": 0, "micro_batch_size": 1}
    return {
        name: cases.train(cases.run_config("llama", plan | {"all_reduce": name}, SGD))
        for name in ("native", "topology")
    }


def routed(group: dist.ProcessGroup) -> torch.Tensor:
    """Two sums at once through what the gradients take, with links measured on the spot."""
    context = ParallelContext(Plan(dp_replicate=SIZE, zero_stage=0), CPU, dist.get_rank(), groups={"data": group})
    along = RoutedSums.along(("data", "expert_data"), context)
    one, other = torch.full((5,), 1.0), torch.arange(300.0)
    for pending in [along(one, "data", context), along(other, "data", context)]:
        pending.wait()
    assert along.end_step() == []
    return torch.cat([one, other])


def main(folder: Path) -> None:
    """Everything, in a group whose ranks are placed by ``FOLDER/topology.json``."""
    context = open_context(
        Plan(tp=2, dp_replicate=2), RuntimeOptions(topology=str(folder / "topology.json"), hang_timeout_seconds=60)
    )
    group = dist.group.WORLD
    assert group is not None
    assert context.links is not None
    samples = probe_edges(VirtualTransport(group, emulated_links()), CPU)
    found = {
        "number": int(os.environ["RANK"]),
        "rank": context.rank,
        "tp_bandwidth": float(context.links.bandwidth[context.rank, context.rank ^ 1]),
        "sums": sums(group),
        "timed": timed(group),
        "slept": slept(group),
        "links": {f"{source}-{target}": figures for (source, target), figures in fit_links(samples).items()},
        "rerouting": rerouting(group),
        "refreshing": refreshing(group),
        "disagreeing": disagreeing(group),
        "routed": routed(group),
        "trained": trained(),
    }
    torch.save(found, folder / f"{context.rank}.pt")
    context.barrier()
