"""``study.yaml``: what a study searches and where its trials live, fixed when it is created."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from autotune.space.objectives import Objective
from autotune.space.space import Space
from autotune.study.store import absolute_url, hide_password
from engine.atomic import write_text
from engine.errors import UserError
from engine.schema import Schema, parse
from engine.spec import Count, CountOrZero, Name
from engine.yaml_file import dump_yaml, read_yaml

STUDY_FILE = "study.yaml"
ANOTHER_STUDY = "begin another study (--study NAME; in Python another folder or name)"
"""What to do instead of going on with this one."""
MEMORY_KEY = "cluster.memory_bytes"
MEMORY_TOLERANCE_RATIO = 0.02
"""A machine states its memory a little differently after a change of kernel or firmware: it is the same machine."""
ESTIMATE_KEYS = (
    "cluster.figures",
    "cluster.links",
    "cluster.measured",
    "cluster.watts",
    "cluster.dollars_per_device_hour",
)
"""What only estimates are made from: a machine that was profiled anew is the same machine."""
LIMITS_KEY = "limits"
"""When trials are ended: a study goes on under others, and what has ended stays as it did."""


class StudyFile(Schema):
    """The study's own file."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    name: Name
    """Name of the study, also in the storage."""
    created: str
    """ISO time."""
    seed: CountOrZero = 0
    """Seeds of proposals and trials derive from it."""
    storage: str | None = None
    """Database address (without its password); null for the journal in the study's folder."""
    trials: Count | None = None
    """Trials asked for so far; null while only a time was given."""
    sampler: str = "tpe"
    """What proposes candidates; may be changed when the study is continued."""
    guesses: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    """Chosen values that the user wants tried first, each once."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and machine that created it."""
    space: dict[str, Any]
    """The resolved space, without the budget."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives of the space."""
        return tuple(parse(Objective, data) for data in self.space["objectives"])


def read_study_file(folder: Path) -> StudyFile:
    """Read ``study.yaml``.

    Raises:
        UserError: There is no such study, or the file is damaged.
    """
    path = folder / STUDY_FILE
    if not path.is_file():
        known = sorted(child.parent.name for child in folder.parent.glob(f"*/{STUDY_FILE}"))
        raise UserError(
            f"there is no study {folder.name!r} in {folder.parent}",
            hint=(f"studies there: {', '.join(known)}" if known else "start one with: autotune sweep SPACE.yaml")
            + f"; one that was made in Python is found where it has folder={str(folder)!r}",
        )
    document = read_yaml(path)
    return parse(StudyFile, document.data, document=document)


def write_study_file(folder: Path, file: StudyFile) -> None:
    """Write ``study.yaml``."""
    write_text(folder / STUDY_FILE, dump_yaml(file.to_data()))


def refuse_changes(folder: Path, space: Space, storage_url: str | None, seed: int | None) -> None:
    """Make sure that the study in ``folder``, if there is one, can go on with these.

    Raises:
        UserError: Something other than the budget differs; with the difference.
    """
    if not (folder / STUDY_FILE).exists():
        return
    file = read_study_file(folder)
    changes = differences(file.space, space.data)
    if seed is not None and seed != file.seed:
        changes.append(f"changed  seed: {file.seed} -> {seed}")
    address = storage_address(storage_url)
    if address is not None and address != file.storage:
        changes.append(f"changed  storage: {file.storage or 'journal'} -> {address}")
    if changes:
        raise changed_search(file.name, changes)


def changed_search(name: str, changes: Sequence[str]) -> UserError:
    """The error of a study that is to go on with another search."""
    return UserError(
        f"study {name!r} was begun with another space:\n  " + "\n  ".join(changes),
        hint=f"undo the change to go on with it, or {ANOTHER_STUDY}",
    )


def storage_address(storage_url: str | None) -> str | None:
    """A storage's address as the study's file keeps it."""
    return hide_password(absolute_url(storage_url)) if storage_url else None


def this_environment() -> dict[str, str]:
    """Versions and machine."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "optuna")}
    return {"python": platform.python_version(), **versions, "system": sys.platform, "host": platform.node()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two spaces, one line for each key: added, removed, changed. Memory of the machines counts as
    changed beyond ``MEMORY_TOLERANCE_RATIO`` only, limits and what estimates are made from not at all."""
    before, after = _flat(old), _flat(new)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if key.startswith((*ESTIMATE_KEYS, LIMITS_KEY)):
            continue
        if key not in after:
            lines.append(f"removed  {key}: {_text(before[key])}")
        elif key not in before:
            lines.append(f"added    {key}: {_text(after[key])}")
        elif before[key] != after[key] and not (key == MEMORY_KEY and _about_equal(before[key], after[key])):
            lines.append(f"changed  {key}: {_text(before[key])} -> {_text(after[key])}")
    return lines


def _about_equal(before: float, after: float) -> bool:
    return math.isclose(before, after, rel_tol=MEMORY_TOLERANCE_RATIO)


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, Mapping) or not data:
        return {prefix: data}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _text(value: Any) -> str:
    return json.dumps(value)
