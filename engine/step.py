"""One optimizer step of any plan: the object the trainer drives."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.comm.routing import RoutedSums
from engine.config import RunConfig
from engine.context import ParallelContext
from engine.errors import UserError
from engine.models.decoder import Decoder
from engine.models.loss import IGNORED
from engine.moe.balance import ExpertBalance
from engine.moe.placer import ExpertPlacer
from engine.optim.build import build_optimizer, set_learning_rate
from engine.optim.groups import GROUPS
from engine.optim.norm import scale_gradients, squared_norms
from engine.optim.sharded import OptimizerShards
from engine.parallel.context_parallel import split_sequences
from engine.parallel.data import end_evaluation
from engine.parallel.experts import mixtures_of, splits_tokens
from engine.parallel.replicated import GradientReducer, native_sum
from engine.parallel.runner import Runner
from engine.parallel.shards import saved
from engine.parallel.tensor import settle_gradients
from engine.parallel.tied import by_model_name, rank_parameters, restore_copies, sum_tied_gradients, without_copies
from engine.parametrization import scales_of
from engine.rng import Generators
from engine.spec import ModelSpec
from engine.split_model import enlarge_vocabulary, make_runner, split_model
from engine.weights import Weights


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks except for the times."""

    loss: float | None
    """Mean loss over the valid tokens of the global batch, nats; None when it was not finite."""
    num_valid_tokens: int
    """Tokens of the global batch that had a label."""
    grad_norm: float | None
    """Global gradient norm before clipping; None when it was not finite."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """Gradient norm of each group of parameters; empty when the step was skipped."""
    auxiliary_loss: float | None = None
    """Sum of the routers' losses with their coefficients, nats, not part of ``loss``; None without experts, and when it
    was not finite."""
    expert_load_ratio: float | None = None
    """Mean load of the experts over the fullest one's, mean over the layers: 1 is even. None without experts."""
    skipped: bool = False
    """Whether nothing was updated because the loss or a gradient was not finite on some rank."""
    compute_seconds: float = 0.0
    """Forward and backward, with their communication."""
    optimizer_seconds: float = 0.0
    """Norm, clipping and update."""
    notes: tuple[str, ...] = ()
    """What was done about the links between the ranks, in words."""


class Stepper:
    """The model, optimizer and random streams of one rank.

    Made by ``Stepper.build``. Every method is called by all ranks together. Tokens and labels are int64
    [local batch, L], the data-parallel rank's own contiguous slice of the global batch; ranks that differ along tp or
    pp pass the same.

    Attributes:
        parts: The pipeline stages this rank holds, in ascending order.
        optimizer: Its optimizer.
        context: Its place in the plan.
        placer: Where it has experts computed.
        spec: The architecture, with the vocabulary enlarged to the tokenizer's.
        generators: The random streams; saved in checkpoints.
        micro_batch_size: Sequences per micro-batch in force.
    """

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        spec: ModelSpec,
        parts: Sequence[Decoder],
        runner: Runner,
        routed_sums: RoutedSums | None = None,
    ) -> None:
        self.context = context
        self.spec = spec
        self.parts = list(parts)
        self.generators = Generators(config.runtime.seed, context.device)
        self._config = config
        self._runner = runner
        self._speaks_for_batch = context.tp_rank == 0
        self._parameters = rank_parameters(parts)
        self._shards = OptimizerShards(self._parameters, context)
        self._scales_of = scales_of(config.hyperparameters, spec)
        self.optimizer = build_optimizer(self._shards.tensors, config.hyperparameters, self._scales_of)
        mixtures = {name: layer for part in parts for name, layer in mixtures_of(part).items()}
        self._balance = ExpertBalance(
            mixtures,
            config.hyperparameters,
            context,
            num_layers=sum(map(spec.is_moe_layer, range(spec.num_layers))),
            splits_tokens=splits_tokens(config.plan),
        )
        num_micro_batches = config.plan.num_micro_batches(config.hyperparameters.global_batch_size)
        self.placer = ExpertPlacer(mixtures, config.plan, context, num_micro_batches)
        weights: dict[str, Tensor] = self._parameters | self._balance.selection_biases()
        self._weights = Weights(weights, spec, config.runtime.seed, context, self._scales_of)
        self._routed_sums = routed_sums
        self._reducer = GradientReducer(
            self._parameters, context, overlap=config.plan.overlap_dp, sum_over=routed_sums or native_sum
        )

    @classmethod
    def build(cls, config: RunConfig, context: ParallelContext, vocab_size: int) -> Stepper:
        """The model of ``config`` split as its plan says, with its first values.

        Args:
            config: A run that passed ``engine.rules.check_run``.
            context: From ``open_context`` with the same plan.
            vocab_size: Of the tokenizer; the model's vocabulary is enlarged to it when smaller.
        """
        spec = enlarge_vocabulary(config.model, vocab_size)
        parts, loss = split_model(config, context, spec)
        for part in parts:
            part.to_empty(device=context.device)
        sums = None
        if config.plan.all_reduce == "topology":
            axes = ("data", "expert_data") if spec.moe else ("data",)
            sums = RoutedSums.along(axes, context, refreshes=config.runtime.refresh_topology)
        stepper = cls(config, context, spec, parts, make_runner(config, context, spec, parts, loss), sums)
        stepper._initialise()
        return stepper

    def _initialise(self) -> None:
        self._weights.initialise()
        for load in self._balance.previous_loads().values():
            load.zero_()

    @property
    def micro_batch_size(self) -> int:
        """Sequences per micro-batch in force."""
        return self._runner.micro_batch_size

    def gradients(self) -> list[Tensor]:
        """The gradients that are there now of what this rank holds of the parameters."""
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

    def set_micro_batch(self, size: int) -> None:
        """Use micro-batches of ``size`` sequences from the next step on; the global batch stays.

        Raises:
            UserError: The size does not divide this plan's local batch.
        """
        local_batch = self._config.hyperparameters.global_batch_size // self.context.dp_size
        if size < 1 or local_batch % size:
            raise UserError(
                f"a micro-batch of {size} does not divide the {local_batch} sequences of a data-parallel rank",
                hint=f"use one of {[n for n in range(1, local_batch + 1) if local_batch % n == 0]}",
            )
        self._runner.set_micro_batch(size)

    def train_step(self, tokens: Tensor, labels: Tensor, learning_rate: float) -> StepResult:
        """Forward, backward and update on one global batch.

        The loss is divided by the valid tokens of the whole global batch before the backward pass, so gradients do not
        depend on how the batch is split. The update is left out, and nothing changes, when the loss or a gradient is
        not finite on any rank.
        """
        start = time.perf_counter()
        context = self.context
        tokens, labels = split_sequences(context, tokens.to(context.device), labels.to(context.device))
        valid = context.sum_over_batch((labels != IGNORED).sum())
        num_valid = int(valid.item())
        for part in self.parts:
            part.train()
        # Ranks of tp hold the same activations between layers, unless they split the sequence.
        place = {"dp": context.dp_rank, "cp": context.cp_rank, "pp": context.pp_rank}
        if self._config.plan.sequence_parallel:
            place["tp"] = context.tp_rank
        with self.generators.stream("dropout", **place):
            self._balance.begin_step(tokens.numel() * context.plan.dp * context.plan.cp)
            self._reducer.begin_step(len(tokens) // self.micro_batch_size)
            loss_share = self._runner.train(tokens, labels, 1.0 / max(num_valid, 1))
        self._reducer.reduce_gradients()
        settle_gradients(self.parts)
        sum_tied_gradients(self._parameters, self.spec, context)
        if not self._speaks_for_batch:
            loss_share.zero_()
        context.synchronize()
        computed = time.perf_counter()
        norms = squared_norms(without_copies(self._parameters), context, self._scales_of)
        sums = torch.cat([loss_share.view(1), self._balance.sum_loads(), norms])
        loss, auxiliary_loss, expert_load_ratio, *squares = context.sum_over_world(sums).tolist()
        grad_norm = math.sqrt(sum(squares))
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not skipped:
            self._update(grad_norm, learning_rate)
            self._balance.end_step()
            self.placer.end_step()
        for parameter in self._parameters.values():
            parameter.grad = None
        context.synchronize()
        return StepResult(
            loss=loss if math.isfinite(loss) else None,
            num_valid_tokens=num_valid,
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            grad_norms={} if skipped else {g: math.sqrt(square) for g, square in zip(GROUPS, squares, strict=True)},
            auxiliary_loss=auxiliary_loss if self.spec.moe and math.isfinite(auxiliary_loss) else None,
            expert_load_ratio=expert_load_ratio if self.spec.moe else None,
            skipped=skipped,
            compute_seconds=computed - start,
            optimizer_seconds=time.perf_counter() - computed,
            notes=tuple(self._routed_sums.end_step()) if self._routed_sums else (),
        )

    def _update(self, grad_norm: float, learning_rate: float) -> None:
        clip_norm = self._config.hyperparameters.clip_norm
        if clip_norm is not None and grad_norm > clip_norm:
            scale_gradients(self._parameters, clip_norm / grad_norm)
        set_learning_rate(self.optimizer, learning_rate)
        self._shards.take_gradients()
        self.optimizer.step()
        self._shards.gather()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> tuple[float, int]:
        """Summed loss in nats and number of valid tokens over all ranks' ``tokens``; equal on all ranks.

        Every rank passes the same number of sequences; a rank that has fewer fills up with labels of -100.
        """
        device = self.context.device
        tokens, labels = split_sequences(self.context, tokens.to(device), labels.to(device))
        for part in self.parts:
            part.eval()
        loss_sum = self._runner.evaluate(tokens, labels)
        for part in self.parts:
            end_evaluation(part)
        if not self._speaks_for_batch:
            loss_sum.zero_()
        sums = self.context.sum_over_world(loss_sum.view(1))
        num_valid = self.context.sum_over_batch((labels != IGNORED).sum())
        return float(sums.item()), int(num_valid.item())

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer by parameter name, as live (sharded) tensors: what DCP saves, and loads in place.

        The form is the same under every plan, so a checkpoint can be read under another one.
        """
        return {
            "model": by_model_name({name: saved(weight.detach()) for name, weight in self._weights.named.items()})
            | self._balance.previous_loads()
            | self.placer.state_dict(),
            "optimizer": by_model_name(
                {
                    f"{name}.{state}": saved(value)
                    for name, tensor in self._shards.tensors.items()
                    for state, value in self.optimizer.state[tensor].items()
                }
            ),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the tensors of a state in the form of ``state_dict``. Those that DCP loaded in place are the live
        ones already."""
        for section, tensors in self.state_dict().items():
            for name, tensor in tensors.items():
                if state[section][name] is not tensor:
                    tensor.copy_(state[section][name])
        restore_copies(self._parameters, self._shards.tensors, self.optimizer)
        self.placer.restore()

    def load_full_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Weights.load``."""
        self._weights.load(weights)

    def full_weights(self) -> dict[str, Tensor]:
        """See ``Weights.whole``."""
        return self._weights.whole()
