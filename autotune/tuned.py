"""Functions that are tuned as a whole: ``autotune.tune``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

from autotune.api import Objectives, Study

P = ParamSpec("P")
R = TypeVar("R")


class Tuned(Generic[P, R]):
    """A function with the search that tunes it, as ``tune`` makes it; called, it is the function."""

    def __init__(self, function: Callable[P, R], make_study: Callable[[], Study]) -> None:
        self.function = function
        self._make_study = make_study
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function itself."""
        return self.function(*args, **kwargs)

    def run(
        self,
        *,
        trials: int | None = None,
        time: str | float | None = None,
        workers: int = 1,
        processes: bool = False,
        trial_seconds: float | None = None,
    ) -> Study:
        """Tune the function (see ``Study.run``).

        Returns:
            The study.
        """
        function: Any = self if processes else self.function  # as the name that workers find
        return self._make_study().run(
            function, trials=trials, time=time, workers=workers, processes=processes, trial_seconds=trial_seconds
        )

    def __reduce__(self) -> str:
        return self.function.__qualname__


def tune(space: Mapping[str, Any], objectives: Objectives, **options: Any) -> Callable[[Callable[P, R]], Tuned[P, R]]:
    """Make a function tunable.

    Args:
        space: As for ``Study``.
        objectives: As for ``Study``.
        options: The other arguments of ``Study``.

    Example:
        >>> import autotune
        >>> @autotune.tune({"x": {"float": [-1, 1]}}, {"loss": "minimize"}, trials=20, sampler="random")
        ... def parabola(x):
        ...     return x * x
        >>> parabola(0.5)
        0.25
        >>> study = parabola.run()
        >>> len(study.trials), study.best.values["loss"] < 0.1
        (20, True)
    """

    def decorate(function: Callable[P, R]) -> Tuned[P, R]:
        return Tuned(function, functools.partial(Study, space, objectives, **options))

    return decorate
