"""Any space file: of training runs, or of a user's own program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.space.command import CommandSpace
from autotune.space.command_grammar import is_command_space, load_command_space
from autotune.space.enumerate import Enumeration
from autotune.space.grammar import load_space
from autotune.space.layers import find_space, merge
from autotune.space.training import TrainingSpace
from engine.errors import UserError


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
    if is_command_space(merge(find_space(path), overrides).data):
        return load_command_space(path, overrides), None
    return load_space(path, overrides)


def inline_overrides(command: str | None, params: Sequence[str], objectives: Sequence[str]) -> list[str]:
    """A space that stands on the command line, as overrides.

    Args:
        command: The program with placeholders.
        params: ``lr=[0.1, 0.2]`` or ``lr=log_float(1e-4, 1e-2)``.
        objectives: ``loss:minimize``.

    Raises:
        UserError: A parameter without a value, or an objective without a direction.
    """
    overrides = [] if command is None else [f"command={_quoted(command)}"]
    for param in params:
        name, separator, value = param.partition("=")
        if not separator or not name.strip() or not value.strip():
            raise UserError(
                f"--param needs NAME=VALUES, got {param!r}", hint="example: --param 'lr=log_float(1e-4, 1e-2)'"
            )
        form, bracket, ends = value.strip().partition("(")
        if bracket and ends.endswith(")"):
            value = f"{{{form.strip()}: [{ends[:-1]}]}}"
        overrides.append(f"space.{name.strip()}={value}")
    for objective in objectives:
        name, separator, direction = objective.partition(":")
        if not separator:
            raise UserError(
                f"--objective needs NAME:minimize or NAME:maximize, got {objective!r}",
                hint=f"--objective {name}:minimize",
            )
        overrides.append(f"objectives.{name.strip()}={direction.strip()}")
    return overrides


def _quoted(text: str) -> str:
    """A text as a YAML value of one line."""
    import json

    return json.dumps(text)
