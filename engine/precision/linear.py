"""The linear map, by the way that suits the dtype and the device.

A CPU without bf16 instructions multiplies bf16 matrices element by element, about ten times slower than fp32 ones.
There the product is taken in fp32 and rounded to bf16: the same mathematics (bf16 products are summed in fp32 anyway),
with what is kept for the backward pass still in bf16.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` in the dtype of ``x``.

    Args:
        x: [..., in].
        weight: [out, in], of the same dtype.
        bias: [out], or None.

    Returns:
        [..., out].
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not has_fast_bf16():
        product = _WideLinear.apply(x, weight)
        return product if bias is None else product + bias
    return F.linear(x, weight, bias)


@functools.cache
def has_fast_bf16() -> bool:
    """Whether this CPU's bf16 matrix products are made for bf16 (AVX-512 and later; unknown kinds count as such)."""
    return torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT")


class _WideLinear(torch.autograd.Function):
    """``x Wᵀ`` of bf16 tensors through fp32 products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wide = grad.float()
        into_x = torch.matmul(wide, weight.float()).to(x.dtype)
        into_weight = torch.matmul(wide.flatten(0, -2).T, x.float().flatten(0, -2)).to(weight.dtype)
        return into_x, into_weight
