"""The page of a study: one HTML file with everything in it, and the front as CSV."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.apply.program import is_program_study
from autotune.apply.select import KNEE_MEANING, front_trials, knee_trial
from autotune.study.snapshot import StudySnapshot
from engine.atomic import write_text
from engine.yaml_file import dump_yaml
from reports import info, plots
from reports.forecasts import get_forecasts
from reports.importance import ImportanceInfo, get_importance

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

CSV_COLUMNS = {"speed": "tokens_per_second", "memory": "peak_memory_bytes", "quality": "held_out_loss"}
"""Objective -> column of ``front.csv``."""


class Chart(NamedTuple):
    """A figure on the page."""

    key: str
    title: str
    caption: str
    figure: Figure
    wide: bool = False
    needs_webgl: bool = False


def write_report(snapshot: StudySnapshot, path: Path) -> Path:
    """Write the page, atomically.

    Raises:
        UserError: It can't be written.
    """
    write_text(path, render_report(snapshot))
    return path


def render_report(snapshot: StudySnapshot) -> str:
    """The page as HTML: no address outside it is ever asked for anything."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"parameter": info.parameter_text, "short_name": info.short_name}
    table = info.get_table(snapshot)
    importance = get_importance(snapshot)
    front_charts, study_charts = _front_charts(snapshot), _study_charts(snapshot, importance)
    charts = [*front_charts, *study_charts]
    # Any trial's command is the command of trial 0 with another number.
    command = info.apply_command(snapshot, 0).rsplit("--pick 0", 1)
    page_data = {
        "columns": [column._asdict() for column in table.columns],
        "rows": table.rows,
        "figures": {chart.key: json.loads(chart.figure.to_json()) for chart in charts},
        "command": [f"{command[0]}--pick ", command[1]],
        "statuses": list(info.STATUSES),
    }
    return environment.get_template("report.html.j2").render(
        snapshot=snapshot,
        summary=info.get_summary(snapshot),
        axes=info.get_axes(snapshot),
        has_plans=not is_program_study(snapshot),
        front_charts=front_charts,
        study_charts=study_charts,
        has_charts=bool(charts),
        failures=info.get_failures(snapshot),
        importance=importance,
        space=dump_yaml(snapshot.space) if snapshot.space else "",
        knee_meaning=KNEE_MEANING,
        page_data=page_data,
        plotly=_plotly_library() if charts else "",
    )


def front_csv(snapshot: StudySnapshot) -> str:
    """The front as CSV: trial, whether it is the knee, plan, objectives in base units, searched values by full name."""
    front = front_trials(snapshot)
    knee = knee_trial(snapshot, front)
    names = info.searched_parameters(front)
    header = ["trial", "knee", "plan", *(CSV_COLUMNS.get(o.name, o.name) for o in snapshot.objectives), *names]
    rows: Iterable[list[Any]] = (
        [
            trial.number,
            str(knee is not None and trial.number == knee.number).lower(),
            trial.plan,
            *((trial.values or {})[objective.name] for objective in snapshot.objectives),
            *(trial.parameters.get(name) for name in names),
        ]
        for trial in front
    )
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def _front_charts(snapshot: StudySnapshot) -> list[Chart]:
    """Every pair of objectives, and all three at once."""
    cloud = info.get_cloud(snapshot)
    charts = []
    for pair in info.get_pairs(cloud):
        over_trials = pair.x.name == "trial"
        title = f"{pair.y.label} over trials" if over_trials else f"{pair.x.label} and {pair.y.label.lower()}"
        caption = f"The dotted edge is the {'best so far' if over_trials else 'front of these two alone'}."
        caption = caption if len(pair.edge) > 1 else ""
        if pair.num_outside:
            caption += f" Far off and left outside: {pair.num_outside} (double-click shows all)."
        charts.append(Chart(f"pair-{pair.x.name}-{pair.y.name}", title, caption, plots.plot_pair(pair)))
    if len(cloud.axes) == 3 and cloud.groups:
        caption = "Drag to turn, scroll or pinch to zoom."
        charts.append(Chart("cloud", "All three objectives", caption, plots.plot_cloud(cloud), needs_webgl=True))
    return charts


def _study_charts(snapshot: StudySnapshot, importance: ImportanceInfo) -> list[Chart]:
    """How the search went and what it found to matter."""
    charts = []
    history = info.get_history(snapshot)
    if history is not None:
        caption = (
            "Hypervolume: the share of the box between the front's best values and the reference point that the trials"
            f" so far dominate. Reference point (1.1 times the front's range): {', '.join(history.reference)}."
        )
        charts.append(Chart("history", "Progress over trials", caption, plots.plot_history(history)))
    for forecast in get_forecasts(snapshot):
        caption = (
            f"What the cost model said of each candidate before its trial. {forecast.summary.capitalize()}. On the"
            " dotted line both are equal; the bars are the estimates' intervals."
        )
        title = f"{forecast.axis.label}: estimated and measured"
        charts.append(Chart(f"forecast-{forecast.axis.name}", title, caption, plots.plot_forecast(forecast)))
    if importance.shares:
        caption = (
            "How much each searched value decides whether a trial is among the best quarter by one objective"
            f" (PED-ANOVA, less what chance alone would show). {importance.note}"
        )
        charts.append(Chart("importance", "What matters", caption, plots.plot_importance(importance)))
    parallel = info.get_parallel(snapshot)
    if parallel is not None:
        caption = (
            f"One line per feasible trial, orange for the best {parallel.coloured_by.lower()}, then blue, then grey."
            " Drag along an axis to filter."
        )
        if parallel.num_left_out:
            caption += f" Left out: {parallel.num_left_out} dominated trials."
        figure = plots.plot_parallel(parallel)
        charts.append(Chart("parallel", "Parallel coordinates", caption, figure, wide=True, needs_webgl=True))
    return charts


@cache
def _plotly_library() -> str:
    """plotly.js, compressed, as base64: a third of its size; the page unpacks it."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
