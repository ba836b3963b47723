"""A user's own program: the command that a trial's values are put into."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.space.objectives import Objective
from engine.errors import UserError

SEED = "seed"
"""Placeholder of the trial's seed, 0 to 2^31 - 1."""
TRIAL_FOLDER = "trial_folder"
"""Placeholder of the absolute path of the trial's own folder."""
OWN_PLACEHOLDERS = (SEED, TRIAL_FOLDER)
FAILURE = "failure"
"""Key of a result that says how the program failed; no objective of a program can be called so."""

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


@dataclass(frozen=True)
class Template:
    """A command with placeholders, split into arguments once: values are put into arguments and never read by a shell,
    so nothing in a value can become another argument or command."""

    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, written: str | Sequence[str]) -> Template:
        """Split a command as a shell would, quotes and all.

        Args:
            written: The command as one line, or as arguments that are split already.

        Raises:
            UserError: An open quote, or nothing.
        """
        try:
            arguments = tuple(shlex.split(written) if isinstance(written, str) else written)
        except ValueError as error:
            raise UserError(
                f"the command can't be split: {str(error).lower()}", hint="close the quote, or write it as \\'"
            ) from None
        if not arguments:
            raise UserError("the command is empty", hint='example: command: "python train.py --lr {lr}"')
        return cls(arguments)

    @property
    def names(self) -> frozenset[str]:
        """Placeholders in it."""
        return frozenset(
            match[1] for argument in self.arguments for match in _PLACEHOLDER.finditer(argument) if match[1] is not None
        )

    def filled(self, texts: Mapping[str, str]) -> list[str]:
        """The arguments with a text for every placeholder; ``{{`` and ``}}`` stand for braces."""

        def text(match: re.Match[str]) -> str:
            return match[0][0] if match[1] is None else texts[match[1]]

        return [_PLACEHOLDER.sub(text, argument) for argument in self.arguments]


@dataclass(frozen=True)
class Program:
    """A user's program as one trial starts it."""

    template: Template
    texts: Mapping[str, str]
    """Placeholder -> text, of all but the trial's folder."""
    objectives: tuple[Objective, ...]
    """What it has to report."""
    folder: Path
    """Where it runs."""
    num_devices: int = 1
    """Devices it needs for itself."""

    def arguments(self, trial_folder: Path) -> list[str]:
        """The command, with results in ``trial_folder``."""
        return self.template.filled({**self.texts, TRIAL_FOLDER: str(trial_folder.absolute())})
