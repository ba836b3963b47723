"""The folder of a job: made once from a run file, continued by the same configuration alone, run by one at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from autotune.study.study_file import differences
from engine.atomic import make_folder, write_text
from engine.config import RunConfig, dump_run, load_run
from engine.errors import UserError
from engine.outcome import Outcome, read_outcome
from engine.telemetry import TELEMETRY_FILE

RUN_FILE = "run.yaml"


def open_job(folder: Path, config: RunConfig) -> bool:
    """Make the job's folder, or find it again. A job that has never trained a step takes a corrected run file.

    Returns:
        Whether the job had begun before.

    Raises:
        UserError: It had begun with another configuration; the difference is told.
    """
    path = folder / RUN_FILE
    if not (folder / TELEMETRY_FILE).exists():
        make_folder(folder)
        write_text(path, dump_run(config))
        return False
    present, _ = load_run(path)
    if present != config:
        changed = differences(present.to_data(), config.to_data())
        raise UserError(
            f"the job in {folder} has another configuration: {'; '.join(changed)}",
            hint="choose another --name for a new job, or give the run file it began with to go on",
        )
    return True


def finished(folder: Path, config: RunConfig) -> Outcome | None:
    """The outcome of a job with no step left to do; None when there is something to do."""
    outcome = read_outcome(folder)
    if outcome is None or outcome.kind != "ok":
        return None
    stop_after = config.runtime.stop_after_steps
    end = config.num_steps if stop_after is None else min(config.num_steps, stop_after)
    return outcome if outcome.num_steps >= end else None


@contextmanager
def only_supervisor(folder: Path, node_rank: int) -> Iterator[None]:
    """Hold the job for this process on this node; free again however the process ends.

    Raises:
        UserError: Another process has it.
    """
    path = folder / f".supervisor-{node_rank}.lock"
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(path.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"the job in {folder} is being trained already",
                hint=f"watch it with: autotune monitor {folder}, or choose another --name",
            ) from None
        except PermissionError:
            hint = "change its permissions, or choose another --runs-dir"
            raise UserError(f"cannot write to {folder}", hint=hint) from None
        yield
