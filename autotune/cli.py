"""The ``autotune`` command. Commands live in ``autotune.commands`` and are imported only when they are used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click
import typer
from typer.core import TyperGroup

from engine.errors import USER_ERROR_EXIT_CODE, UserError

COMMANDS = {
    "sweep": "Run a tuning sweep over layouts and hyperparameters.",
    "report": "Write the page of a study: Pareto front, knee, failures.",
    "apply": "Write the chosen configuration as a run file.",
    "train": "Train a run file, with live retuning when asked.",
    "monitor": "Watch a live run in the terminal.",
    "studies": "List, show and stop studies.",
    "doctor": "Say what this machine has, and what is missing for what.",
}
"""Command name -> one line of help, in the order people need them."""

INTERRUPTED_EXIT_CODE = 130


class LazyGroup(TyperGroup):
    """Lists commands without importing them, so that ``--help`` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import ``autotune.commands.<name>`` and build its command (for the group's own help: a stand-in)."""
        if cmd_name not in COMMANDS:
            return None
        if _asks_for_group_help(ctx):
            return click.Command(cmd_name, short_help=COMMANDS[cmd_name], help=COMMANDS[cmd_name])
        module = importlib.import_module(f"autotune.commands.{cmd_name}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            app.command(help=COMMANDS[cmd_name])(module.command)
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command


def _asks_for_group_help(ctx: click.Context) -> bool:
    return not ctx._protected_args and not ctx.args


app = typer.Typer(
    cls=LazyGroup,
    name="autotune",
    no_args_is_help=True,
    add_completion=False,
    help="Find, prove and keep the best way to train a model on the machines you have.",
)


@app.callback()
def _root() -> None:
    """Shared by all commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake ends in one message and exit code 2.

    Returns:
        The exit code.
    """
    try:
        result = typer.main.get_command(app).main(
            args=list(arguments) if arguments is not None else None, prog_name="autotune", standalone_mode=False
        )
    except UserError as error:
        print_error(error)
        return USER_ERROR_EXIT_CODE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted; the same command goes on where it was", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def print_error(error: UserError) -> None:
    """One message on standard error: place, what is wrong, hint."""
    place = f"{error.where}: " if error.where else ""
    print(f"error: {place}{error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
