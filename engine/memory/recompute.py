"""Recomputation of activations: which blocks forget what they computed and compute it again in the backward pass."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint, noop_context_fn

from engine.models.decoder import Decoder
from engine.moe.layer import MixtureOfExperts
from engine.plan import Plan


def apply_recompute(part: Decoder, plan: Plan, *, preserve_rng: bool) -> None:
    """Make the blocks that ``plan.recompute`` names save their input only.

    The decision is by the layer's number in the whole model, so it does not change with the pipeline's stages. A
    block's hooks stay outside, so sharded parameters are gathered once for recomputation and backward. Routing is not
    decided again (``engine.moe.kept_routing``).

    Args:
        part: A model or a stage.
        plan: ``none``, ``full`` or ``every_k`` (layers 0, k, 2k ...).
        preserve_rng: Whether blocks draw random numbers, which must be repeated.
    """
    for number, block in part.layers.items():
        if plan.recomputes(int(number)):
            layer = block.feed_forward
            block.forward = partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=preserve_rng,
                context_fn=layer.memory.contexts if isinstance(layer, MixtureOfExperts) else noop_context_fn,
            )
