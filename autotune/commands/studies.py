"""``autotune studies``: list, show, stop, export, merge and import studies."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.paths import DEFAULT_RUNS, check_writable_file, study_folder
from engine.errors import UserError

if TYPE_CHECKING:
    from autotune.study.snapshot import StudySnapshot, TrialRow

STOP_TIMEOUT_SECONDS = 120.0

app = typer.Typer(
    help="List, show, stop, export, merge and import studies.",
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
)

RunsDir = Annotated[Path, typer.Option(help="Folder of studies and jobs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]


@dataclass(frozen=True)
class Summary:
    """One study in a line."""

    name: str
    state: str
    """``running``, ``stopped`` or ``done``, or what is wrong with it."""
    num_finished: int = 0
    num_asked: int | None = None
    num_feasible: int = 0
    created: str = ""
    num_trainings: float = 0.0
    """What the trials come to in full trainings, which the budget counts; another number where trials grow."""
    is_growing: bool = False


@app.callback()
def _default(context: typer.Context, runs_dir: RunsDir = DEFAULT_RUNS, as_json: AsJson = False) -> None:
    """List, show, stop, export, merge and import studies. Alone it lists them."""
    if context.invoked_subcommand is None:
        list_(runs_dir, as_json)


@app.command("list")
def list_(runs_dir: RunsDir = DEFAULT_RUNS, as_json: AsJson = False) -> None:
    """List all studies."""
    from autotune.study.study_file import STUDY_FILE

    folders = sorted(path.parent for path in (runs_dir / "studies").glob(f"[!.]*/{STUDY_FILE}"))
    summaries = [_summary(folder) for folder in folders]
    if as_json:
        print(json.dumps([vars(summary) for summary in summaries], indent=2))
        return
    if not summaries:
        print(f"no studies in {runs_dir / 'studies'}; begin one with: autotune sweep demo")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("study", "state", "trials", "feasible", "created", box=None, header_style="dim")
    for summary in summaries:
        asked = f" of {summary.num_asked}" if summary.num_asked is not None else ""
        trials = f"{summary.num_finished}{asked}"
        if summary.is_growing:
            trials = f"{summary.num_trainings:.4g}{asked} in {summary.num_finished} parts"
        table.add_row(summary.name, escape(summary.state), trials, str(summary.num_feasible), summary.created)
    Console().print(table)


@app.command()
def show(name: StudyName, runs_dir: RunsDir = DEFAULT_RUNS, as_json: AsJson = False) -> None:
    """Show one study: its state, front and trials."""
    from autotune.apply.program import is_program_study
    from autotune.study.study import load_snapshot

    folder = study_folder(runs_dir, name)
    snapshot = load_snapshot(folder)
    if as_json:
        print(json.dumps(_data(snapshot), indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from reports.terminal import front_table

    console = Console()
    summary = _summary_of(snapshot)
    kinds = Counter(row.outcome.kind for row in snapshot.trials if row.outcome is not None)
    refused = ", ".join(f"{count} by {rule}" for rule, count in sorted(snapshot.num_refused.items())) or "none"
    console.print(f"{name}: {summary.state}, created {snapshot.created}", highlight=False)
    outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none yet"
    console.print(f"outcomes: {outcomes}; refused proposals: {refused}", highlight=False)
    if not is_program_study(snapshot):
        console.print(f"text: {snapshot.corpus_hash or 'not read yet'}", highlight=False)
    labels = [objective.label.lower() for objective in snapshot.objectives]
    trials = Table("trial", "state", "candidate", *labels, box=None, header_style="dim")
    for row in snapshot.trials:
        trials.add_row(str(row.number), _state(row), escape(row.plan), *map(escape, _values(row, snapshot)))
    console.print(trials)
    console.print(front_table(snapshot, width=console.width))


@app.command()
def stop(name: StudyName, runs_dir: RunsDir = DEFAULT_RUNS, as_json: AsJson = False) -> None:
    """End a running sweep at its trials' next checkpoints, and wait for it."""
    from autotune.study.study import is_running, request_stop
    from autotune.study.study_file import read_study_file

    folder = study_folder(runs_dir, name)
    read_study_file(folder)
    was_running = is_running(folder)
    if was_running:
        request_stop(folder)
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while is_running(folder):
        if time.monotonic() > deadline:
            raise UserError(
                f"study {name} still runs {STOP_TIMEOUT_SECONDS:.0f} s after it was asked to stop",
                hint="it ends by itself once its trials do; end its process to force it, no trial is lost",
            )
        time.sleep(0.2)
    if as_json:
        print(json.dumps({"study": name, "was_running": was_running}))
    else:
        print(f"study {name} " + ("stopped; the same sweep goes on where it was" if was_running else "was not running"))


@app.command()
def export(
    name: StudyName,
    format_: Annotated[str, typer.Option("--format", metavar="csv|json", help="What to write.")] = "csv",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="The file. [default: standard output]")
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Write all trials of a study as a table: one row a trial, also of failed and running ones."""
    from autotune.study.frame import csv_text, json_text
    from autotune.study.study import load_snapshot
    from engine.atomic import write_text

    writers = {"csv": csv_text, "json": json_text}
    if format_ not in writers:
        raise UserError(f"there is no format {format_!r}", hint="use csv or json")
    text = writers["json" if as_json else format_](load_snapshot(study_folder(runs_dir, name)))
    if output is None:
        print(text, end="")
    else:
        check_writable_file(output, "--output")
        write_text(output, text)


@app.command()
def merge(
    names: Annotated[list[str], typer.Argument(metavar="STUDY STUDY...", help="Studies with equal spaces.")],
    into: Annotated[str, typer.Option("--into", metavar="NAME", help="Name of the new study.")],
    runs_dir: RunsDir = DEFAULT_RUNS,
    as_json: AsJson = False,
) -> None:
    """Make one study of several with equal spaces; they stay as they are."""
    from autotune.study.merge import merge_studies

    merged = merge_studies([study_folder(runs_dir, name) for name in names], study_folder(runs_dir, into))
    if as_json:
        print(json.dumps({"study": into, **vars(merged)}, indent=2))
        return
    parts = [f"{merged.num_trials} trials"]
    parts += [f"{merged.num_repeats} repeats of them"] if merged.num_repeats else []
    parts += [f"left out: {merged.num_same} that stood in several"] if merged.num_same else []
    parts += [f"left out: {merged.num_unfinished} without an outcome"] if merged.num_unfinished else []
    print(f"study {into}: {', '.join(parts)}")


@app.command("import")
def import_(
    url: Annotated[str, typer.Argument(metavar="URL", help="Database address, or the file of an Optuna journal.")],
    name: StudyName,
    optuna_name: Annotated[
        str | None, typer.Option("--optuna-name", metavar="NAME", help="Its name there. [default: the only one]")
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    as_json: AsJson = False,
) -> None:
    """Make a study STUDY of one of Optuna's."""
    from autotune.study.optuna_import import import_optuna

    imported = import_optuna(url, optuna_name, study_folder(runs_dir, name))
    if as_json:
        print(json.dumps({"study": name, **vars(imported)}, indent=2))
        return
    print(f"study {name}: {imported.num_trials} trials, {imported.num_failed} of them failed or pruned")
    if imported.num_left_out:
        print(f"left out: {imported.num_left_out} without an end")
    for note in imported.notes:
        print(f"note: {note}")


def _summary(folder: Path) -> Summary:
    from autotune.study.study import load_snapshot

    try:
        return _summary_of(load_snapshot(folder))
    except UserError as error:  # one damaged study must not hide the others
        return Summary(folder.name, f"damaged: {error.message}")


def _summary_of(snapshot: StudySnapshot) -> Summary:
    from autotune.study.study import is_running

    counted = [row for row in snapshot.trials if row.repeat_of is None]
    num_finished = sum(row.outcome is not None for row in counted)
    asked = snapshot.num_trials_asked
    state = "stopped"
    if is_running(snapshot.folder):
        state = "running"
    elif asked is not None and _is_used_up(snapshot, asked):
        state = "done"
    num_feasible = sum(row.feasible for row in counted)
    return Summary(
        snapshot.name,
        state,
        num_finished,
        asked,
        num_feasible,
        snapshot.created,
        num_trainings=snapshot.spent,
        is_growing=snapshot.is_growing,
    )


def _is_used_up(snapshot: StudySnapshot, num_trials: int) -> bool:
    """Whether no full training is left of a budget."""
    from autotune.search.fidelity import TOLERANCE

    return num_trials - snapshot.spent < snapshot.needed - TOLERANCE


def _state(row: TrialRow) -> str:
    state: str = row.outcome.kind if row.outcome is not None else row.state
    state += f" ({100 * row.share:.3g} % of a training)" if row.share < 1 else ""
    state += f" (continues {row.continues})" if row.continues is not None else ""
    return state if row.repeat_of is None else f"{state} (repeats {row.repeat_of})"


def _values(row: TrialRow, snapshot: StudySnapshot) -> list[str]:
    if row.values is None:
        detail = row.outcome.detail if row.outcome is not None else ""
        return [detail[:40], *[""] * (len(snapshot.objectives) - 1)]
    return [objective.text(row.values[objective.name]) for objective in snapshot.objectives]


def _data(snapshot: StudySnapshot) -> dict[str, Any]:
    return {
        **vars(_summary_of(snapshot)),
        "folder": str(snapshot.folder),
        "corpus_hash": snapshot.corpus_hash,
        "num_refused": snapshot.num_refused,
        "objectives": [objective.to_data() for objective in snapshot.objectives],
        "trials": [
            {
                "trial": row.number,
                "state": row.state,
                "plan": row.plan,
                "parameters": row.parameters,
                "values": row.values,
                "feasible": row.feasible,
                "attempts": row.attempts,
                "repeat_of": row.repeat_of,
                "share": row.share,
                "continues": row.continues,
                "outcome": row.outcome.to_data() if row.outcome is not None else None,
            }
            for row in snapshot.trials
        ],
    }
