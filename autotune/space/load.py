"""Any space file: of training runs, or of a user's own program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from autotune.space.command import CommandSpace
from autotune.space.command_grammar import is_command_space, load_command_space
from autotune.space.enumerate import Enumeration
from autotune.space.fidelity import parse_words
from autotune.space.grammar import load_space
from autotune.space.layers import COMMAND, Override, find_space, merge, shipped_spaces
from autotune.space.training import TrainingSpace
from engine.errors import UserError
from engine.yaml_file import YamlDocument, parse_yaml

RUNG_WORDS = {"min", "rungs", "widths"}
"""Words of ``fidelity`` that say where the rungs are: one replaces all."""
NEEDED = ("model", "workload", "space")
"""Sections that a space of training runs can't do without."""


def load_any_space(
    path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[TrainingSpace, Enumeration] | tuple[CommandSpace, None]:
    """Read a space file (or a shipped space by name).

    Args:
        path: The file; None for a program's space that stands on the command line alone.
        overrides: ``dotted.key=value`` texts laid over it, values as in YAML.

    Returns:
        The space, with the enumeration of its plans where it has any.

    Raises:
        UserError: Any mistake in it, with file and line.
    """
    if path is None:
        if not overrides:
            raise UserError(
                "no space is given", hint="name a space file, a shipped space such as 'demo', or give --command"
            )
        return load_command_space(None, overrides), None
    data = merge(find_space(path), overrides).data
    if is_command_space(data) and {COMMAND, "objectives"} & set(data):
        return load_command_space(path, overrides), None
    if missing := [section for section in NEEDED if section not in data]:
        name = str(path) if str(path) in shipped_spaces() else Path(path).name
        raise UserError(
            f"{path} is a part of a space: it has no {' and no '.join(map(repr, missing))}",
            hint=f"build on it in a file of yours, 'use: [{name}]', and add that there ('command' and 'objectives' for"
            " a program of yours); 'demo' is a whole space",
        )
    return load_space(path, overrides)


def inline_overrides(command: str | None, params: Sequence[str], objectives: Sequence[str]) -> list[Override]:
    """A space that stands on the command line, as overrides.

    Args:
        command: The program with placeholders.
        params: ``lr=[0.1, 0.2]`` or ``lr=log_float(1e-4, 1e-2)``.
        objectives: ``loss:minimize``, with a bound ``loss:minimize:4``.

    Raises:
        UserError: A parameter without a value, or an objective without a direction.
    """
    given = f"--command {command}"
    overrides = [] if command is None else [Override(f"command={_quoted(command)}", given)]
    for param in params:
        name, separator, value = param.partition("=")
        if not separator or not name.strip() or not value.strip():
            raise UserError(
                f"--param needs NAME=VALUES, got {param!r}", hint="example: --param 'lr=log_float(1e-4, 1e-2)'"
            )
        form, bracket, ends = value.strip().partition("(")
        if bracket and ends.endswith(")"):
            value = f"{{{form.strip()}: [{ends[:-1]}]}}"
        overrides.append(Override(f"space.{name.strip()}={value}", f"--param {param}"))
    for objective in objectives:
        name, *words = (word.strip() for word in objective.split(":"))
        if len(words) not in (1, 2):
            raise UserError(
                f"--objective needs NAME:minimize or NAME:maximize, and a bound where there is one, got {objective!r}",
                hint=f"--objective {name}:minimize, or --objective {name}:minimize:4",
            )
        value = words[0] if len(words) == 1 else f"{{direction: {words[0]}, bound: {words[1]}}}"
        overrides.append(Override(f"objectives.{name}={value}", f"--objective {objective}"))
    return overrides


def fidelity_override(path: str | Path | None, overrides: Sequence[str], written: str) -> Override:
    """How trials grow, as told on the command line, as an override: what it does not say stays as the space has it.

    Args:
        path: The space's file; None where it stands on the command line alone.
        overrides: All others.
        written: Rungs, ``on``, ``off`` or a mapping.
    """
    given = f"--fidelity {written}"
    words = parse_words(parse_yaml(written, given).data)
    base = merge(YamlDocument({}, "the command line") if path is None else find_space(path), overrides)
    present = parse_words(base.data.get("fidelity"))
    if isinstance(words, dict) and isinstance(present, dict):
        replaced = RUNG_WORDS if RUNG_WORDS & set(words) else set()
        words = {**{key: value for key, value in present.items() if key not in replaced}, **words}
    return Override(f"fidelity={json.dumps(words)}", given)


def _quoted(text: str) -> str:
    """A text as a YAML value of one line."""
    return json.dumps(text)
