"""The tuner: searches plans and hyperparameters, applies the best, and retunes the live run. Imports no torch.

``autotune.Study`` and ``autotune.tune`` search from Python (``docs/python_api.md``); they are imported when they are
first used, so that ``import autotune`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import Study
    from autotune.study.function_executor import TrialFailed
    from autotune.trials import Trial, TrialResult
    from autotune.tuned import Tuned, tune
    from engine.errors import UserError

    __version__: str

__all__ = ["Study", "Trial", "TrialFailed", "TrialResult", "Tuned", "UserError", "__version__", "tune"]

_HOMES = {
    "Study": "autotune.api",
    "Trial": "autotune.trials",
    "TrialFailed": "autotune.study.function_executor",
    "TrialResult": "autotune.trials",
    "Tuned": "autotune.tuned",
    "UserError": "engine.errors",
    "tune": "autotune.tuned",
}
"""Public name -> module."""


def __getattr__(name: str) -> Any:
    """The public names and ``autotune.__version__``, made when they are asked for."""
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("paretune")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
