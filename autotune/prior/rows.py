"""Finished trials as rows that the prior learns from, and the user's own file of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from autotune.prior.task import HYPERPARAMETERS, Task
from engine.atomic import append_line, decode_line, encode_line, make_folder, read_lines, write_text
from engine.errors import UserError
from engine.file_lock import file_lock
from engine.outcome import OutcomeKind
from engine.schema import Schema

ROWS_VARIABLE = "PARETUNE_PRIOR_ROWS"
"""Environment variable that names another file of rows."""


class MetaRow(Schema):
    """One finished trial."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    study: str = Field(min_length=1)
    """Where it comes from: a study's name, or a table's."""
    folder: str = ""
    """That study's folder; empty where it is not known."""
    trial: int = Field(ge=0)
    """Its number there."""
    task: Task
    """What was trained, with the recipe's values of what is not named below."""
    hyperparameters: dict[str, float | str]
    """Name -> value, in the units of ``HYPERPARAMETERS``."""
    loss: float | None = Field(default=None, allow_inf_nan=False)
    """Held-out loss at the end, nats per token; null where the trial has none."""
    status: OutcomeKind = "ok"
    """How it ended."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = sorted(set(self.hyperparameters) - set(HYPERPARAMETERS))
        if unknown:
            raise ValueError(f"unknown hyperparameter {unknown[0]!r}; known: {', '.join(HYPERPARAMETERS)}")
        for name in ("learning_rate", "global_batch_tokens"):
            value = self.hyperparameters.get(name)
            if not isinstance(value, float | int) or not value > 0:
                raise ValueError(f"hyperparameters.{name} must be a number above zero, got {value!r}")
        if self.status == "ok" and self.loss is None:
            raise ValueError("loss must be given where status is ok")
        return self

    def is_of(self, study: str, folder: str) -> bool:
        """Whether it is a trial of the study of this name in this folder.

        Where either folder is not known, or the row's is gone (the study was moved), the name decides.
        """
        if self.study != study:
            return False
        return not self.folder or not folder or self.folder == folder or not Path(self.folder).exists()


def default_rows_file() -> Path:
    """The user's file of rows: named by the environment, else below the user's data folder (XDG)."""
    named = os.environ.get(ROWS_VARIABLE)
    if named:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "paretune" / "prior_rows.jsonl"


def read_rows(path: Path) -> list[MetaRow]:
    """All rows of a file; no file, no rows. A line torn by a kill is left out.

    Raises:
        UserError: A whole line is no row (of a later version of this program, or edited by hand).
    """
    if path.is_dir():
        raise UserError(f"the rows file {path} is a folder", hint="name a file")
    rows = []
    for number, record in enumerate(read_lines(path), start=1):
        try:
            rows.append(MetaRow.model_validate(record))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise UserError(
                f"{path}: row {number} cannot be used: {place} {problem['msg']}".replace("  ", " "),
                hint="remove its study with 'autotune prior remove', or move the file away",
            ) from None
    return rows


def rows_of_others(rows: Iterable[MetaRow], study_folder: Path) -> list[MetaRow]:
    """Rows that are not of the study in a folder: no study is to be predicted from its own trials."""
    folder = study_folder.absolute()
    return [row for row in rows if not row.is_of(folder.name, str(folder))]


def add_rows(path: Path, rows: Iterable[MetaRow]) -> int:
    """Append the rows that are not in the file yet (by study, its folder, and trial).

    Returns:
        How many were appended.
    """
    with _only_writer(path):
        known: dict[tuple[str, int], list[MetaRow]] = {}
        for row in read_rows(path):
            known.setdefault((row.study, row.trial), []).append(row)
        new = [r for r in rows if not any(k.is_of(r.study, r.folder) for k in known.get((r.study, r.trial), ()))]
        for row in new:
            append_line(path, row.to_data(), sync=row is new[-1])
    return len(new)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Change a file of rows alone."""
    try:
        make_folder(path.parent)
        with file_lock(path.with_name(f"{path.name}.lock")):
            yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", hint="choose another file by --rows") from None


def count_damaged(path: Path) -> int:
    """Lines of a file that are no whole rows: torn by a kill, or changed by hand."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        return sum(decode_line(line) is None for line in file)
    return 0


def read_studies(path: Path) -> list[str]:
    """Names of the studies whose rows the file has, also where some of the rows are of no use."""
    return list(dict.fromkeys(str(record.get("study")) for record in read_lines(path)))


def remove_rows(path: Path, study: str) -> int:
    """Take the rows of a study out of the file, atomically.

    Returns:
        How many there were.
    """
    with _only_writer(path):
        records = list(read_lines(path))
        kept = [record for record in records if record.get("study") != study]
        if len(kept) < len(records):
            write_text(path, "".join(encode_line(record) for record in kept))
    return len(records) - len(kept)
