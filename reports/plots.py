"""From plain data to Plotly figures. Colours of text, grid and background are left to the page, which knows whether it
is light or dark.

A trace with ``customdata`` carries trial numbers; the page shows the trial's details on hover. Plotly reads a subset of
HTML in every text, so texts that come from a study are escaped.
"""

from __future__ import annotations

import itertools
from html import escape

import numpy as np
import plotly.graph_objects as go

from reports.forecasts import ForecastInfo
from reports.importance import ImportanceInfo
from reports.info import Axis, CloudInfo, HistoryInfo, PairInfo, ParallelInfo

BLUE, ORANGE, GREY, ROSE, TEAL = "#3b82f6", "#f59e0b", "#94a3b8", "#f43f5e", "#14b8a6"
"""Colours that stand out on white and on near-black alike."""

LOOKS = {
    "knee": ("Knee", ORANGE, "star", 17, 1.0),
    "front": ("Pareto front", BLUE, "circle", 9, 1.0),
    "dominated": ("Dominated", GREY, "circle", 6, 0.55),
    "infeasible": ("Beyond a bound", ROSE, "x-thin", 7, 0.8),
    "repeat": ("Repeat", TEAL, "circle-open", 7, 0.8),
}
"""Status -> legend, colour, symbol, size and opacity."""

SYMBOLS_3D = {"star": "diamond", "x-thin": "x"}
"""Symbols that exist in two dimensions only -> what stands for them in three."""


def plot_pair(info: PairInfo) -> go.Figure:
    """Two objectives, with the edge of their front as steps."""
    figure = go.Figure()
    if len(info.edge) > 1 or info.x.name == "trial":
        # Between two points of the front the better x is bought with the worse y at once, so the edge is a stair.
        shape = "vh" if info.x.higher_is_better else "hv"
        figure.add_trace(
            go.Scatter(
                x=_compact(info.edge[:, 0]),
                y=_compact(info.edge[:, 1]),
                mode="lines",
                line={"color": BLUE, "width": 1.5, "shape": shape, "dash": "dot"},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    for group in info.groups:
        name, colour, symbol, size, opacity = LOOKS[group.status]
        line = {"width": 1.5 if symbol.endswith("thin") else 0.5, "color": colour}
        figure.add_trace(
            go.Scatter(
                x=_compact(group.values[:, 0]),
                y=_compact(group.values[:, 1]),
                customdata=group.numbers,
                mode="markers",
                name=name,
                marker={"color": colour, "symbol": symbol, "size": size, "opacity": opacity, "line": line},
            )
        )
    figure.update_layout(**_layout(), hovermode="closest")
    figure.update_xaxes(title=_title(info.x), range=info.x_range)
    figure.update_yaxes(title=_title(info.y), range=info.y_range)
    return figure


def plot_cloud(info: CloudInfo) -> go.Figure:
    """Three objectives in space."""
    figure = go.Figure()
    for group in info.groups:
        name, colour, symbol, size, opacity = LOOKS[group.status]
        figure.add_trace(
            go.Scatter3d(
                **{axis: _compact(group.values[:, column]) for column, axis in enumerate("xyz")},
                customdata=group.numbers,
                mode="markers",
                name=name,
                marker={
                    "color": colour,
                    "symbol": SYMBOLS_3D.get(symbol, symbol),
                    "size": size * 0.55,
                    "opacity": opacity,
                    "line": {"width": 0},
                },
            )
        )
    # The axes' titles without the better direction: there is no room on a cube's edge.
    titles = {f"{axis}axis": {"title": {"text": info.axes[column].title}} for column, axis in enumerate("xyz")}
    camera = {"eye": {"x": 1.75, "y": 1.75, "z": 0.9}}
    figure.update_layout(**_layout(), scene={**titles, "aspectmode": "cube", "camera": camera})
    figure.update_layout(margin={"l": 0, "r": 0, "t": 8, "b": 0})
    return figure


def plot_forecast(info: ForecastInfo) -> go.Figure:
    """Estimates with their intervals over measurements; on the line they are equal."""
    figure = go.Figure()
    both = np.concatenate([info.measured, info.estimated])
    ends = np.array([both.min(), both.max()]) * np.array([0.9, 1.1])
    figure.add_trace(
        go.Scatter(
            x=_compact(ends),
            y=_compact(ends),
            mode="lines",
            line={"color": GREY, "width": 1.5, "dash": "dot"},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    error = {
        "type": "data",
        "symmetric": False,
        "array": _compact(np.maximum(info.high - info.estimated, 0)),
        "arrayminus": _compact(np.maximum(info.estimated - info.low, 0)),
        "thickness": 0.8,
        "width": 0,
        "color": GREY,
    }
    figure.add_trace(
        go.Scatter(
            x=_compact(info.measured),
            y=_compact(info.estimated),
            customdata=info.numbers,
            mode="markers",
            marker={"color": BLUE, "size": 7, "opacity": 0.85},
            error_y=error,
            showlegend=False,
        )
    )
    figure.update_layout(**_layout(), hovermode="closest")
    figure.update_xaxes(title=f"Measured ({info.axis.unit})" if info.axis.unit else "Measured")
    figure.update_yaxes(title=f"Estimated ({info.axis.unit})" if info.axis.unit else "Estimated")
    return figure


def plot_history(info: HistoryInfo) -> go.Figure:
    """Hypervolume over trials."""
    figure = go.Figure(
        go.Scatter(
            x=info.numbers,
            y=_compact(info.shares),
            mode="lines+markers" if len(info.numbers) < 60 else "lines",
            line={"shape": "hv", "color": BLUE, "width": 2},
            marker={"size": 5},
            hovertemplate="after trial %{x}: %{y:.3f}<extra></extra>",
            fill="tozeroy",
            fillcolor="rgba(59, 130, 246, 0.12)",
        )
    )
    figure.update_layout(**_layout(), showlegend=False)
    figure.update_xaxes(title="Trial", dtick=1 if info.numbers.max() < 10 else None)
    figure.update_yaxes(title="Share of the box dominated", range=(0, 1.02))
    return figure


def plot_importance(info: ImportanceInfo) -> go.Figure:
    """Bars per searched value and objective."""
    figure = go.Figure()
    names = [_escaped(_shortened(name)) for name in reversed(info.parameters)]
    colours = itertools.cycle((BLUE, TEAL, ORANGE, ROSE, GREY))
    rows = list(zip(info.objectives, info.shares, colours, strict=False))
    for objective, shares, colour in reversed(rows):
        figure.add_trace(
            go.Bar(
                y=names,
                x=_compact(np.array(shares[::-1])),
                name=_escaped(objective),
                orientation="h",
                marker={"color": colour},
                hovertemplate="%{y}: %{x:.0%} of " + _escaped(objective.lower()) + "<extra></extra>",
            )
        )
    figure.update_layout(**_layout(), barmode="group", bargap=0.28, legend_traceorder="reversed")
    figure.update_layout(height=120 + 32 * len(names))
    figure.update_xaxes(title="Share of the influence", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(automargin=True)
    return figure


def plot_parallel(info: ParallelInfo) -> go.Figure:
    """One line per trial through its searched values and objectives."""
    dimensions = [
        {
            "label": _escaped(_shortened(column.label, 28)),
            "values": _compact(column.positions),
            "tickvals": column.tick_positions,
            "ticktext": [_shortened(text) for text in column.tick_texts],  # the one text that is shown as it is
        }
        for column in info.columns
    ]
    line = {
        "color": _compact(1.0 - info.ranks),
        "colorscale": [[0, GREY], [0.6, BLUE], [1, ORANGE]],
        "cmin": 0,
        "cmax": 1,
    }
    figure = go.Figure(go.Parcoords(dimensions=dimensions, line=line, labelangle=-18, labelside="top"))
    figure.update_layout(**_layout())
    # The page makes it as wide as there is room, and lets it scroll below this.
    width = max(95 * len(dimensions), 600)
    figure.update_layout(width=width, height=440, margin={"l": 64, "r": 72, "t": 84, "b": 24})
    return figure


def _layout() -> dict[str, object]:
    return {
        "template": "none",
        "height": 380,
        "margin": {"l": 64, "r": 16, "t": 12, "b": 52},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "reversed"},
    }


def _title(axis: Axis) -> str:
    if axis.name == "trial":
        return "Trial"
    return f"{axis.title}, {'higher' if axis.higher_is_better else 'lower'} is better"


def _compact(values: np.ndarray) -> np.ndarray:
    """Single precision: half the bytes in the page, and more digits than a screen has."""
    return values.astype(np.float32)


def _escaped(text: str) -> str:
    return escape(text, quote=False)


def _shortened(text: str, most: int = 18) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
