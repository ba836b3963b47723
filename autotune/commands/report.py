"""``autotune report``: write the page of a study and its front as CSV."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.paths import DEFAULT_RUNS, study_folder

if TYPE_CHECKING:
    from autotune.study.snapshot import StudySnapshot

PAGE_FILE = "report.html"
FRONT_FILE = "front.csv"


def command(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="The page. [default: in the study's folder]")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of studies and jobs.")] = DEFAULT_RUNS,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the page of a study: Pareto front, knee, failures. One HTML file that needs no network; also front.csv."""
    from autotune.study.study import load_snapshot
    from engine.atomic import write_text
    from reports.render import front_csv, write_report

    folder = study_folder(runs_dir, study)
    snapshot = load_snapshot(folder)
    page = write_report(snapshot, output or folder / PAGE_FILE)
    front = folder / FRONT_FILE
    write_text(front, front_csv(snapshot))
    if as_json:
        print(json.dumps(_result(snapshot, page, front), indent=2))
    else:
        _print(snapshot, page, front)
    if open_page:
        typer.launch(page.absolute().as_uri())


def _result(snapshot: StudySnapshot, page: Path, front: Path) -> dict[str, Any]:
    """What was written and found, as plain data."""
    from autotune.apply.select import front_trials, knee_trial
    from reports.info import get_summary

    trials = front_trials(snapshot)
    knee = knee_trial(snapshot, trials)
    return {
        "study": snapshot.name,
        "page": str(page),
        "front_csv": str(front),
        "num_trials": len(snapshot.trials),
        "statuses": get_summary(snapshot).counts,
        "front": [trial.number for trial in trials],
        "knee": None if knee is None else knee.number,
    }


def _print(snapshot: StudySnapshot, page: Path, front: Path) -> None:
    from rich.console import Console

    from reports.info import get_failures, get_summary
    from reports.terminal import front_table, status_line

    console = Console()
    console.print(front_table(snapshot, width=console.width))
    lines = [status_line(snapshot)]
    lines += [f"{kind.kind} (trial {kind.first_trial}): {kind.first_detail}" for kind in get_failures(snapshot)]
    summary = get_summary(snapshot)
    if summary.choices:
        knee = summary.choices[0]
        lines += ["", f"{knee.title}, trial {knee.trial.number}", *knee.reasons]
    lines += ["", f"page   {page}", f"front  {front}"]
    if summary.choices:
        lines.append(f"next   {summary.choices[0].command}")
    else:
        lines.append(f"next   {shlex.join(['autotune', 'studies', 'show', snapshot.name])}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
