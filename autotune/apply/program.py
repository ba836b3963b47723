"""The chosen trial of a user's own program or function: its values, and the command that runs it again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from autotune.space.command_grammar import is_command_space, space_of_data
from autotune.space.program import TRIAL_FOLDER
from autotune.study.command_runner import TRIAL_FILE
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.errors import UserError
from engine.yaml_file import dump_yaml, read_yaml

PLACE = Path("results")
"""Stands for the trial's folder in the command."""


def is_program_study(snapshot: StudySnapshot) -> bool:
    """Whether a study is of a user's program or function; its trials are no runs of the engine."""
    return "objectives" in snapshot.space and is_command_space(snapshot.space)


def best_values(snapshot: StudySnapshot, trial: TrialRow, *, how: str, seed: int | None = None) -> dict[str, Any]:
    """What was chosen, as plain data.

    Args:
        snapshot: A study of a program or function.
        trial: A trial with a result.
        how: How it was picked.
        seed: Of the command; None for the trial's.

    Raises:
        UserError: A seed, where there is no command.
    """
    space = space_of_data(snapshot.space, snapshot.name)
    values = {**space.fixed, **trial.parameters}
    data: dict[str, Any] = {"study": snapshot.name, "trial": trial.number, "picked": how}
    data |= {"values": values, "measured": dict(trial.values or {})}
    program = space.program(trial.parameters, _seed_of(trial) if seed is None else seed)
    if program is None and seed is not None:
        raise UserError("the trials of this study are calls of a function: there is no --seed", hint="leave it out")
    if program is not None:
        arguments = program.template.filled({**program.texts, TRIAL_FOLDER: str(PLACE)})
        data |= {"command": shlex.join(arguments)}
    return data


def refuse_choice(path: Path) -> None:
    """Refuse a file of ``best_values`` where a run of the engine is asked for.

    Raises:
        UserError: It is one, with the command that it holds.
    """
    try:
        data = read_yaml(path).data
    except UserError:
        return  # what else it may be is told by who reads it
    if isinstance(data, dict) and {"study", "trial", "values", "measured"} <= data.keys():
        raise UserError(
            f"{path} holds the chosen values of a program or function of yours, no run of the engine",
            hint=f"run its command: {data['command']}" if "command" in data else "call your function with its values",
        )


def _seed_of(trial: TrialRow) -> int:
    """The seed that a trial was run with; 0 where its folder is gone."""
    try:
        text = ((trial.folder or Path()) / TRIAL_FILE).read_text(encoding="utf-8")
        return int(json.loads(text)["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def text_of(data: dict[str, Any], path: Path) -> str:
    """The choice as the file's ending says: JSON or YAML."""
    return json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else dump_yaml(data)
