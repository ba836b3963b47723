"""The samplers by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from autotune.search.sampler import Sampler
from engine.errors import UserError

DEFAULT_SAMPLER = "tpe"


def _tpe() -> Sampler:
    from autotune.search.optuna_samplers import OptunaSampler, tree_parzen

    return OptunaSampler(tree_parzen)


def _random() -> Sampler:
    from autotune.search.uniform import UniformSampler

    return UniformSampler()


SAMPLERS: Mapping[str, Callable[[], Sampler]] = {"tpe": _tpe, "random": _random}
"""Name -> what makes it; libraries are imported then."""


def make_sampler(name: str) -> Sampler:
    """The sampler of a name.

    Raises:
        UserError: There is none of this name, or what it needs is not installed.
    """
    if name not in SAMPLERS:
        close = difflib.get_close_matches(name, SAMPLERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(SAMPLERS)}"
        raise UserError(f"there is no sampler {name!r}", hint=hint)
    return SAMPLERS[name]()
