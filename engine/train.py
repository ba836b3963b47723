"""Check, train, evaluate or export one run: python -P -m engine.train RUN.yaml, alone or under torchrun on many nodes.

The folder of the run gets telemetry.jsonl, checkpoints/ and outcome.json. Started again, the run goes on from its
newest checkpoint. Exit codes: 0 done, 2 the user must change something, 75 stopped on request (start it again), 130 and
143 ended by SIGINT and SIGTERM (after a checkpoint), 1 any other failure.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from engine.atomic import make_folder
from engine.config import RunConfig, load_run, start_from
from engine.errors import USER_ERROR_EXIT_CODE, UserError
from engine.failures import Interrupted, classify, describe, has_lost_peer
from engine.flops import parameter_counts
from engine.hf_export import to_hf_config
from engine.outcome import (
    OUTCOME_FILE,
    Outcome,
    RankFailure,
    clear_failures,
    read_failures,
    read_outcome,
    write_failure,
    write_outcome,
)
from engine.rules import check_run
from engine.signals import SignalWatch
from engine.stage_split import describe_split
from engine.units import format_bytes, format_count

if TYPE_CHECKING:
    from engine.context import ParallelContext
    from engine.trainer import Trainer

LOCK_FILE = ".lock"


@dataclass
class Arguments:
    """The command line."""

    run: Path
    folder: Path
    evaluate_only: bool
    check: bool
    export: Path | None
    init_from: Path | None
    json: bool
    quiet: bool


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the command line; prints help and exits when it is empty or wrong."""
    parser = argparse.ArgumentParser(prog="engine.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN.yaml", type=Path, help="the run file")
    parser.add_argument("--folder", type=Path, help="run folder (default: where the run file lies)")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="only the held-out loss, of the newest checkpoint if there is one"
    )
    parser.add_argument(
        "--check", action="store_true", help="only read the run file and the data, and say what they are"
    )
    parser.add_argument("--init-from", type=Path, metavar="WEIGHTS", help="begin with these Hugging Face weights")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write Hugging Face safetensors there at the end")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON and nothing else")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    if not argv:
        parser.print_help(sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
    given = parser.parse_args(argv)
    folder = (given.folder or given.run.parent).absolute()
    return Arguments(
        given.run, folder, given.evaluate_only, given.check, given.export, given.init_from, given.json, given.quiet
    )


class Program:
    """One process of one run, from the command line to the exit code."""

    def __init__(self, arguments: Arguments, signals: SignalWatch) -> None:
        self._arguments = arguments
        self._signals = signals
        self._rank = int(os.environ.get("RANK", "0"))
        self._speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # for its node: each has a terminal of its own
        self._writes = not (arguments.evaluate_only or arguments.check)
        self._lock: IO[str] | None = None
        self._trainer: Trainer | None = None

    def run(self) -> int:
        """Do what was asked; the exit code."""
        try:
            return self._run()
        except (Exception, Interrupted, KeyboardInterrupt) as error:
            self._signals.deferred = True
            return self._fail(error)
        finally:
            if self._lock:
                self._lock.close()

    def _run(self) -> int:
        arguments = self._arguments
        config, notes = load_run(arguments.run)
        if arguments.init_from:
            config = start_from(config, arguments.init_from)
        check_run(config)
        if arguments.export:
            to_hf_config(config.model)  # refuses what can't be exported now, not after the training
        if arguments.check:
            self._check(config, notes)
            return 0
        if config.runtime.device == "cpu":
            # Read by the OpenMP runtime when torch is imported; torch.set_num_threads alone leaves its pool large.
            os.environ["OMP_NUM_THREADS"] = str(config.runtime.threads_per_rank)
        if self._writes:
            make_folder(arguments.folder)
            clear_failures(arguments.folder, self._rank, config.plan.world_size)

        from engine.context import open_context

        context = open_context(config.plan, config.runtime, has_experts=config.model.moe is not None)
        for note in [*notes, *_describe_stages(config)]:
            self._report(note)
        exit_code = self._with_context(config, context)
        context.barrier()  # torchrun ends all ranks as soon as one ends: rank 0 must have written everything
        return exit_code

    def _check(self, config: RunConfig, notes: list[str]) -> None:
        """Read all that a start would read, prepare the corpus, and print what was found."""
        from engine.checkpoint.hf_weights import import_weights
        from engine.comm.placed import checked_topology
        from engine.data.corpus import prepare_corpus
        from engine.split_model import describe_enlarged, enlarge_vocabulary

        if config.runtime.topology:
            checked_topology(config.plan, config.runtime.topology)
        corpus = prepare_corpus(config.workload.data)
        spec = enlarge_vocabulary(config.model, corpus.vocab_size)
        if config.runtime.init_from:
            import_weights(Path(config.runtime.init_from), spec)  # compares names and shapes, reads none
        found = {
            "corpus_hash": corpus.hash,
            "num_documents": corpus.num_documents,
            "num_bytes": corpus.num_bytes,
            "vocab_size": corpus.vocab_size,
            "num_parameters": parameter_counts(spec).total,
            "num_processes": config.plan.world_size,
            "notes": [*notes, *_describe_stages(config), *describe_enlarged(config.model, spec)],
        }
        lines = [json.dumps(found)] if self._arguments.json else [f"{key}: {value}" for key, value in found.items()]
        print("\n".join(lines), flush=True)

    def _with_context(self, config: RunConfig, context: ParallelContext) -> int:
        from engine.trainer import Trainer

        arguments = self._arguments
        if self._writes:
            context.on_main(self._take_lock)
            self._writes = context.broadcast(self._lock is not None)
            if not self._writes:
                raise UserError(
                    f"another process trains in {arguments.folder}",
                    hint="wait for it, stop it, or choose another --folder",
                )
            _check_shared(arguments.folder, context)
        trainer = Trainer(config, context, arguments.folder, signals=self._signals, report=self._report)
        self._trainer = trainer
        if arguments.evaluate_only:
            self._report(f"evaluating {trainer.resumed_from.path if trainer.resumed_from else 'the initial weights'}")
            outcome, exit_code = trainer.outcome("ok", evaluation=trainer.evaluate()), 0
        else:
            if self._rank == 0 and not trainer.is_complete:
                (arguments.folder / OUTCOME_FILE).unlink(missing_ok=True)  # of an earlier process: this one goes on
            self._signals.deferred = True
            outcome, exit_code = trainer.run()
        self._end(outcome, exit_code)
        self._report(_summary(outcome))
        if arguments.export and exit_code == 0:
            trainer.export(arguments.export)
            self._report(f"exported to {arguments.export}")
        return exit_code

    def _end(self, outcome: Outcome, exit_code: int) -> None:
        """Write the outcome, close the trainer, print JSON if asked for."""
        if self._rank == 0 and self._may_write(outcome):
            write_outcome(self._arguments.folder, outcome)
        if self._trainer:
            self._trainer.close(outcome, exit_code)
            self._trainer = None
        if self._rank == 0 and self._arguments.json:
            print(json.dumps(outcome.to_data()), flush=True)

    def _may_write(self, outcome: Outcome) -> bool:
        """Whether the outcome goes into the folder: a start that was refused leaves the result of a finished run."""
        if not self._writes:
            return False
        previous = read_outcome(self._arguments.folder)
        return outcome.kind != "user" or previous is None or previous.kind != "ok"

    def _fail(self, error: BaseException) -> int:
        """Write down what ended this process, and on rank 0 the outcome of the job."""
        kind, detail = classify(error), describe(error)
        if kind in ("infra", "oom", "hang") and not has_lost_peer(error):
            traceback.print_exception(error)
        elif self._speaks:
            print(f"error: {error if kind == 'user' else f'{kind}: {detail}'}", file=sys.stderr, flush=True)
        exit_code = USER_ERROR_EXIT_CODE if kind == "user" else 1
        if isinstance(error, Interrupted):
            exit_code = 128 + error.signal_number
        try:
            self._writes = self._may_write_failure()
            if self._writes:
                folder = self._arguments.folder
                write_failure(folder, RankFailure(kind=kind, detail=detail, rank=self._rank, time=time.time()))
                # Another rank may know better: this one perhaps only lost its peer.
                worst = read_failures(folder)[0]
                kind, detail = worst.kind, worst.detail
            if self._rank == 0:
                trainer = self._trainer
                outcome = trainer.outcome(kind, detail, alone=True) if trainer else Outcome(kind=kind, detail=detail)
                self._end(outcome, exit_code)
        except UserError as unwritable:
            print(f"error: {unwritable}", file=sys.stderr, flush=True)
        return exit_code

    def _may_write_failure(self) -> bool:
        """Whether the folder is this job's to write to, even if the failure came before it was locked."""
        if not self._writes or not self._arguments.folder.is_dir():
            return False
        if self._rank == 0 and self._lock is None:
            self._take_lock()
        return self._rank != 0 or self._lock is not None

    def _take_lock(self) -> None:
        """Lock the folder until the process ends, however it does; leave ``_lock`` None when another has it.

        Raises:
            UserError: The folder can't be written to.
        """
        path = self._arguments.folder / LOCK_FILE
        try:
            file = open(path, "w")  # noqa: SIM115  (an open file holds the lock)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = file
            except BlockingIOError:
                file.close()
        except OSError as error:
            hint = "choose another --folder"
            raise UserError(f"cannot write to {path.parent}: {error.strerror}", hint=hint) from None

    def _report(self, line: str) -> None:
        if self._rank == 0 and not self._arguments.quiet and not self._arguments.json:
            print(line, flush=True)


def _describe_stages(config: RunConfig) -> list[str]:
    """A line on the layers of each pipeline stage; nothing without a pipeline."""
    if config.plan.pp == 1:
        return []
    return [describe_split(config.model, config.plan, config.workload.sequence_length)]


def _check_shared(folder: Path, context: ParallelContext) -> None:
    """Refuse a run over several nodes whose folder is not one and the same on all of them.

    Raises:
        UserError: On all ranks.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) >= context.world_size:
        return
    name = context.broadcast(f".shared-{uuid.uuid4().hex}")
    if context.is_main:
        (folder / name).touch()
    context.barrier()
    is_shared = context.all_agree((folder / name).exists())
    if context.is_main:
        (folder / name).unlink()
    if not is_shared:
        raise UserError(
            f"the run folder {folder.absolute()} is not shared by all nodes",
            hint="name a folder on a file system that every node mounts, with --folder",
        )


def _summary(outcome: Outcome) -> str:
    """The outcome in one line."""
    parts = [f"{outcome.num_steps} steps"]
    if outcome.tokens_per_second is not None:
        parts.append(f"{format_count(outcome.tokens_per_second)} tokens/s")
    if outcome.peak_memory_bytes is not None:
        parts.append(f"peak memory {format_bytes(outcome.peak_memory_bytes)}")
    return f"{outcome.kind}: {', '.join([*([outcome.detail] if outcome.detail else []), *parts])}"


def main(argv: Sequence[str] | None = None) -> int:
    """The program; the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    with SignalWatch() as signals:
        return Program(arguments, signals).run()


if __name__ == "__main__":
    exit_code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The process groups are left to the system: taken down, or ended with Python, gloo's threads sometimes abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
