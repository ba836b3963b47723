"""What the parallel tests run: functions called by one process for the reference and by every rank of a plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from engine.config import RunConfig, RuntimeOptions
from engine.context import ParallelContext, open_context
from engine.models.loss import IGNORED
from engine.parallel.shards import gather
from engine.plan import Plan
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.step import Stepper
from engine.trace_collectives import CollectiveCounter

LENGTH = 16
GLOBAL_BATCH = 12
NUM_STEPS = 3
LEARNING_RATE = 0.1
VOCAB = 61

_LLAMA = {
    "num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48,
    "vocab_size": 62,
}  # fmt: skip
_BIASED = {
    "norm": "layernorm", "positions": "learned", "mlp": "plain", "activation": "gelu_tanh", "num_kv_heads": 4,
    "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "max_positions": 32,
}  # fmt: skip
_MOE = {"num_experts": 4, "experts_per_token": 2, "ffn_size": 16}
_LATENT = {"query_rank": 12, "kv_rank": 8, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 7}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_MATRIX = _LLAMA | {"num_layers": 4, "vocab_size": VOCAB}
MODELS: dict[str, ModelSpec] = {
    "llama": ModelSpec(**_LLAMA),
    "llama-tied": ModelSpec(**_LLAMA, tied_embeddings=True),
    "gpt2": ModelSpec(**(_LLAMA | _BIASED), tied_embeddings=True),
    "gpt2-untied": ModelSpec(**(_LLAMA | _BIASED)),
    "uneven": ModelSpec(**(_LLAMA | {"hidden_size": 34, "ffn_size": 50, "vocab_size": 67})),
    "windows": ModelSpec(**_LLAMA, sliding_window=5, sliding_layers=[0, 2], attention_sinks=True, qk_norm=True),
    "one-kv": ModelSpec(
        **(_LLAMA | {"num_kv_heads": 1, "vocab_size": VOCAB}), qkv_bias=True, qk_norm=True, attention_sinks=True
    ),
    "latent": ModelSpec(**(_LLAMA | {"num_kv_heads": 4}), latent_attention=_LATENT),
    "moe": ModelSpec(**_LLAMA, moe=_MOE),
    "moe-biased": ModelSpec(
        **_LLAMA, mlp_bias=True, moe=_MOE | {"router_bias": True, "expert_bias": True, "shared_ffn_size": 12}
    ),
    "matrix-dense": ModelSpec(**_MATRIX, tied_embeddings=True),
    "matrix-moe": ModelSpec(**_MATRIX, moe=_MOE | {"num_dense_layers": 1, "shared_ffn_size": 16}),
    # Every token goes to every expert, so the experts' loads are even.
    "moe-all": ModelSpec(**(_LLAMA | {"num_layers": 2}), moe=_MOE | {"experts_per_token": 4, "shared_ffn_size": 12}),
    "moe-deepseek": ModelSpec(
        **_LLAMA,
        moe=_MOE
        | {"num_experts": 8, "shared_ffn_size": 12, "num_dense_layers": 1, "scoring": "sigmoid", "routed_scaling": 1.5}
        | {"num_groups": 4, "groups_per_token": 2, "selection_bias": True},
    ),
    "moe-gpt-oss": ModelSpec(
        **_LLAMA, activation="clamped_swiglu", moe=_MOE | {"router_bias": True, "expert_bias": True}
    ),
    "seven-tied": ModelSpec(**(_LLAMA | {"num_layers": 7}), tied_embeddings=True),
    "deepseek": ModelSpec(
        **(_LLAMA | {"num_kv_heads": 4}), family="deepseek_v3", latent_attention=_LATENT,
        rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        moe={
            "num_experts": 8, "experts_per_token": 2, "ffn_size": 16, "shared_ffn_size": 12, "num_dense_layers": 1,
            "scoring": "sigmoid", "routed_scaling": 1.5, "num_groups": 4, "groups_per_token": 2, "selection_bias": True,
        },
    ),
    "gpt-oss": ModelSpec(
        **_LLAMA, family="gpt_oss", qkv_bias=True, attention_out_bias=True, attention_sinks=True, rope_scaling=_YARN,
        activation="clamped_swiglu", sliding_window=5, sliding_layers=[0, 2],
        moe=_MOE | {"router_bias": True, "expert_bias": True},
    ),
    "qwen3": ModelSpec(
        **(_LLAMA | {"max_positions": 8}), family="qwen3", qk_norm=True, tied_embeddings=True, sliding_window=6,
        sliding_layers=[1], rope_scaling={"rope_type": "dynamic", "factor": 3.0},
    ),
    "moe-some": ModelSpec(**_LLAMA, moe=_MOE | {"num_dense_layers": 1, "layer_period": 2}),
}  # fmt: skip


def run_config(model: str, plan: dict[str, Any], hyperparameters: dict[str, Any]) -> RunConfig:
    """A tiny run: fp64, three micro-batches a step (two under tp alone, for speed) unless the plan says otherwise."""
    sizes = {"dp_shard": 2, "pp": 4, "tp": 6}
    micro_batch_size = next((size for axis, size in sizes.items() if plan.get(axis, 1) > 1), GLOBAL_BATCH)
    return RunConfig(
        model=MODELS[model],
        workload=Workload(sequence_length=LENGTH, total_tokens=GLOBAL_BATCH * LENGTH * NUM_STEPS),
        hyperparameters=Hyperparameters(**{"global_batch_size": GLOBAL_BATCH, **hyperparameters}),
        plan=Plan(**{"precision": "fp64", "micro_batch_size": micro_batch_size, **plan}),
        runtime=RuntimeOptions(seed=3),
    )


def build(config: RunConfig) -> Stepper:
    """A stepper of this rank."""
    context = open_context(config.plan, config.runtime, has_experts=config.model.moe is not None)
    return Stepper.build(config, context, vocab_size=1)


def batch(step: int, context: ParallelContext, size: int = GLOBAL_BATCH) -> tuple[Tensor, Tensor]:
    """This rank's slice of global batch ``step`` of ``size`` sequences. Valid labels are spread unevenly over
    sequences, so over ranks and micro-batches; some sequences, the last among them, have none."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (size, LENGTH), generator=draws)
    labels = torch.randint(0, VOCAB, (size, LENGTH), generator=draws)
    for sequence in range(size):
        labels[sequence, max(LENGTH - 2 * (sequence % GLOBAL_BATCH), 0) :] = IGNORED
    size //= context.dp_size
    part = slice(context.dp_rank * size, (context.dp_rank + 1) * size)
    return tokens[part], labels[part]


def train(
    config: RunConfig, *, first_step: int = 0, last_step: int = NUM_STEPS, load: str = "", save: str = ""
) -> dict[str, Any]:
    """Train some steps and tell everything that must not depend on the plan.

    Args:
        config: Of the run.
        first_step: Steps done already.
        last_step: Where to end.
        load: Checkpoint to start from, if any.
        save: Where to write a checkpoint at the end, if anywhere.

    Returns:
        Losses and norms of all steps; this rank's whole gradients of the first; on rank 0 the whole parameters at the
        end; the loss on another batch.
    """
    stepper = build(config)
    context, size = stepper.context, config.hyperparameters.global_batch_size
    if load:
        stepper.evaluate(*batch(0, context, size))  # what an evaluation gathered must not outlive the load
        state = stepper.state_dict()
        dcp.load(state, checkpoint_id=load, no_dist=context.world_size == 1)
        stepper.load_state_dict(state)
    gradients: dict[str, Tensor] = {}
    hook = stepper.optimizer.register_step_pre_hook(lambda *_: gradients.update(_whole_gradients(stepper)))
    results = []
    for step in range(first_step, last_step):
        results.append(stepper.train_step(*batch(step, context, size), LEARNING_RATE))
        hook.remove()
    if save:
        dcp.save(stepper.state_dict(), checkpoint_id=save, no_dist=context.world_size == 1)
    # The last sequence has no valid label: without it nothing changes but the shape, which no longer divides evenly.
    held_out = [tensor[: len(tensor) - (context.dp_size == 1)] for tensor in batch(99, context, size)]
    return {
        "losses": torch.tensor([result.loss for result in results], dtype=torch.float64),
        "grad_norms": torch.tensor([result.grad_norm for result in results], dtype=torch.float64),
        "group_norms": torch.tensor(list(results[0].grad_norms.values()), dtype=torch.float64),
        "gradients": gradients,
        "parameters": stepper.full_weights(),
        "evaluation": torch.tensor(stepper.evaluate(*held_out), dtype=torch.float64),
    }


def _whole_gradients(stepper: Stepper) -> dict[str, Tensor]:
    named = [item for part in stepper.parts for item in part.named_parameters()]
    return {fqn: gather(parameter.grad).clone() for fqn, parameter in named if parameter.grad is not None}


def dropout_draws(config: RunConfig) -> dict[str, Any]:
    """Each rank's loss of two steps on equal sequences, and that of a run resumed before the second."""
    losses = []
    for _ in range(2):
        stepper = build(config)
        context = stepper.context
        tokens, labels = batch(0, context)
        tokens[:], labels[:] = torch.arange(LENGTH), torch.arange(LENGTH)
        runner_train = stepper._runner.train
        shares: list[float] = []

        def train_and_note(*arguments: Any, run: Any = runner_train, into: list[float] = shares) -> Tensor:
            loss = run(*arguments)
            into.append(float(loss))
            return loss

        stepper._runner.train = train_and_note  # type: ignore[method-assign]
        if losses:
            stepper.generators.load_state_dict({"dropout": 1})
        for _ in range(2 - len(losses)):
            stepper.train_step(tokens, labels, 0.0)
        losses.append(context.gather(shares))
    return {"all": losses[0], "resumed": losses[1]}


def time_limits(config: RunConfig) -> dict[str, Any]:
    """Seconds after which a collective operation along each axis is given up."""
    context = open_context(config.plan, config.runtime)
    groups = {axis: context.group(axis) for axis in ("dp", "tp")}
    return {axis: group._get_backend(context.device).options._timeout.seconds for axis, group in groups.items()}


def collectives(config: RunConfig) -> dict[str, Any]:
    """Calls and message bytes of every kind of collective in a step after the first, as each rank counts them."""
    stepper = build(config)
    context, size = stepper.context, config.hyperparameters.global_batch_size
    stepper.train_step(*batch(0, context, size), LEARNING_RATE)
    with CollectiveCounter(context) as counter:
        stepper.train_step(*batch(1, context, size), LEARNING_RATE)
    return {"ranks": context.gather({" ".join(map(str, key)): count for key, count in counter.counts().items()})}


def one_part_ignored(config: RunConfig) -> dict[str, Any]:
    """A step and an evaluation where the tokens that the last of two context-parallel ranks holds have no label."""
    stepper = build(config)
    tokens, labels = batch(0, stepper.context)
    labels[:, LENGTH // 4 : -LENGTH // 4] = IGNORED
    evaluated = stepper.evaluate(tokens, labels)
    told = stepper.train_step(tokens, labels, LEARNING_RATE)
    return {
        "loss": told.loss,
        "grad_norm": told.grad_norm,
        "num_valid_tokens": told.num_valid_tokens,
        "evaluated": dict(zip(("loss", "num_valid_tokens"), evaluated, strict=True)),
    }


def dropped(config: RunConfig) -> dict[str, Any]:
    """What dropout takes of the embedding in each rank's first micro-batch, bool [B, L, H]."""
    stepper = build(config)
    masks: list[Tensor] = []
    first = next(iter(stepper.parts[0].layers.values()))
    hook = first.register_forward_pre_hook(lambda _, inputs: masks.append(inputs[0] == 0))
    stepper.train_step(*batch(0, stepper.context), LEARNING_RATE)
    hook.remove()
    return {"masks": stepper.context.gather(masks[0])}
