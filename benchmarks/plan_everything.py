"""Every model of a folder planned on every kind of machine: no crash, plausible figures, every refusal explained.

    python benchmarks/plan_everything.py FOLDER [--quick | --full]

Six kinds of devices, four sizes, for every ``config.json`` of a folder, with what would help. Choices that multiply the
space and change little (``PINS``) are held; ``--quick`` holds more and leaves the advice out (as the test of the same
name does), ``--full`` holds none.
Writes ``benchmarks/results/plan_everything.json``.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autotune.search.answer import Answer
from autotune.search.estimated import EstimatedPlan, Figure
from autotune.search.question import ask
from autotune.search.solve import solve
from autotune.search.words import layout_words
from autotune.specs.cluster import parse_cluster
from engine.atomic import write_json
from engine.errors import UserError
from engine.hf_config import load_model
from engine.spec import ModelSpec

RESULT = Path(__file__).resolve().parent / "results" / "plan_everything.json"
DEVICES = ("a100", "h100", "h200", "b200", "mi300x", "gb200")
NUM_DEVICES = (8, 64, 512, 4096)
SEQUENCE_LENGTH = 4096
BATCH_TOKENS = 2**22
PINS = ("dp_replicate=1", "rank_order=tp-cp-dp-pp", "layers_per_stage=even", "recompute_period=2")
"""Choices that are held unless all are searched."""
QUICK_PINS = (
    "dp_replicate=1", "cp=1", "schedule=1f1b,interleaved_1f1b", "virtual_stages=1,2,4", "layers_per_stage=even",
    "micro_batch_size=1,4", "rank_order=tp-cp-dp-pp", "zero_stage=1,3", "recompute=none,full", "overlap_tp=true",
)  # fmt: skip
"""Choices that the quick form holds."""
MOST_MFU = 0.75


@dataclass(frozen=True)
class Case:
    """One question and what came of it."""

    model: ModelSpec
    device: str
    num_devices: int
    answer: Answer | None
    refusal: str
    seconds: float

    @property
    def name(self) -> str:
        """Model, device and size."""
        return f"{self.model.name} on {self.num_devices} {self.device}"

    @property
    def kind(self) -> str:
        """``planned``, ``nothing fits`` or ``refused``."""
        if self.answer is None:
            return "refused"
        return "planned" if self.answer.plans else "nothing fits"


def cases(
    models: Sequence[ModelSpec], devices: Sequence[str], sizes: Sequence[int], pins: Sequence[str], *, advise: bool
) -> Iterator[Case]:
    """Ask about every combination. A refusal that is no UserError is a crash and ends it."""
    for model in models:
        length = min(SEQUENCE_LENGTH, model.max_positions)
        for device in devices:
            for size in sizes:
                started = time.perf_counter()
                answer, refusal = None, ""
                try:
                    question = ask(
                        model=model,
                        cluster=cluster_of(device, size),
                        sequence_length=length,
                        global_batch=str(max(BATCH_TOKENS // length, size)),
                        pins=pins,
                    )
                    answer = solve(question, top=3, advise=advise)
                except UserError as error:
                    refusal = str(error)
                yield Case(model, device, size, answer, refusal, time.perf_counter() - started)


def cluster_of(device: str, num_devices: int) -> Any:
    """So many devices in the usual nodes of their kind."""
    per_node = min(parse_cluster(device).devices_per_node, num_devices)
    while num_devices % per_node:
        per_node -= 1
    return parse_cluster(f"{device}x{per_node}:{num_devices // per_node}")


def faults(case: Case) -> list[str]:
    """What is not plausible about an answer; empty where all is."""
    answer, found = case.answer, []
    if answer is None:
        return (
            [] if len(case.refusal) > 40 and "hint" in case.refusal else [f"refused without saying why: {case.refusal}"]
        )
    for rank, plan in enumerate(answer.plans, start=1):
        found += [f"plan {rank}: {fault}" for fault in plan_faults(plan)]
        if not plan.fits:
            found.append(f"plan {rank} does not fit")
    if not answer.plans:
        found += misfit_faults(answer)
    return found


def plan_faults(plan: EstimatedPlan) -> list[str]:
    """What is not plausible about one plan."""
    figures: dict[str, Figure | None] = {
        name: getattr(plan, name) for name in ("step_seconds", "tokens_per_second", "memory_bytes", "mfu", "hfu")
    }
    found = [
        f"{name} {figure} is not ordered or not positive"
        for name, figure in figures.items()
        if figure is not None and not 0 < figure.low <= figure.value <= figure.high < float("inf")
    ]
    if plan.mfu is None or not 0 < plan.mfu.value < MOST_MFU:
        found.append(f"MFU {plan.mfu and plan.mfu.value} is out of bounds")
    for whole, parts in ((plan.step_seconds.value, plan.time), (plan.memory_bytes.value, plan.memory)):
        if min(parts.values()) < 0 or abs(sum(parts.values()) - whole) > 1e-6 * whole:
            found.append(f"parts {parts} do not add up to {whole}")
    return found


def misfit_faults(answer: Answer) -> list[str]:
    """What a refusal for want of memory lacks."""
    misfit = answer.misfit
    if misfit is None:
        return ["nothing fits and nothing is said about it"]
    found = [] if misfit.closest.excess_bytes > 0 else ["the closest plan fits"]
    if not misfit.fixes:
        found.append("no change is named that makes it fit")
    found += [f"{fix.id} does not fit" for fix in misfit.fixes if fix.plan is None or not fix.plan.fits]
    return found


def main() -> int:
    """Plan everything, write the result file."""
    parser = argparse.ArgumentParser(description="Plan every model of a folder on every kind of machine.")
    parser.add_argument("folder", type=Path, help="folder of Hugging Face config.json files")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="hold more choices, no advice")
    size.add_argument("--full", action="store_true", help="hold none: half an hour and more")
    options = parser.parse_args()
    models = [load_model(path) for path in sorted(options.folder.glob("*.json"))]
    pins = QUICK_PINS if options.quick else () if options.full else PINS
    found = []
    for case in cases(models, DEVICES, NUM_DEVICES, pins, advise=not options.quick):
        found.append(case)
        best = case.answer.plans[0] if case.answer and case.answer.plans else None
        told = f"{layout_words(best.plan)}, {best.step_seconds.value:.3g} s" if best else case.refusal
        print(f"{case.seconds:6.2f} s  {case.name}: {case.kind} {told}", *faults(case), sep="\n    ", flush=True)
    wrong = {case.name: faults(case) for case in found if faults(case)}
    kinds = Counter(case.kind for case in found)
    mfus = [plan.mfu.value for case in found if case.answer for plan in case.answer.plans[:1] if plan.mfu]
    seconds = [case.seconds for case in found]
    sizes = ", ".join(map(str, NUM_DEVICES))
    lines = [
        f"{len(found)} questions ({len(models)} models, {len(DEVICES)} kinds of devices, {sizes} devices):"
        f" {', '.join(f'{count} {kind}' for kind, count in kinds.items())}, {len(wrong)} implausible.",
        "",
        f"MFU of the best plans: median {median(mfus) * 100:.0f} %, from {min(mfus) * 100:.0f} to"
        f" {max(mfus) * 100:.0f} %. Seconds an answer: median {median(seconds):.2f}, at most {max(seconds):.1f}.",
    ]
    write_json(RESULT, {
        "title": "Every model on every kind of machine",
        "arguments": ["FOLDER"],
        "setup": "2 cores shared with other work; held: " + (", ".join(pins) or "nothing"),
        "lines": lines,
        "kinds": dict(kinds),
        "implausible": wrong,
        "answers": [_data(case) for case in found],
    })  # fmt: skip
    print("\n".join(lines))
    return int(bool(wrong))


def _data(case: Case) -> dict[str, Any]:
    data: dict[str, Any] = {"case": case.name, "kind": case.kind, "seconds": round(case.seconds, 2)}
    if case.answer and case.answer.plans:
        best = case.answer.plans[0]
        data |= {"plan": best.plan.describe(), "step_seconds": float(f"{best.step_seconds.value:.4g}")}
        data |= {"mfu": best.mfu and round(best.mfu.value, 3), "memory_gib": round(best.memory_bytes.value / 2**30, 1)}
    elif case.answer and case.answer.misfit:
        data["fixes"] = [fix.words for fix in case.answer.misfit.fixes]
    else:
        data["refusal"] = case.refusal
    return data


if __name__ == "__main__":
    raise SystemExit(main())
