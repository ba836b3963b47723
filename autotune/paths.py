"""Where results lie below the runs folder."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import UserError

DEFAULT_RUNS = Path("runs")


def check_name(name: str, what: str) -> str:
    """A study's or job's name: a plain word, so that it can't leave its folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", name):
        raise UserError(
            f"{what} name {name!r} is not allowed",
            hint="use letters, digits, '.', '_', '+' and '-', beginning with a letter or digit",
        )
    return name


def check_writable_file(path: Path, option: str) -> None:
    """A file that an option names can be written: neither a folder, nor in one that doesn't exist.

    Raises:
        UserError: One of these.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        wrong = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise UserError(f"{path} {wrong}", hint=f"choose another {option}")


def study_folder(runs: Path, name: str) -> Path:
    """``runs/studies/<study>``."""
    return runs / "studies" / check_name(name, "study")


def job_folder(runs: Path, name: str) -> Path:
    """``runs/jobs/<job>``."""
    return runs / "jobs" / check_name(name, "job")
