"""How fast the planner answers, and how exactly.

    python benchmarks/planner_speed.py [--only rate front shell]

``rate``: plans per CPU second with the full cost model, nothing pruned. ``front``: the exact Pareto front of step time
and memory of a mixture of experts of 1.0T parameters (``planner_speed_moe.yaml``) on 16,384 devices, over every
combination of the default space. ``shell``: ``autotune plan`` for a dense model of 70B on 512 devices, from the shell.

CPU time is of all processes. Wall times count only where nothing else ran: the load at the start is written down.

Writes ``benchmarks/results/planner_speed.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.search.exact import SearchResult, search
from autotune.search.plan_space import PlanSpace, plan_space
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.atomic import write_json
from engine.flops import parameter_counts
from engine.hf_config import load_model
from engine.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planner_speed.json"
MOE_FILE = ROOT / "benchmarks" / "planner_speed_moe.yaml"
DENSE_FILE = ROOT / "benchmarks" / "planner_speed_dense.yaml"

RATE_PINS = {
    "dense": ("virtual_stages=1,2,4", "dp_replicate=1"),
    "mixture": ("schedule=1f1b", "virtual_stages=1", "dp_replicate=1", "layers_per_stage=even", "micro_batch_size=1,2"),
}
"""What keeps the spaces of the rate small enough to be estimated whole."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("rate", "front", "shell"), default=("rate", "front", "shell"))
    chosen = parser.parse_args().only
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    load = os.getloadavg()[0]
    for name, measure in {"rate": rate, "front": front, "shell": shell}.items():
        if name in chosen:
            found[name] = measure() | {"load_before": round(load, 1)}
            print(name, json.dumps(found[name], indent=2), flush=True)
    head = {
        "title": "How fast the planner answers",
        "setup": f"{os.cpu_count()} cores ({platform.machine()}), no GPU; CPU seconds of all processes",
        "lines": lines(found),
    }
    write_json(RESULT, head | {name: found[name] for name in ("rate", "front", "shell") if name in found})
    print("\n".join(head["lines"]))


def lines(found: dict[str, Any]) -> list[str]:
    """What is said of the figures."""
    told = []
    for name, r in found.get("rate", {}).items():
        if name in ("dense", "mixture"):
            told.append(
                f"- Full cost model, {r['model']}: {r['plans_per_cpu_second']:,} plans per CPU second"
                f" ({r['plans']:,} plans, nothing pruned)."
            )
    if "front" in found:
        r = found["front"]
        told.append(
            f"- Exact front of step time and memory, {r['model']} on {r['devices']:,} devices:"
            f" {r['combinations']:,} combinations, {r['legal']:,} of them legal, in {r['wall_seconds']} s"
            f" ({r['cpu_seconds']} CPU seconds, {r['processes']} processes, {r['peak_gib']} GiB at most together;"
            f" load before: {r['load_before']}). {r['evaluated']:,} plans were estimated, bounds rule out the others;"
            f" the front has {r['front']} points."
        )
    if "shell" in found:
        r = found["shell"]
        told.append(
            f"- `autotune plan`, {r['model']} on {r['devices']} devices, from the shell: {r['wall_seconds']} s"
            f" ({r['cpu_seconds']} CPU seconds; load before: {r['load_before']})."
        )
    return told


def rate() -> dict[str, Any]:
    """Plans per CPU second with nothing pruned, in one process."""
    dense = load_model(DENSE_FILE)
    cases = {
        "dense": (dense, parse_cluster("h100x8:64"), 512, 8192),
        "mixture": (load_model(MOE_FILE), parse_cluster("h100x8:256"), 4096, 4096),
    }
    return {
        name: _rate(model, cluster, batch, length, RATE_PINS[name])
        for name, (model, cluster, batch, length) in cases.items()
    }


def _rate(model: ModelSpec, cluster: ClusterSpec, batch: int, length: int, pins: tuple[str, ...]) -> dict[str, Any]:
    space = plan_space(model, cluster, global_batch_sizes=[batch], sequence_lengths=[length], pins=pins)
    result, cpu, wall = _timed(lambda: search(model, cluster, space, num_processes=1, prune=False))
    return {
        "model": f"{model.name} on {cluster.num_devices} devices",
        "plans": result.counts.evaluated,
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "plans_per_cpu_second": round(result.counts.evaluated / cpu),
    }


def front() -> dict[str, Any]:
    """The exact front of the mixture of experts on 16,384 devices."""
    model, cluster = load_model(MOE_FILE), parse_cluster("h100x8:2048")
    space: PlanSpace = plan_space(model, cluster, global_batch_sizes=[16384], sequence_lengths=[4096])
    processes = 2
    result, cpu, wall = _timed(lambda: search(model, cluster, space, num_processes=processes))
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    counts = result.counts
    return {
        "model": f"{model.name} ({parameter_counts(model).total / 1e12:.2f}T parameters)",
        "devices": cluster.num_devices,
        "combinations": counts.combinations,
        "redundant": counts.redundant,
        "removed": counts.removed,
        "legal": counts.legal,
        "pruned": counts.pruned,
        "pruned_by_memory": counts.pruned_by_memory,
        "evaluated": counts.evaluated,
        "front": len(result.front),
        "fastest": result.front.plans[0].describe() if result.fits else "",
        "fastest_step_seconds": float(result.front.values[0, 0]) if result.fits else None,
        "processes": processes,
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(wall, 1),
        "peak_gib": round((own + processes * child) / 2**20, 2),
    }


def shell() -> dict[str, Any]:
    """``autotune plan`` as people start it; the fastest of three."""
    command = [
        str(Path(sys.executable).with_name("autotune")), "plan", "--model", str(DENSE_FILE), "--cluster", "h100x8:64",
        "--seq-len", "8192", "--global-batch", "512",
    ]  # fmt: skip
    runs = [_timed(lambda: subprocess.run(command, check=True, capture_output=True))[1:] for _ in range(3)]
    cpu, wall = min(runs, key=lambda run: run[1])
    model = load_model(DENSE_FILE)
    return {"model": model.name, "devices": 512, "cpu_seconds": round(cpu, 2), "wall_seconds": round(wall, 2)}


def _timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Result, CPU seconds of this process and its children, wall seconds."""
    cpu, wall = _cpu_seconds(), time.perf_counter()
    result: SearchResult = work()
    return result, _cpu_seconds() - cpu, time.perf_counter() - wall


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
