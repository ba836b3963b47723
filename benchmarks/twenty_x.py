"""How much a tuned layout gains over a naive one, by the cost model: GPT-3 175B on 1,024 A100 of 80 GB.

    python benchmarks/twenty_x.py

"Twenty times faster" is widely quoted for tuned parallel training. Here the same job is estimated under naive plans
(data parallelism and one plain split of the model, no overlap, no sharding, full recompute) and under the best plan of
the exact search, by one model of one training stack. Published runs of the same model on as many devices say whether
the best is plausible.

Writes ``benchmarks/results/twenty_x.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.cost.columns import encode
from autotune.cost.estimate import estimate
from autotune.search.estimated import EstimatedPlan, describe_estimates
from autotune.search.neighbourhood import Neighbourhood, explore
from autotune.search.question import Question, ask
from autotune.search.solve import solve
from autotune.search.words import layout_words, settings, settings_words
from autotune.specs.cluster import parse_cluster
from engine.atomic import write_json
from engine.plan import Plan, plan_table
from engine.rule import RuleContext
from engine.rules import violations
from engine.spec import ModelSpec

RESULT = Path(__file__).resolve().parent / "results" / "twenty_x.json"

GPT3 = ModelSpec(
    name="gpt3-175b",
    family="gpt2",
    num_layers=96,
    hidden_size=12288,
    num_heads=96,
    num_kv_heads=96,
    head_dim=128,
    ffn_size=49152,
    vocab_size=51200,
    max_positions=2048,
    norm="layernorm",
    positions="learned",
    mlp="plain",
    activation="gelu_tanh",
    tied_embeddings=True,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)
"""GPT-3 (arXiv 2005.14165, table 2.1), the vocabulary padded as Megatron-LM does."""
CLUSTER = "a100x8:128"
SEQUENCE_LENGTH = 2048
BATCH = 1536
"""3.1 million tokens, near GPT-3's 3.2 million."""

NAIVE_PINS = (
    "zero_stage=0", "dp_replicate=1", "cp=1", "micro_batch_size=1", "recompute=full", "sequence_parallel=false",
    "overlap_dp=false", "overlap_tp=false", "overlap_pp=false", "schedule=gpipe,1f1b", "virtual_stages=1",
    "layers_per_stage=even", "rank_order=tp-cp-dp-pp", "precision=bf16",
)  # fmt: skip
"""What a first attempt does: data parallelism and a plain split of the model, any degrees."""
STARVED_PINS = (
    "micro_batch_size=1,2,3,4,6,8,12,16,24,32,48,64,96,128,192,384,768,1536",
    *(pin for pin in NAIVE_PINS if not pin.startswith(("micro_batch_size", "schedule"))), "schedule=gpipe",
)  # fmt: skip
"""The same with any micro-batch: large ones leave a pipeline with little to do."""
SHARDED = Plan(
    tp=2, dp_shard=512, zero_stage=3, recompute="full", precision="bf16", overlap_dp=False, overlap_pp=False
)  # fmt: skip
"""Another first attempt: parameters sharded over all pairs of devices."""

PUBLISHED = {
    "Megatron-LM, 2021 (arXiv 2104.04473, section 5.1)": (1536, 32.0),
    "Megatron-LM, 2024 (MegaScale, arXiv 2402.15627, table 2)": (768, 11.9),
    "MegaScale, 2024 (the same)": (768, 8.9),
}
"""Source -> sequences and seconds of a step; GPT-3 175B, 1,024 A100, sequences of 2,048 tokens."""


def main() -> int:
    """Estimate, compare, write the result file."""
    question = ask(model=GPT3, cluster=parse_cluster(CLUSTER), sequence_length=SEQUENCE_LENGTH, global_batch=str(BATCH))
    answer = solve(question, top=1, ladder=True, advise=False)
    best = answer.plans[0]
    naive, order = fitting(question, NAIVE_PINS)
    starved, starved_order = fitting(question, STARVED_PINS, starved=True)
    shown = {
        "fastest naive plan": naive.plan(int(order[0])),
        "median naive plan": naive.plan(int(order[len(order) // 2])),
        "slowest naive plan": naive.plan(int(order[-1])),
        "sharded over 512 pairs, no overlap": estimated(question, SHARDED),
        "starved pipeline, median": starved.plan(int(starved_order[len(starved_order) // 2])),
        "starved pipeline, slowest": starved.plan(int(starved_order[-1])),
    }
    factors = {name: plan.step_seconds.value / best.step_seconds.value for name, plan in shown.items()}
    rows = ["| plan | step | tokens/s a device | MFU | memory | the best plan is |", "|---|---|---|---|---|---|"]
    for name, plan in shown.items():
        told = f"{name}: {layout_words(plan.plan)}, {settings(plan.plan)['schedule']}" if plan.plan.pp > 1 else name
        rows.append(_row(told, plan, f"{factors[name]:.2g} times faster"))
    rows.append(_row(f"**best**: {layout_words(best.plan)}, {settings_words(best.plan)}", best, ""))
    published = {}
    for source, (batch, seconds) in PUBLISHED.items():
        published[source] = batch * SEQUENCE_LENGTH / seconds / question.cluster.num_devices
    rates = "; ".join(f"{source} {rate:.0f}" for source, rate in published.items())
    lines = [
        f"GPT-3 175B, {BATCH} sequences of {SEQUENCE_LENGTH} tokens, 1,024 A100 of 80 GB. Of {len(naive)} naive plans"
        f" (any tensor, pipeline and data-parallel degrees; no sharding, no overlap, micro-batch 1, full recompute)"
        f" {len(order)} fit; the best plan of the exact search is {factors['fastest naive plan']:.2g} times faster than"
        f" the fastest of them, {factors['median naive plan']:.2g} times faster than the median one and"
        f" {factors['slowest naive plan']:.2g} times faster than the slowest. Factors near twenty need a pipeline that"
        f" waits most of the time: of {len(starved_order)} such plans that fit, with at most a quarter as many"
        f" micro-batches as ranks, it is {factors['starved pipeline, median']:.2g} times faster than the median and"
        f" {factors['starved pipeline, slowest']:.2g} times faster than the slowest.",
        "",
        *rows,
        "",
        f"Published tokens/s a device of the same model on as many A100: {rates}. The table holds estimates, not runs.",
    ]
    write_json(RESULT, {
        "title": "Naive against tuned: GPT-3 175B on 1,024 A100",
        "setup": f"the cost model's closed form, exact search of {answer.counts.num_combinations:,} combinations",
        "lines": lines,
        "factors": factors,
        "best": _data(best),
        "naive": {name: _data(plan) for name, plan in shown.items()},
        "published_tokens_per_second_per_device": published,
        "ladder": [
            {"rung": rung.words, "gain_ratio": rung.gain_ratio, "reason": rung.reason} for rung in answer.ladder
        ],
    })  # fmt: skip
    print("\n".join(lines))
    return 0


def fitting(question: Question, pins: Sequence[str], *, starved: bool = False) -> tuple[Neighbourhood, np.ndarray]:
    """The plans of a space of one's own, and the rows of those that fit, fastest first."""
    attempts = question.changed(pins=pins)
    found = explore(attempts, attempts.space)
    assert found is not None
    which = found.fits
    if starved:
        which &= found.columns.num_micro_batches * 4 <= found.columns.pp
    rows = np.flatnonzero(which)
    return found, rows[np.argsort(found.estimates.step_seconds[rows])]


def estimated(question: Question, plan: Plan) -> EstimatedPlan:
    """A plan of one's own, estimated; it must be legal and fit."""
    row = (plan, question.global_batch_size, question.sequence_length)
    table = plan_table([row])
    broken = violations(RuleContext(question.model, question.cluster.num_devices), table, ("universal",))
    assert not any(flags[0] for flags in broken.values()), [rule for rule, flags in broken.items() if flags[0]]
    columns = encode(table, question.model.num_layers)
    estimates = estimate(question.model, question.cluster, columns, software=question.software)
    return describe_estimates(question.model, question.cluster, [row], estimates, question.memory_limit_bytes)[0]


def _row(name: str, plan: EstimatedPlan, factor: str) -> str:
    step, mfu = plan.step_seconds, plan.mfu
    rate = plan.tokens_per_second.value / plan.plan.world_size
    memory = plan.memory_bytes.value / 2**30
    told_mfu = f"{mfu.value * 100:.1f} %" if mfu else "unknown"
    cells = [name, f"{step.value:.3g} s ({step.low:.3g} to {step.high:.3g})", f"{rate:.3g}", told_mfu]
    cells += [f"{memory:.0f} GiB" + ("" if plan.fits else " (does not fit)"), factor]
    return f"| {' | '.join(cells)} |"


def _data(plan: EstimatedPlan) -> dict[str, Any]:
    return {
        "plan": plan.plan.to_data(),
        "step_seconds": plan.step_seconds._asdict(),
        "tokens_per_second_per_device": plan.tokens_per_second.value / plan.plan.world_size,
        "mfu": plan.mfu.value if plan.mfu else None,
        "memory_gib": plan.memory_bytes.value / 2**30,
        "fits": plan.fits,
    }


if __name__ == "__main__":
    raise SystemExit(main())
