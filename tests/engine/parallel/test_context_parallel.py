"""Sequences split between ranks train as whole ones do, and cost what they should.

The parts by themselves first, in one process; then plans with two and four ranks, each world in one process group.
Equality of plain layers, of other axes beside this one and of whole families is looked at in ``test_matrix`` and
``test_families``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import RuntimeOptions
from engine.context import open_context
from engine.models.attention import attend
from engine.parallel import blockwise
from engine.parallel.blockwise import TILE_TOKENS, tiles
from engine.parallel.context_parallel import split_sequences
from engine.parallel.ring_attention import SplitAttention
from engine.parallel.sequence_order import Part, SequenceOrder, SplitPositions
from engine.plan import Plan
from engine.torch_private import TorchDispatchMode
from tests.engine.parallel.cases import LENGTH, MODELS, one_part_ignored, run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

CPU = torch.device("cpu")

# ----------------------------------------------------------------------------------------------------- in one process


@pytest.mark.unit
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_has_one_home_and_keeps_its_position(size: int) -> None:
    length = 8 * size
    sequences = torch.arange(3 * length).view(3, length)
    orders = [SequenceOrder(size, rank) for rank in range(size)]
    held = [order.split(sequences) for order in orders]
    assert sorted(torch.cat(held, 1).flatten().tolist()) == sequences.flatten().tolist()
    for order, tokens in zip(orders, held, strict=True):
        positions = SplitPositions(order)
        assert torch.equal(positions.ids(8, CPU), tokens[0])
        assert positions.whole_length(8) == length


@pytest.mark.unit
def test_sequences_stay_whole_without_the_axis() -> None:
    context = open_context(Plan(), RuntimeOptions())
    tokens = torch.zeros(2, 3)
    assert split_sequences(context, tokens)[0] is tokens


def seen_pairs(order: SequenceOrder, length: int, window: int | None, size: int) -> Tensor:
    """How often each query (row) of a rank meets each key of the whole sequence, unless hidden."""
    count = torch.zeros(order.size * length, order.size * length, dtype=torch.int64)
    for owner in range(order.size):
        for tile in tiles(order.parts(order.rank, length), order.parts(owner, length), window, size):
            assert max(tile.queries.length, tile.keys.length) <= size
            visible = ~tile.hidden(CPU)
            assert visible.any(), "tiles in which nothing is seen are left out"
            assert tile.is_whole == bool(visible.all())
            rows, columns = (slice(part.position, part.position + part.length) for part in (tile.queries, tile.keys))
            count[rows, columns] += visible
    return count


@pytest.mark.unit
@pytest.mark.parametrize("size", [3, 5, 100])
@pytest.mark.parametrize("window", [None, 1, 4, 17])
def test_tiles_cover_what_a_query_sees_exactly_once(window: int | None, size: int) -> None:
    for num_ranks, length in ((1, 20), (2, 12), (4, 10)):
        met = sum(seen_pairs(SequenceOrder(num_ranks, rank), length, window, size) for rank in range(num_ranks))
        distance = torch.arange(num_ranks * length)[:, None] - torch.arange(num_ranks * length)
        visible = (distance >= 0) & (distance < (window or num_ranks * length))
        assert torch.equal(met, visible.long())


def quarters(parts: list[list[Part]], rank: int) -> list[float]:
    """Logits that a rank computes at each step of the ring, in quarters of those of all its queries and a block.

    Args:
        parts: What each rank holds.
        rank: The rank.
    """
    owners = [(rank - step) % len(parts) for step in range(len(parts))]
    found = [tiles(parts[rank], parts[owner], None, TILE_TOKENS) for owner in owners]
    return [sum(tile.queries.length * tile.keys.length for tile in some) / TILE_TOKENS**2 for some in found]


@pytest.mark.unit
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_do_the_same_work_at_every_step_of_the_ring(num_ranks: int) -> None:
    """In plain order the last rank would see every block whole and the first nothing beyond its own."""
    ranks, size = range(num_ranks), TILE_TOKENS
    head_tail = [SequenceOrder(num_ranks, 0).parts(rank, 2 * size) for rank in ranks]
    assert [quarters(head_tail, rank) for rank in ranks] == [[3.0] + [2.0] * (num_ranks - 1)] * num_ranks
    plain = [[Part(start, 2 * rank * size + start, size) for start in (0, size)] for rank in ranks]
    assert [sum(quarters(plain, rank)) for rank in ranks] == [3.0 + 4 * rank for rank in ranks]


class Alone:
    """An exchange of a rank with itself, which plays all ranks."""

    def __init__(self, size: int = 1) -> None:
        self._size = size

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See ``Exchange``."""
        for owner in range(self._size):
            yield owner, own

    def sum_home(self, shares: Iterator[Tensor]) -> Tensor:
        """See ``Exchange``."""
        return torch.stack(list(shares)).sum(0)


HEADS = {"whole": (4, 4, 8, 8), "grouped": (4, 2, 8, 8), "latent": (4, 4, 6, 8), "latent-grouped": (4, 1, 8, 4)}
"""Query heads, key heads, key and value dimension."""


@pytest.mark.unit
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_in_tiles_equals_attention(
    heads: str, window: int | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "TILE_TOKENS", 5)
    draws = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, key_dim, value_dim = HEADS[heads]
    shapes = [(2, num_heads, 24, key_dim), (2, num_kv_heads, 24, key_dim), (2, num_kv_heads, 24, value_dim)]
    inputs = [torch.randn(s, dtype=torch.float64, generator=draws).requires_grad_() for s in shapes]
    sinks = torch.randn(num_heads, dtype=torch.float64, generator=draws).requires_grad_() if with_sinks else None
    wanted = [*inputs, *([sinks] if sinks is not None else [])]
    grad = torch.randn(2, num_heads, 24, value_dim, dtype=torch.float64, generator=draws)
    found = []
    for core in (attend, SplitAttention(Alone(), SequenceOrder(1, 0))):
        out = core(*inputs, window=window, sinks=sinks, scale=0.3)
        found.append([out, *torch.autograd.grad(out, wanted, grad)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.unit
@pytest.mark.parametrize(("value_dim", "window"), [(16, None), (16, 20), (8, None)])
def test_sums_of_bf16_are_wide(value_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to fp64 as attention of whole sequences in bf16 is, over many tiles."""
    monkeypatch.setattr(blockwise, "TILE_TOKENS", 8)
    draws = torch.Generator().manual_seed(0)
    dims = (16, 16, value_dim, value_dim)
    exact = [torch.randn(2, 4, 64, dim, generator=draws).bfloat16().double() for dim in dims]
    errors = []
    for core in (attend, SplitAttention(Alone(), SequenceOrder(1, 0))):
        found = []
        for dtype in (torch.float64, torch.bfloat16):
            *inputs, grad = (tensor.to(dtype).requires_grad_() for tensor in exact)
            out = core(*inputs, window=window)
            assert out.dtype == dtype
            found.append([out, *torch.autograd.grad(out, inputs, grad)])
        errors.append([float(((a - b).abs().max() / a.abs().max()).detach()) for a, b in zip(*found, strict=True)])
    assert max(errors[1]) < 1.5 * max(errors[0]) < 0.03


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operator makes."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return found


@pytest.mark.unit
@pytest.mark.parametrize("fused", [True, False])
def test_logits_beyond_a_tile_are_never_held(fused: bool) -> None:
    num_ranks, length = 4, 4 * TILE_TOKENS
    query, key, value = (torch.randn(1, 1, length, dim).requires_grad_() for dim in (4, 4, 4 if fused else 5))
    with Largest() as largest:
        out = SplitAttention(Alone(num_ranks), SequenceOrder(num_ranks, 3))(query, key, value)
        out.sum().backward()
    assert largest.num_elements <= max(TILE_TOKENS**2, num_ranks * length * 9) < length**2


# ------------------------------------------------------------------------------------------------------- many processes

SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}
GATHER, FULL, SP = {"cp_attention": "all_gather"}, {"recompute": "full"}, {"sequence_parallel": True}


def equal(name: str, plan: dict[str, Any], model: str) -> Case:
    """A plan that must equal one process."""
    return Case(f"{name}-{model}", plan, model, hyperparameters=SGD)


TWO, FOUR = {"cp": 2}, {"cp": 4}
EQUAL_TWO = [
    equal("ring", TWO | {"zero_stage": 2}, "gpt2"),
    equal("ring-recompute", TWO | FULL, "windows"),
    equal("gather", TWO | GATHER, "windows"),
    equal("gather-recompute", TWO | GATHER | FULL, "latent"),
]
EQUAL_FOUR = [
    equal("cp4-ring", FOUR, "windows"),
    equal("cp4-gather", FOUR | GATHER, "latent"),
    equal("tp2-sp", TWO | SP | {"tp": 2}, "gpt2"),
    equal("pp2-recompute", TWO | FULL | {"pp": 2, "rank_order": "tp-pp-cp-dp"}, "windows"),
]
BF16 = [
    Case(f"bf16-{name}", {"precision": "bf16", **TWO, **plan}, hyperparameters=SGD)
    for name, plan in (("ring", {}), ("gather", GATHER))
]
COUNTED = [
    Case(f"counted-{name}", {"precision": "bf16", **TWO, **plan}, function="collectives", hyperparameters=SGD)
    for name, plan in (("ring-recompute", FULL), ("gather", GATHER))
]
IGNORED_PART = Case("ignored-part", TWO, function="one_part_ignored", hyperparameters=SGD)
DROPPED = Case("dropped", TWO | {"tp": 2}, function="dropped", hyperparameters={"dropout": 0.5})
WORLDS = {2: [*EQUAL_TWO, *BF16, *COUNTED, IGNORED_PART], 4: [*EQUAL_FOUR, DROPPED]}

Results = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each case gave; all run before the first is looked at."""
    folder = tmp_path_factory.mktemp("context_parallel")
    for world_size, cases in WORLDS.items():
        run_cases(cases, world_size, folder)
    return lambda case: result(case, folder)


@cache
def reference(model: str, precision: str = "fp64") -> dict[str, Any]:
    """What one process gives on whole sequences."""
    return train(run_config(model, {"precision": precision}, SGD))


@pytest.mark.dist
@pytest.mark.parametrize("case", [*EQUAL_TWO, *EQUAL_FOUR], ids=lambda case: case.name)
def test_split_sequences_train_as_whole_ones(case: Case, results: Results) -> None:
    """Positions, labels and masks follow their tokens, rotary and learned, windows and sinks included."""
    found = largest_difference(results(case), reference(case.model), EVERYTHING)
    assert found.ratio <= 1e-10, found


@pytest.mark.dist
@pytest.mark.parametrize("case", BF16, ids=lambda case: case.name)
def test_bf16_rounds_as_in_one_process(case: Case, results: Results) -> None:
    expected = reference(case.model, "bf16")
    assert largest_difference(results(case), expected, ["losses", "parameters"]).ratio <= 1e-2
    assert largest_difference(results(case), expected, ["gradients"]).ratio <= 0.05


@pytest.mark.dist
def test_a_part_without_labels_counts_nothing(results: Results) -> None:
    """The tokens that one rank holds have no label: its loss is 0, and the mean is that of the others."""
    found, expected = results(IGNORED_PART), one_part_ignored(run_config("llama", {}, SGD))
    assert found["num_valid_tokens"] == expected["num_valid_tokens"] == expected["evaluated"]["num_valid_tokens"]
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-12)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-12)


@pytest.mark.dist
def test_dropout_differs_between_tokens_and_agrees_between_copies(results: Results) -> None:
    masks = results(DROPPED)["masks"]
    first, copy, second, other_copy = masks
    assert torch.equal(first, copy)
    assert torch.equal(second, other_copy)
    assert 0.3 < (first != second).double().mean() < 0.7


@pytest.mark.dist
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_bytes_are_those_of_the_formula(case: Case, results: Results) -> None:
    """Per layer and micro-batch, with a rank's keys and values in bf16 and their gradients in fp32: they go around once
    forward, once more where the layer is recomputed, and once backward, when gradients do, too."""
    model, plan = MODELS[case.model], Plan(**{"micro_batch_size": 12} | case.plan)
    elements = plan.micro_batch_size * LENGTH // plan.cp * model.num_kv_heads * 2 * model.head_dim
    passes = model.num_layers * (3 if plan.recompute == "full" else 2)
    rounds = plan.cp - 1
    if plan.cp_attention == "ring":
        sent = (rounds * (passes + model.num_layers), rounds * elements * (2 * passes + 4 * model.num_layers))
        expected = {"send": sent, "receive": sent}
    else:
        expected = {
            "all_gather": (passes, 2 * plan.cp * elements * passes),
            "reduce_scatter": (model.num_layers, 4 * plan.cp * elements * model.num_layers),
        }
    for counts in results(case)["ranks"]:
        assert {kind: tuple(count) for kind, count in counts.items() if kind.startswith("cp ")} == {
            f"cp {operation} {plan.cp}": count for operation, count in expected.items()
        }
