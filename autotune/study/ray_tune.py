"""Ray Tune as what places trials: it takes tasks from a mailbox, starts them where there is room, and hands their
answers back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.search import Searcher

from autotune.study.ray_cluster import RayCluster
from autotune.study.ray_worker import RayTask, TrialOnWorker

if TYPE_CHECKING:
    from autotune.study.ray_pool import Mailbox


class MailboxSearcher(Searcher):
    """Hands out the tasks of a mailbox as Tune's trials, and their answers to who waits for them."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox

    def suggest(self, trial_id: str) -> Any:
        """The next task, None while there is none, and a word of Tune's when there will be none."""
        task = self._mailbox.take(trial_id)
        if task is not None:
            return {"task": task}
        return Searcher.FINISHED if self._mailbox.is_closed or self._mailbox.is_idle else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Hand the answer on. There is none when the worker was lost."""
        self._mailbox.end(trial_id, None if error or result is None else result.get("answer"))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study's storage has it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the study's storage has it all."""


class _Starts(tune.Callback):
    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A worker has begun."""
        self._mailbox.start(trial.trial_id)


class _Closing(tune.Stopper):
    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Trials end by themselves."""
        return False

    def stop_all(self) -> bool:
        """Whether the executor was closed."""
        return self._mailbox.is_closed


def serve(mailbox: Mailbox, cluster: RayCluster, scratch: Path) -> None:
    """Run what comes in the mailbox until it is closed. Without work Tune ends, so that others get the devices: two
    drivers, each holding what the other's trial needs, would wait for ever.

    Args:
        mailbox: Tasks and answers.
        cluster: Where they run.
        scratch: Folder for what Tune writes.
    """

    def placement(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        task: RayTask = config["task"]
        bundle = cluster.resources(task.bundles.devices_per_node)
        strategy = "STRICT_PACK" if task.bundles.num_nodes == 1 else "STRICT_SPREAD"
        return tune.PlacementGroupFactory([bundle] * task.bundles.num_nodes, strategy=strategy)

    for number in itertools.count():
        if not mailbox.wait_for_task():
            return
        _tuner(mailbox, placement, scratch, f"trials-{number}").fit()


def _tuner(
    mailbox: Mailbox,
    placement: Callable[[dict[str, Any]], tune.PlacementGroupFactory],
    scratch: Path,
    name: str,
) -> tune.Tuner:
    return tune.Tuner(
        tune.with_resources(TrialOnWorker, placement),
        tune_config=tune.TuneConfig(
            search_alg=MailboxSearcher(mailbox),
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=lambda trial: trial.trial_id,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(scratch),
            stop=_Closing(mailbox),
            callbacks=[_Starts(mailbox)],
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=0),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False, checkpoint_frequency=0),
        ),
    )
