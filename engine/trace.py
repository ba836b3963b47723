"""Dry run of one rank of a plan on one CPU: python -P -m engine.trace RUN.yaml [--rank R] [--json].

The engine's own model, sharding, pipeline and optimizer run a step of any one rank, with tensors that have shapes and
no values (torch's fake tensors) in a process group that sends nothing (torch's fake backend). It shows what the rank
sends in a step and what memory it needs at its peak. It shows no times, no losses and nothing that depends on values:
experts get equal loads. Kernels of GPUs keep other tensors than the CPU's here; memory between tensors, of libraries
and of communicators is not seen. The vocabulary is the model's: no data is read.

Exit codes: 0 done, 2 the user must change something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.config import load_run
from engine.errors import USER_ERROR_EXIT_CODE, UserError
from engine.rules import check_run
from engine.stage_split import describe_split
from engine.traced import RankTrace
from engine.units import format_bytes


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="engine.trace", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN.yaml", type=Path, help="the run file")
    parser.add_argument("--rank", type=int, default=0, help="which rank of the plan (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the trace as JSON")
    return parser.parse_args(argv)


def trace_file(path: Path, rank: int, tell: Callable[[str], None] = lambda words: None) -> tuple[RankTrace, list[str]]:
    """Dry-run one rank of a run file; also what there is to say of the file: notes, and the stages of a pipeline.

    Args:
        path: The run file.
        rank: Of the plan's ranks.
        tell: Called with what begins now, for people who wait.

    Raises:
        UserError: The run breaks a rule, or has no such rank.
    """
    config, notes = load_run(path)
    check_run(config)
    if config.plan.pp > 1:
        notes.append(describe_split(config.model, config.plan, config.workload.sequence_length))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

    from engine.trace_run import trace_rank

    return trace_rank(config, rank, tell), notes


def describe(trace: RankTrace) -> str:
    """The trace for people."""
    lines = [
        f"rank {trace.rank} of {trace.world_size} (pipeline rank {trace.pipeline_rank}), {trace.num_micro_batches}"
        f" micro-batches a step, {trace.num_traced_micro_batches} of them run",
        f"peak memory {format_bytes(trace.peak_bytes)}",
        *(f"  {part:<14} {format_bytes(size)}" for part, size in trace.peak_parts.items()),
        "collectives of a step: axis, operation, ranks, calls, message bytes, sent by this rank",
        *(
            f"  {use.axis:<6} {use.operation:<15} {use.group_size:>5} {use.calls:>8.0f}"
            f" {format_bytes(use.message_bytes):>12} {format_bytes(use.sent_bytes):>12}"
            for use in trace.collectives
        ),
    ]
    return "\n".join(lines)


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore")
    try:
        tell = (lambda words: None) if arguments.json else _tell
        trace, notes = trace_file(arguments.run, arguments.rank, tell)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    told = "\n" + json.dumps(trace.to_data()) if arguments.json else "\n".join([*notes, describe(trace)])
    print(told, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
