"""Reading a table of runs, cell by cell: numbers and flags as people write them, and what can't be read said."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError

COUNTS = (
    "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len", "num_gpus", "gpus_per_node",
    "tp", "pp", "dp", "ep", "cp", "vpp", "micro_batch", "global_batch",
)  # fmt: skip
"""Columns of whole numbers from 1 on."""

COUNTS_OR_ZERO = ("year", "num_experts", "experts_per_token", "moe_ffn_hidden", "shared_experts", "zero_stage")
"""Columns of whole numbers."""

FIGURES = (
    "params_total_B", "params_active_B", "measured_value", "memory_gb_per_gpu", "step_time_s_equiv",
    "tokens_per_s_per_gpu_equiv",
)  # fmt: skip
"""Columns of positive numbers."""

FLAGS = ("gated_mlp", "sequence_parallel")
"""Columns of yes or no."""

WORDS = (
    "id", "source", "url_or_repo_path", "model_name", "gpu", "intra_node_link", "inter_node_link", "recompute",
    "precision", "schedule", "measured_metric", "flops_convention", "notes", "tier", "workload", "outcome",
)  # fmt: skip
"""Columns of text."""

UNUSED = ("tflops_per_gpu_reported", "mfu_pct_reported")
"""Columns that are known and not read: printed TFLOP/s and MFU follow conventions that differ by up to 4/3."""

COLUMNS = frozenset((*COUNTS, *COUNTS_OR_ZERO, *FIGURES, *FLAGS, *WORDS, *UNUSED))
"""Every known column."""

REQUIRED = ("gpu", "seq_len")
"""Columns that no run can do without."""

_UNKNOWN = frozenset(("", "-", "--", "?", "na", "n/a", "nan", "null", "none", "unknown", "not stated", "tbd"))
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:[,' _\u00a0\u202f]\d{3})+(?:\.\d+)?")
MAX_LAYERS = 10_000
_MOST = {"layers": MAX_LAYERS, "vpp": 1_000, "heads": 10**5, "kv_heads": 10**5, "num_experts": 10**5, "hidden": 10**6}
_MOST_OTHERWISE = 10**9
"""More of anything is a slip of the pen, and would take its time and memory."""

Cell = int | float | bool | str | None
"""A value, or None where it is unknown."""


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        line: Line of the file.
        cells: Column -> value, for every known column; words as they stand.
        problems: What can't be read, in words.
    """

    line: int
    cells: Mapping[str, Cell]
    problems: tuple[str, ...]

    def count(self, name: str) -> int | None:
        """A whole number."""
        value = self.cells.get(name)
        return value if isinstance(value, int) else None

    def figure(self, name: str) -> float | None:
        """A number."""
        value = self.cells.get(name)
        return float(value) if isinstance(value, int | float) else None

    def flag(self, name: str) -> bool | None:
        """Yes or no."""
        value = self.cells.get(name)
        return value if isinstance(value, bool) else None

    def word(self, name: str) -> str:
        """Text; empty when unknown."""
        value = self.cells.get(name)
        return value if isinstance(value, str) else ""


def read_rows(path: str | Path) -> tuple[list[Row], list[str]]:
    """The rows of a table of runs.

    Args:
        path: A CSV file with a header; comma, semicolon or tab; UTF-8 with or without a byte order mark.

    Returns:
        The rows, and the names of the columns that are not known.

    Raises:
        UserError: The file can't be read, is empty, or has none of the columns of such a table.
    """
    text = _text(Path(path))
    header_line = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=header_line.count)
    reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(header, path)
        rows = [_row(reader.line_num, header, values) for values in reader if any(value.strip() for value in values)]
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num}: not a readable CSV file ({error})",
            hint="quote cells that hold the separator or quotes, and remove null bytes",
        ) from None
    return rows, [name for name in header if name and name not in COLUMNS]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})", hint="save it as a UTF-8 CSV file") from None
    except OSError as error:
        raise UserError(
            f"can't read {path}: {error.strerror or error}", hint="give the path of a CSV file with one run a row"
        ) from None


def _check_header(header: list[str], path: str | Path) -> None:
    if not any(header):
        raise UserError(f"{path} is empty", hint=f"it needs a header with, for example: {', '.join(_example())}")
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise UserError(f"{path} has the column {', '.join(twice)} more than once", hint="leave one of each")
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        near = {name: difflib.get_close_matches(name, [h for h in header if h not in COLUMNS], n=1) for name in missing}
        meant = [f"'{close[0]}' for '{name}'" for name, close in near.items() if close]
        raise UserError(
            f"{path} has no column {', '.join(missing)}: it is not a table of runs",
            hint=(f"rename {' and '.join(meant)}; " if meant else "")
            + f"the header holds, for example: {', '.join(_example())}",
        )


def _example() -> tuple[str, ...]:
    return ("id", "model_name", "layers", "hidden", "gpu", "num_gpus", "tp", "pp", "dp", "micro_batch", "global_batch",
            "seq_len", "precision", "step_time_s_equiv")  # fmt: skip


def _row(line: int, header: list[str], values: list[str]) -> Row:
    problems = []
    if len(values) > len(header) and any(value.strip() for value in values[len(header) :]):
        problems.append(f"{len(values)} cells under {len(header)} columns")
    cells: dict[str, Cell] = {}
    for name, value in zip(header, values, strict=False):
        if name not in COLUMNS or name in UNUSED:
            continue
        try:
            cells[name] = _cell(name, value.strip())
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return Row(line, cells, tuple(problems))


def _cell(name: str, text: str) -> Cell:
    if name in WORDS:
        return text
    if text.lower() in _UNKNOWN:
        return None
    if name in FLAGS:
        return _flag(text)
    number = _number(text)
    if name in FIGURES:
        if number <= 0:
            raise ValueError(f"{text!r} is not a positive number")
        return number
    least = 0 if name in COUNTS_OR_ZERO else 1
    most = _MOST.get(name, _MOST_OTHERWISE)
    if number != int(number) or not least <= number <= most:
        raise ValueError(f"{text!r} is not a whole number from {least} to {most}")
    return int(number)


def _number(text: str) -> float:
    plain = re.sub(r"[,' _\u00a0\u202f]", "", text) if _THOUSANDS.fullmatch(text) else text
    try:
        number = float(plain)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    return number


def _flag(text: str) -> bool:
    if text.lower() in ("1", "1.0", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "0.0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither 0 nor 1")
