"""The samplers by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping

from autotune.search.sampler import Sampler
from engine.errors import UserError

DEFAULT_SAMPLER = "joint"


def _joint() -> Sampler:
    from autotune.search.joint import JointSampler

    return JointSampler()


def _tpe() -> Sampler:
    from autotune.search.optuna_samplers import OptunaSampler, tree_parzen

    return OptunaSampler(tree_parzen)


def _gp() -> Sampler:
    from autotune.search.optuna_samplers import OptunaSampler, gaussian_process

    return OptunaSampler(gaussian_process)


def _nsga2() -> Sampler:
    from autotune.search.optuna_samplers import GeneticSampler, nsga2

    return GeneticSampler(nsga2)


def _nsga3() -> Sampler:
    from autotune.search.optuna_samplers import GeneticSampler, nsga3

    return GeneticSampler(nsga3)


def _qmc() -> Sampler:
    from autotune.search.uniform import SobolSampler

    return SobolSampler()


def _random() -> Sampler:
    from autotune.search.uniform import UniformSampler

    return UniformSampler()


def _rl() -> Sampler:
    from autotune.search.reinforce import ReinforceSampler

    return ReinforceSampler()


SAMPLERS: Mapping[str, Callable[[], Sampler]] = {
    "joint": _joint,
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": _nsga2,
    "nsga3": _nsga3,
    "qmc": _qmc,
    "random": _random,
    "rl": _rl,
}
"""Name -> what makes it; libraries are imported then."""

EXTRAS: Mapping[str, str] = {"rl": "rl"}
"""Name of a sampler -> the extra of this package that has what it needs."""


def make_sampler(name: str) -> Sampler:
    """The sampler of a name.

    Args:
        name: One of ``SAMPLERS``, or ``package.module:Name`` of a class (or function) of the user's own that makes one.

    Raises:
        UserError: There is none of this name, or what it needs is not installed.
    """
    if ":" in name:
        return _own(name)
    if name not in SAMPLERS:
        close = difflib.get_close_matches(name, SAMPLERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(SAMPLERS)}"
        raise UserError(f"there is no sampler {name!r}", hint=hint)
    try:
        return SAMPLERS[name]()
    except ImportError as error:
        extra = EXTRAS.get(name)
        if extra is None:
            raise
        raise UserError(
            f"the sampler {name!r} needs {error.name or 'a package'}, which is not installed",
            hint=f"pip install 'paretune[{extra}]', or choose another sampler",
        ) from None


def _own(name: str) -> Sampler:
    """A user's sampler."""
    module_name, _, attribute = name.partition(":")
    try:
        made: Sampler = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"can't make the sampler {name!r}: {error}",
            hint="name it package.module:Class, installed or on PYTHONPATH; it is made without arguments",
        ) from error
    if not callable(getattr(made, "propose", None)):
        raise UserError(f"{name!r} is no sampler", hint="it needs a method propose(state), see autotune.search.sampler")
    return made
