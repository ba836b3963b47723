"""Measures one device: matrix products, attention, memory-bound operators and the host's cost of an operator.

Everything runs as the engine runs it: its own linear map, norm and loss, with autograd, into memory that is allocated
anew each time. On a CPU that memory has to be mapped page by page, which is a large part of what an operator costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.measurement import AttentionSample, MatmulSample, StreamSample
from engine.models.layers import ACTIVATIONS, Norm
from engine.models.loss import summed_loss
from engine.optim.build import build_optimizer
from engine.parametrization import standard_scales
from engine.plan import Precision
from engine.precision.linear import linear
from engine.precision.policy import precision_policy
from engine.probe_timing import Timer, drop_gradients
from engine.spec import Hyperparameters

MatmulShape = tuple[int, int, int]
"""Rows (tokens), inputs and outputs of a linear layer."""

CPU_SHAPES: tuple[MatmulShape, ...] = (
    (64, 128, 128), (128, 64, 256), (128, 256, 256), (256, 128, 512), (256, 512, 128), (256, 384, 1024),
    (512, 256, 256), (512, 256, 704), (512, 512, 512), (512, 1024, 384), (1024, 512, 1408), (2048, 128, 384),
    (512, 512, 4096), (2048, 768, 768),
)  # fmt: skip
"""Big, thin and transformer-like, up to some 40 ms of one core."""
CUDA_SHAPES: tuple[MatmulShape, ...] = (
    (2048, 1024, 1024), (2048, 4096, 4096), (4096, 512, 4096), (4096, 1024, 4096), (4096, 4096, 1024),
    (4096, 4096, 4096), (4096, 4096, 14336), (8192, 1024, 8192), (8192, 8192, 8192), (8192, 8192, 28672),
    (4224, 4096, 4096), (4096, 4096, 4352), (1024, 8192, 8192), (16384, 5120, 5120),
)  # fmt: skip
"""Model sizes from 1B to 70B, and a tile more than a whole wave."""
CPU_LENGTHS, CUDA_LENGTHS = ((4, 128), (2, 256), (1, 512), (1, 1024)), ((4, 1024), (2, 2048), (1, 4096), (1, 8192))
"""Sequences and their length."""
CPU_ELEMENTS, CUDA_ELEMENTS = (2**15, 2**17, 2**19, 2**21), (2**20, 2**22, 2**24, 2**26, 2**28)
"""Elements of the operands of memory-bound operators: within and beyond the caches."""
WIDTH = 512
"""Last dimension of norms and activations."""
VOCABULARY = 4096
"""Last dimension of the loss."""


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Those that the engine trains in on this kind of device."""
    return ("fp32", "bf16") if device.type == "cuda" else ("fp32", "bf16", "fp64")


def measure_matmul(timer: Timer, precision: Precision, shapes: Sequence[MatmulShape]) -> list[MatmulSample]:
    """The three products of a linear layer, each by itself."""
    samples = []
    for tokens, inputs, outputs in shapes:
        x = _random(timer, precision, tokens, inputs)
        weight = _random(timer, precision, outputs, inputs)
        gradient = _random(timer, precision, tokens, outputs)
        forward = timer.each(partial(linear, x, weight))
        into_x = timer.each(partial(linear, gradient, weight.T))
        into_weight = timer.each(partial(linear, gradient.T, x.T))
        kinds = {
            "forward": (tokens, outputs, inputs, forward),
            "input_gradient": (tokens, inputs, outputs, into_x),
            "weight_gradient": (outputs, inputs, tokens, into_weight),
        }
        for part, (rows, columns, depth, seconds) in kinds.items():
            data = {"part": part, "rows": rows, "columns": columns, "depth": depth, "seconds": seconds}
            samples.append(MatmulSample.model_validate(data | {"precision": precision}))
    return samples


def measure_attention(
    timer: Timer, precision: Precision, sequences: Sequence[tuple[int, int]], num_heads: int, head_dim: int
) -> list[AttentionSample]:
    """Causal attention, forward and backward."""
    samples = []
    for batch, length in sequences:
        shape = (batch, length, num_heads, head_dim)
        # Projections leave the heads side by side, so what attention reads is transposed.
        query, key, value = (_random(timer, precision, *shape).transpose(1, 2).requires_grad_() for _ in range(3))
        gradient = _random(timer, precision, *shape).transpose(1, 2)

        def forward(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> Tensor:
            drop_gradients(query, key, value)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        def backward(mixed: object, gradient: Tensor = gradient) -> None:
            assert isinstance(mixed, Tensor)
            mixed.backward(gradient)

        seconds = timer.pair(forward, backward)
        samples.append(
            AttentionSample(
                precision=precision,
                batch=batch,
                num_heads=num_heads,
                head_dim=head_dim,
                length=length,
                forward_seconds=seconds[0],
                backward_seconds=seconds[1],
            )
        )
    return samples


def measure_stream(timer: Timer, precision: Precision, sizes: Sequence[int]) -> list[StreamSample]:
    """Memory-bound operators over operands of different sizes."""
    samples = []
    for elements in sizes:
        rows = max(elements // WIDTH, 1)
        x = _random(timer, precision, rows, WIDTH).requires_grad_()
        other = _random(timer, precision, rows, WIDTH).requires_grad_()
        gradient = torch.ones_like(x)
        norm = Norm(WIDTH, 1e-5).to(timer.context.device, precision_policy(precision).parameters)
        labels = torch.randint(VOCABULARY, (1, max(elements // VOCABULARY, 1)), device=timer.context.device)
        logits = _random(timer, precision, 1, labels.shape[1], VOCABULARY).requires_grad_()

        def add(x: Tensor = x, other: Tensor = other) -> Tensor:
            with torch.no_grad():
                return x + other

        def activation(x: Tensor = x, other: Tensor = other, gradient: Tensor = gradient) -> None:
            drop_gradients(x, other)
            (ACTIVATIONS["silu"](x) * other).backward(gradient)

        def normalise(x: Tensor = x, norm: Norm = norm, gradient: Tensor = gradient) -> None:
            drop_gradients(x, *norm.parameters())
            norm(x).backward(gradient)

        def loss(logits: Tensor = logits, labels: Tensor = labels) -> None:
            drop_gradients(logits)
            summed_loss(logits, labels).backward()

        def sample(operator: str, count: int, seconds: float) -> StreamSample:
            return StreamSample.model_validate(
                {"operator": operator, "precision": precision, "elements": count, "seconds": seconds}
            )

        samples.append(sample("add", x.numel(), timer.each(add)))
        samples.append(sample("activation", x.numel(), timer.each(activation)))
        samples.append(sample("norm", x.numel(), timer.each(normalise)))
        samples.append(sample("loss", logits.numel(), timer.each(loss)))
    return samples


def measure_optimizer(timer: Timer, sizes: Sequence[int]) -> list[StreamSample]:
    """AdamW with the gradient's norm, on fp32 parameters."""
    samples = []
    for elements in sizes:
        weight = nn.Parameter(_random(timer, "fp32", max(elements // WIDTH, 1), WIDTH))
        weight.grad = torch.ones_like(weight)
        optimizer = build_optimizer({"layers.0.ffn.up.weight": weight}, Hyperparameters(), standard_scales)

        def step(weight: nn.Parameter = weight, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert weight.grad is not None
            torch._foreach_norm([weight.grad], 2.0)
            optimizer.step()

        samples.append(
            StreamSample(operator="optimizer", precision="fp32", elements=weight.numel(), seconds=timer.each(step))
        )
    return samples


def measure_launch(timer: Timer) -> float:
    """Host seconds of one small operator with its part of the backward pass, per kernel: a chain of ten, of which each
    has one kernel forward and one backward."""
    x = _random(timer, "fp32", 8).requires_grad_()

    def chain() -> None:
        drop_gradients(x)
        y = x
        for _ in range(10):
            y = torch.sin(y)
        y.sum().backward()

    return timer.each(chain) / 20


def measure_host_link(timer: Timer, num_bytes: int = 2**28) -> float | None:
    """Bytes per second of a copy from pinned host memory; None without a device of its own."""
    if timer.context.device.type != "cuda":
        return None
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device=timer.context.device)
    return num_bytes / timer.each(lambda: device.copy_(host, non_blocking=True))


def _random(timer: Timer, precision: Precision, *shape: int) -> Tensor:
    return torch.randn(*shape, device=timer.context.device).to(precision_policy(precision).compute)
