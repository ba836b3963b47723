"""How first values and the optimizer's settings of each parameter follow the width and the depth of the model.

``standard``: not at all. ``mup``: maximal update parametrization (Yang et al. 2022, arXiv 2203.03466, table 8), so that
what was tuned at one width holds at another; with ``base_num_layers`` also over depth (CompleteP: Dey et al. 2025,
arXiv 2505.01618, alpha 1). All is relative to a base size, at which both are the same to the last bit.

Nothing is multiplied in the forward pass. Where the table has a factor on a parameter's output, it is in the first
value and the learning rate instead (table 3 of the paper; for Adam the two are the same, lemma J.1 there). So the model
computes what it always does, under every plan, and its weights are whole in checkpoints and exports. With tied
embeddings the factor on the logits is in the final norm, whose weights nothing else uses.

The width is that of the residual stream; all other widths are taken to be in proportion (``engine.proxy`` makes such
models). Heads keep their size and grow in number, so attention scales its logits as ever: 1/head_dim relative to a base
of the same head_dim is 1/sqrt(head_dim). The number of experts, those per token and the vocabulary stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Literal, NamedTuple

from engine.spec import Hyperparameters, ModelSpec

Kind = Literal["vector", "constant", "hidden", "output"]


class Scales(NamedTuple):
    """Factors for one parameter."""

    initial_value: float = 1.0
    """On the first value."""
    learning_rate: float = 1.0
    """On the learning rate."""
    epsilon: float = 1.0
    """On AdamW's epsilon: gradients are smaller the wider a model is."""
    gradient: float = 1.0
    """On the gradient where its norm is taken: what it is with the factor in the forward pass, which keeps the norm
    (and so clipping) alike over widths."""

    @property
    def weight_decay(self) -> float:
        """On the weight decay: its product with the learning rate, the share of a weight that a step takes, is the
        same at every width (arXiv 2203.03466, appendix B.3; arXiv 2510.19093)."""
        return 1.0 / self.learning_rate


ScalesOf = Callable[[str], Scales]
"""From a parameter's name to its factors."""


def standard_scales(fqn: str) -> Scales:
    """All one."""
    return Scales()


def is_standard(hyperparameters: Hyperparameters, spec: ModelSpec) -> bool:
    """Whether a model is trained as under ``standard``: it is, or the model has the base size."""
    if hyperparameters.parametrization == "standard":
        return True
    has_base_depth = hyperparameters.base_num_layers in (None, spec.num_layers)
    return hyperparameters.base_hidden_size == spec.hidden_size and has_base_depth


def scales_of(hyperparameters: Hyperparameters, spec: ModelSpec) -> ScalesOf:
    """The factors of every parameter of a model under the run's parametrization.

    Args:
        hyperparameters: Of the run.
        spec: The architecture that is trained.
    """
    base = hyperparameters.base_hidden_size
    if hyperparameters.parametrization == "standard" or base is None:
        return standard_scales
    width = spec.hidden_size / base
    depth = spec.num_layers / (hyperparameters.base_num_layers or spec.num_layers)
    # Each step asks for the factors of every parameter.
    return cache(partial(_mup_scales, spec=spec, optimizer=hyperparameters.optimizer, width=width, depth=depth))


def _mup_scales(fqn: str, *, spec: ModelSpec, optimizer: str, width: float, depth: float) -> Scales:
    table = _adamw_scales if optimizer == "adamw" else _sgd_scales
    scales = table(kind_of(fqn, spec), width)
    if not fqn.startswith("layers."):
        return scales
    if not writes_to_residual(fqn):
        return scales._replace(epsilon=scales.epsilon / depth)
    # What a block adds is divided by the depth, which is in these parameters; the first values that come in are those
    # of a model this deep, divided by the root of its depth already.
    return Scales(
        scales.initial_value / depth**0.5, scales.learning_rate / depth, scales.epsilon, scales.gradient / depth
    )


def _adamw_scales(kind: Kind, width: float) -> Scales:
    """Table 8 for Adam, with epsilon as CompleteP has it (appendix on AdamW's epsilon)."""
    return {
        "vector": Scales(epsilon=1 / width),
        "constant": Scales(),
        "hidden": Scales(initial_value=width**-0.5, learning_rate=1 / width, epsilon=1 / width),
        "output": Scales(initial_value=1 / width, learning_rate=1 / width, gradient=1 / width),
    }[kind]


def _sgd_scales(kind: Kind, width: float) -> Scales:
    """Table 8 for SGD. A factor in the forward pass counts twice there: on the gradient and on the weight."""
    return {
        "vector": Scales(learning_rate=width),
        "constant": Scales(),
        "hidden": Scales(initial_value=width**-0.5),
        "output": Scales(initial_value=1 / width, learning_rate=1 / width, gradient=1 / width),
    }[kind]


def kind_of(fqn: str, spec: ModelSpec) -> Kind:
    """Which dimensions of a parameter grow with the width: of a ``vector`` what it puts out (embeddings, gains, biases,
    sinks), of a ``hidden`` one both sides, of an ``output`` what it takes in (head, router), of a ``constant`` none.

    With tied embeddings the final norm counts as output: it stands for the factor on the logits.
    """
    parts = fqn.split(".")
    if parts[0] == "head" or fqn.endswith(".router.weight") or (parts[0] == "norm" and spec.tied_embeddings):
        return "output"
    if fqn.endswith(".router.bias") or (parts[-2] in ("query_norm", "key_norm") and spec.latent_attention is None):
        return "constant"
    if parts[0] in ("embedding", "positions") or fqn.endswith("bias") or parts[-2].endswith(("norm", "sinks")):
        return "vector"
    return "hidden"


def writes_to_residual(fqn: str) -> bool:
    """Whether a parameter belongs to the last projection of attention or feed-forward, back into the residual
    stream."""
    projection = fqn.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias")
    return projection.endswith((".attention.out", ".ffn.down", ".shared.down", ".experts.down"))
