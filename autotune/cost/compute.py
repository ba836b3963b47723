"""Work of one device on one micro-batch: matrix products, attention, memory-bound operators and kernel launches.

A matrix product is a function of its shape: whole tiles in whole waves of the device's units, a start-up per tile that
a deep inner dimension pays off, and never faster than its operands pass through memory. Everything else is bytes over
attained bandwidth by class of operator, and each kernel costs the device a little and the host a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autotune.cost.coefficients import Coefficients
from autotune.cost.columns import PlanColumns
from autotune.cost.device_columns import DeviceColumns, SoftwareColumns
from autotune.cost.parameters import fullest_load
from autotune.cost.shapes import ModelShape, Number

ALIGNMENT = 64
"""Elements that a dimension is best a multiple of."""
VECTOR = 8
"""Elements that a unit loads at once (16 bytes of 16-bit numbers); it can't where rows begin in between."""
VOCAB_MULTIPLE = 128
"""A vocabulary that is split is enlarged to a multiple of so many rows per tensor-parallel rank."""


class Work(NamedTuple):
    """Device seconds by class, and kernels. Each ``[n]``. What a kernel costs beyond its work counts as memory."""

    matmul: Number
    attention: Number
    memory: Number
    kernels: Number

    def plus(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: Number) -> Work:
        """So many times."""
        return Work(*(a * factor for a in self))

    @property
    def seconds(self) -> Number:
        """Device time of all classes."""
        return self.matmul + self.attention + self.memory


class Passes(NamedTuple):
    """A forward and a backward pass."""

    forward: Work
    backward: Work

    def plus(self, other: Passes) -> Passes:
        """Both, one after the other."""
        return Passes(self.forward.plus(other.forward), self.backward.plus(other.backward))

    def times(self, factor: Number) -> Passes:
        """So many times."""
        return Passes(self.forward.times(factor), self.backward.times(factor))


@dataclass(frozen=True)
class Basis:
    """What every operator's time is a function of."""

    shape: ModelShape
    device: DeviceColumns
    software: SoftwareColumns
    coefficients: Coefficients
    c: PlanColumns

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on one rank."""
        return self.c.micro_batch_size * self.c.sequence_length / self.c.cp

    @property
    def sequence_split(self) -> Number:
        """Ranks over which the work between tensor-parallel regions is split."""
        return np.where(self.c.sequence_parallel > 0, self.c.tp, 1)


@dataclass(frozen=True)
class ComputeWork:
    """Work per micro-batch of each kind of block on one rank."""

    dense_layer: Passes
    moe_layer: Passes
    embedding: Passes
    head: Passes
    attention_again: Work
    """What selective recompute does again in the backward pass of a layer."""


def compute_work(b: Basis) -> ComputeWork:
    """Work of each kind of block, per micro-batch and rank."""
    attention, again = _attention_block(b)
    kernel = b.coefficients.kernel_us * 1e-6

    def whole(passes: Passes) -> Passes:
        return Passes(*(w._replace(memory=w.memory + w.kernels * kernel) for w in passes))

    return ComputeWork(
        dense_layer=whole(attention.plus(_feed_forward(b, b.shape.ffn / b.c.tp, b.tokens))),
        moe_layer=whole(attention.plus(_experts(b))),
        embedding=whole(_embedding(b)),
        head=whole(_head(b)),
        attention_again=again,
    )


def matmul_seconds(
    b: Basis, rows: Number, columns: Number, depth: Number, count: Number = 1, *, wide: bool = False
) -> Number:
    """Time of ``count`` products ``[rows, depth] x [depth, columns]`` that run beside each other.

    ``seconds = max(tiles of whole waves * tile area * 2 (depth + half_depth) / rate, bytes / bandwidth)``, with the
    wave quantisation damped by ``wave_share``, as libraries choose among tiles.

    Args:
        b: Device and coefficients.
        rows: Of the output.
        columns: Of the output.
        depth: Inner dimension.
        count: Products of that shape at once.
        wide: In 16 bits though the plan's products are in 8.
    """
    d, k = b.device, b.coefficients
    flops, half = (d.wide_flops, d.wide_half_depth) if wide else (d.matmul_flops * _fp8_factor(b), d.half_depth)
    whole = _tile_flops(d, k, rows, columns, depth + half, count, 1.0)
    halves = _tile_flops(d, k, rows, columns, depth + half, count, 0.5) / k.half_tile_ratio
    products = np.minimum(whole, halves) / flops * _misalignment(k, columns, depth)
    traffic = count * d.element_bytes * (rows * columns + (rows + columns) * depth) / d.memory_bytes_per_second
    return np.maximum(products, traffic) * b.software.compute_ratio


def _tile_flops(
    d: DeviceColumns, k: Coefficients, rows: Number, columns: Number, depth: Number, count: Number, share: float
) -> Number:
    """FLOP of a product computed in whole tiles, ``share`` as wide as the device's, in waves of its units."""
    width = d.tile_columns * share
    tiles = np.maximum(np.ceil(rows / d.tile_rows) * np.ceil(columns / width) * count, 1)
    waves = tiles / d.num_units
    quantised = waves * (np.ceil(waves) / waves) ** k.wave_share
    return np.asarray(quantised * (d.num_units * d.tile_rows * width * 2) * depth)


def _fp8_factor(b: Basis) -> Number:
    """What the stack and the recipe of scales do to the rate of 8-bit products."""
    k = b.coefficients
    recipes = np.array([1.0, k.rowwise_ratio, k.mxfp8_ratio, k.nvfp4_ratio])
    return np.where(np.asarray(b.device.is_fp8) > 0, b.software.fp8_ratio * recipes[b.device.recipe], 1.0)


def _misalignment(k: Coefficients, columns: Number, depth: Number) -> Number:
    """Factor on products whose contiguous dimensions are no multiple of ``ALIGNMENT``, or not even of ``VECTOR``."""
    factor: Number = 1.0
    for dim in (columns, depth):
        whole = np.maximum(np.asarray(dim, dtype=np.float64).astype(np.int64), 1)
        lowest_bit = np.minimum(whole & -whole, ALIGNMENT)
        halvings = np.log2(ALIGNMENT / np.maximum(lowest_bit, VECTOR))
        factor = factor + k.misalignment * halvings + k.scalar_access * (lowest_bit < VECTOR)
    return factor


def _linear(b: Basis, inputs: Number, outputs: Number, tokens: Number, *, wide: bool = False) -> Passes:
    """A linear layer: one product forward, one each for the gradients of input and weight backward."""
    forward = matmul_seconds(b, tokens, outputs, inputs, wide=wide)
    input_gradient = matmul_seconds(b, tokens, inputs, outputs, wide=wide)
    weight_gradient = matmul_seconds(b, outputs, inputs, tokens, wide=wide)
    backward = (input_gradient + weight_gradient) * b.coefficients.gradient_product_ratio
    cast = 0.0 if wide else _cast_seconds(b, tokens * inputs)
    cast_back = 0.0 if wide else _cast_seconds(b, tokens * outputs)
    return Passes(Work(forward, 0.0, cast, 1.0), Work(backward, 0.0, cast_back, 2.0))


def _cast_seconds(b: Basis, elements: Number) -> Number:
    return b.device.is_fp8 * elements * b.coefficients.cast_bytes / b.device.memory_bytes_per_second


def _elementwise(b: Basis, elements: Number, kernels: float, ratio: float | None = None) -> Passes:
    """Operators that read and write so many elements in all, forward; half as many again backward."""
    k = b.coefficients
    ratio = k.memory_bound_ratio if ratio is None else ratio
    width = np.where(
        np.asarray(b.device.element_bytes) == 2, 4 * b.software.half_precision_ratio, b.device.element_bytes
    )
    seconds = elements * width * ratio / b.device.memory_bytes_per_second * b.software.memory_bound_ratio
    return Passes(Work(0.0, 0.0, seconds, kernels), Work(0.0, 0.0, seconds * 1.5, kernels * k.backward_launch_ratio))


def _attention_block(b: Basis) -> tuple[Passes, Work]:
    """Norm, projections, attention and residual of a layer; and the work of attention alone, forward."""
    s, c, tokens = b.shape, b.c, b.tokens
    heads = s.num_heads / c.tp
    kv_heads = np.maximum(s.num_kv_heads / c.tp, 1)
    value_width = heads * s.value_dim
    plain = _linear(b, s.hidden, heads * s.query_key_dim + kv_heads * (s.query_key_dim + s.value_dim), tokens)
    projections = _choose(np.asarray(s.kv_rank) > 0, lambda: _latent_projections(b), lambda: plain)
    core = _attention_core(b)
    shared = tokens * s.hidden / b.sequence_split
    around = _elementwise(b, shared * 5, 3.0)
    rope = _elementwise(b, tokens * (heads + kv_heads) * s.query_key_dim * 2, 3.0)
    out = _linear(b, value_width, s.hidden, tokens)
    return projections.plus(core).plus(around).plus(rope).plus(out), core.forward


def _latent_projections(b: Basis) -> Passes:
    """Projections of latent attention: down (replicated over tensor-parallel ranks, split with the sequence) and up."""
    s, c, tokens = b.shape, b.c, b.tokens
    heads = s.num_heads / c.tp
    split = tokens / b.sequence_split
    rank = np.maximum(s.query_rank, 1)
    down = _linear(b, s.hidden, np.where(np.asarray(s.query_rank) > 0, rank, 0) + s.kv_rank, split)
    query_inputs = np.where(np.asarray(s.query_rank) > 0, s.query_rank, s.hidden)
    query = _linear(b, query_inputs, heads * s.query_key_dim, tokens)
    key_value = _linear(b, s.kv_rank, heads * (s.query_key_dim + s.value_dim), tokens)
    norms = _elementwise(b, split * (rank + s.kv_rank) * 2, 2.0)
    return down.plus(query).plus(key_value).plus(norms)


def mean_context(shape: ModelShape, length: Number) -> Number:
    """Tokens that a token attends to, on average over the sequence and the layers, causal."""
    window = np.where(np.asarray(shape.window) > 0, np.minimum(shape.window, length), length)
    full, windowed = (length + 1) / 2, window - window * (window - 1) / 2 / length
    share = shape.num_windowed_layers / shape.num_layers
    context: Number = full * (1 - share) + windowed * share
    return context


FUSED_SOFTMAX_MULTIPLE = 4
"""Megatron's fused scale, mask and softmax take batches of scores that are a multiple of this (fused_softmax.py,
``is_kernel_available``); others go through separate kernels."""

SEPARATE_SOFTMAX_KERNELS = 12.0
"""Kernels more of a layer's pass then: making and applying the mask, casts, scale and softmax each for itself."""


def _attention_core(b: Basis) -> Passes:
    """Attention between the projections, in one kernel or with its scores in memory."""
    return _choose(np.asarray(b.software.fused_attention) > 0, lambda: _fused(b), lambda: _unfused(b))


def _fused(b: Basis) -> Passes:
    """One causal kernel: products at the device's attention rate (or the kernel's own most, where it was written for
    an older device), slower for short contexts and small heads.

    Backward does 2.5 times the products of forward (scores again, and four gradients' products).
    """
    s, c, k, d = b.shape, b.c, b.coefficients, b.device
    context = mean_context(s, c.sequence_length)
    width = s.num_heads / c.tp * (s.query_key_dim + s.value_dim)
    rate = np.minimum(d.wide_flops * d.attention_ratio, b.software.attention_tflops * 1e12)
    rate = rate / (1 + k.attention_half_length / context)
    rate = rate * np.minimum(s.value_dim / 128, 1) ** 0.3
    forward = 2 * b.tokens * context * width / rate * b.software.attention_ratio
    return Passes(Work(0.0, forward, 0.0, 1.0), Work(0.0, forward * 2.5 * k.attention_backward_ratio, 0.0, 3.0))


def _unfused(b: Basis) -> Passes:
    """Two batches of products over the whole score matrix, which passes through memory between them."""
    s, c, k, d = b.shape, b.c, b.coefficients, b.device
    rows, length, batch = c.sequence_length / c.cp, c.sequence_length, c.micro_batch_size * s.num_heads / c.tp
    scores = matmul_seconds(b, rows, length, s.query_key_dim, batch, wide=True)
    values = matmul_seconds(b, rows, s.value_dim, length, batch, wide=True)
    elements = batch * rows * length * d.element_bytes / 2 / d.memory_bytes_per_second * b.software.memory_bound_ratio
    separate = SEPARATE_SOFTMAX_KERNELS * (batch % FUSED_SOFTMAX_MULTIPLE != 0)
    return Passes(
        Work(0.0, scores + values + elements * k.score_bytes_forward, 0.0, 5.0 + separate),
        Work(0.0, 2 * (scores + values) + elements * k.score_bytes_backward, 0.0, 8.0 + separate),
    )


def _feed_forward(b: Basis, width: Number, tokens: Number) -> Passes:
    """Norm, feed-forward of ``width`` on a rank, and residual."""
    s = b.shape
    up = _linear(b, s.hidden, (s.ffn_matrices - 1) * width, tokens)
    down = _linear(b, width, s.hidden, tokens)
    activation = _elementwise(b, tokens * width * s.ffn_matrices, 1.0)
    around = _elementwise(b, tokens * s.hidden / b.sequence_split * 5, 3.0)
    return up.plus(activation).plus(down).plus(around)


def _experts(b: Basis) -> Passes:
    """Router, permutation, routed experts as grouped products, shared expert, norm and residual."""
    s, c, k = b.shape, b.c, b.coefficients
    if not np.any(np.asarray(s.num_experts) > 0):
        return Passes(Work(0.0, 0.0, 0.0, 0.0), Work(0.0, 0.0, 0.0, 0.0))
    experts = np.maximum(s.num_experts, 1)
    own = b.tokens / c.tp
    routed = own * s.experts_per_token * c.etp * fullest_load(b.software.imbalance_ratio, c.ep)
    local = np.maximum(experts / c.ep, 1)
    width = np.maximum(s.expert_ffn, 1) / c.etp
    per_expert = routed / local
    up = _grouped(b, s.hidden, (s.ffn_matrices - 1) * width, per_expert, local)
    down = _grouped(b, width, s.hidden, per_expert, local)
    activation = _elementwise(b, routed * width * s.ffn_matrices, 1.0)
    permute = _elementwise(b, (routed + own * s.experts_per_token) * s.hidden * 4, 12.0, k.permute_ratio)
    router = _linear(b, s.hidden, experts, b.tokens / b.sequence_split, wide=True)
    routing = _elementwise(b, b.tokens / b.sequence_split * experts * 4, 12.0)
    around = _elementwise(b, b.tokens * s.hidden / b.sequence_split * 5, 3.0)
    has_shared = (np.asarray(s.shared_ffn) > 0).astype(np.float64)
    shared = _feed_forward(b, np.maximum(s.shared_ffn, 1) / c.tp, b.tokens).times(has_shared)
    return up.plus(activation).plus(down).plus(permute).plus(router).plus(routing).plus(around).plus(shared)


def _grouped(b: Basis, inputs: Number, outputs: Number, rows: Number, count: Number) -> Passes:
    """A linear layer of each of ``count`` experts over ``rows`` tokens each, in one grouped kernel.

    The ratios stand for waves that experts share, so they are below one; but no kernel beats the device's best rate.
    """
    k = b.coefficients
    ratio = k.grouped_ratio * b.software.expert_ratio
    rate = b.device.matmul_flops * _fp8_factor(b)
    least = 2 * rows * inputs * outputs * count / rate * b.software.compute_ratio
    forward = np.maximum(matmul_seconds(b, rows, outputs, inputs, count) * ratio, least)
    input_gradient = matmul_seconds(b, rows, inputs, outputs, count)
    weight_gradient = matmul_seconds(b, outputs, inputs, rows, count)
    backward = np.maximum((input_gradient + weight_gradient) * ratio, 2 * least) * k.gradient_product_ratio
    elements = rows * count
    launches = count * b.software.expert_launches
    return Passes(
        Work(forward, 0.0, _cast_seconds(b, elements * inputs), 2.0 + launches),
        Work(backward, 0.0, _cast_seconds(b, elements * outputs), 4.0 + 2 * launches),
    )


def _embedding(b: Basis) -> Passes:
    return _elementwise(b, b.tokens * b.shape.hidden * 3, 8.0)


def _head(b: Basis) -> Passes:
    """Final norm, head and cross-entropy."""
    s, c = b.shape, b.c
    split = np.where(c.vocab_parallel > 0, c.tp, 1)
    padded = (split > 1) | (np.asarray(b.software.pads_vocabulary) > 0)
    rows = np.where(padded, np.ceil(s.vocab / (VOCAB_MULTIPLE * split)) * VOCAB_MULTIPLE, s.vocab)
    product = _linear(b, s.hidden, rows, b.tokens, wide=True)
    loss = _elementwise(b, b.tokens * rows * 4, 16.0, b.coefficients.loss_ratio)
    norm = _elementwise(b, b.tokens * s.hidden / b.sequence_split * 2, 1.0)
    return product.plus(loss).plus(norm)


def _choose(condition: np.ndarray, yes, no) -> Passes:  # type: ignore[no-untyped-def]
    """``yes()`` where the condition holds, ``no()`` elsewhere; neither is computed for nothing."""
    if condition.all():
        return yes()  # type: ignore[no-any-return]
    if not condition.any():
        return no()  # type: ignore[no-any-return]
    a, b = yes(), no()
    return Passes(
        *(Work(*(np.where(condition, x, y) for x, y in zip(p, q, strict=True))) for p, q in zip(a, b, strict=True))
    )
