"""Narrower models of the same family, and runs whose tuned hyperparameters hold for the model they stand for."""

from __future__ import annotations

import math

from engine.config import RunConfig
from engine.errors import UserError
from engine.spec import Hyperparameters, LatentAttentionSpec, ModelSpec, MoESpec

FIXED_HEAD_FAMILIES = frozenset({"gpt2"})
"""Families whose files have no size of heads: it is the hidden size over their number."""


def proxy_model(spec: ModelSpec, width_ratio: float) -> ModelSpec:
    """A narrower model of the same family: the residual stream, heads, feed-forwards, experts and low ranks of latent
    attention in proportion; layers, the size of heads, the vocabulary and the number of experts as they are.

    Sizes are rounded to multiples of 8 (or of the largest power of two that divides the size itself), heads to whole
    ones in groups of equal size; none is below one unit. ``describe_proxy`` says what that made of the ratio.

    Args:
        spec: The architecture.
        width_ratio: Hidden size of the proxy over that of ``spec``, above 0 and at most 1; 1 gives ``spec`` itself.

    Raises:
        UserError: The ratio is out of range.
    """
    if not 0 < width_ratio <= 1:
        raise UserError(
            f"width_ratio must be above 0 and at most 1, got {width_ratio:g}",
            hint="0.25 makes a model a quarter as wide",
        )
    if width_ratio == 1:
        return spec
    num_heads, num_kv_heads = _heads(spec, width_ratio)
    hidden_size = _size(spec.hidden_size, width_ratio)
    if spec.family in FIXED_HEAD_FAMILIES and spec.hidden_size == spec.num_heads * spec.head_dim:
        hidden_size = num_heads * spec.head_dim
    ratio = hidden_size / spec.hidden_size
    return spec.changed(
        name=f"{spec.name[:100]}-w{hidden_size}",
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_size=_size(spec.ffn_size, ratio),
        latent_attention=_latent_attention(spec.latent_attention, ratio),
        moe=_moe(spec.moe, ratio),
    )


def describe_proxy(spec: ModelSpec, proxy: ModelSpec) -> tuple[str, ...]:
    """A line for each width of ``proxy`` whose ratio to that of ``spec`` is not the residual stream's."""
    ratio = proxy.hidden_size / spec.hidden_size
    widths = _widths(proxy)
    return tuple(
        f"{name} {size} is {widths[name]}, {widths[name] / size:.3g} of it; hidden_size is {ratio:.3g}"
        for name, size in _widths(spec).items()
        if abs(widths[name] - size * ratio) > 1e-9 * size
    )


def proxy_hyperparameters(hyperparameters: Hyperparameters, target: ModelSpec) -> Hyperparameters:
    """What to train proxies of ``target`` with, so that what is best for them is best for the target under
    ``hyperparameters``.

    Those of a standard run are the same as muP's relative to the target's own width. Those that are relative to a
    width already stay.
    """
    if hyperparameters.parametrization == "mup":
        return hyperparameters
    return hyperparameters.changed(parametrization="mup", base_hidden_size=target.hidden_size)


def proxy_run(config: RunConfig, width_ratio: float) -> RunConfig:
    """The run with a proxy of its model, its hyperparameters relative to the model itself. With ``width_ratio`` 1 it
    trains as ``config`` does, to the last bit.

    The plan stays: whether it still divides the heads is told by ``engine.rules.check_run``.

    Raises:
        UserError: The ratio is out of range.
    """
    return config.changed(
        model=proxy_model(config.model, width_ratio),
        hyperparameters=proxy_hyperparameters(config.hyperparameters, config.model),
    )


def _size(size: int, ratio: float) -> int:
    """``size`` times ``ratio``, in units that divide ``size``."""
    unit = math.gcd(size, 8)
    return max(round(size * ratio / unit), 1) * unit


def _heads(spec: ModelSpec, ratio: float) -> tuple[int, int]:
    """Query heads, and key and value heads that divide them."""
    num_kv_heads = max(round(spec.num_kv_heads * ratio), 1)
    return max(round(spec.num_heads * ratio / num_kv_heads), 1) * num_kv_heads, num_kv_heads


def _latent_attention(latent: LatentAttentionSpec | None, ratio: float) -> LatentAttentionSpec | None:
    if latent is None:
        return None
    query_rank = None if latent.query_rank is None else _size(latent.query_rank, ratio)
    return latent.changed(query_rank=query_rank, kv_rank=_size(latent.kv_rank, ratio))


def _moe(moe: MoESpec | None, ratio: float) -> MoESpec | None:
    """Narrower experts; shared ones as many times as wide as a routed one as they were, where that is whole."""
    if moe is None:
        return None
    ffn_size, shared = _size(moe.ffn_size, ratio), moe.shared_ffn_size
    if shared % moe.ffn_size == 0:
        return moe.changed(ffn_size=ffn_size, shared_ffn_size=shared // moe.ffn_size * ffn_size)
    return moe.changed(ffn_size=ffn_size, shared_ffn_size=_size(shared, ratio))


def _widths(spec: ModelSpec) -> dict[str, int]:
    """Every size that follows the width, by name."""
    widths = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "ffn_size": spec.ffn_size}
    if spec.moe is not None:
        widths["moe.ffn_size"] = spec.moe.ffn_size
        widths |= {"moe.shared_ffn_size": spec.moe.shared_ffn_size} if spec.moe.shared_ffn_size else {}
    if spec.latent_attention is not None:
        widths["latent_attention.kv_rank"] = spec.latent_attention.kv_rank
        rank = spec.latent_attention.query_rank
        widths |= {"latent_attention.query_rank": rank} if rank else {}
    return widths
