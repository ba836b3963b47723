"""``autotune apply``: write a chosen trial of a study as a run file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.paths import DEFAULT_RUNS, study_folder
from engine.errors import UserError

if TYPE_CHECKING:
    from autotune.space.objectives import Objective
    from autotune.study.snapshot import StudySnapshot, TrialRow
    from engine.config import RunConfig

CHOSEN_FILE = "chosen.yaml"
RUN_FILE = Path("run.yaml")
PROGRAM_FILE = Path("best.yaml")


def command(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")],
    pick: Annotated[
        str,
        typer.Option(
            metavar="knee|fastest|smallest|best|cheapest|thriftiest|OBJECTIVE|ID",
            help="Which trial: of the front, or its number.",
        ),
    ] = "knee",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="The file to write. [default: run.yaml; best.yaml for a user's own program]",
        ),
    ] = None,
    max_memory: Annotated[str | None, typer.Option(help="Most peak memory per rank, such as 70GiB.")] = None,
    min_speed: Annotated[float | None, typer.Option(help="Least training speed, in tokens/s.")] = None,
    max_loss: Annotated[float | None, typer.Option(help="Highest held-out loss, in nats/token.")] = None,
    total_tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on, such as 20B. [default: as the trial]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run. [default: the trial's]")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of studies and jobs.")] = DEFAULT_RUNS,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing, different file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the chosen configuration of a study as a run file for a real run."""
    from autotune.apply.engine import run_file
    from autotune.apply.program import is_program_study
    from autotune.apply.select import explain
    from autotune.apply.select import pick as pick_trial
    from autotune.study.study import load_snapshot
    from engine.atomic import write_text
    from engine.config import dump_run
    from engine.units import parse_tokens
    from engine.yaml_file import dump_yaml

    bounds = _bounds(max_memory, min_speed, max_loss)
    tokens = None if total_tokens is None else parse_tokens(total_tokens, what="--total-tokens")
    folder = study_folder(runs_dir, study)
    snapshot = load_snapshot(folder)
    trial = pick_trial(snapshot, pick, bounds)
    reasons = explain(snapshot, trial, pick, bounds)
    if is_program_study(snapshot):
        if tokens is not None:
            raise UserError("a user's own program has no --total-tokens", hint="leave it out, and edit the command")
        output = output or PROGRAM_FILE
        _apply_program(snapshot, trial, pick, reasons, output, seed, force=force, as_json=as_json)
        return
    output = output or RUN_FILE
    config = run_file(snapshot, trial, how=pick, total_tokens=tokens, seed=seed)
    write_new(output, dump_run(config), force=force)
    chosen = _chosen(snapshot, trial, pick, reasons, output)
    write_text(folder / CHOSEN_FILE, dump_yaml(chosen))
    train = shlex.join(["autotune", "train", str(output), "--retune-every", "10m"])
    if runs_dir != DEFAULT_RUNS:
        train += f" {shlex.join(['--runs-dir', str(runs_dir)])}"
    if as_json:
        print(json.dumps(chosen | {"chosen_file": str(folder / CHOSEN_FILE), "next": train}, indent=2))
    else:
        _print(snapshot, trial, config, reasons, output, folder / CHOSEN_FILE, train, own_tokens=tokens is None)


def _apply_program(
    snapshot: StudySnapshot,
    trial: TrialRow,
    pick: str,
    reasons: list[str],
    output: Path,
    seed: int | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write the values of a trial of a user's own program or function, and the command that runs it again."""
    from autotune.apply.program import best_values, text_of
    from engine.atomic import write_text
    from engine.yaml_file import dump_yaml

    data = best_values(snapshot, trial, how=pick, seed=seed)
    write_new(output, text_of(data, output), force=force)
    chosen = {**data, "reasons": reasons, "file": str(output.absolute())}
    write_text(snapshot.folder / CHOSEN_FILE, dump_yaml(chosen))
    if as_json:
        print(json.dumps(chosen, indent=2))
        return
    from rich.console import Console

    from reports.info import parameter_text

    figures = [f"{o.label.lower()} {o.text(data['measured'][o.name])}" for o in snapshot.objectives]
    lines = [f"trial {trial.number} of {snapshot.name}", f"  {', '.join(figures)}"]
    lines += [f"  {name} = {parameter_text(value)}" for name, value in data["values"].items()]
    lines += ["", *reasons, "", f"file     {output}"]
    lines += [f"command  {data['command']}"] if "command" in data else []
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write a file atomically, never over a different one unless told to.

    Raises:
        UserError: Another file is there, or it can't be written.
    """
    from engine.atomic import write_text

    if path.is_dir():
        raise UserError(f"{path} is a folder, a file is needed", hint=f"for example -o {path / 'run.yaml'}")
    if path.exists() and not force:
        try:
            same = path.read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError):
            same = False
        if not same:
            raise UserError(
                f"{path} exists and says something else", hint="choose another -o, or replace it with --force"
            )
    write_text(path, text)


def _bounds(max_memory: str | None, min_speed: float | None, max_loss: float | None) -> list[Objective]:
    """The command's limits as objectives with a bound."""
    from autotune.space.objectives import Objective
    from engine.schema import parse
    from engine.units import parse_bytes

    given = {
        "memory": None if max_memory is None else float(parse_bytes(max_memory)),
        "speed": min_speed,
        "quality": max_loss,
    }
    return [parse(Objective, {"name": name, "bound": bound}) for name, bound in given.items() if bound is not None]


def _chosen(snapshot: StudySnapshot, trial: TrialRow, pick: str, reasons: list[str], output: Path) -> dict[str, Any]:
    """The choice as plain data (``chosen.yaml``)."""
    return {
        "study": snapshot.name,
        "trial": trial.number,
        "picked": pick,
        "reasons": reasons,
        "plan": trial.plan,
        "values": dict(trial.values or {}),
        "parameters": dict(trial.parameters),
        "run_file": str(output.absolute()),
    }


def _print(
    snapshot: StudySnapshot,
    trial: TrialRow,
    config: RunConfig,
    reasons: list[str],
    output: Path,
    chosen_file: Path,
    train: str,
    *,
    own_tokens: bool,
) -> None:
    from rich.console import Console

    from engine.units import format_count
    from reports.info import parameter_text

    lines = [f"trial {trial.number} of {snapshot.name}: {trial.plan}"]
    figures = [
        f"{objective.label.lower()} {objective.text((trial.values or {})[objective.name])}"
        for objective in snapshot.objectives
    ]
    lines += [f"  {', '.join(figures)}"]
    lines += [f"  {name} = {parameter_text(value)}" for name, value in trial.parameters.items()]
    lines += ["", *reasons, ""]
    length = f"trains on {format_count(config.workload.total_tokens)} tokens in {config.num_steps} steps"
    lines.append(f"{length}, as the trial; --total-tokens gives the real run its length" if own_tokens else length)
    lines += ["", f"run file  {output}", f"chosen    {chosen_file}", f"next      {train}"]
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
