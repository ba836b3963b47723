"""What a parameter's name says: the group its gradient norm is reported under, and whether its weights decay."""

from __future__ import annotations

from torch import nn

GROUPS = ("embedding", "attention", "ffn", "norm", "head")
"""The groups gradient norms are reported for."""


def group_of(fqn: str) -> str:
    """The group of a parameter, by its name."""
    parts = fqn.split(".")
    if any(part.endswith("norm") for part in parts):
        return "norm"
    if parts[0] in ("embedding", "positions"):
        return "embedding"
    if parts[0] == "head":
        return "head"
    return "attention" if parts[2] == "attention" else "ffn"


def decays(fqn: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases and the embedding of positions."""
    is_bias = fqn.endswith("bias")  # experts' are stacked, and so have two dimensions
    return parameter.ndim > 1 and not is_bias and not fqn.startswith("positions.")


def of_experts(fqn: str) -> bool:
    """Whether a parameter belongs to routed experts, whose ranks are seen as ``engine.layout.EXPERT_AXES``."""
    return ".moe.experts." in fqn
