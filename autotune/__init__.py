"""The tuner: searches plans and hyperparameters, applies the best, and retunes the live run. Imports no torch.

``autotune.Study`` and ``autotune.tune`` search from Python (``docs/python_api.md``); they are imported when they are
first used, so that ``import autotune`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import Study, Trial, TrialResult, Tuned, tune
    from autotune.study.function_executor import TrialFailed
    from engine.errors import UserError

    __version__: str

__all__ = ["Study", "Trial", "TrialFailed", "TrialResult", "Tuned", "UserError", "__version__", "tune"]


def __getattr__(name: str) -> Any:
    """The public names and ``autotune.__version__``, made when they are asked for."""
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("paretune")
    homes = {"TrialFailed": "autotune.study.function_executor", "UserError": "engine.errors"}
    homes |= dict.fromkeys(("Study", "Trial", "TrialResult", "Tuned", "tune"), "autotune.api")
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
