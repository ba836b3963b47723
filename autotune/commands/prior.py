"""``autotune prior``: the user's own runs that warm starts learn from."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from autotune.paths import DEFAULT_RUNS, study_folder
from engine.errors import UserError
from engine.units import format_count

app = typer.Typer(
    help="Show, add and remove own runs that warm starts learn from.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)

RowsFile = Annotated[
    Path | None,
    typer.Option("--rows", help="File of own runs; by default that of your data folder, or PARETUNE_PRIOR_ROWS."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]


@app.command()
def add(
    name: StudyName,
    runs_dir: Annotated[Path, typer.Option(help="Folder of studies and jobs.")] = DEFAULT_RUNS,
    rows: RowsFile = None,
    as_json: AsJson = False,
) -> None:
    """Add the finished trials of a study; those added before are left as they are."""
    from autotune.prior.rows import add_rows, default_rows_file
    from autotune.study.meta_rows import meta_rows
    from autotune.study.study import load_snapshot

    path = rows or default_rows_file()
    found = meta_rows(load_snapshot(study_folder(runs_dir, name)))
    if not found:
        raise UserError(
            f"study {name} has no finished trial of which learning rate, batch and held-out loss are known",
            hint="add it once trials have finished; a program's or function's space says by 'task' what it trains",
        )
    added = add_rows(path, found)
    if as_json:
        print(json.dumps({"study": name, "file": str(path), "num_added": added, "num_known": len(found) - added}))
    else:
        known = f", {len(found) - added} were there before" if added < len(found) else ""
        print(f"{added} {'trial' if added == 1 else 'trials'} of {name} added to {path}{known}")


@app.command()
def show(rows: RowsFile = None, as_json: AsJson = False) -> None:
    """Show which own runs there are, by study."""
    from autotune.prior.rows import count_damaged, default_rows_file, read_rows

    path = rows or default_rows_file()
    by_study: dict[str, list[float]] = {}
    found = read_rows(path)
    num_damaged = count_damaged(path)
    for row in found:
        by_study.setdefault(row.study, []).extend([row.loss] if row.loss is not None else [])
    counts = Counter(row.study for row in found)
    sizes = {
        study: sorted({(row.task.num_parameters, row.task.total_tokens) for row in found if row.study == study})
        for study in counts
    }
    if as_json:
        data = [
            {
                "study": study,
                "num_rows": count,
                "best_loss": min(by_study[study], default=None),
                "tasks": [{"num_parameters": n, "total_tokens": d} for n, d in sizes[study]],
            }
            for study, count in counts.items()
        ]
        print(json.dumps({"file": str(path), "num_damaged_lines": num_damaged, "studies": data}, indent=2))
        return
    if num_damaged:
        words = "1 line is" if num_damaged == 1 else f"{num_damaged} lines are"
        print(f"{words} damaged in {path} and not used; add the studies again", file=sys.stderr)
    if not counts:
        print(f"no own runs in {path}; add a study's with: autotune prior add STUDY")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("study", "trials", "best loss", "parameters × tokens", box=None, header_style="dim")
    for study, count in counts.items():
        best = min(by_study[study], default=None)
        words = ", ".join(f"{format_count(n)} × {format_count(d)}" for n, d in sizes[study])
        table.add_row(study, str(count), "" if best is None else f"{best:.4g}", words)
    console = Console(highlight=False)
    console.print(table)
    console.print(str(path), markup=False)


@app.command()
def remove(name: StudyName, rows: RowsFile = None, as_json: AsJson = False) -> None:
    """Remove the runs of a study from the file; the study itself is not touched."""
    from autotune.prior.rows import default_rows_file, read_studies, remove_rows

    path = rows or default_rows_file()
    removed = remove_rows(path, name)
    if not removed:
        known = ", ".join(read_studies(path)) or "none"
        raise UserError(f"{path} has no runs of a study {name!r}", hint=f"studies in it: {known}")
    if as_json:
        print(json.dumps({"study": name, "num_removed": removed}))
    else:
        print(f"{removed} {'trial' if removed == 1 else 'trials'} of {name} removed")
