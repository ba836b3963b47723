"""Hugging Face's names for our parameters, and how its tensors are made of ours, by family.

Each family is a table from our modules to Hugging Face's. Several of our tensors under one foreign name are that
tensor's parts along the output dimension; so fused projections need no code of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import UserError
from engine.spec import ModelSpec

_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "layers": "transformer.h",
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
_QWEN3 = _LLAMA | {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
# ``{}`` stands for the number of an expert: each has tensors of its own, which are stacked in ours.
_MIXTRAL = _LLAMA | {
    "moe.router": "block_sparse_moe.gate",
    "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}
_ROUTED = {
    "moe.router": "mlp.gate",
    "moe.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "moe.experts.up": "mlp.experts.{}.up_proj.weight",
    "moe.experts.down": "mlp.experts.{}.down_proj.weight",
}
_STACKED = {
    "moe.router": "mlp.gate",
    "moe.experts.gate": "mlp.experts.gate_up_proj",
    "moe.experts.up": "mlp.experts.gate_up_proj",
    "moe.experts.down": "mlp.experts.down_proj",
}
"""Experts as newer versions of ``transformers`` hold them, and may save them, in every family with gated experts."""
_DEEPSEEK = (
    _LLAMA
    | _ROUTED
    | {
        "attention.query_down": "self_attn.q_a_proj",
        "attention.query_norm": "self_attn.q_a_layernorm",
        "attention.query_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "moe.selection_bias": "mlp.gate.e_score_correction_bias",
        "moe.shared.gate": "mlp.shared_experts.gate_proj",
        "moe.shared.up": "mlp.shared_experts.up_proj",
        "moe.shared.down": "mlp.shared_experts.down_proj",
    }
)
_GPT_OSS = (
    _LLAMA
    | _STACKED
    | {
        "attention.sinks.weight": "self_attn.sinks",
        "moe.router": "mlp.router",
        "moe.experts.gate_bias": "mlp.experts.gate_up_proj_bias",
        "moe.experts.up_bias": "mlp.experts.gate_up_proj_bias",
        "moe.experts.down_bias": "mlp.experts.down_proj_bias",
    }
)
TABLES: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3 | _ROUTED,
    "deepseek_v3": _DEEPSEEK,
    "gpt2": _GPT2,
    "gpt_oss": _GPT_OSS,
}
"""Family -> our modules (or whole names of tensors that aren't called weight or bias) -> Hugging Face's."""

_TRANSPOSED = {
    "gpt2": re.compile(r"\.(?:attn|mlp)\.\w+\.weight$"),
    "gpt_oss": re.compile(r"\.experts\.(?:gate_up|down)_proj$"),
}
"""Families that keep some weights as [..., in, out]."""
_ALTERNATING = {"gpt_oss": re.compile(r"\.gate_up_proj(?:_bias)?$")}
"""Families in which outputs of some tensors' parts take turns, instead of standing one part after another."""

Shapes = dict[str, torch.Size]


@dataclass(frozen=True)
class Part:
    """One of our tensors, or one expert's slice of it."""

    fqn: str
    expert: int | None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of our whole tensor."""
        return tensor if self.expert is None else tensor[self.expert]


@dataclass(frozen=True)
class ForeignTensor:
    """How one of Hugging Face's tensors is made of ours."""

    parts: tuple[Part, ...]
    transposed: bool
    """Whether its last two dimensions are exchanged."""
    alternating: bool
    """Whether outputs of its parts take turns."""

    @property
    def _dim(self) -> int:
        """The dimension of outputs in our order: behind that of experts where these are stacked."""
        part = self.parts[0]
        return int(part.expert is None and ".moe.experts." in part.fqn)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The foreign tensor from its parts."""
        if len(tensors) == 1:
            joined = tensors[0]
        elif self.alternating:
            joined = torch.stack(list(tensors), dim=self._dim + 1).flatten(self._dim, self._dim + 1)
        else:
            joined = torch.cat(list(tensors), dim=self._dim)
        return (joined.transpose(-1, -2) if self.transposed else joined).contiguous()

    def shape(self, shapes: Shapes) -> list[int]:
        """The foreign tensor's shape, from those of our whole tensors."""
        return list(self.join([part.of(torch.empty(shapes[part.fqn], device="meta")) for part in self.parts]).shape)

    def piece(self, stored: Tensor, fqn: str, shapes: Shapes) -> Tensor:
        """The part of the foreign tensor that is ours under ``fqn``."""
        if self.transposed:
            stored = stored.transpose(-1, -2)
        if len(self.parts) > 1:
            index = [part.fqn for part in self.parts].index(fqn)
            if self.alternating:
                stored = stored.unflatten(self._dim, (-1, len(self.parts))).select(self._dim + 1, index)
            else:
                stored = stored.split([shapes[part.fqn][self._dim] for part in self.parts], dim=self._dim)[index]
        return stored.contiguous()


Layout = dict[str, ForeignTensor]
"""By foreign name, in our order."""


def table_of(spec: ModelSpec, *, stacked_experts: bool = False) -> dict[str, str]:
    """The names of a family.

    Args:
        spec: The architecture.
        stacked_experts: Whether the experts of each layer are one tensor, in a family that has both ways.
    """
    table = TABLES[spec.family]
    if stacked_experts and "{}" in table.get("moe.experts.up", ""):
        table = table | _STACKED
    return table


def layout_of(spec: ModelSpec, shapes: Shapes, table: Mapping[str, str]) -> Layout:
    """What the foreign tensors of ``spec`` are made of.

    Args:
        spec: The architecture.
        shapes: Of all our parameters.
        table: The names.

    Raises:
        UserError: The architecture has something that the family has no name for.
    """
    parts: dict[str, list[Part]] = {}
    for fqn in shapes:
        name = _foreign_name(fqn, table)
        if name is None:
            raise UserError(
                f"models of the family {spec.family} have no weights like {fqn}",
                hint="change model.family, or the model",
            )
        experts = range(spec.moe.num_experts) if spec.moe and "{}" in name else [None]
        for expert in experts:
            parts.setdefault(name.format(expert), []).append(Part(fqn, expert))
    transposed, alternating = _TRANSPOSED.get(spec.family), _ALTERNATING.get(spec.family)
    return {
        name: ForeignTensor(
            tuple(found),
            transposed=bool(transposed and transposed.search(name)),
            alternating=bool(alternating and alternating.search(name)),
        )
        for name, found in parts.items()
    }


def _foreign_name(fqn: str, table: Mapping[str, str]) -> str | None:
    prefix = ""
    if fqn.startswith("layers."):
        _, layer, fqn = fqn.split(".", 2)
        prefix = f"{table['layers']}.{layer}."
    if fqn in table:  # a tensor that isn't called weight or bias on either side
        return prefix + table[fqn]
    module, kind = fqn.rsplit(".", 1)
    return f"{prefix}{table[module]}.{kind}" if module in table else None
