"""The model of a published run: what its row says, completed from the catalogue of public architectures."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from autotune.cost.architectures import Architecture, find_architecture
from autotune.cost.published_cells import MAX_LAYERS, Row
from engine.spec import ModelSpec, MoESpec


class Unreadable(Exception):
    """Why a row can't be priced, in words."""


@dataclass
class Assumptions:
    """What was completed in one row, in words."""

    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Note one."""
        if text not in self.texts:
            self.texts.append(text)


_MOE_NAME = re.compile(r"moe|mixtral|\d+x\d+\.?\d*b|[-_ ]a\d+(\.\d+)?b|deepseek|experts?\b", re.IGNORECASE)
_GATED_NAME = re.compile(
    r"llama|mistral|qwen|gemma|deepseek|yi-|phi-?[34]|olmo|baichuan|internlm|vicuna", re.IGNORECASE
)
_OTHER = Architecture(patterns=["."], source="")
_HEAD_DIM = 128


def model_of(row: Row, assumptions: Assumptions) -> ModelSpec:
    """The architecture of a row.

    Args:
        row: The row.
        assumptions: Gets every cell that was completed, with its value.

    Raises:
        Unreadable: It can't be told, with the reason.
    """
    name = row.word("model_name")
    found = find_architecture(name) if name else None
    catalogue_name, known = found or ("", _OTHER)
    if known.unsupported:
        raise Unreadable(f"{name} can't be priced: {known.unsupported}")
    cells = _Cells(row, catalogue_name, known, assumptions)
    hidden = cells.need("hidden", known.hidden)
    moe = _moe(row, cells, known, name)
    gated = _gated(row, cells, known, name)
    ffn = cells.get("ffn_hidden", known.ffn)
    if ffn is None and moe and not known.num_dense_layers:
        ffn = moe.ffn_size
    if ffn is None:
        if gated:
            raise Unreadable("ffn_hidden unknown, and a gated feed-forward has no usual width")
        ffn = 4 * hidden
        assumptions.add(f"ffn_hidden unknown: 4 * hidden = {ffn}")
    vocab = cells.get("vocab", known.vocab)
    if vocab is None:
        vocab = 51200
        assumptions.add("vocab unknown: 51200")
    layers = cells.get("layers", known.layers)
    if layers is None:
        layers = _layers_from_parameters(row, hidden, ffn, vocab, gated, moe, assumptions)
    heads, kv_heads, head_dim = _heads(row, cells, known, hidden, assumptions)
    if known.latent_attention:
        assumptions.add(f"latent attention of {catalogue_name}, from the catalogue")
    windowed = known.window_period > 1 and known.window is not None
    values: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-._+")[:128] or "model",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_size": ffn,
        "vocab_size": vocab,
        "max_positions": row.count("seq_len") or 2048,
        "norm": "rmsnorm" if gated else "layernorm",
        "positions": known.positions,
        "mlp": "gated" if gated else "plain",
        "activation": "silu" if gated else "gelu",
        "tied_embeddings": bool(known.tied),
        "sliding_window": known.window,
        "sliding_layers": tuple(range(0, layers, known.window_period)) if windowed else None,
        "latent_attention": known.latent_attention,
        "moe": moe,
    }
    try:
        return ModelSpec(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        raise Unreadable(f"not a possible model: {f'{place}: ' if place else ''}{text}") from None


@dataclass(frozen=True)
class _Cells:
    """Cells of a row with the catalogue behind them."""

    row: Row
    catalogue_name: str
    known: Architecture
    assumptions: Assumptions

    def get(self, column: str, fallback: int | None) -> int | None:
        """The row's count, else the catalogue's, noted."""
        value = self.row.count(column)
        if value is None and fallback is not None:
            self.assumptions.add(f"{column} unknown: {fallback}, the catalogue's {self.catalogue_name}")
            return fallback
        return value

    def need(self, column: str, fallback: int | None) -> int:
        """The same, refused where neither has it."""
        value = self.get(column, fallback)
        if value is None:
            name = self.row.word("model_name")
            told = f"and {name!r} is not in the catalogue with it" if name else "and the model has no name"
            raise Unreadable(f"{column} unknown, {told}")
        return value


def _moe(row: Row, cells: _Cells, known: Architecture, name: str) -> MoESpec | None:
    stated = row.count("num_experts")
    if stated in (0, 1):
        return None
    if stated is None and known.num_experts is None:
        total, active = row.figure("params_total_B"), row.figure("params_active_B")
        if _MOE_NAME.search(name) or (row.count("ep") or 1) > 1 or (total and active and active < 0.95 * total):
            raise Unreadable(f"{name or 'the model'} is a mixture of experts whose experts are not known")
        return None
    num_experts = cells.need("num_experts", known.num_experts)
    per_token = cells.need("experts_per_token", known.experts_per_token)
    width = row.count("moe_ffn_hidden") or None
    if width is None:
        width = cells.need("moe_ffn_hidden", known.moe_ffn or row.count("ffn_hidden"))
    shared = row.count("shared_experts")
    if shared is None:
        shared = known.shared_experts
    dense_layers = known.num_dense_layers
    reduced = row.count("layers")
    if dense_layers and reduced and known.layers and reduced < known.layers // 4:
        dense_layers = 1
    if dense_layers:
        cells.assumptions.add(f"the first {dense_layers} of the layers dense, as in {cells.catalogue_name}")
    try:
        return MoESpec(
            num_experts=num_experts,
            experts_per_token=per_token,
            ffn_size=width,
            shared_ffn_size=shared * width,
            num_dense_layers=dense_layers,
        )
    except ValidationError as error:
        raise Unreadable(f"not a possible model: {error.errors(include_url=False)[0]['msg']}") from None


def _gated(row: Row, cells: _Cells, known: Architecture, name: str) -> bool:
    stated = row.flag("gated_mlp")
    if stated is not None:
        return stated
    if known.gated is not None:
        cells.assumptions.add(f"gated_mlp unknown: {int(known.gated)}, the catalogue's {cells.catalogue_name}")
        return known.gated
    gated = bool(_GATED_NAME.search(name))
    cells.assumptions.add(f"gated_mlp unknown: {int(gated)}, by the model's name")
    return gated


def _heads(row: Row, cells: _Cells, known: Architecture, hidden: int, assumptions: Assumptions) -> tuple[int, int, int]:
    heads = cells.get("heads", known.heads)
    if heads is None:
        heads = _usual_heads(hidden, row.count("tp") or 1)
        assumptions.add(f"heads unknown: {heads} of {hidden // heads} dimensions")
    kv_heads = cells.get("kv_heads", known.kv_heads if heads == known.heads else None)
    if kv_heads is None:
        kv_heads = heads
        assumptions.add(f"kv_heads unknown: {heads}, as many as heads")
    if known.head_dim and heads == known.heads and hidden == known.hidden:
        if known.head_dim * heads != hidden:
            assumptions.add(f"heads of {known.head_dim} dimensions, the catalogue's {cells.catalogue_name}")
        return heads, kv_heads, known.head_dim
    if hidden % heads:
        raise Unreadable(f"heads {heads} do not divide hidden {hidden}")
    return heads, kv_heads, hidden // heads


def _usual_heads(hidden: int, tp: int) -> int:
    """Heads whose dimension is even and comes nearest to the usual one, divisible by tp where that is possible."""
    fits = [heads for heads in range(1, hidden // 16 + 1) if hidden % (2 * heads) == 0]
    split = [heads for heads in fits if heads % tp == 0] or fits
    if not split:
        raise Unreadable(f"heads unknown, and hidden {hidden} has no usual division into heads")
    return min(split, key=lambda heads: abs(hidden / heads - _HEAD_DIM))


def _layers_from_parameters(
    row: Row, hidden: int, ffn: int, vocab: int, gated: bool, moe: MoESpec | None, assumptions: Assumptions
) -> int:
    total = row.figure("params_total_B")
    if total is None or moe is not None:
        raise Unreadable("layers unknown")
    kv_ratio = (row.count("kv_heads") or 1) / (row.count("heads") or row.count("kv_heads") or 1)
    layer = hidden * hidden * (2 + 2 * kv_ratio) + (3 if gated else 2) * hidden * ffn
    layers = round((total * 1e9 - vocab * hidden) / layer)
    if not 1 <= layers <= MAX_LAYERS:
        raise Unreadable(f"layers unknown, and params_total_B {total:g} with hidden {hidden} would make {layers}")
    assumptions.add(f"layers unknown: {layers}, from params_total_B {total:g}")
    return layers
