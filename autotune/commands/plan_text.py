"""What the planner's tables and sentences are made of: numbers with units, bars, sections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engine.units import format_bytes

LEAST_BAR_RATIO = 0.005
"""Parts below this share of the whole are put together."""
INDENT = (0, 0, 0, 2)
EIGHTHS = " ▏▎▍▌▋▊▉"


def heading(text: str) -> Text:
    """A section's title."""
    return Text(text, style="bold")


def section(title: str, body: RenderableType) -> RenderableType:
    """A title with something below it, indented."""
    return Group(heading(title), Padding(body, INDENT, expand=False))


def plain_table(*, header: bool = False) -> Table:
    """A table without lines."""
    return Table(box=None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def indented(text: str, style: str = "") -> RenderableType:
    """A paragraph below a title."""
    return Padding(Text(text, style=style), INDENT, expand=False)


def time_unit(seconds: float) -> tuple[str, float]:
    """Unit for a column of times around ``seconds``, and what seconds are multiplied with."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3)


def seconds_text(seconds: float) -> str:
    """Three digits with the unit."""
    if not seconds:
        return "0 s"
    unit, scale = time_unit(abs(seconds))
    return f"{seconds * scale:.{decimals(abs(seconds) * scale)}f} {unit}"


def decimals(value: float) -> int:
    """Decimals that make three digits of a value, three at most."""
    return min(3, max(0, 2 - math.floor(math.log10(max(value, 1e-2)))))


def signed_seconds(seconds: float) -> str:
    """Seconds with their sign, the minus as a minus."""
    return f"{'−' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"


def signed_bytes(size: float) -> str:
    """Bytes with their sign."""
    return f"{'−' if size < 0 else '+'}{format_bytes(abs(size))}"


def percent(ratio: float) -> str:
    """A ratio in per cent, two digits."""
    return f"{ratio * 100:.1f}%" if abs(ratio) < 0.1 else f"{ratio * 100:.0f}%"


def signed_percent(ratio: float) -> str:
    """A ratio in per cent with its sign, or as a factor from two on."""
    if ratio >= 1:
        return f"×{1 + ratio:.3g}"
    return f"{'−' if ratio < 0 else '+'}{percent(abs(ratio))}"


def bars(
    title: str, parts: Mapping[str, float], names: Mapping[str, str], text: Callable[[float], str], width: int
) -> RenderableType:
    """Parts of a whole as bars, largest first; small ones together."""
    whole = sum(parts.values()) or 1.0
    shown = sorted(((name, size) for name, size in parts.items()), key=lambda item: -item[1])
    large = [(names[name], size) for name, size in shown if size >= LEAST_BAR_RATIO * whole]
    small = whole - sum(size for _, size in large)
    if small > 5e-4 * whole:
        large.append(("the rest", small))
    most = max(size for _, size in large)
    table = plain_table()
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    length = max(10, min(40, width - 56))
    for name, size in large:
        bar = Text(bar_text(size / most, length), style="cyan")
        table.add_row(name, bar, text(size), f"{size / whole * 100:.1f}%")
    return section(title, table)


def bar_text(ratio: float, length: int) -> str:
    """A bar of ``ratio`` of ``length`` columns, to an eighth of a column."""
    eighths = round(ratio * length * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
