"""What the meta-learned prior says of the runs of a space."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from autotune.prior.predict import Prior, TaskPrior
from autotune.prior.rows import MetaRow
from autotune.prior.task import HYPERPARAMETERS, Task
from autotune.space.command import CommandSpace
from autotune.space.objectives import QUALITY
from autotune.space.space import Space
from autotune.space.training import TrainingSpace
from engine.errors import UserError
from engine.parametrization import is_standard
from engine.schema import parse

ROLES = (*HYPERPARAMETERS, "global_batch_size", QUALITY)
"""What a value or an objective of a user's program may stand for."""


def task_prior_of(space: Space, extra_rows: Sequence[MetaRow] = ()) -> TaskPrior | None:
    """The prior at what a space trains; None where it speaks of nothing that is sought, and under muP relative to
    another size, whose learning rates it does not know.

    Args:
        space: Of training runs, or of a user's program that trains what its ``task`` says; quality is an objective.
        extra_rows: The user's own runs, which the prior is conditioned on.

    Raises:
        UserError: A task or a role of a program is not known.
    """
    if all(objective.name != space.quality_name for objective in space.objectives):
        return None
    if isinstance(space, TrainingSpace):
        run = space.base_run()
        return Prior.load(extra_rows).at(Task.of_run(run)) if is_standard(run.hyperparameters, run.model) else None
    if isinstance(space, CommandSpace) and space.task:
        return Prior.load(extra_rows).at(task_of(space))
    return None


def task_of(space: CommandSpace) -> Task:
    """What a user's program trains, as its space's ``task`` says.

    Raises:
        UserError: A task or a role is not known.
    """
    _check_roles(space.roles)
    return parse(Task, dict(space.task), path=("task",))


def _check_roles(roles: Mapping[str, str]) -> None:
    for role in roles:
        if role not in ROLES:
            close = difflib.get_close_matches(role, ROLES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"roles are {', '.join(ROLES)}"
            raise UserError(f"the prior knows no role {role!r}", hint=hint, where="task.roles")
