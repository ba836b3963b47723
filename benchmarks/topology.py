"""All-reduce along chosen routes, placement and re-routing over emulated links, against what enumeration finds.

    python benchmarks/topology.py [--topologies 50]

Links are emulated throughout, no figure is of a real network. In virtual time: 50 random topologies of 8 devices with
shuffled numbers (clusters, a straggler, unrelated and asymmetric links, two levels of hierarchy) and three sizes of
buffers. Seeds 100 to 149: the search was widened after what it had missed on seeds 0 to 49. The time of the chosen
route is replayed from its list of messages and compared with the best of every ring, every order of ranks in
halving-doubling and in every two-level shape, and every tree; and with what a library takes that knows no links: a ring
or halving-doubling in the order of numbers, whichever is faster. Then one link of the route in use becomes ten times
slower. In real time: four gloo processes whose transport sleeps as a token bucket says.

Writes ``benchmarks/results/topology.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine.atomic import write_json
from engine.plan import Plan
from engine.rank_placement import assignment_cost, best_assignment, improved_assignment, traffic
from engine.route_choice import SIZE_CLASSES, choose
from engine.route_plan import RoutePlan
from engine.routes import halving_doubling, replay, ring
from engine.topology import Links

RESULT = Path(__file__).resolve().parent / "results" / "topology.json"
NUM_DEVICES = 8
FIRST_SEED = 100
"""Of the topologies; those below were looked at while the search was made."""
FAULT = 10.0
"""How much slower a link becomes."""
FAULT_AT, LAST_STEP = 6, 16
"""Step from which it is, and the last one."""
KINDS = ("clusters", "straggler", "asymmetric", "hierarchical")
PLANS = (
    Plan(tp=2, pp=2, dp_replicate=2),
    Plan(tp=4, dp_shard=2),
    Plan(pp=4, dp_shard=2),
    Plan(tp=2, cp=2, dp_replicate=2),
)
REAL_RANKS, REAL_BYTES = 4, 2**20
REAL_PROBED_BYTES = (2**10, 2**17)


def topology(seed: int) -> tuple[str, Links]:
    """A random one of the kinds in turn: latencies of 3 to 40 us, bandwidths of 1 to 100 GB/s."""
    draws = np.random.default_rng(seed)
    shape = (NUM_DEVICES, NUM_DEVICES)
    kind = KINDS[seed % len(KINDS)]
    number = draws.permutation(NUM_DEVICES)
    if kind == "clusters":
        cluster = draws.integers(0, draws.integers(2, 5), NUM_DEVICES)
        near = cluster[:, None] == cluster
        latency, bandwidth = np.where(near, 5e-6, 3e-5), np.where(near, 5e10, 5e9)
    elif kind == "hierarchical":
        pair, half = (number[:, None] // size == number // size for size in (2, 4))
        latency, bandwidth = np.select([pair, half], [3e-6, 8e-6], 4e-5), np.select([pair, half], [1e11, 2e10], 3e9)
    elif kind == "straggler":
        latency, bandwidth = np.full(shape, 1e-5), np.full(shape, 1e10)
        bandwidth[number[0]] /= draws.uniform(2, 8)
        bandwidth[:, number[0]] /= draws.uniform(2, 8)
    else:
        return kind, Links(draws.uniform(3e-6, 3e-5, shape), draws.uniform(1e9, 2e10, shape))
    return kind, Links(latency * draws.uniform(0.8, 1.25, shape), bandwidth * draws.uniform(0.8, 1.25, shape))


@dataclass(frozen=True)
class Judged:
    """One topology; lists by size class."""

    kind: str
    to_best: list[float]
    """Time of the chosen route over the enumerated optimum."""
    unaware_to_best: list[float]
    """The same of a ring or halving-doubling in the order of numbers, whichever is faster."""
    routes: list[str]
    choice_seconds: list[float]
    """What choosing took, of one CPU."""
    placement_to_best: list[float]
    """Cost of the placement by exchanges over the best of all, by plan."""
    placement_gain: list[float]
    """Cost of numbers as they are over the best, by plan."""
    faults: list[dict[str, Any]]
    """What a fault did, by size class."""


def judge(seed: int) -> Judged:
    """Everything about one topology in virtual time."""
    kind, links = topology(seed)
    chosen, best, seconds = [], [], []
    for num_bytes in SIZE_CLASSES:
        start = time.process_time()
        chosen.append(choose(links, num_bytes))
        seconds.append(time.process_time() - start)
        best.append(choose(links, num_bytes, exact=True).seconds)
    numbers = np.arange(NUM_DEVICES)
    unaware = [
        min(float(replay(route(NUM_DEVICES), links, num_bytes)[0]) for route in (ring, halving_doubling))
        for num_bytes in SIZE_CLASSES
    ]
    placements, gains = [], []
    for plan in PLANS:
        sent, times = traffic(plan), links.seconds(2**20)
        least = assignment_cost(sent, times, best_assignment(sent, times))
        placements.append(assignment_cost(sent, times, improved_assignment(sent, times)) / least)
        gains.append(assignment_cost(sent, times, numbers) / least)
    plan_in_force = RoutePlan(links, chosen)
    return Judged(
        kind=kind,
        to_best=[found.seconds / least for found, least in zip(chosen, best, strict=True)],
        unaware_to_best=[time_of / least for time_of, least in zip(unaware, best, strict=True)],
        routes=[found.route.kind for found in chosen],
        choice_seconds=seconds,
        placement_to_best=placements,
        placement_gain=gains,
        faults=[fault(plan_in_force, index, seed) for index in range(len(SIZE_CLASSES))],
    )


def degraded(links: Links, edge: tuple[int, int]) -> Links:
    """One link ten times slower."""
    return links.updated({edge: (FAULT * float(links.latency[edge]), float(links.bandwidth[edge]) / FAULT)})


def fault(plan: RoutePlan, index: int, seed: int) -> dict[str, Any]:
    """Sums of one size, step by step, while a link of their route breaks; what is done is what ``Router`` does."""
    links, num_bytes = plan.links, SIZE_CLASSES[index]
    plan = RoutePlan(links, plan.choices)
    edges = plan.choices[index].route.edges
    edge = edges[np.random.default_rng(seed).integers(len(edges))]
    now, times, changed_after = links, [], None
    for step in range(1, LAST_STEP + 1):
        if step == FAULT_AT:
            now = degraded(links, edge)
        seconds = plan.choices[index].seconds_over(now)
        times.append(seconds)
        plan.observe(num_bytes, seconds)
        suspected = plan.suspected(plan.end_step())
        if suspected:
            figures = {pair: (float(now.latency[pair]), float(now.bandwidth[pair])) for pair in suspected}
            revised = plan.revised(plan.links.updated(figures))
            if plan.changes(revised) and changed_after is None:
                changed_after = step - FAULT_AT + 1
            plan = revised
    before, during, after = times[FAULT_AT - 2], times[FAULT_AT - 1], times[-1]
    return {"during_to_before": during / before, "after_to_before": after / before, "steps": changed_after}


# ------------------------------------------------------------------------------------------------------------ real time


def real_rank(output: Path) -> None:
    """One of four processes: sums over links that sleep; from a step on one is ten times slower."""
    import torch
    import torch.distributed as dist

    from engine.comm.routing import Router
    from engine.comm.transport import EmulatedTransport
    from engine.config import RuntimeOptions
    from engine.context import open_context

    context = open_context(Plan(dp_replicate=REAL_RANKS), RuntimeOptions())
    assert dist.group.WORLD is not None
    near = np.equal.outer(np.arange(REAL_RANKS) % 2, np.arange(REAL_RANKS) % 2)
    links = Links(np.where(near, 1e-3, 4e-3), np.where(near, 80e6, 20e6))
    transport = EmulatedTransport(dist.group.WORLD, links)
    router = Router(links, transport, context.device, probed_bytes=REAL_PROBED_BYTES)
    choice = router.plan.choices[1]
    edge = choice.route.edges[0]
    times, notes = [], []
    for step in range(1, LAST_STEP + 1):
        if step == FAULT_AT:
            transport.set_links(degraded(links, edge))
        values = torch.ones(REAL_BYTES // 4)
        context.barrier()
        start = time.perf_counter()
        router.all_reduce(values)
        times.append(max(context.gather(time.perf_counter() - start)))
        assert bool((values == REAL_RANKS).all())
        notes.append(router.end_step())
    if context.is_main:
        expected = [choice.seconds, choice.seconds_over(degraded(links, edge))]
        write_json(output, {"seconds": times, "notes": notes, "expected": expected, "kind": choice.route.kind})
    context.barrier()
    os._exit(0)  # taken down, gloo's threads sometimes abort


def real_run() -> dict[str, Any]:
    """Start the four processes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        root = Path(__file__).resolve().parents[1]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REAL_RANKS}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        subprocess.run([*launch, __file__, "--real-rank", str(output)], check=True, env=environment, cwd=root)
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


# --------------------------------------------------------------------------------------------------------------- report


def spread(values: list[float]) -> str:
    """Median, 95th percentile and largest, as cells."""
    return f"{median(values):.3f} | {np.quantile(values, 0.95):.3f} | {max(values):.3f}"


def uniform_loss() -> float:
    """The chosen route over the best known one on equal links, the worst of the size classes, less one."""
    links = Links(np.full((NUM_DEVICES, NUM_DEVICES), 1e-5), np.full((NUM_DEVICES, NUM_DEVICES), 1e10))
    return max(choose(links, size).seconds / choose(links, size, exact=True).seconds for size in SIZE_CLASSES) - 1


def tables(judged: list[Judged], loss: float) -> list[str]:
    """What was found in virtual time, as lines."""
    lines = [
        f"**Emulated links, virtual time.** Chosen route over the enumerated optimum, {len(judged)} topologies of"
        f" {NUM_DEVICES} devices (seeds {FIRST_SEED} to {FIRST_SEED + len(judged) - 1}; the search was made on others);"
        " beside it what a library takes that knows no links: a ring or halving-doubling in the order of numbers,"
        " whichever is faster:",
        "",
        "| buffer | median | 95 % | largest | unaware: median | 95 % | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for index, size in enumerate(SIZE_CLASSES):
        chosen, unaware = ([getattr(one, name)[index] for one in judged] for name in ("to_best", "unaware_to_best"))
        lines.append(f"| {size // 2**10} KiB | {spread(chosen)} | {spread(unaware)} |")
    everything = [ratio for one in judged for ratio in one.to_best]
    choosing = [seconds for one in judged for seconds in one.choice_seconds]
    share = sum(ratio <= 1.05 for ratio in everything) / len(everything)
    lines += [
        f"| all | {spread(everything)} | {spread([ratio for one in judged for ratio in one.unaware_to_best])} |",
        "",
        f"Within 5 % of the optimum: {share:.1%} of {len(everything)}. On equal links the loss is {loss:.2%}. Choosing"
        f" takes {median(choosing):.2f} s of a CPU for one size (median; largest {max(choosing):.2f} s).",
        "",
        "| kind | median | 95 % | largest | routes of large buffers |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [one for one in judged if one.kind == kind]
        if not of_kind:
            continue
        routes = [one.routes[-1] for one in of_kind]
        common = sorted(set(routes), key=lambda name: -routes.count(name))[:3]
        told = ", ".join(f"{name} ({routes.count(name)})" for name in common)
        lines.append(f"| {kind} | {spread([ratio for one in of_kind for ratio in one.to_best])} | {told} |")
    placements = [ratio for one in judged for ratio in one.placement_to_best]
    gains = [ratio for one in judged for ratio in one.placement_gain]
    lines += [
        "",
        f"Placement of {len(PLANS)} plans by greedy starts and exchanges, as of more than {NUM_DEVICES} devices, over"
        " the best of all 8! assignments: median"
        f" {median(placements):.3f}, largest {max(placements):.3f} (numbers as they are: median {median(gains):.2f},"
        f" largest {max(gains):.2f}).",
        "",
        *fault_lines([one for found in judged for one in found.faults]),
    ]
    return lines


def fault_lines(faults: list[dict[str, Any]]) -> list[str]:
    """What faults did, in words."""
    felt = [one for one in faults if one["during_to_before"] > 1.5]
    moved = [one for one in felt if one["steps"] is not None]
    if not moved:
        return [f"No link of {len(faults)} that became ten times slower was left by another route."]
    steps = sorted({one["steps"] for one in moved})
    return [
        f"One link of the route in use ten times slower: {len(felt)} of {len(faults)} faults made sums more than 1.5"
        f" times as long (median {median(one['during_to_before'] for one in felt):.1f} times). {len(moved)} of these"
        f" links were left by another route, after {' or '.join(map(str, steps))} slow steps; sums then took"
        f" {median(one['after_to_before'] for one in moved):.2f} times as long as before the fault (median; largest"
        f" {max(one['after_to_before'] for one in moved):.2f}). Other routes stayed: choosing again"
        " found nothing 5 % faster, or sums were not slow enough to look.",
    ]


def real_lines(found: dict[str, Any]) -> list[str]:
    """What the real run showed, in words."""
    seconds, notes = found["seconds"], found["notes"]
    acted = next((step for step, note in enumerate(notes) if note and "new routes" in note), None)
    steps = "was not left" if acted is None else f"was left after {acted - FAULT_AT + 2} slow steps"
    before, after = median(seconds[: FAULT_AT - 1]), median(seconds[(acted or FAULT_AT) + 1 :])
    during = median(seconds[FAULT_AT - 1 : (acted or FAULT_AT) + 1])
    return [
        f"**Emulated links, real time.** {REAL_RANKS} gloo processes, {REAL_BYTES // 2**20} MiB, a transport that"
        f" sleeps by token buckets (1 or 4 ms, 80 or 20 MB/s); first route {found['kind']}. Before the fault"
        f" {before * 1e3:.0f} ms (by the links {found['expected'][0] * 1e3:.0f} ms), during it {during * 1e3:.0f} ms"
        f" (by the links {found['expected'][1] * 1e3:.0f} ms), after re-routing {after * 1e3:.0f} ms; the link"
        f" {steps}.",
        "",
        *(f"* step {step + 1}: {note}" for step, note in enumerate(notes) if note),
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Routes, placement and re-routing over emulated links.")
    parser.add_argument("--topologies", type=int, default=50, help="random topologies")
    parser.add_argument("--real-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.topologies < 1:
        parser.error("--topologies: 1 or more")
    if options.real_rank:
        real_rank(options.real_rank)
        return
    start = time.perf_counter()
    found = real_run()
    with ProcessPoolExecutor() as pool:
        judged = list(pool.map(judge, range(FIRST_SEED, FIRST_SEED + options.topologies)))
    loss = uniform_loss()
    lines = [*tables(judged, loss), "", *real_lines(found)]
    result = {
        "title": "Topology: routes, placement and re-routing over emulated links",
        "arguments": sys.argv[1:],
        "setup": f"links emulated; {os.cpu_count()} CPU cores shared with other work, Python"
        f" {platform.python_version()}, {time.perf_counter() - start:.0f} s",
        "lines": lines,
        "topologies": [vars(one) for one in judged],
        "uniform_loss": loss,
        "real": found,
    }
    write_json(RESULT, result)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
