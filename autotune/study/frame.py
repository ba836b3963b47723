"""A study's trials as a table: for pandas, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from autotune.study.snapshot import StudySnapshot, TrialRow

VALUE, PARAM, METRIC = "value.", "param.", "metric."
"""What columns of objectives, chosen values and further figures begin with."""


def table_rows(snapshot: StudySnapshot) -> list[dict[str, Any]]:
    """One mapping a trial, all with the same keys in the same order; what a trial lacks is None.

    Unfinished and failed trials are rows like any other, so nobody mistakes a failure for a missing trial.
    """
    rows = [_row(trial, snapshot) for trial in snapshot.trials]
    fixed = list(dict.fromkeys(key for row in rows for key in row if not key.startswith((PARAM, METRIC))))
    params = list(dict.fromkeys(key for row in rows for key in row if key.startswith(PARAM)))
    metrics = sorted({key for row in rows for key in row if key.startswith(METRIC)})
    return [{key: row.get(key) for key in (*fixed, *params, *metrics)} for row in rows]


def data_frame(snapshot: StudySnapshot) -> Any:
    """The table as a ``pandas.DataFrame``."""
    import pandas as pd  # type: ignore[import-untyped]

    return pd.DataFrame(table_rows(snapshot))


def csv_text(snapshot: StudySnapshot) -> str:
    """The table as CSV; empty fields for what a trial lacks."""
    rows = table_rows(snapshot)
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def json_text(snapshot: StudySnapshot) -> str:
    """The table with what the study is, as JSON."""
    data = {
        "study": snapshot.name,
        "created": snapshot.created,
        "objectives": [{"name": o.name, "direction": o.direction, "bound": o.bound} for o in snapshot.objectives],
        "space": snapshot.space,
        "trials": table_rows(snapshot),
    }
    return json.dumps(data, indent=2) + "\n"


def _row(trial: TrialRow, snapshot: StudySnapshot) -> dict[str, Any]:
    outcome = trial.outcome
    row: dict[str, Any] = {
        "number": trial.number,
        "state": trial.state if outcome is None else outcome.kind,
        "detail": "" if outcome is None else outcome.detail,
        "feasible": trial.feasible,
        "seconds": trial.seconds,
        "attempts": trial.attempts,
        "repeat_of": trial.repeat_of,
        "share": trial.share,
        "continues": trial.continues,
        "label": trial.plan,
        "origin": trial.origin,
    }
    values = trial.values or {}
    row |= {f"{VALUE}{objective.name}": values.get(objective.name) for objective in snapshot.objectives}
    row |= {f"{PARAM}{name}": value for name, value in trial.parameters.items()}
    metrics = {} if outcome is None else outcome.metrics
    return row | {f"{METRIC}{name}": value for name, value in metrics.items() if name not in values}
