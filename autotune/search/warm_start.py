"""What the meta-learned prior says of the runs of a space."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.prior.predict import Prior, TaskPrior
from autotune.prior.rows import MetaRow
from autotune.prior.task import Task
from autotune.space.command import CommandSpace
from autotune.space.space import Space
from autotune.space.training import TrainingSpace
from engine.schema import parse


def task_prior_of(space: Space, extra_rows: Sequence[MetaRow] = ()) -> TaskPrior | None:
    """The prior at what a space trains; None where it speaks of nothing that is sought.

    Args:
        space: Of training runs, or of a user's program that trains what its ``task`` says; quality is an objective.
        extra_rows: The user's own runs, which the prior is conditioned on.
    """
    quality = space.roles.get("quality", "quality")
    if all(objective.name != quality for objective in space.objectives):
        return None
    if isinstance(space, TrainingSpace):
        return Prior.load(extra_rows).at(Task.of_run(space.base_run()))
    if isinstance(space, CommandSpace) and space.task:
        return Prior.load(extra_rows).at(parse(Task, dict(space.task), path=("task",)))
    return None
