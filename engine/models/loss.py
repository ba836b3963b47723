"""The training loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.precision.policy import wide

IGNORED = -100
"""Label of a position that predicts nothing."""


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the valid positions, nats, in at least fp32; 0 when there are none.

    Args:
        logits: [B, L, V].
        labels: int64 [B, L]; ``IGNORED`` positions do not count.
    """
    flat = logits.to(wide(logits.dtype)).flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
