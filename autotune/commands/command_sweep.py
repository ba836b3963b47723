"""What a sweep of a user's own program does before its first trial."""

from __future__ import annotations

import itertools
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import UserError

if TYPE_CHECKING:
    from autotune.space.command import CommandSpace
    from autotune.space.program import Program
    from autotune.space.space import Scalar

GUESSES_TITLE = "tried first"
EXAMPLES_TITLE = "examples of candidates (the search chooses by what it learns: not these, nor in this order)"
NUM_SHOWN_CANDIDATES = 5
MAX_DRAWS = 1000
"""Uniform draws among which a legal candidate must be."""
MAX_REASONS = 4
"""Reasons of refused candidates that are shown."""


def check_program(space: CommandSpace) -> None:
    """Make sure that a sweep has something to run.

    Raises:
        UserError: The program or its folder is not there, or no candidate is legal.
    """
    from autotune.study.command_runner import find_executable

    if not space.folder.is_dir():
        raise UserError(
            f"the folder {space.folder} that the command runs in does not exist", hint="correct 'folder', or make it"
        )
    find_executable(_program(space, _draw(space, 0)[0][0]))


def print_dry_run(space: CommandSpace, guesses: Sequence[Mapping[str, Scalar]], seed: int, *, as_json: bool) -> None:
    """Show what is searched, and the commands of the first guesses and of some candidates.

    Raises:
        UserError: No candidate is legal.
    """
    from autotune.search.seeds import derive_seed
    from autotune.space.command import text_of

    legal, refused = _draw(space, derive_seed(seed, "uniform", 0))
    candidates, num_drawn = legal[:NUM_SHOWN_CANDIDATES], len(legal) + sum(refused.values())
    commands, guessed = (
        [_program(space, chosen).arguments(Path("TRIAL_FOLDER")) for chosen in shown] for shown in (candidates, guesses)
    )
    rungs = [space.grown(rung) for rung in range(space.fidelity.last + 1)] if space.fidelity else []
    if as_json:
        data = {
            "name": space.name,
            "folder": str(space.folder),
            "dimensions": {dimension.name: dimension.describe() for dimension in space.dimensions},
            "rungs": rungs,
            "num_drawn": num_drawn,
            "refused": dict(refused),
            "first_guesses": [dict(guess) for guess in guesses],
            "candidates": candidates,
            "commands": commands,
        }
        print(json.dumps(data, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    objectives = ", ".join(f"{objective.label} ({objective.direction})" for objective in space.objectives)
    assert space.cluster is not None
    console.print(f"{space.name}: {objectives}, on {space.cluster.describe()}", highlight=False)
    dimensions = Table("searched", "values", box=None, header_style="dim")
    for dimension in space.dimensions:
        dimensions.add_row(escape(dimension.name), escape(dimension.describe()))
    console.print(dimensions)
    lines = []
    if rungs:
        told = ", ".join(text_of(value) for values in rungs for value in values.values())
        from_where = "the part before" if space.fidelity and space.fidelity.continues(1) else "the beginning"
        lines += [f"\ntrials grow from part to part: {', '.join(rungs[0])} {told}; each goes on from {from_where}"]
    lines += [f"\nof {num_drawn} candidates drawn at random {len(legal)} are legal"] if refused else []
    lines += [f"  {count} refused: {reason}" for reason, count in refused.most_common(MAX_REASONS)]
    lines += [f"\nin {space.folder}"]
    for title, shown in ((GUESSES_TITLE, guessed), (EXAMPLES_TITLE, commands)):
        lines += [f"\n{title}", *(f"  {shlex.join(command)}" for command in shown)] if shown else []
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _draw(space: CommandSpace, seed: int) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Legal candidates, and the reasons of those that are not, of ``MAX_DRAWS`` drawn at random or of a whole discrete
    space."""
    from autotune.search.uniform import uniform_draws

    legal: list[dict[str, Any]] = []
    refused: Counter[str] = Counter()
    for chosen in itertools.islice(uniform_draws(space, None, seed), MAX_DRAWS):
        candidate = space.candidate(chosen)
        if candidate.is_legal:
            legal.append(chosen)
        else:
            refused[candidate.reason] += 1
    if not legal:
        reason, count = refused.most_common(1)[0]
        raise UserError(
            f"none of {sum(refused.values())} candidates drawn from the space is legal ({reason}: {count})",
            hint="loosen the constraint",
        )
    return legal, refused


def _program(space: CommandSpace, chosen: Mapping[str, Any]) -> Program:
    program = space.program(chosen, 0)
    assert program is not None, "a space with a command"
    return program
