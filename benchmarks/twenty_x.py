"""How much a tuned layout gains over a naive one, by the cost model: GPT-3 175B on 1,024 A100 of 80 GB.

    python benchmarks/twenty_x.py

"Twenty times faster" is widely quoted for tuned parallel training. Here the same job is estimated under naive plans
(data parallelism and one plain split of the model, no overlap, no sharding, full recompute) and under the best plan of
the exact search, by one model of one training stack. Published runs of the same model on as many devices say whether
the best is plausible.

Writes ``benchmarks/results/twenty_x.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.cost.columns import encode
from autotune.cost.estimate import estimate
from autotune.search.estimated import EstimatedPlan, describe_estimates
from autotune.search.question import Question, ask
from autotune.search.solve import solve
from autotune.search.words import layout_words, settings_words
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

PLAIN: dict[str, Any] = {
    "precision": "bf16",
    "recompute": "full",
    "zero_stage": 0,
    "overlap_dp": False,
    "overlap_tp": False,
    "overlap_pp": False,
    "schedule": "gpipe",
}
NAIVE = {
    "tensor parallel over four nodes, two pipeline ranks": Plan(tp=32, pp=2, dp_shard=16, **PLAIN),
    "pipeline of 64 ranks, whole batch in flight": Plan(pp=64, dp_shard=16, **PLAIN),
    "pipeline of 64 ranks, four sequences a micro-batch": Plan(pp=64, dp_shard=16, micro_batch_size=4, **PLAIN),
    "parameters sharded over all ranks, no overlap": Plan(dp_shard=1024, **(PLAIN | {"zero_stage": 3})),
}
"""What a first attempt does: the smallest groups that hold the model, split one way."""

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
    naive = {name: estimated(question, plan) for name, plan in NAIVE.items()}
    rows = ["| plan | step | tokens/s a device | MFU | memory | the best plan is |", "|---|---|---|---|---|---|"]
    for name, plan in naive.items():
        factor = plan.step_seconds.value / best.step_seconds.value
        rows.append(_row(f"{name}: {layout_words(plan.plan)}", plan, f"{factor:.2g} times faster"))
    rows.append(_row(f"**best**: {layout_words(best.plan)}, {settings_words(best.plan)}", best, ""))
    published = {}
    for source, (batch, seconds) in PUBLISHED.items():
        published[source] = batch * SEQUENCE_LENGTH / seconds / question.cluster.num_devices
    told = "; ".join(f"{source} {rate:.0f}" for source, rate in published.items())
    factors = {name: plan.step_seconds.value / best.step_seconds.value for name, plan in naive.items()}
    lowest, highest = min(factors.values()), max(factors.values())
    lines = [
        f"GPT-3 175B, {BATCH} sequences of {SEQUENCE_LENGTH} tokens, 1,024 A100 of 80 GB: the best plan is"
        f" {lowest:.2g} to {highest:.2g} times faster than naive ones that fit.",
        "",
        *rows,
        "",
        f"Published tokens/s a device of the same model on as many A100: {told}. The table holds estimates, not runs.",
    ]
    write_json(RESULT, {
        "title": "Naive against tuned: GPT-3 175B on 1,024 A100",
        "setup": f"the cost model's closed form, exact search of {answer.counts.num_combinations:,} combinations",
        "lines": lines,
        "factors": factors,
        "best": _data(best),
        "naive": {name: _data(plan) for name, plan in naive.items()},
        "published_tokens_per_second_per_device": published,
        "ladder": [
            {"rung": rung.words, "gain_ratio": rung.gain_ratio, "reason": rung.reason} for rung in answer.ladder
        ],
    })  # fmt: skip
    print("\n".join(lines))
    return 0


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
