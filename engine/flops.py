"""Parameter counts by group, and the model FLOPs of training, in closed form.

Multi-token-prediction blocks are counted apart everywhere. The selection bias of a router is no parameter: nothing
trains it by gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.spec import ModelSpec, MoESpec


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one block (or the sum of several)."""

    attention: int = 0
    """Projections with their biases, and sinks."""
    ffn: int = 0
    """Dense feed-forward, or the shared experts."""
    experts: int = 0
    """Routed experts."""
    router: int = 0
    """Routers with their biases."""
    norms: int = 0
    """Normalisations, of the block and inside the attention."""

    @property
    def total(self) -> int:
        """All groups."""
        return self.attention + self.ffn + self.experts + self.router + self.norms

    def __add__(self, other: LayerParameters) -> LayerParameters:
        return LayerParameters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a whole model by group."""

    embedding: int
    """Token embedding and learned positions."""
    head: int
    """Output projection; 0 when tied to the embedding."""
    layers: LayerParameters
    """All blocks."""
    final_norm: int
    """The normalisation before the head."""
    active_experts: int
    """Those of the routed experts' parameters that a token passes."""
    mtp: int
    """Multi-token-prediction blocks; in no other number of this class."""

    @property
    def total(self) -> int:
        """All parameters without the multi-token-prediction blocks."""
        return self.embedding + self.head + self.layers.total + self.final_norm

    @property
    def active(self) -> int:
        """Parameters that one token passes: all but the routed experts it is not sent to."""
        return self.total - self.layers.experts + self.active_experts


def parameter_counts(spec: ModelSpec) -> ParameterCounts:
    """Parameters of ``spec`` by group."""
    layers = sum((layer_parameters(spec, layer) for layer in range(spec.num_layers)), LayerParameters())
    experts_per_token = spec.moe.experts_per_token if spec.moe else 0
    num_experts = spec.moe.num_experts if spec.moe else 1
    learned = spec.max_positions if spec.positions == "learned" else 0
    return ParameterCounts(
        embedding=(spec.vocab_size + learned) * spec.hidden_size,
        head=0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size,
        layers=layers,
        final_norm=_norm(spec),
        active_experts=layers.experts // num_experts * experts_per_token,
        mtp=spec.num_mtp_layers * _mtp_block(spec),
    )


def layer_parameters(spec: ModelSpec, layer: int) -> LayerParameters:
    """Parameters of block ``layer`` (from 0)."""
    weights, biases, inner_norms = _attention(spec)
    norms = 2 * _norm(spec) + inner_norms
    if spec.moe is None or not spec.is_moe_layer(layer):
        width, ffn_biases = spec.ffn_size, spec.mlp_bias
        return LayerParameters(weights + biases, _mlp(spec, width) + ffn_biases * _mlp_biases(spec, width), norms=norms)
    moe = spec.moe
    return LayerParameters(
        attention=weights + biases,
        ffn=_mlp(spec, moe.shared_ffn_size),
        experts=moe.num_experts * (_mlp(spec, moe.ffn_size) + moe.expert_bias * _mlp_biases(spec, moe.ffn_size)),
        router=moe.num_experts * (spec.hidden_size + moe.router_bias),
        norms=norms,
    )


def training_flops_per_token(spec: ModelSpec, sequence_length: int, *, causal: bool = True) -> float:
    """Model FLOPs of training on one token: forward and backward, without recompute.

    Convention: only matrix products count, a multiply-add is 2 FLOPs and the backward pass costs twice the forward
    pass. So each weight that a token is multiplied with (routed experts it is sent to, routers and the head included,
    tied or not; the embedding's lookup, biases and norms left out) gives 6 FLOPs, and attention gives 6 FLOPs for each
    query-key and each weight-value multiply-add. A token attends to the tokens up to itself and within the layer's
    window: (sequence_length + 1) / 2 on average without one. Multi-token-prediction blocks are left out.

    Args:
        spec: The architecture.
        sequence_length: Tokens per sequence.
        causal: False counts masked positions too, as published figures often do: sequence_length (or the window)
            for each token.
    """
    blocks = sum(layer_flops_per_token(spec, layer, sequence_length, causal=causal) for layer in range(spec.num_layers))
    return blocks + head_flops_per_token(spec)


def layer_flops_per_token(spec: ModelSpec, layer: int, sequence_length: int, *, causal: bool = True) -> float:
    """The part of block ``layer`` (from 0) in ``training_flops_per_token``."""
    return 6.0 * _layer_weights(spec, layer) + attention_flops_per_token(spec, layer, sequence_length, causal=causal)


def attention_flops_per_token(spec: ModelSpec, layer: int, sequence_length: int, *, causal: bool = True) -> float:
    """The part of the attention's own two products of block ``layer`` in ``training_flops_per_token``."""
    latent = spec.latent_attention
    if latent:
        width = spec.num_heads * (latent.nope_head_dim + latent.rope_head_dim + latent.value_head_dim)
    else:
        width = 2 * spec.num_heads * spec.head_dim
    return 6.0 * width * _mean_context(spec, layer, sequence_length, causal)


def head_flops_per_token(spec: ModelSpec) -> float:
    """The part of the head in ``training_flops_per_token``."""
    return 6.0 * spec.vocab_size * spec.hidden_size


def recomputed_flops_per_token(
    spec: ModelSpec, sequence_length: int, recompute: str, period: int = 1, *, causal: bool = True
) -> float:
    """FLOPs that recompute adds to training on one token, in the convention of ``training_flops_per_token``.

    ``full`` does the forward pass of every block again, ``every_k`` that of one block in ``period``, ``selective`` the
    attention's own two products (Korthikanti et al., arXiv 2205.05198); the head is never done again.

    Args:
        spec: The architecture.
        sequence_length: Tokens per sequence.
        recompute: A word of ``Plan.recompute``.
        period: For ``every_k``.
        causal: As for ``training_flops_per_token``.
    """
    if recompute == "none":
        return 0.0
    layers = range(spec.num_layers)
    if recompute == "selective":
        return sum(attention_flops_per_token(spec, layer, sequence_length, causal=causal) for layer in layers) / 3
    blocks = sum(layer_flops_per_token(spec, layer, sequence_length, causal=causal) for layer in layers)
    return blocks / 3 / (period if recompute == "every_k" else 1)


def _layer_weights(spec: ModelSpec, layer: int) -> int:
    """Weights of a block in matrix products with one token: active ones without biases and norms."""
    weights, _, _ = _attention(spec)
    if spec.moe is not None and spec.is_moe_layer(layer):
        return weights + _active_moe_weights(spec, spec.moe)
    return weights + _mlp(spec, spec.ffn_size)


def _active_moe_weights(spec: ModelSpec, moe: MoESpec) -> int:
    routed = moe.experts_per_token * _mlp(spec, moe.ffn_size)
    return routed + _mlp(spec, moe.shared_ffn_size) + moe.num_experts * spec.hidden_size


def _mean_context(spec: ModelSpec, layer: int, sequence_length: int, causal: bool) -> float:
    """Tokens that one token attends to in block ``layer``, on average over the sequence."""
    window = min(spec.window_of(layer) or sequence_length, sequence_length)
    if not causal:
        return window
    return window - window * (window - 1) / 2 / sequence_length


def _norm(spec: ModelSpec) -> int:
    return spec.hidden_size * (2 if spec.norm == "layernorm" else 1)


def _mlp(spec: ModelSpec, width: int) -> int:
    return (3 if spec.mlp == "gated" else 2) * spec.hidden_size * width


def _mlp_biases(spec: ModelSpec, width: int) -> int:
    return (2 if spec.mlp == "gated" else 1) * width + spec.hidden_size


def _attention(spec: ModelSpec) -> tuple[int, int, int]:
    """Weights of the projections; their biases and the sinks; parameters of the norms inside."""
    hidden, heads = spec.hidden_size, spec.num_heads
    sinks = heads * spec.attention_sinks
    if spec.latent_attention is None:
        query, kv = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        biases = spec.qkv_bias * (query + 2 * kv) + spec.attention_out_bias * hidden
        return hidden * (2 * query + 2 * kv), biases + sinks, 2 * spec.head_dim * spec.qk_norm
    latent = spec.latent_attention
    query = heads * (latent.nope_head_dim + latent.rope_head_dim)
    rank = latent.query_rank or 0
    query_weights = (hidden + query) * rank if rank else hidden * query
    kv_weights = hidden * (latent.kv_rank + latent.rope_head_dim)
    kv_weights += latent.kv_rank * heads * (latent.nope_head_dim + latent.value_head_dim)
    out = heads * latent.value_head_dim * hidden
    biases = spec.qkv_bias * (rank + latent.kv_rank + latent.rope_head_dim) + spec.attention_out_bias * hidden
    return query_weights + kv_weights + out, biases + sinks, rank + latent.kv_rank


def _mtp_block(spec: ModelSpec) -> int:
    """One multi-token-prediction block of DeepSeek-V3 (arXiv 2412.19437, section 2.2): two norms, a projection of their
    concatenation, a block like the last one and a norm; embedding and head are the model's own."""
    return 2 * spec.hidden_size**2 + 3 * _norm(spec) + layer_parameters(spec, spec.num_layers - 1).total
