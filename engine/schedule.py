"""The learning-rate schedule as a function of tokens. Shared by the trainer, which follows it, and the twin, which
forecasts with it."""

from __future__ import annotations

import math

from engine.spec import Hyperparameters


def learning_rate_at(hyperparameters: Hyperparameters, tokens: float, total_tokens: int) -> float:
    """Learning rate for the batch that ends at ``tokens`` tokens of a run of ``total_tokens``.

    Linear from 0 over ``warmup_ratio`` of the tokens; then constant, cosine to ``min_lr_ratio`` of the peak, or (wsd)
    constant until the last ``decay_ratio`` of the tokens, linear to ``min_lr_ratio`` there. Beyond the end it stays.
    """
    h = hyperparameters
    done = min(tokens / total_tokens, 1.0)
    if done < h.warmup_ratio:
        return h.learning_rate * done / h.warmup_ratio
    if h.schedule == "cosine":
        phase = (done - h.warmup_ratio) / (1 - h.warmup_ratio) if h.warmup_ratio < 1 else 1.0
        return h.learning_rate * (h.min_lr_ratio + (1 - h.min_lr_ratio) * (1 + math.cos(math.pi * phase)) / 2)
    if h.schedule == "wsd" and h.decay_ratio > 0 and done > 1 - h.decay_ratio:
        left = (1 - done) / h.decay_ratio
        return h.learning_rate * (h.min_lr_ratio + (1 - h.min_lr_ratio) * left)
    return h.learning_rate
