"""What is trained: the architecture (ModelSpec), the data (Workload) and what changes the result (Hyperparameters)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from engine.schema import Schema

MAX_COUNT = 10**15
"""More of anything is a slip of the pen, and products of a few counts would leave 64 bits."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SWIGLU_LIMIT = 7.0
"""Where ``clamped_swiglu`` cuts its gate and its other half."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=128)]


class MoESpec(Schema):
    """Mixture-of-experts feed-forward layers."""

    num_experts: Annotated[int, Field(ge=2, le=MAX_COUNT)]
    """Routed experts per layer."""
    experts_per_token: Count
    """Routed experts each token is sent to (top-k)."""
    ffn_size: Count
    """Width of one routed expert."""
    shared_ffn_size: CountOrZero = 0
    """Total width of the shared experts, which every token passes; 0 without any."""
    num_dense_layers: CountOrZero = 0
    """Leading layers with a dense feed-forward of width ``ModelSpec.ffn_size``."""
    layer_period: Count = 1
    """Of the later layers, every so many is a mixture of experts; the others are dense."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become expert weights."""
    normalize_weights: bool = True
    """Whether the weights of the chosen experts are scaled to sum to one."""
    routed_scaling: Positive = 1.0
    """Factor on the routed experts' output."""
    num_groups: Count = 1
    """Expert groups of group-limited routing."""
    groups_per_token: Count = 1
    """Groups each token may be routed to."""
    selection_bias: bool = False
    """Whether a bias, balanced without a loss, is added to the scores for selection only."""
    router_bias: bool = False
    """Whether the router is a linear layer with bias."""
    expert_bias: bool = False
    """Whether the experts' linear layers have biases."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups {self.num_groups} does not divide num_experts {self.num_experts}")
        reachable = self.num_experts // self.num_groups * self.groups_per_token
        if self.groups_per_token > self.num_groups or self.experts_per_token > reachable:
            raise ValueError(
                f"groups_per_token {self.groups_per_token} must be at most num_groups {self.num_groups} and hold"
                f" experts_per_token {self.experts_per_token} experts or more"
            )
        return self


class LatentAttentionSpec(Schema):
    """Multi-head latent attention: queries, keys and values made from low-rank projections."""

    query_rank: Count | None
    """Rank of the query projection; null when queries are projected directly."""
    kv_rank: Count
    """Rank of the joint key and value projection."""
    nope_head_dim: Count
    """Query and key dimensions per head without a rotary position."""
    rope_head_dim: Count
    """Query and key dimensions per head with a rotary position."""
    value_head_dim: Count
    """Value dimensions per head."""


class ModelSpec(Schema):
    """A decoder-only language model. Defaults are those of a small llama-like model with tied embeddings off."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    name: Name = "model"
    """What the model is called in reports."""
    family: Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "gpt_oss"] = (
        "llama"
    )
    """Which family's weight names are used for import and export."""
    num_layers: Count
    """Transformer blocks (multi-token-prediction blocks counted apart)."""
    hidden_size: Count
    """Width of the residual stream."""
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    """Key and value heads; equal to num_heads without grouped-query attention."""
    head_dim: Count
    """Dimensions per head."""
    ffn_size: Count
    """Width of a dense feed-forward layer."""
    vocab_size: Count
    """Rows of the embedding. A run may enlarge it to its tokenizer's size, never shrink it."""
    max_positions: Count = 2048
    """Longest sequence the positions are made for."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of normalisation, always before attention, before the feed-forward and before the head."""
    norm_eps: Positive = 1e-5
    """Epsilon of the normalisation."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary or learned absolute positions."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Hugging Face ``rope_scaling`` settings: ``rope_type`` linear, dynamic, llama3, yarn or longrope, and that kind's
    keys; null for plain rotary positions."""
    mlp: Literal["gated", "plain"] = "gated"
    """Gated (gate, up, down) or plain (up, down) feed-forward."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"] = "silu"
    """Activation of the feed-forward; ``gelu_tanh`` is the tanh approximation."""
    tied_embeddings: bool = False
    """Whether the head uses the embedding's weights."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    attention_out_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""
    qk_norm: bool = False
    """RMSNorm on each query and key head."""
    attention_sinks: bool = False
    """A learned logit per head added to the softmax's denominator."""
    sliding_window: Count | None = None
    """Attention window in tokens; null for full causal attention."""
    sliding_layers: Annotated[tuple[CountOrZero, ...], Field(strict=False)] | None = None
    """Layers that use the window; null for all."""
    latent_attention: LatentAttentionSpec | None = None
    """Multi-head latent attention, in place of grouped-query attention."""
    moe: MoESpec | None = None
    """Mixture of experts; null for a dense model."""
    num_mtp_layers: CountOrZero = 0
    """Multi-token-prediction blocks after the last layer, counted apart in every parameter count."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.sliding_layers and max(self.sliding_layers) >= self.num_layers:
            raise ValueError(
                f"sliding_layers names layer {max(self.sliding_layers)}, layers are 0 to {self.num_layers - 1}"
            )
        if self.positions == "rope" and self.latent_attention is None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.positions == "rope" and self.latent_attention and self.latent_attention.rope_head_dim % 2:
            raise ValueError(
                f"rope_head_dim must be even for rotary positions, got {self.latent_attention.rope_head_dim}"
            )
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block ``layer`` (from 0) has routed experts."""
        if self.moe is None or layer < self.moe.num_dense_layers:
            return False
        return (layer - self.moe.num_dense_layers + 1) % self.moe.layer_period == 0

    def window_of(self, layer: int) -> int | None:
        """Tokens that one token of block ``layer`` (from 0) attends to at most; null for no limit."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None


class DataSpec(Schema):
    """Where the text comes from and how it becomes tokens."""

    paths: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("python-stdlib",)
    """Files, folders or JSONL files; ``python-stdlib`` is the source code of the running Python's standard library."""
    patterns: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("*.txt", "*.md", "*.py", "*.jsonl")
    """File name patterns looked for in folders."""
    text_key: str = "text"
    """Key of the text in each JSONL record."""
    tokenizer: str = "bytes"
    """``bytes`` (256 values and an end of document), or a Hugging Face ``tokenizer.json``."""
    holdout_ratio: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Share of the documents held out for evaluation, chosen by the hash of each document."""
    max_bytes: Count | None = None
    """Use at most so many bytes of text (whole documents, in their fixed order); null for all."""


class Workload(Schema):
    """Data, sequence length and total tokens."""

    data: DataSpec = DataSpec()
    """The corpus."""
    sequence_length: Count
    """Tokens per training sequence (each predicts its next token)."""
    total_tokens: Count
    """Tokens trained on in the whole run; rounded up to whole global batches."""


class Hyperparameters(Schema):
    """What changes the result of training."""

    global_batch_size: Count = 32
    """Sequences per optimizer step. Files also take ``512-seqs`` or ``4Mi-tokens``."""
    learning_rate: Positive = 1e-3
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """Learning rate after warm-up: constant, cosine to the minimum, or stable then linear decay (wsd)."""
    warmup_ratio: Ratio = 0.05
    """Share of the total tokens over which the learning rate rises linearly from 0."""
    decay_ratio: Ratio = 0.2
    """Share of the total tokens over which wsd decays."""
    min_lr_ratio: Ratio = 0.1
    """Final learning rate as a share of the peak (cosine and wsd)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW (decoupled weight decay) or SGD with momentum."""
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices; norms, biases and embeddings of positions have none."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first-moment decay, or SGD's momentum."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's second-moment decay."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    clip_norm: Positive | None = 1.0
    """Largest global gradient norm; null for no clipping."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the embedding, the attention's output and the feed-forward's output."""
    router_aux_loss_coefficient: NonNegative = 0.0
    """Weight of the loss that evens out the experts' load; 0 for none."""
    router_aux_loss_scope: Literal["global", "micro_batch"] = "global"
    """Whose load that loss looks at: of the previous global batch (the same under every plan), or of each rank's
    micro-batch."""
    router_z_loss_coefficient: NonNegative = 0.0
    """Weight of the loss that keeps router logits small; 0 for none."""
    expert_bias_rate: NonNegative = 0.0
    """Step of the selection bias that evens out the experts' load without a loss (needs moe.selection_bias); 0 keeps
    it as it is."""
    parametrization: Literal["standard", "mup"] = "standard"
    """How first values and learning rates follow the width of the model: not at all, or so that what is tuned at one
    width holds at another (maximal update parametrization, relative to ``base_hidden_size``)."""
    base_hidden_size: Count | None = None
    """Hidden size at which ``mup`` is the same as ``standard``: that of the model the other hyperparameters are from,
    or are for. Only with ``mup``."""
    base_num_layers: Count | None = None
    """Layers at which ``mup`` is the same as ``standard``, to transfer over depth, too (AdamW only); null to leave
    depth out."""

    @model_validator(mode="after")
    def _check_parametrization(self) -> Self:
        if self.parametrization == "mup":
            if self.base_hidden_size is None:
                raise ValueError(
                    "parametrization mup needs base_hidden_size, the hidden size at which it is the same as standard"
                )
            if self.base_num_layers is not None and self.optimizer != "adamw":
                raise ValueError(
                    f"base_num_layers is for optimizer adamw, got {self.optimizer}: no rule for depth is known for it;"
                    " leave base_num_layers out"
                )
            return self
        given = [name for name in ("base_hidden_size", "base_num_layers") if getattr(self, name) is not None]
        if given:
            raise ValueError(
                f"{given[0]} is for parametrization mup, which is standard: set it to mup, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        tail = self.decay_ratio if self.schedule == "wsd" else 0.0
        if self.warmup_ratio + tail > 1:
            raise ValueError(f"warmup_ratio {self.warmup_ratio} and decay_ratio {tail} exceed the whole run")
        return self
