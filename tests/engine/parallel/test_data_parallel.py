"""Data parallelism beyond what the equality matrix shows: what each kind sends, replicas that stay equal bit for bit,
clipping and finite checks over every mesh, states that are read under any other sharding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.optim.groups import GROUPS
from engine.parallel.replicated import BUCKET_BYTES, GradientReducer, gradient_buckets
from engine.plan import Plan
from tests.engine.parallel.cases import MODELS, run_config, train
from tests.engine.parallel.compare import largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

SGD: dict[str, Any] = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}
ADAMW: dict[str, Any] = {"clip_norm": 0.5, "weight_decay": 0.1}
AUXILIARY = {"router_aux_loss_coefficient": 0.05}
ZERO = {f"zero{stage}": {"dp_shard": 2, "zero_stage": stage} for stage in range(4)}
HYBRID = {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}
SP = {"tp": 2, "sequence_parallel": True}

COUNTED = [
    Case(f"{kind}-counts-{accumulation}", {**plan, "micro_batch_size": size // accumulation}, "gpt2-untied",
         "collectives", SGD)
    for kind, plan, size in (*((kind, plan, 6) for kind, plan in ZERO.items()), ("hybrid", HYBRID, 3))
    for accumulation in (1, 3)
]  # fmt: skip
SPLIT_BACKWARD = ("zbv", "interleaved_zero_bubble")
FOUR_STAGES = {"pp": 2, "virtual_stages": 2, "micro_batch_size": 2}
PIPELINED = [
    Case(f"{schedule}-{kind}", {**ZERO[kind], **FOUR_STAGES, "schedule": schedule}, "seven-tied", "collectives", SGD)
    for schedule in SPLIT_BACKWARD
    for kind in ("zero0", "zero2", "zero3")
]  # fmt: skip
REPLICAS = {
    "replicated": {"dp_replicate": 2},
    "zero1": ZERO["zero1"],
    "without-overlap": {**ZERO["zero1"], "overlap_dp": False},
    "zero1-experts": {**ZERO["zero1"], "ep": 2},
    "zero1-tp": {**ZERO["zero1"], **SP},
    "zero1-of-hybrid": {**HYBRID, "zero_stage": 1},
}
EQUAL_COPIES = [
    Case(name, {"micro_batch_size": 3, **plan}, "moe" if "ep" in plan else "gpt2", "data_cases:replicas", ADAMW)
    for name, plan in REPLICAS.items()
]
SPOILED = [
    Case(f"infinite-{name}", plan, model, "data_cases:infinite_gradient", ADAMW, {"parameter": parameter})
    for name, plan, model, parameter in (
        ("shard", ZERO["zero3"], "llama", "layers.1.ffn.up.weight"),
        ("replica", {"dp_replicate": 2, "micro_batch_size": 2}, "llama", "layers.1.ffn.up.weight"),
        ("zero1", ZERO["zero1"], "llama", "layers.1.ffn.up.weight"),
        ("tp", {"tp": 2}, "llama", "layers.1.ffn.up.weight"),
        ("repeated-over-tp", {"tp": 2}, "llama", "layers.1.ffn_norm.weight"),
        ("stage", {"pp": 2}, "llama", "layers.2.ffn.up.weight"),
        ("experts", {**ZERO["zero2"], "ep": 2}, "moe", "layers.1.moe.experts.up"),
    )
]
CLIP: dict[str, Any] = {**SGD, **AUXILIARY, "clip_norm": 0.05}
CLIPPED = [
    Case(f"clipped-{name}", {"micro_batch_size": 3, **plan}, "moe", hyperparameters=CLIP)
    for name, plan in {
        "experts-replicated": {"dp_replicate": 2},
        "experts-split": {"dp_replicate": 2, "ep": 2},
        "experts-split-beside-shards": {**ZERO["zero3"], "ep": 2},
        "experts-over-tp": {**SP, "ep": 2, "micro_batch_size": 6},
        "experts-hybrid": {**HYBRID, "ep": 2},
        "experts-in-slices": {**ZERO["zero2"], **SP, "etp": 2, "ep": 2},
    }.items()
]
WRITTEN = [
    Case(f"saved-by-{name}", {"micro_batch_size": 3, **plan}, "uneven", hyperparameters=ADAMW,
         options={"last_step": 2, "save": name})
    for name, plan in {"zero1": ZERO["zero1"], "hybrid": HYBRID}.items()
]  # fmt: skip
READ = [
    Case(f"{source}-to-{name}", {"micro_batch_size": 2, **plan}, "uneven", hyperparameters=ADAMW,
         options={"first_step": 2, "load": source})
    for source, name, plan in (
        ("zero1", "zero0", ZERO["zero0"]), ("zero1", "zero2", ZERO["zero2"]), ("zero1", "zero3", ZERO["zero3"]),
        ("zero1", "tp", {**SP}), ("zero1", "hybrid", {**HYBRID, "micro_batch_size": 1}),
        ("zero1", "zero1-tp", {**ZERO["zero1"], **SP}),
        ("hybrid", "zero1-of-four", {"dp_shard": 4, "zero_stage": 1, "micro_batch_size": 1}),
        ("hybrid", "replicated-tp", {"dp_replicate": 2, **SP}),
        ("hybrid", "zero1-of-three", {"dp_shard": 3, "zero_stage": 1}), ("hybrid", "zero3-of-three", {"dp_shard": 3}),
    )
]  # fmt: skip
EXPERTS_WRITTEN = [
    Case("saved-by-experts", {**ZERO["zero1"], "ep": 2}, "moe", hyperparameters=ADAMW,
         options={"last_step": 2, "save": "experts"})
]  # fmt: skip
EXPERTS_READ = [
    Case(f"experts-to-{name}", plan, "moe", hyperparameters=ADAMW, options={"first_step": 2, "load": "experts"})
    for name, plan in {"zero3": ZERO["zero3"], "zero0-ep": {**ZERO["zero0"], "ep": 2}}.items()
]
REORDERED = [
    Case(f"reordered-{name}", ZERO[name], "gpt2", "data_cases:changed_order", ADAMW) for name in ("zero1", "zero3")
]
ALL = [
    *WRITTEN, *EXPERTS_WRITTEN, *COUNTED, *PIPELINED, *EQUAL_COPIES, *SPOILED, *CLIPPED, *READ, *EXPERTS_READ,
    *REORDERED,
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each case gave."""
    folder = tmp_path_factory.mktemp("data")
    for world_size in (2, 4, 3):  # what is read was written before
        run_cases([case for case in ALL if Plan(**case.plan).world_size == world_size], world_size, folder)
    return folder


@cache
def reference(model: str, hyperparameters: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """What one process gives on whole batches, all three steps."""
    return train(run_config(model, {}, dict(hyperparameters)))


def one_process(case: Case) -> dict[str, Any]:
    """The reference of a case."""
    return reference(case.model, tuple(case.hyperparameters.items()))


# --------------------------------------------------------------------------------------------------- what is sent


def group_bytes(num_ranks: int) -> dict[str, int]:
    """Bytes of the parameters that ``fully_shard`` moves together, every one padded to rows for all ranks."""
    found: dict[str, int] = {}
    with torch.device("meta"):
        decoder = Decoder(MODELS["gpt2-untied"], layers=range(3))
    for fqn, parameter in decoder.named_parameters():
        first = fqn.split(".")[0]
        group = ".".join(fqn.split(".")[:2]) if first == "layers" else "last" if first in ("norm", "head") else first
        rows = -(-len(parameter) // num_ranks) * num_ranks
        found[group] = found.get(group, 0) + rows * (parameter.numel() // len(parameter)) * 8
    return found


def expected_counts(case: Case) -> dict[str, tuple[int, int]]:
    """Calls and message bytes of a step in closed form.

    Beside gradients and parameters: valid tokens (8 bytes over data-parallel ranks), and the loss, the auxiliary loss,
    the experts' evenness and squared norms of all groups (8 bytes each over all ranks, here the data-parallel ones).
    """
    plan = Plan(**case.plan)
    accumulation = plan.num_micro_batches(12)
    groups = group_bytes(plan.dp_shard)
    size = sum(groups.values())
    sums = 8 + 8 * (3 + len(GROUPS))
    if plan.zero_stage < 2:  # one bucket
        found = {f"dp all_reduce {plan.dp}": (3, size + sums)}
        return found | ({f"dp all_gather {plan.dp_shard}": (1, size)} if plan.zero_stage == 1 else {})
    found = {f"dp all_reduce {plan.dp}": (2, sums)}
    scatters = 1 if plan.zero_stage == 2 else accumulation
    found[f"dp reduce_scatter {plan.dp_shard}"] = (len(groups) * scatters, size * scatters)
    # Stage 3 gathers for the forward and again for the backward pass of each micro-batch, but for what is used last in
    # the one and first in the other, and what belongs to no block: the embedding of positions.
    kept = groups["last"] + groups["positions"]
    gathers = 1 if plan.zero_stage == 2 else 2 * accumulation
    once = 2 * accumulation if plan.zero_stage == 3 else 0
    found[f"dp all_gather {plan.dp_shard}"] = (
        len(groups) * gathers - once,
        size * gathers - (kept * accumulation if once else 0),
    )
    if plan.dp_replicate > 1:  # replicas sum their shards once
        key = f"dp all_reduce {plan.dp_replicate}"
        assert key not in found
        found[key] = (len(groups), size // plan.dp_shard)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_collectives_are_the_formulas(case: Case, results: Path) -> None:
    expected = expected_counts(case)
    for counts in result(case, results)["ranks"]:
        assert {key: tuple(count) for key, count in counts.items()} == expected


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_pipelines_that_split_the_backward_pass_reduce_once(schedule: str, results: Path) -> None:
    """Several stages a rank, three micro-batches: what is scattered is what whole gradients are, but for padding."""
    found = {case.name: result(case, results)["ranks"] for case in PIPELINED}
    for whole, *sharded in zip(*(found[f"{schedule}-{kind}"] for kind in ("zero0", "zero2", "zero3")), strict=True):
        calls, size = whole["dp all_reduce 2"]
        assert calls == 2, "valid tokens and one bucket"
        for counts in sharded:
            assert counts["dp reduce_scatter 2"][1] == pytest.approx(size - 8, rel=0.01)


@pytest.mark.unit
def test_whole_gradients_and_shards_of_zero_2_travel_once_whatever_the_micro_batches() -> None:
    for case in COUNTED:
        once, often = (Case(case.name, {**case.plan, "micro_batch_size": size}) for size in (3, 1))
        changes = Plan(**case.plan).zero_stage == 3
        assert (expected_counts(once) != expected_counts(often)) == changes


class NoGroup:
    """Stands for a process group that is never used."""


def data_context(plan: Plan) -> ParallelContext:
    """A rank whose data-parallel axes exist in name."""
    return ParallelContext(plan, torch.device("cpu"), groups={"data": NoGroup(), "expert_data": NoGroup()})  # type: ignore[dict-item]


@pytest.mark.unit
def test_buckets_are_filled_from_the_last_parameter_and_experts_have_their_own() -> None:
    rows = BUCKET_BYTES // 8 // 100
    parameters = {
        "first": nn.Parameter(torch.empty(5)),
        "layers.0.moe.experts.up": nn.Parameter(torch.empty(7)),
        "large": nn.Parameter(torch.empty(rows, 200)),
        "fixed": nn.Parameter(torch.empty(3), requires_grad=False),
        "last": nn.Parameter(torch.empty(11)),
    }
    found = gradient_buckets(parameters, data_context(Plan(dp_replicate=2, ep=2)))
    names = {parameter: name for name, parameter in parameters.items()}
    assert [(bucket.axis, [names[p] for p in bucket.parameters]) for bucket in found] == [
        ("data", ["last", "large"]), ("data", ["first"]), ("expert_data", ["layers.0.moe.experts.up"]),
    ]  # fmt: skip
    assert found[0].num_bytes == 4 * (11 + rows * 200)


class Doubled:
    """A sum over two ranks of equal gradients; it may be as late as it likes."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def wait(self) -> None:
        """Now they are summed."""
        self.values.mul_(2)


@pytest.mark.unit
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_buckets_leave_in_order_when_gradients_of_all_micro_batches_are_there(num_micro_batches: int) -> None:
    weights = {name: nn.Parameter(torch.ones(4)) for name in ("early", "unused", "late")}
    sent: list[tuple[str, int]] = []

    def sum_over(values: Tensor, axis: str, _: ParallelContext) -> Doubled:
        sent.append((axis, values.numel()))
        return Doubled(values)

    reducer = GradientReducer(weights, data_context(Plan(dp_replicate=2)), overlap=True, sum_over=sum_over)
    reducer.begin_step(num_micro_batches)
    for _ in range(num_micro_batches):
        assert not sent
        (weights["early"] * 3 + weights["late"] * 5).sum().backward()
    assert not sent, "one gradient of the bucket has not come"
    reducer.reduce_gradients()
    assert sent == [("data", 12)]
    gradients = {name: weight.grad for name, weight in weights.items()}
    for name, value in {"early": 6.0, "unused": 0.0, "late": 10.0}.items():
        assert torch.equal(gradients[name], torch.full((4,), value * num_micro_batches))
    (weights["early"] * 3).sum().backward()
    assert sent == [("data", 12)], "no hook is left behind"


# ----------------------------------------------------------------------------------------- replicas, norms, clipping


@pytest.mark.dist
@pytest.mark.parametrize("case", EQUAL_COPIES, ids=lambda case: case.name)
def test_replicas_stay_equal_in_every_bit(case: Case, results: Path) -> None:
    found, plan = result(case, results), Plan(**case.plan)
    assert found["versions"] == [1, 1, 1]
    shards = (plan.dp_shard if plan.zero_stage == 1 else 1) * plan.tp
    assert max(found["elements"]) == pytest.approx(found["whole"] / shards, rel=0.2)
    if plan.ep == plan.tp == 1:
        assert sum(found["elements"]) == found["whole"] * plan.world_size / shards


@pytest.mark.dist
@pytest.mark.parametrize("case", SPOILED, ids=lambda case: case.name)
def test_infinite_gradient_on_one_rank_skips_the_step_on_all(case: Case, results: Path) -> None:
    assert result(case, results) == {"skipped": True, "unchanged": True, "goes_on": True}


@pytest.mark.dist
@pytest.mark.parametrize("case", CLIPPED, ids=lambda case: case.name)
def test_every_element_of_experts_is_counted_once_and_all_clip_alike(case: Case, results: Path) -> None:
    expected = one_process(case)
    assert float(expected["grad_norms"].min()) > case.hyperparameters["clip_norm"]
    keys = ["losses", "grad_norms", "group_norms", "parameters"]
    worst = largest_difference(result(case, results), expected, keys)
    assert worst.ratio <= 1e-10, worst


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.dist
@pytest.mark.parametrize("case", [*READ, *EXPERTS_READ], ids=lambda case: case.name)
def test_state_is_read_under_another_sharding(case: Case, results: Path) -> None:
    """AdamW divides by the square root of tiny second moments, which magnifies the last bits."""
    keys = ["losses", "grad_norms", "parameters", "evaluation"]
    worst = largest_difference(result(case, results), one_process(case), keys)
    assert worst.ratio <= 1e-8, worst


@pytest.mark.dist
@pytest.mark.parametrize("case", REORDERED, ids=lambda case: case.name)
def test_optimizer_states_belong_to_names(case: Case, results: Path) -> None:
    assert result(case, results) == {"same": True}
