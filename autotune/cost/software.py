"""Training stacks by name: ``software.yaml``."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

import numpy as np

from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import DeviceFigures, SoftwareFigures
from engine.errors import UserError
from engine.schema import parse
from engine.yaml_file import read_yaml

OWN_ENGINE = "paretune"
"""This project's engine."""
SOFTWARE_FILE = Path(__file__).with_name("software.yaml")


@functools.cache
def software_catalogue() -> dict[str, SoftwareFigures]:
    """Name -> the stack's figures."""
    document = read_yaml(SOFTWARE_FILE)
    return {name: parse(SoftwareFigures, data, document=document, path=(name,)) for name, data in document.data.items()}


def time_interval_ratio(stack: SoftwareFigures, device: DeviceFigures) -> float:
    """Half-width of the interval of step times, relative: the stack's own where both it and the device are known."""
    if stack.interval_ratio is None:
        return device.interval_ratio
    return stack.interval_ratio if device.is_fitted else max(stack.interval_ratio, device.interval_ratio)


def time_interval(seconds: np.ndarray, half_width_ratio: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end of step times ``[n]``: errors of time are errors of its logarithm, so the ends are factors."""
    return seconds / (1 + half_width_ratio), seconds * (1 + half_width_ratio)


def software_figures(name: str) -> SoftwareFigures:
    """The figures of one stack.

    Raises:
        UserError: No such stack (with the nearest name).
    """
    known = software_catalogue()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    raise UserError(
        f"unknown software {name!r}; known are {', '.join(known)}",
        hint=f"did you mean '{close[0]}'?" if close else "'default' is a recent Megatron-Core or an engine like it",
    )


def software_on(cluster: ClusterSpec, name: str) -> SoftwareFigures:
    """The figures of one stack; of this project's engine, those that were measured on the cluster's own machine.

    Raises:
        UserError: No such stack, or the cluster's file names figures that there are none of.
    """
    figures = software_figures(name)
    measured = cluster.measured.software if cluster.measured and name == OWN_ENGINE else {}
    return parse(SoftwareFigures, figures.to_data() | measured) if measured else figures
