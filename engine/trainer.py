"""The training loop: batches, steps, records, evaluations, checkpoints, requests. What must be equal on all ranks is
decided from what all ranks know."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    Manifest,
    check_identity,
    differences,
    identity_of,
    load_tensors,
    open_checkpoint,
)
from engine.config import RunConfig
from engine.context import ParallelContext
from engine.control import PLANNED_STOP_EXIT_CODE
from engine.data.corpus import prepare_corpus
from engine.data.loader import Loader
from engine.data.sampler import Sampler
from engine.data.sequences import Batch
from engine.errors import UserError
from engine.evaluate import Evaluation, Evaluator
from engine.failures import RunFailure
from engine.flops import parameter_counts
from engine.logging_sinks import MetricSinks
from engine.loss_guard import LossGuard
from engine.measure import Meter, environment
from engine.outcome import Outcome, OutcomeKind, read_outcome
from engine.plan import Plan
from engine.requests import RequestDesk
from engine.rng import draw_alike
from engine.rules import check_run
from engine.schedule import learning_rate_at
from engine.signals import SignalWatch
from engine.split_model import describe_enlarged
from engine.step import Stepper, StepResult
from engine.telemetry import AckRecord, EventRecord, StepRecord, TelemetryWriter
from engine.units import format_count, format_duration

_MAX_STEPS_PER_LINE = 100
_LINES_PER_RUN = 50


@dataclass
class RunState:
    """Where the run stands and which settings are in force; equal on all ranks."""

    learning_rate_scale: float
    """Factor on the schedule."""
    micro_batch_size: int
    """Sequences per micro-batch and data-parallel rank."""
    step: int = 0
    """Optimizer steps done."""
    num_skipped_steps: int = 0
    """Steps whose update was left out."""
    handled: tuple[str, ...] = ()
    """Ids of the newest requests answered."""


class Trainer:
    """One run in one process of a job.

    Building it loads the corpus, the model and, when the folder holds one, the newest checkpoint.

    Args:
        config: The run, already checked against the rules.
        context: This process's place in the job.
        folder: The run folder; the same on all ranks.
        signals: Signals to heed.
        report: Prints a line for people; called on rank 0 only.

    Raises:
        UserError: The corpus, the weights to start from or the checkpoint do not fit the run.
    """

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        folder: Path,
        *,
        signals: SignalWatch,
        report: Callable[[str], None],
    ) -> None:
        self.config = config
        self.context = context
        self._folder = folder
        self._signals = signals
        self._report = report
        self._meter = Meter(config.runtime, context)
        corpus = context.together(lambda: prepare_corpus(config.workload.data))
        _check_same(config, corpus.hash, context)
        self._corpus_hash = corpus.hash
        self.identity = identity_of(config, corpus.hash)
        self._stepper = Stepper.build(config, context, corpus.vocab_size)
        batch_size, length = config.hyperparameters.global_batch_size, config.workload.sequence_length
        train, held_out = corpus.train.sequences(length), corpus.held_out.sequences(length)
        self._loader = Loader(
            train, Sampler(len(train), config.runtime.seed), batch_size, context.dp_rank, context.dp_size
        )
        self._evaluator = Evaluator(
            held_out, self._stepper, batch_size // context.dp_size, config.evaluation.max_tokens
        )
        self._store = CheckpointStore(folder, config.checkpoint.keep, context)
        self._guard = LossGuard(config.runtime.diverged_above, config.runtime.max_skipped_steps)
        self.state = RunState(config.runtime.learning_rate_scale, config.plan.micro_batch_size)
        self.resumed_from = self._find_start()
        """The checkpoint that the run goes on from, if any."""
        self._start_step = self.state.step
        self._telemetry: TelemetryWriter | None = None
        self._sinks: MetricSinks | None = None
        self._desk: RequestDesk | None = None
        self._exit_code: int | None = None
        self._losses: deque[float] = deque(maxlen=max(1, (self._end_step - self._branch_start) // 10))
        if self.resumed_from and config.branch is None:
            before = self.resumed_from.manifest.measured
            self._losses.extend(before.losses)
            self._meter.go_on(config.plan, before)

    # ------------------------------------------------------------------------------------------------------- position

    @property
    def tokens(self) -> int:
        """Tokens trained on so far; steps left out by a roll-back do not count."""
        return self.state.step * self.config.tokens_per_step

    @property
    def is_ending(self) -> bool:
        """Whether the run ends at this step boundary."""
        return self._exit_code is not None

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to do."""
        return self.state.step >= self._end_step

    @property
    def _branch_start(self) -> int:
        return self._start_step if self.config.branch else 0

    @property
    def _end_step(self) -> int:
        branch, stop_after = self.config.branch, self.config.runtime.stop_after_steps
        if branch:
            return self._start_step + branch.num_steps
        return self.config.num_steps if stop_after is None else min(self.config.num_steps, stop_after)

    def learning_rate(self, step: int) -> float:
        """Learning rate of step ``step`` (from 1).

        In a branch the schedule is scaled by the branch's factor and blended linearly, over the last ``anneal_steps``,
        into the schedule's minimum scaled alike: were the minimum not scaled, annealing a small rate would raise it.
        """
        h, branch = self.config.hyperparameters, self.config.branch
        rate = learning_rate_at(h, step * self.config.tokens_per_step, self.config.workload.total_tokens)
        if branch and branch.anneal_steps:
            phase = max(0.0, 1 - (self._end_step - step) / branch.anneal_steps)
            rate += phase * (h.learning_rate * h.min_lr_ratio - rate)
        return rate * (branch.learning_rate_scale if branch else self.state.learning_rate_scale)

    # ---------------------------------------------------------------------------------------------------------- start

    def _find_start(self) -> Checkpoint | None:
        """Go to where the run starts: the branch's checkpoint, the newest of the folder, or the initial weights."""
        if self.config.branch:
            checkpoint: Checkpoint | None = open_checkpoint(self.config.branch.checkpoint)
        else:
            checkpoint = self._store.newest()
        if checkpoint:
            check_identity(checkpoint, self.identity)
            self._restore(checkpoint)
            manifest = checkpoint.manifest
            self.state.learning_rate_scale = manifest.learning_rate_scale
            self.state.handled = manifest.handled
            if manifest.plan == self.config.plan and manifest.micro_batch_size != self.state.micro_batch_size:
                self.set_micro_batch(manifest.micro_batch_size)
        elif self.config.runtime.init_from:
            from engine.checkpoint.hf_weights import import_weights

            source, stepper = Path(self.config.runtime.init_from), self._stepper
            self.context.together(lambda: stepper.load_full_weights(import_weights(source, stepper.spec)))
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Take parameters, optimizer state, random numbers and position from a checkpoint."""
        tensors = self._stepper.state_dict()
        load_tensors(checkpoint, tensors, self.context)
        self._stepper.load_state_dict(tensors)
        manifest = checkpoint.manifest
        self._stepper.generators.load_state_dict(manifest.random_uses)
        self._loader.seek(manifest.position)
        self._guard.history = manifest.losses
        self.state.step = manifest.step
        self.state.num_skipped_steps = manifest.num_skipped_steps

    # ------------------------------------------------------------------------------------------------------------ run

    def run(self) -> tuple[Outcome, int]:
        """Train to the end, or until a request or a signal ends it.

        Returns:
            The outcome (complete on rank 0) and the exit code.

        Raises:
            RunFailure: Too many non-finite steps, divergence, or a held-out loss that is not finite.
        """
        self.context.on_main(self._open_sinks)
        if self.config.branch is None:
            self._desk = RequestDesk(self, self._folder)
        self._record_start()
        attention = self._wants_attention()
        while True:
            if attention:
                self._attend()
            if self.is_ending or self.is_complete:
                break
            attention = self._advance()
            attention = self._after_step() or attention
        return self._finish()

    def _advance(self) -> bool:
        """Do one step and record it. Returns whether somebody wants attention at this boundary, on all ranks."""
        start = time.perf_counter()
        batch = self._loader.next()
        data_seconds = time.perf_counter() - start
        rate = self.learning_rate(self.state.step + 1)
        result, timed = self._meter.run_step(
            self._stepper,
            lambda: self._train_step(batch, rate),
            is_last=self.state.step + 1 >= self._end_step,
        )
        self.state.step += 1
        self.state.num_skipped_steps += result.skipped
        attention = self._wants_attention()
        seconds = time.perf_counter() - start
        self._meter.add(seconds, self.config.tokens_per_step, timed=timed)
        self._record_step(result, rate, seconds, data_seconds, timed)
        if result.loss is not None:
            self._losses.append(result.loss)
        for note in result.notes:
            self._record_event("note", {"text": note})
            if self.context.is_main:
                self._report(note)
        self._guard.check(result.loss, result.skipped)
        return attention

    def _train_step(self, batch: Batch, rate: float) -> StepResult:
        result = self._stepper.train_step(batch.tokens, batch.labels, rate)
        if self.config.runtime.step_delay_seconds:
            time.sleep(self.config.runtime.step_delay_seconds)
        return result

    def _after_step(self) -> bool:
        """Evaluation and checkpoint, when this step is one for them. The end has its own.

        Returns:
            Whether a signal cut the evaluation short.
        """
        if self.is_complete:
            return False
        every_tokens, every_steps = self.config.evaluation.every_tokens, self.config.checkpoint.every_steps
        before = self.tokens - self.config.tokens_per_step
        is_due = every_tokens and self.tokens // every_tokens > before // every_tokens
        if is_due and self.evaluate() is None:
            return True
        if every_steps and self.state.step % every_steps == 0 and self.config.branch is None:
            self.save_checkpoint()
        return False

    def _finish(self) -> tuple[Outcome, int]:
        evaluation = self.evaluate() if self._exit_code is None else None
        if evaluation is None and self._exit_code is None:
            self._attend()
        if evaluation is None:
            assert self._exit_code is not None
            detail = f"ended at step {self.state.step}; the same command goes on from there"
            return self.outcome("interrupted", detail), self._exit_code
        if not math.isfinite(evaluation.loss):
            raise RunFailure("nan", "the held-out loss is not finite")
        # A branch's last checkpoint is one that the run itself may be rolled back to, to go on from there.
        stops_early = self._end_step < self.config.num_steps and self.config.branch is None
        if self.config.checkpoint.at_end or stops_early:
            self.save_checkpoint()
        return self.outcome("ok", evaluation=evaluation), 0

    # ------------------------------------------------------------------------------------------ requests and signals

    def _wants_attention(self) -> bool:
        """Whether any rank has a signal or rank 0 a request: one small agreement a step."""
        quiet = not self._signals.received and not (self._desk and self._desk.is_waiting())
        return not self.context.all_agree(quiet)

    def _attend(self) -> None:
        # SIGINT wins over SIGTERM, so that all ranks end with the same code.
        for number in (signal.SIGINT, signal.SIGTERM):
            if not self.context.all_agree(self._signals.received != number):
                if self.config.branch is None:
                    self.save_checkpoint()
                self._exit_code = 128 + number
                return
        if self._desk:
            self._desk.handle_all()

    def end_planned(self) -> None:
        """End at this boundary with the planned-stop exit code."""
        self._exit_code = PLANNED_STOP_EXIT_CODE

    def set_micro_batch(self, size: int) -> None:
        """Use another micro-batch at the same global batch, from the next step on.

        Raises:
            UserError: It can't be.
        """
        plan: Plan = self.config.plan.changed(micro_batch_size=size)
        check_run(self.config.changed(plan=plan), self.context.world_size)
        self._stepper.set_micro_batch(size)
        self.state.micro_batch_size = size

    def roll_back(self, checkpoint: Checkpoint, scale: float, skip_steps: int) -> None:
        """Go back to a checkpoint of this run, with another learning-rate scale, and leave out the next batches.

        Later checkpoints are removed: a process started anew must not go on from what was given up.
        """
        before = self.state.step
        self._restore(checkpoint)
        self.state.learning_rate_scale = scale
        position = checkpoint.manifest.position + skip_steps * self.config.hyperparameters.global_batch_size
        self._loader.seek(position)
        self._losses.clear()
        if self._store.holds(checkpoint):
            self._store.discard_after(self.state.step)
            self._store.amend(checkpoint, position=position, **self._settings())
        else:
            self._store.discard_after(self.state.step - 1)
            self.save_checkpoint()
        text = f"rolled back from step {before} to {self.state.step}; {skip_steps} batches left out"
        self._record_event("note", {"text": text, "from_step": before, "checkpoint": str(checkpoint.path)})

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, *, requested: bool = False) -> Path:
        """Write a checkpoint of this step; called on all ranks."""
        start = time.perf_counter()
        manifest = Manifest(
            step=self.state.step,
            tokens=self.tokens,
            position=self._loader.position,
            num_skipped_steps=self.state.num_skipped_steps,
            random_uses=self._stepper.generators.state_dict(),
            losses=self._guard.history,
            measured=self._meter.so_far(self.config.plan, self._losses),
            identity=self.identity,
            requested=requested,
            **self._settings(),
        )
        path = self._store.save(manifest, self._stepper.state_dict)
        self._record_event("checkpoint", {"path": str(path), "seconds": time.perf_counter() - start})
        return path

    def secure_settings(self) -> None:
        """Make the settings in force those that a process started anew goes on with."""
        newest = self._store.newest()
        if newest:
            self._store.amend(newest, **self._settings())
        else:
            self.save_checkpoint()

    def _settings(self) -> dict[str, Any]:
        return {
            "learning_rate_scale": self.state.learning_rate_scale,
            "micro_batch_size": self.state.micro_batch_size,
            "handled": self.state.handled,
            "plan": self.config.plan,
            "world_size": self.context.world_size,
        }

    def export(self, folder: Path) -> None:
        """Write the weights as Hugging Face safetensors; called on all ranks.

        Raises:
            UserError: On all ranks, when the folder can't be written.
        """
        from engine.checkpoint.hf_weights import export_weights

        weights = self._stepper.full_weights()
        self.context.on_main(lambda: export_weights(weights, self._stepper.spec, folder))

    # ----------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self) -> Evaluation | None:
        """The held-out loss now; called on all ranks. None when a signal on some rank cut it short."""
        evaluation = self._evaluator.run(lambda: not self._signals.received)
        if evaluation is None:
            return None
        finite = math.isfinite(evaluation.loss)
        data = {
            "held_out_loss": evaluation.loss if finite else None,
            "held_out_bits_per_byte": evaluation.bits_per_byte if finite else None,
            "num_tokens": evaluation.num_tokens,
            "seconds": evaluation.seconds,
        }
        self._record_event("evaluation", data)
        if self._sinks and finite:
            metrics = {"held_out_loss": evaluation.loss, "held_out_bits_per_byte": evaluation.bits_per_byte}
            self._sinks.log(self.state.step, metrics)
        if self.context.is_main:
            self._report(
                f"held-out loss {evaluation.loss:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte"
                f" ({format_count(evaluation.num_tokens)} tokens, {format_duration(evaluation.seconds)})"
            )
        return evaluation

    # -------------------------------------------------------------------------------------------------------- records

    def _open_sinks(self) -> None:
        self._telemetry = TelemetryWriter(self._folder)
        self._sinks = MetricSinks(self.config.logging, self._folder, self.config)

    def record_ack(self, change_id: str, *, accepted: bool, reason: str, data: dict[str, Any]) -> None:
        """Write the answer to a change request into the telemetry."""
        if self._telemetry:
            answer = AckRecord(**self._moment(), change_id=change_id, accepted=accepted, reason=reason, data=data)
            self._telemetry.write(answer)

    def _record_event(self, kind: Any, data: dict[str, Any]) -> None:
        if self._telemetry:
            self._telemetry.write(EventRecord(kind=kind, **self._moment(), data=data))

    def _moment(self) -> dict[str, Any]:
        return {"time": time.time(), "step": self.state.step, "tokens": self.tokens}

    def _record_start(self) -> None:
        resumed = self.resumed_from
        data = {
            "world_size": self.context.world_size,
            "pid": os.getpid(),
            "num_steps": self._end_step,
            "tokens_per_step": self.config.tokens_per_step,
            "resumed_from": str(resumed.path) if resumed else None,
            "corpus_hash": self._corpus_hash,
            "num_parameters": self._num_parameters,
        }
        self._record_event("start", data)
        self._note_draws()
        if self.context.is_main:
            place = f"step {self.state.step} of {self._end_step}"
            self._report(
                f"{self.config.name}: {format_count(self._num_parameters)} parameters, {self.config.plan.describe()},"
                + (f" resumed at {place} from {resumed.path}" if resumed else f" {place}")
            )
            for note in describe_enlarged(self.config.model, self._stepper.spec):
                self._report(note)

    def _note_draws(self) -> None:
        """Say it where dropout does not go on as it would have in the run that wrote the checkpoint."""
        before = self.resumed_from and self.resumed_from.manifest
        if not before or not self.config.hyperparameters.dropout:
            return
        written = before.plan.changed(micro_batch_size=before.micro_batch_size)
        if not draw_alike(written, self.config.plan.changed(micro_batch_size=self.state.micro_batch_size)):
            text = f"the plan was {written.describe()}: dropout goes on with fresh draws, in each rank's own stream"
            self._record_event("note", {"text": text})
            if self.context.is_main:
                self._report(text)

    def _record_step(self, result: StepResult, rate: float, seconds: float, data_seconds: float, timed: bool) -> None:
        if not self._telemetry or not self._sinks:
            return
        record = StepRecord(
            **self._moment(),
            loss=result.loss,
            learning_rate=rate,
            learning_rate_scale=self._scale_in_force,
            grad_norm=result.grad_norm,
            grad_norms=result.grad_norms,
            auxiliary_loss=result.auxiliary_loss,
            expert_load_ratio=result.expert_load_ratio,
            step_seconds=seconds,
            data_seconds=data_seconds,
            compute_seconds=result.compute_seconds,
            optimizer_seconds=result.optimizer_seconds,
            memory_bytes=self._meter.memory_bytes(),
            skipped=result.skipped,
            micro_batch_size=self.state.micro_batch_size,
            precision=self.config.plan.precision,
            timed=timed,
        )
        self._telemetry.write(record)
        speed = self.config.tokens_per_step / seconds
        metrics = {"loss": result.loss, "learning_rate": rate, "grad_norm": result.grad_norm}
        metrics |= {"tokens_per_second": speed}
        self._sinks.log(self.state.step, {name: value for name, value in metrics.items() if value is not None})
        every = max(1, min(_MAX_STEPS_PER_LINE, (self._end_step - self._branch_start) // _LINES_PER_RUN))
        if self.state.step % every == 0 or self.state.step == self._end_step:
            loss = "not finite" if result.loss is None else f"{result.loss:.4f}"
            self._report(
                f"step {self.state.step}/{self._end_step}  loss {loss}  lr {rate:.3g}  {format_count(speed)} tokens/s"
                + ("  (update left out)" if result.skipped else "")
            )

    @property
    def _scale_in_force(self) -> float:
        return self.config.branch.learning_rate_scale if self.config.branch else self.state.learning_rate_scale

    # -------------------------------------------------------------------------------------------------------- outcome

    @property
    def _num_parameters(self) -> int:
        return parameter_counts(self._stepper.spec).total

    def outcome(
        self, kind: OutcomeKind, detail: str = "", *, evaluation: Evaluation | None = None, alone: bool = False
    ) -> Outcome:
        """What the run measured; called on all ranks, or with ``alone`` on one, after a failure.

        A process that had nothing left to train takes the measurements from the outcome that the folder has.
        """
        measured = self._meter.results(all_ranks=not alone)
        measured["train_loss"] = sum(self._losses) / len(self._losses) if self._losses else None
        if self._meter.num_steps == 0 and (previous := read_outcome(self._folder)):
            kept = ("tokens_per_second", "step_seconds", "peak_memory_bytes", "train_loss")
            told = {name: getattr(previous, name) for name in kept}
            measured |= {name: value for name, value in told.items() if value is not None}
        return Outcome(
            kind=kind,
            detail=detail,
            held_out_loss=evaluation.loss if evaluation else None,
            held_out_bits_per_byte=evaluation.bits_per_byte if evaluation else None,
            num_steps=self.state.step,
            num_tokens=self.tokens,
            num_skipped_steps=self.state.num_skipped_steps,
            corpus_hash=self._corpus_hash,
            num_parameters=self._num_parameters,
            environment=environment(self.context.device),
            **measured,
        )

    def close(self, outcome: Outcome | None, exit_code: int) -> None:
        """Write the end record and stop the helpers."""
        if outcome:
            self._record_event("end", {"outcome": outcome.kind, "detail": outcome.detail, "exit_code": exit_code})
        if self._sinks:
            self._sinks.close()
        self._loader.close()


def _check_same(config: RunConfig, corpus_hash: str, context: ParallelContext) -> None:
    """Refuse ranks that were given different runs or corpora: each node reads its own files. Where they lie may differ.

    Raises:
        UserError: On all ranks, with the differences.
    """
    run = config.to_data()
    del run["workload"]["data"], run["runtime"]["init_from"], run["runtime"]["topology"], run["origin"]
    runs = context.gather(run | {"corpus": corpus_hash})
    for rank, other in enumerate(runs):
        if other != runs[0]:
            raise UserError(
                f"the run is not the same on all ranks: {'; '.join(differences(runs[0], other))}"
                f" (there: rank 0, here: rank {rank})",
                hint="give every node the same run file, texts and tokenizer; best on a file system that all mount",
            )
