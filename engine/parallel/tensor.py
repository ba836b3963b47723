"""Tensor parallelism as a table: how each module of the decoder is split over the ``tp`` axis.

Columns of the projections out of the residual stream and rows of those back into it are split, so a block costs one
reduction after attention and one after the feed-forward (two more in the backward pass). With ``sequence_parallel`` the
residual stream between them is split over the sequence: the reductions become reduce-scatters, and what enters a
projection is gathered first. Modules without a line here keep whole parameters and compute the same on every rank.

Inside attention a rank works on its own heads. Parameters that all heads share (norms of heads, the low-rank
projections of latent attention) are whole on every rank and their gradients are parts. So are key and value heads that
are fewer than the ranks: each rank computes the one that its query heads need. That costs every rank whole weights,
gradients and optimizer states of ``key`` and ``value``, and these gradients take part in the sum of parts; activations
are no larger and a layer sends no more.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.parallel.sharding import COLUMNS, ONCE, ROWS, SHARED, WHOLE, Border, Move, Sharding, Use
from engine.parallel.vocabulary import EmbeddingRows
from engine.plan import Plan
from engine.rule import kv_heads
from engine.spec import ModelSpec

_GATHER = Move(Shard(1), Replicate())
_SPLIT = Move(Replicate(), Shard(1))


def tensor_parallel_table(spec: ModelSpec, plan: Plan) -> dict[str, Sharding]:
    """Sharding by module name, ``*`` for any layer number. Names that a model or stage lacks are skipped."""
    stream: Placement = Shard(1) if plan.sequence_parallel else Replicate()
    enter, leave = Move(stream, Replicate(), gradient=Partial()), Move(Partial(), stream)
    outward = Sharding({"weight": ROWS, "bias": ROWS})
    shared = Sharding({"weight": SHARED, "bias": SHARED})
    back = Sharding({"weight": COLUMNS, "bias": SHARED if plan.sequence_parallel else WHOLE}, output=leave)
    table = {
        "attention": Sharding(inputs=(enter,)),
        **dict.fromkeys(("query", "query_up", "kv_up"), outward),
        **dict.fromkeys(("key", "value"), _key_heads(spec, plan)),
        **dict.fromkeys(("query_norm", "key_norm", "query_down", "kv_down", "kv_norm"), shared),
        "sinks": outward,
        "out": back,
    }
    table = {name if name == "attention" else f"attention.{name}": sharding for name, sharding in table.items()}
    table |= {"ffn": Sharding(inputs=(enter,)), "ffn.gate": outward, "ffn.up": outward, "ffn.down": back}
    table |= _experts(plan, stream, enter, leave)
    if plan.sequence_parallel:
        table |= dict.fromkeys(("attention_norm", "ffn_norm"), shared)
    return {f"layers.*.{name}": sharding for name, sharding in table.items()} | _ends(spec, plan, enter, leave)


def _experts(plan: Plan, stream: Placement, enter: Border, leave: Border) -> dict[str, Sharding]:
    """Router and shared experts; the routed experts' own parameters are split by ``engine.parallel.experts``.

    With a slice of each expert on every rank, all ranks see all tokens, and what each computes after the router is a
    part of the output: so all gradients, the router's too, are parts until they leave the layer. With whole experts,
    each rank has its own part of every sequence between the layer's borders.
    """
    router = Sharding({"weight": SHARED, "bias": SHARED})
    into_shared = dict.fromkeys(("moe.shared.gate", "moe.shared.up"), Sharding({"weight": ROWS, "bias": ROWS}))
    if plan.etp == plan.tp:
        return {
            "moe": Sharding(inputs=(enter,), output=leave),
            "moe.router": router,
            **into_shared,
            "moe.shared.down": Sharding({"weight": COLUMNS, "bias": ONCE}),
        }
    own_tokens = Shard(1)
    return {
        "moe": Sharding(inputs=(Move(stream, own_tokens),), output=Move(own_tokens, stream)),
        "moe.router": router,
        "moe.shared": Sharding(inputs=(Move(own_tokens, Replicate(), gradient=Partial()),)),
        **into_shared,
        "moe.shared.down": Sharding({"weight": COLUMNS, "bias": SHARED}, output=Move(Partial(), own_tokens)),
    }


def _key_heads(spec: ModelSpec, plan: Plan) -> Sharding:
    """Heads of keys or values; whole where they are fewer than the ranks, which then use one each."""
    heads = kv_heads(spec)
    use = ROWS if heads % plan.tp == 0 else Use(Replicate(), Partial(), pieces=heads)
    return Sharding({"weight": use, "bias": use})


def _ends(spec: ModelSpec, plan: Plan, enter: Border, leave: Border) -> dict[str, Sharding]:
    """Embedding, positions, last norm and head."""
    table: dict[str, Sharding] = {}
    if plan.vocab_parallel:
        # A tied head has no weights of its own: it is called with the embedding's beside its input.
        table["embedding"] = EmbeddingRows({"weight": ROWS}, output=leave, vocab_size=spec.vocab_size)
        table["head"] = Sharding({"weight": ROWS}, inputs=(enter, ROWS) if spec.tied_embeddings else (enter,))
    if plan.sequence_parallel:
        table["positions"] = Sharding(output=_SPLIT)
        table["norm"] = Sharding({"weight": SHARED, "bias": SHARED})
        if not plan.vocab_parallel:
            table["embedding"] = Sharding(output=_SPLIT)
            table["head"] = Sharding(inputs=(_GATHER,))
    return table


def apply_tensor_parallel(part: Decoder, spec: ModelSpec, context: ParallelContext) -> None:
    """Split a whole model or a stage, still on the meta device, over the ``tp`` axis where there is one."""
    if not context.has_axis("tp"):
        return
    modules = dict(part.named_modules())
    for pattern, sharding in tensor_parallel_table(spec, context.plan).items():
        for name in [pattern.replace("*", layer) for layer in part.layers] if "*" in pattern else [pattern]:
            if name in modules:
                sharding.apply(modules[name], context.axis("tp"))


def settle_gradients(parts: Iterable[nn.Module]) -> None:
    """Sum gradients that ranks hold in parts, in one message for each axis and dtype.

    Which ones follows from placements: the parameter is whole on every rank and the gradient is not. Where parameters
    are sharded over data-parallel ranks as well, ``fully_shard`` has done it before it summed over those.
    """
    found: dict[tuple[DeviceMesh, torch.dtype], list[nn.Parameter]] = {}
    for part in parts:
        for parameter in part.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                found.setdefault((gradient.device_mesh, gradient.dtype), []).append(parameter)
    for (mesh, _), parameters in found.items():
        gradients = [parameter.grad.to_local() for parameter in parameters]  # type: ignore[union-attr]
        summed = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(summed, group=mesh.get_group())
        pieces = summed.split([gradient.numel() for gradient in gradients])
        for parameter, piece in zip(parameters, pieces, strict=True):
            whole = piece.view(parameter.shape)
            parameter.grad = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
