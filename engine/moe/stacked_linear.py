"""Linear maps of many experts at once: each takes the rows that are its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.precision.linear import has_fast_bf16, linear

_ALIGNMENT_BYTES = 16
"""Grouped kernels want rows that begin at multiples of this."""


def stacked_linear(rows: Tensor, loads: Sequence[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """``row Wᵀ + b`` with the weights of each row's expert.

    One grouped matrix product where torch has a kernel for the dtype, device and sizes; else one product after another,
    which is right in every dtype.

    Args:
        rows: [R, in], those of the first expert first.
        loads: Rows of each expert; their sum is R.
        weight: [E, out, in], of the rows' dtype.
        bias: [E, out], or None.

    Returns:
        [R, out].
    """
    if not suits_grouped_product(rows, weight):
        pieces = zip(rows.split(list(loads)), weight, bias if bias is not None else [None] * len(weight), strict=True)
        return torch.cat([linear(piece, matrix, shift) for piece, matrix, shift in pieces])
    ends = torch.tensor(list(accumulate(loads)), dtype=torch.int32, device=rows.device)
    product = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    if bias is None:
        return product
    return product + bias.index_select(0, experts_of_rows(loads, rows.device))


def suits_grouped_product(rows: Tensor, weight: Tensor) -> bool:
    """Whether the grouped kernel takes these: bf16, fast on this device, aligned rows, and any rows at all."""
    fast = rows.device.type == "cuda" or has_fast_bf16()
    aligned = all(size * rows.element_size() % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    return rows.dtype == torch.bfloat16 and fast and aligned and len(rows) > 0


def experts_of_rows(loads: Sequence[int], device: torch.device) -> Tensor:
    """The expert of each row, int64 [R]."""
    experts = torch.arange(len(loads), device=device)
    return experts.repeat_interleave(torch.tensor(loads, device=device), output_size=sum(loads))
