"""This rank's part of the model, split as a plan says, and what runs it: all axes of a plan in the order they need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import RunConfig
from engine.context import ParallelContext
from engine.memory.recompute import apply_recompute
from engine.models.decoder import Decoder
from engine.models.loss import summed_loss
from engine.moe.placer import apply_placement
from engine.parallel.context_parallel import apply_context_parallel
from engine.parallel.data import apply_data_parallel
from engine.parallel.experts import apply_experts, mixtures_of
from engine.parallel.pipeline import PipelineRunner
from engine.parallel.runner import AccumulationRunner, LossFunction, Runner
from engine.parallel.tensor import apply_tensor_parallel
from engine.parallel.vocabulary import SplitLoss
from engine.precision.policy import precision_policy
from engine.spec import ModelSpec
from engine.stage_split import rank_stages


def split_model(config: RunConfig, context: ParallelContext, spec: ModelSpec) -> tuple[list[Decoder], LossFunction]:
    """This rank's stages of the model, split as the plan says and still on the meta device, and the loss of its logits.

    Args:
        config: The run.
        context: This rank's place.
        spec: The architecture, with its final vocabulary.
    """
    plan, hyper = config.plan, config.hyperparameters
    policy = precision_policy(plan.precision)
    layers = plan.stage_layers(spec.num_layers)
    parts = []
    for stage in rank_stages(plan, context.pp_rank):
        with torch.device("meta"):
            part = Decoder(
                spec,
                layers=layers[stage],
                stage=stage,
                has_embedding=stage == 0,
                has_head=stage == plan.num_stages - 1,
                dropout=hyper.dropout,
                compute_dtype=policy.compute,
            ).to(policy.parameters)
        apply_recompute(part, plan, preserve_rng=hyper.dropout > 0)
        apply_tensor_parallel(part, spec, context)
        apply_experts(part, plan, context)
        apply_placement(mixtures_of(part), plan, context)
        apply_context_parallel(part, plan, context)
        apply_data_parallel(part, plan, policy, context)
        parts.append(part)
    split_vocabulary = context.has_axis("tp") and plan.vocab_parallel
    return parts, SplitLoss(context.axis("tp"), spec.vocab_size) if split_vocabulary else summed_loss


def make_runner(
    config: RunConfig, context: ParallelContext, spec: ModelSpec, parts: Sequence[Decoder], loss: LossFunction
) -> Runner:
    """What runs the local batch of ``config`` on the parts that ``split_model`` made."""
    plan = config.plan
    if not context.has_axis("pp"):
        return AccumulationRunner(parts[0], loss, plan)
    return PipelineRunner(
        parts,
        loss,
        spec,
        context,
        precision_policy(plan.precision),
        num_micro_batches=plan.num_micro_batches(config.hyperparameters.global_batch_size),
        sequence_length=config.workload.sequence_length,
    )


def enlarge_vocabulary(spec: ModelSpec, vocab_size: int) -> ModelSpec:
    """The spec with a vocabulary of at least ``vocab_size``."""
    return spec if vocab_size <= spec.vocab_size else spec.changed(vocab_size=vocab_size)


def describe_enlarged(given: ModelSpec, spec: ModelSpec) -> list[str]:
    """A line for people on what ``enlarge_vocabulary`` made of ``given``; nothing where it is as it was."""
    if spec.vocab_size == given.vocab_size:
        return []
    return [f"the vocabulary is enlarged from {given.vocab_size} to the tokenizer's {spec.vocab_size}"]
