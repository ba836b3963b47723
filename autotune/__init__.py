"""The tuner: searches plans and hyperparameters, applies the best, and retunes the live run. Imports no torch."""


def __getattr__(name: str) -> str:
    """`autotune.__version__`, read from the installed distribution when asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("paretune")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
