"""Layers split over tensor-parallel ranks train as whole ones do, hold what they should, and send what they should.

Places of parts first, in one process; then plans with two and four ranks, each world in one process group. Equality of
plain layers, of other axes beside this one and of whole families is looked at in ``test_matrix`` and ``test_families``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import Shard

from engine.optim.groups import GROUPS
from engine.parallel.shards import chunk_of, spans
from engine.torch_private import StridedShard
from tests.engine.parallel.cases import GLOBAL_BATCH, LENGTH, MODELS, VOCAB, run_config, train
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import Case, result, run_cases

# ----------------------------------------------------------------------------------------------------- in one process


@pytest.mark.unit
@pytest.mark.parametrize(("tp", "shards"), [(2, 1), (2, 3), (3, 2), (4, 4)])
def test_every_row_has_one_home_where_two_axes_divide_unevenly(tp: int, shards: int) -> None:
    """Rows over tp, and each part over data-parallel ranks: nowhere twice, nowhere missing, as ``chunk`` cuts."""
    for size in [*range(1, 40), 997]:
        found: list[int] = []
        for rank, index in product(range(tp), range(shards)):
            mesh = SimpleNamespace(ndim=2, size=[shards, tp].__getitem__, get_local_rank=[index, rank].__getitem__)
            placements = (StridedShard(0, split_factor=tp), Shard(0))
            split: Any = SimpleNamespace(shape=(size, 3), device_mesh=mesh, placements=placements)
            rows, columns = spans(split)
            assert rows == chunk_of(chunk_of(range(size), tp, rank), shards, index)
            assert columns == range(3)
            found += rows
        assert sorted(found) == list(range(size))


@pytest.mark.unit
def test_pieces_are_those_of_torch() -> None:
    for num_chunks, length in product((1, 2, 3, 4, 7), range(1, 20)):
        pieces = [piece.tolist() for piece in torch.arange(length).chunk(num_chunks)]
        ours = [list(chunk_of(range(length), num_chunks, index)) for index in range(num_chunks)]
        assert ours == pieces + [[]] * (num_chunks - len(pieces))


# ---------------------------------------------------------------------------------------------------------- on ranks

SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None}
MOMENTUM = {"optimizer": "sgd", "beta1": 0.9, "weight_decay": 0.1, "clip_norm": 0.5}
SP = {"sequence_parallel": True}
FULL = {"recompute": "full"}
WHOLE_VOCABULARY = {"vocab_parallel": False}


def equal(name: str, plan: dict[str, Any], model: str) -> Case:
    """A plan that must equal one process."""
    return Case(name, plan, model, hyperparameters=SGD)


EQUAL = {
    2: [
        equal("one-kv", {"tp": 2}, "one-kv"),
        equal("one-kv-sp-recompute", {"tp": 2, **SP, **FULL}, "one-kv"),
        equal("latent", {"tp": 2}, "latent"),
        equal("tied-61-whole", {"tp": 2, **WHOLE_VOCABULARY}, "matrix-dense"),
        equal("biased-experts", {"tp": 2, "etp": 2}, "moe-biased"),
        equal("whole-biased-experts-sp", {"tp": 2, **SP}, "moe-biased"),
    ],
    4: [
        equal("two-kv-tp4", {"tp": 4}, "llama"),
        equal("tied-61-tp4-sp", {"tp": 4, **SP}, "matrix-dense"),
        equal("one-kv-dp2-tp2-sp", {"tp": 2, "dp_shard": 2, **SP}, "one-kv"),
    ],
}
REPEATED = {
    2: Case("repeated-one-kv", {"tp": 2, **SP}, "one-kv", "tensor_cases:repeated", SGD | {"dropout": 0.2}),
    4: Case("repeated-two-kv", {"tp": 4}, "llama", "tensor_cases:repeated", SGD | {"dropout": 0.2}),
}
DROPPED = [
    Case(f"dropped-{name}", plan, "llama", "dropped", SGD | {"dropout": 0.5})
    for name, plan in (("whole", {"tp": 2}), ("split", {"tp": 2, **SP}))
]
RESUMED = Case("resumed-draws", {"tp": 2, **SP}, "llama", "tensor_cases:resumed_draws", SGD | {"dropout": 0.5})
COUNTED = [
    Case(f"counted-{model}{name}", plan, model, "collectives", SGD)
    for model, name, plan in (
        ("llama", "", {"tp": 2}),
        ("llama", "-sp-recompute", {"tp": 2, **SP, **FULL}),
        ("one-kv", "-sp", {"tp": 2, **SP}),
        ("latent", "", {"tp": 2}),
    )
]
SAVED = {
    size: Case(f"saved-tp{size}", {"tp": size}, "one-kv", "train", MOMENTUM, {"last_step": 2, "save": f"by-tp{size}"})
    for size in (2, 4)
}
LOADED = [
    Case(f"tp{source}-to-{name}", plan, "one-kv", "train", MOMENTUM, {"first_step": 2, "load": f"by-tp{source}"})
    for source, name, plan in (
        (2, "tp4", {"tp": 4, **SP}),
        (4, "dp2-tp2", {"dp_shard": 2, "tp": 2}),
        (2, "whole", {"tp": 4, **WHOLE_VOCABULARY}),
    )
]
WORLDS = {
    2: [*EQUAL[2], REPEATED[2], *DROPPED, RESUMED, *COUNTED, SAVED[2]],
    4: [*EQUAL[4], REPEATED[4], SAVED[4], *LOADED],
}

Results = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of all worlds have left their results and checkpoints."""
    path = tmp_path_factory.mktemp("tensor")
    for world_size, cases in WORLDS.items():
        run_cases(cases, world_size, path)
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """What each case gave."""
    return lambda case: result(case, folder)


@cache
def reference(model: str, hyperparameters: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """What one process gives."""
    return train(run_config(model, {}, dict(hyperparameters)))


@pytest.mark.dist
@pytest.mark.parametrize("case", [*EQUAL[2], *EQUAL[4]], ids=lambda case: case.name)
def test_plan_equals_one_process(case: Case, results: Results) -> None:
    expected = reference(case.model, tuple(case.hyperparameters.items()))
    difference = largest_difference(results(case), expected, EVERYTHING)
    assert difference.ratio <= 1e-10, difference.where


@pytest.mark.dist
@pytest.mark.parametrize("case", REPEATED.values(), ids=lambda case: case.name)
def test_what_ranks_hold_in_common_stays_bitwise_equal(case: Case, results: Results) -> None:
    told = results(case)
    assert {"layers.0.attention.key.weight", "layers.2.attention.value.weight"} <= set(told["names"])
    assert told["equal"]
    assert told["generator_untouched"], "dropout draws from the engine's streams alone"


@pytest.mark.dist
def test_dropout_differs_where_the_sequence_is_split_and_agrees_where_it_is_not(results: Results) -> None:
    whole, split = (results(case)["masks"] for case in DROPPED)
    assert torch.equal(*whole)
    assert 0.4 < whole[0].double().mean() < 0.6
    assert not torch.equal(*split)
    assert all(0.4 < mask.double().mean() < 0.6 for mask in split)
    first, second = (mask.flatten().double() - mask.double().mean() for mask in split)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.1, "masks of two ranks are independent"


@pytest.mark.dist
def test_dropout_of_every_rank_resumes_from_counts_that_are_equal_on_all(results: Results) -> None:
    told = results(RESUMED)
    assert told["resumed"] == told["went_on"]
    assert told["uses"] == {"dropout": 1}


@pytest.mark.dist
@pytest.mark.parametrize("case", LOADED, ids=lambda case: case.name)
def test_checkpoint_is_read_at_another_degree(case: Case, results: Results) -> None:
    expected = reference(case.model, tuple(case.hyperparameters.items()))
    difference = largest_difference(results(case), expected, ["losses", "grad_norms", "parameters", "evaluation"])
    assert difference.ratio <= 1e-10, difference.where


@pytest.mark.dist
@pytest.mark.parametrize("size", SAVED)
def test_checkpoint_holds_true_shapes_and_is_read_by_one_process(size: int, folder: Path, results: Results) -> None:
    results(SAVED[size])
    path = folder / f"by-tp{size}"
    held: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    shapes = {name: tuple(held[f"model.{name}"].size) for name in ("embedding.weight", "head.weight")}
    assert shapes == dict.fromkeys(shapes, (VOCAB, 32)), "no rows of padding"
    assert tuple(held["model.layers.0.attention.key.weight"].size) == (8, 32), "a replicated head stands there once"
    resumed = train(run_config("one-kv", {}, MOMENTUM), first_step=2, load=str(path))
    expected = reference("one-kv", tuple(MOMENTUM.items()))
    assert largest_difference(resumed, expected, ["losses", "parameters"]).ratio <= 1e-10


NUM_BYTES = 8
"""Of a number in fp64."""
IN_PARTS = {
    "llama": 0,
    "one-kv": 2 * (8 * 32 + 8) + 2 * 8,  # weights and biases of a layer's keys and values, norms of heads
    "latent": 12 * 32 + 12 + (8 + 4) * 32 + 8,  # projections to the low ranks, their norms
}
"""Elements of a layer whose gradients ranks have in parts, because each uses them on its own heads."""


@pytest.mark.dist
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_a_step_sends_what_the_formula_says(case: Case, results: Results) -> None:
    """Per layer two reductions each way, whatever its attention: all-reduces, or reduce-scatters with a gather each.
    Recomputation repeats what a layer sent, without its last reduction."""
    split, again = "sequence_parallel" in case.plan, "recompute" in case.plan
    layers = MODELS[case.model].num_layers
    micro_batches = GLOBAL_BATCH // run_config(case.model, case.plan, SGD).plan.micro_batch_size
    tokens = GLOBAL_BATCH * LENGTH
    stream = tokens // micro_batches * 32 * NUM_BYTES
    norms = (2 * layers + 1) * 32 if split else 0
    in_parts = (layers * IN_PARTS[case.model] + norms) * NUM_BYTES
    # The embedding's output, and the gradient of the head's input.
    reductions, gathers = 4 * layers + again * layers + 2, 4 * layers + again * 2 * layers + 2
    # The loss: the largest logit, then the sum and the label's logit. Once a step: gradients in parts; and together
    # the losses, the evenness of loads and the norms.
    calls = 2 * micro_batches + (in_parts > 0) + 1
    num_bytes = 3 * tokens * NUM_BYTES + in_parts + (3 + len(GROUPS)) * NUM_BYTES
    if split:
        expected = {
            "tp all_gather 2": (micro_batches * gathers, micro_batches * gathers * stream),
            "tp reduce_scatter 2": (micro_batches * reductions, micro_batches * reductions * stream),
            "tp all_reduce 2": (calls, num_bytes),
        }
    else:
        calls += micro_batches * reductions
        expected = {"tp all_reduce 2": (calls, num_bytes + micro_batches * reductions * stream)}
    for counts in results(case)["ranks"]:
        assert counts == expected
