"""The ``autotune`` command. Commands live in ``autotune.commands`` and are imported only when they are used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from engine.errors import USER_ERROR_EXIT_CODE, UserError

COMMANDS = {
    "plan": "Say which layout is best for a model on machines, without running it.",
    "warmstart": "Say which hyperparameters to start from, by what earlier runs tell.",
    "prior": "Show, add and remove own runs that warm starts learn from.",
    "validate": "Compare the planner's estimates with measured runs.",
    "sweep": "Run a tuning sweep over layouts and hyperparameters.",
    "report": "Write the page of a study: Pareto front, knee, failures.",
    "apply": "Write the chosen configuration as a run file.",
    "train": "Train a run file, with live retuning when asked.",
    "monitor": "Watch a live run in the terminal.",
    "studies": "List, show, stop, export, merge and import studies.",
    "profile": "Measure this machine, so that plans are estimated for it.",
    "doctor": "Say what this machine has, and what is missing for what.",
}
"""Command name -> one line of help, in the order people need them."""


class LazyGroup(TyperGroup):
    """Imports a command when it is resolved, not when the group lists its commands for ``--help``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the line of help; ``resolve_command`` puts the real command in its place."""
        return TyperCommand(cmd_name, short_help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import ``autotune.commands.<name>`` and build its command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _import_command(str(name)), rest


def _import_command(name: str) -> Any:
    module = importlib.import_module(f"autotune.commands.{name}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(help=module.command.__doc__)(module.command)
    command = typer.main.get_command(app)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    name="autotune",
    no_args_is_help=True,
    add_completion=False,
    help="Find, prove and keep the best way to train a model on the machines you have.",
)


@app.callback()
def _root() -> None:
    """Find, prove and keep the best way to train a model on the machines you have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake ends in one message and exit code 2, Ctrl-C in 130.

    Returns:
        The exit code.
    """
    command = typer.main.get_command(app)
    try:
        command(args=list(arguments) if arguments is not None else None, prog_name="autotune")
    except UserError as error:
        print_error(error)
        return USER_ERROR_EXIT_CODE
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def print_error(error: UserError) -> None:
    """One message on standard error: place, what is wrong, hint."""
    place = f"{error.where}: " if error.where else ""
    print(f"error: {place}{error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
