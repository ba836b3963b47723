"""The catalogue of public architectures: what completes a model that is known by name and a few cells."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from engine.schema import Schema, parse
from engine.spec import Count, CountOrZero, LatentAttentionSpec
from engine.yaml_file import read_yaml

CATALOGUE_FILE = Path(__file__).with_name("architectures.yaml")


class Architecture(Schema):
    """One architecture, or what all sizes of a family share; null where they differ."""

    patterns: Annotated[list[str], Field(min_length=1)]
    """Regular expressions, one of which is found in the model's name."""
    unsupported: str | None = None
    """Why a model of this name can't be described; null when it can."""
    layers: Count | None = None
    """Transformer blocks."""
    hidden: Count | None = None
    """Width of the residual stream."""
    ffn: Count | None = None
    """Width of a dense feed-forward."""
    heads: Count | None = None
    """Query heads."""
    kv_heads: Count | None = None
    """Key and value heads."""
    head_dim: Count | None = None
    """Dimensions per head; null for hidden / heads."""
    vocab: Count | None = None
    """Rows of the embedding, as trained."""
    gated: bool | None = None
    """Whether the feed-forward is gated."""
    tied: bool | None = None
    """Whether the head uses the embedding's weights."""
    positions: Literal["rope", "learned"] = "rope"
    """Learned positions have parameters; linear biases count as rotary, they have none."""
    num_experts: Count | None = None
    """Routed experts per layer; null for a dense model."""
    experts_per_token: Count | None = None
    """Routed experts of each token."""
    moe_ffn: Count | None = None
    """Width of one routed expert."""
    shared_experts: CountOrZero = 0
    """Shared experts, each as wide as a routed one."""
    num_dense_layers: CountOrZero = 0
    """Leading layers without experts."""
    latent_attention: LatentAttentionSpec | None = None
    """Multi-head latent attention."""
    window: Count | None = None
    """Attention window in tokens of the layers that have one."""
    window_period: Count = 1
    """The first of so many layers has the window."""
    source: str
    """Where the facts come from."""


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Name -> architecture, in the order in which names are matched."""
    document = read_yaml(CATALOGUE_FILE)
    return {name: parse(Architecture, data, document=document, path=(name,)) for name, data in document.data.items()}


@functools.cache
def find_architecture(model_name: str) -> tuple[str, Architecture] | None:
    """The first architecture whose pattern is found in a model's name, with what the catalogue calls it."""
    for name, architecture in architectures().items():
        if any(re.search(pattern, model_name, re.IGNORECASE) for pattern in architecture.patterns):
            return name, architecture
    return None
