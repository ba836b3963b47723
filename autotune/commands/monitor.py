"""``autotune monitor``: a terminal view of a live run."""

from __future__ import annotations

import difflib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.paths import DEFAULT_RUNS, job_folder
from engine.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotune.retune.overview import Overview

REFRESH_SECONDS = 1.0
_BARS = "▁▂▃▄▅▆▇█"


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a job, or the folder of a job or trial.")],
    runs_dir: Annotated[Path, typer.Option(help="Folder of studies and jobs.")] = DEFAULT_RUNS,
    once: Annotated[bool, typer.Option("--once", help="Look once instead of following.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
) -> None:
    """Watch a live run: loss, speed, memory, forecast, health, the retuner's last decisions. Ctrl-C ends it."""
    from rich.console import Console

    from autotune.retune.overview import Watcher

    watcher = Watcher(_find(run, runs_dir))
    if as_json:
        print(json.dumps(watcher.look().to_data(), indent=2))
        return
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_render(watcher.look()))
        return
    from rich.live import Live

    try:
        with Live(_render(watcher.look()), console=console, auto_refresh=False) as live:
            while True:
                look = watcher.look()
                live.update(_render(look), refresh=True)
                if look.outcome is not None:
                    return
                time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:  # the watching is over; the run is not touched
        return


def _find(run: str, runs_dir: Path) -> Path:
    """The folder of a run given by name or path.

    Raises:
        UserError: Neither a job nor a folder.
    """
    if Path(run).is_dir():
        return Path(run).absolute()
    jobs = runs_dir / "jobs"
    names = sorted(path.name for path in jobs.iterdir() if path.is_dir()) if jobs.is_dir() else []
    if "/" not in run and run in names:
        return job_folder(runs_dir, run).absolute()
    close = difflib.get_close_matches(run, names, n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    elif names:
        hint = f"jobs in {runs_dir}: {', '.join(names)}"
    else:
        hint = f"there are no jobs in {runs_dir}: start one with autotune train, or name another --runs-dir"
    raise UserError(f"no job or folder named {run!r}", hint=hint)


def _render(look: Overview) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in _rows(look):
        table.add_row(name, Text(value))
    parts: list[RenderableType] = [table]
    if look.findings:
        parts += [Text("\nHealth", style="bold"), *(Text(f"  {one.describe()}") for one in look.findings)]
    if look.decisions:
        parts.append(Text("\nRetuner", style="bold"))
        parts += [Text(f"  step {entry.step}: {entry.text}") for entry in look.decisions]
    return Panel(Group(*parts), title=f"{look.name}  step {look.step}/{look.num_steps}", title_align="left")


def _rows(look: Overview) -> list[tuple[str, str]]:
    from engine.units import format_bytes, format_count, format_duration

    rows = []
    if not look.is_alive and look.outcome is None:
        rows.append(("state", "nothing trains it now; the command that started it goes on where it was"))
    elif look.step == 0:
        rows.append(("state", "has not done a step yet"))
    if look.loss is not None:
        rows.append(("loss", f"{look.loss:.4f} nats/token  {sparkline(look.loss_curve)}"))
    if look.held_out_loss is not None:
        rows.append(("held-out loss", f"{look.held_out_loss:.4f} nats/token"))
    if look.forecast is not None:
        end = look.forecast
        told = f"{end.loss:.4f} at the end, 90 % between {end.low:.4f} and {end.high:.4f} ({end.law} law)"
        rows.append(("forecast", told))
    if look.learning_rate is not None:
        rows.append(("learning rate", f"{look.learning_rate:.4g} (schedule x {look.learning_rate_scale:.4g})"))
    if look.tokens_per_second is not None and look.step_seconds is not None:
        speed = f"{format_count(look.tokens_per_second)} tokens/s, {format_duration(look.step_seconds)} a step"
        rows.append(("speed", speed))
    if look.memory_bytes is not None:
        rows.append(("process memory", format_bytes(look.memory_bytes)))
    if look.seconds_left is not None:
        rows.append(("time left", format_duration(look.seconds_left)))
    if look.outcome is not None:
        rows.append(("ended", f"{look.outcome.kind} {look.outcome.detail}".strip()))
    return rows


def sparkline(values: tuple[float, ...]) -> str:
    """Values as a row of bars, the lowest and the highest filling the range."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in values)
