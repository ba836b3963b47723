"""``autotune train``: run a run file to its end, with the retuner beside it when asked."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.paths import DEFAULT_RUNS, job_folder
from engine.errors import UserError

if TYPE_CHECKING:
    from autotune.retune.supervisor import Rendezvous
    from engine.config import RunConfig
    from engine.outcome import Outcome


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")],
    name: Annotated[str | None, typer.Option(help="Name of the job. [default: the run's name]")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of studies and jobs.")] = DEFAULT_RUNS,
    retune_every: Annotated[
        str | None, typer.Option(help="Retune while training, looking so often: 10m, 30s or 200steps.")
    ] = None,
    start_lr_scale: Annotated[
        float | None, typer.Option(help="Start at so many times the run file's learning rate.")
    ] = None,
    nnodes: Annotated[int | None, typer.Option(min=1, help="Machines; the same command runs on each.")] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of the machines this is, from 0.")] = None,
    nproc_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each machine.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of machine 0, where all meet.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Names the meeting. [default: the job's name]")] = None,
    init_from: Annotated[Path | None, typer.Option(help="Begin with these Hugging Face weights.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = False,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="Send metrics to this MLflow server too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Train a run file, with live retuning when asked. The same command goes on with a job that was interrupted."""
    from autotune.apply.program import refuse_choice
    from autotune.commands.train_view import TrainView
    from autotune.retune.job import finished, only_supervisor, open_job
    from autotune.retune.supervisor import Supervisor
    from engine.config import load_run, start_from
    from engine.units import parse_interval

    refuse_choice(run)
    config, notes = load_run(run)
    if init_from is not None:
        config = start_from(config, init_from)
    config = _with_options(config, start_lr_scale, tensorboard, mlflow)
    if retune_every is not None:
        parse_interval(retune_every)
    job = name or config.name
    folder = job_folder(runs_dir, job).absolute()
    meeting = _rendezvous(config, job, nnodes, node_rank, nproc_per_node, rdzv_endpoint, rdzv_id)
    _check(config)
    resumed = open_job(folder, config)
    view = TrainView(config, folder, silent=as_json)
    for note in notes:
        view.say(note)
    outcome, exit_code = finished(folder, config), 0
    if outcome is not None:
        view.say(f"job {job} has been trained to its end already")
    else:
        view.say(f"job {job}: {'going on' if resumed else 'training'} in {folder}")
        with only_supervisor(folder, meeting.node_rank if meeting else 0), view.shown():
            supervisor = Supervisor(folder, every=retune_every, rendezvous=meeting, on_records=view.update)
            exit_code = supervisor.run()
        outcome = _told(folder)
    if outcome is not None and outcome.kind == "user":
        raise UserError(outcome.detail, hint=f"{folder / 'stdout.log'} has the whole output")
    result = _result(job, folder, outcome, exit_code, retune_every, runs_dir)
    print(json.dumps(result, indent=2)) if as_json else view.summary(result)
    raise SystemExit(exit_code)


def _with_options(config: RunConfig, start_lr_scale: float | None, tensorboard: bool, mlflow: str | None) -> RunConfig:
    from autotune.retune.actions import MAX_SCALE, MIN_SCALE, is_allowed

    if start_lr_scale is not None:
        if not is_allowed(start_lr_scale):
            raise UserError(
                f"--start-lr-scale must lie between {MIN_SCALE:g} and {MAX_SCALE:g}, got {start_lr_scale:g}",
                hint="change hyperparameters.learning_rate in the run file instead",
            )
        config = config.changed(runtime=config.runtime.changed(learning_rate_scale=start_lr_scale))
    logging = config.logging.changed(
        tensorboard=config.logging.tensorboard or tensorboard, mlflow_uri=mlflow or config.logging.mlflow_uri
    )
    if config.branch is not None:
        raise UserError("this run file is a branch of another run", hint="remove its 'branch' section")
    return config.changed(logging=logging)


def _check(config: RunConfig) -> None:
    """What the engine would refuse, told before anything is written."""
    from engine.rules import check_run

    check_run(config)


def _rendezvous(
    config: RunConfig,
    job: str,
    nnodes: int | None,
    node_rank: int | None,
    nproc_per_node: int | None,
    endpoint: str | None,
    run_id: str | None,
) -> Rendezvous | None:
    """Check the options of several machines, which go together.

    Raises:
        UserError: One is missing, given without ``--nnodes``, or does not fit the plan.
    """
    from autotune.retune.supervisor import Rendezvous

    world = config.plan.world_size
    given = {"--node-rank": node_rank, "--rdzv-endpoint": endpoint, "--rdzv-id": run_id}
    if nnodes is None or nnodes == 1:
        for option, value in given.items():
            if value is not None:
                raise UserError(f"{option} is for several machines", hint="give --nnodes too, or leave it out")
        if nproc_per_node not in (None, world):
            raise UserError(
                f"the plan needs {world} ranks, --nproc-per-node is {nproc_per_node}",
                hint=f"leave it out, or give --nproc-per-node {world}",
            )
        return None
    missing = [option for option in ("--node-rank", "--rdzv-endpoint") if given[option] is None]
    if missing:
        raise UserError(
            f"--nnodes {nnodes} needs {' and '.join(missing)} too",
            hint="example: --nnodes 2 --node-rank 0 --rdzv-endpoint first-machine:29500",
        )
    assert node_rank is not None
    assert endpoint is not None
    if node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank} must be below --nnodes {nnodes}", hint="machines count from 0")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--rdzv-endpoint must be HOST:PORT, got {endpoint!r}", hint="example: first-machine:29500")
    per_node = nproc_per_node or world // nnodes
    if per_node * nnodes != world:
        raise UserError(
            f"the plan needs {world} ranks, {nnodes} machines with {per_node} each have {per_node * nnodes}",
            hint="change --nnodes or --nproc-per-node, or the degrees of the plan",
        )
    return Rendezvous(nnodes, node_rank, endpoint, run_id or job, per_node)


def _told(folder: Path) -> Outcome | None:
    from engine.outcome import read_outcome

    return read_outcome(folder)


def _result(
    job: str, folder: Path, outcome: Outcome | None, exit_code: int, retune_every: str | None, runs_dir: Path
) -> dict[str, Any]:
    """All that is said at the end, as plain data."""
    from dataclasses import asdict

    from autotune.retune.ledger import STORY_KINDS, Ledger, costs

    entries = Ledger(folder).entries()
    options = ["--runs-dir", str(runs_dir)] if runs_dir != DEFAULT_RUNS else []
    ok = outcome is not None and outcome.kind == "ok"
    following = [shlex.join(["autotune", "monitor", job, *options])]
    if ok:
        run_file, export = str(folder / "run.yaml"), str(folder / "export")
        following.append(shlex.join(["python", "-P", "-m", "engine.train", run_file, "--export", export]))
    return {
        "job": job,
        "folder": str(folder),
        "exit_code": exit_code,
        "outcome": outcome.to_data() if outcome else None,
        "retuned": retune_every is not None or bool(entries),
        "decisions": [entry.to_data() for entry in entries if entry.kind in STORY_KINDS],
        "costs": asdict(costs(entries)),
        "next": following,
    }
