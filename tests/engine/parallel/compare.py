"""How far what a plan gave is from what one process gives."""

from __future__ import annotations

from typing import Any, NamedTuple

EVERYTHING = ["losses", "grad_norms", "group_norms", "gradients", "parameters", "evaluation"]
"""What ``cases.train`` tells."""


class Difference(NamedTuple):
    """The largest difference of some values."""

    ratio: float
    """Of the largest expected value of its kind; infinite where a value is missing or is no number."""
    where: str
    """Kind and name of the value."""


def largest_difference(given: dict[str, Any], expected: dict[str, Any], keys: list[str]) -> Difference:
    """Compare results of ``cases.train``. Where fewer steps were run than expected, they are the last ones.

    Args:
        given: Of a plan.
        expected: Of one process.
        keys: Kinds to compare.
    """
    found = [Difference(0.0, "")]
    for key in keys:
        if isinstance(expected[key], dict):
            if given[key].keys() != expected[key].keys():
                names = sorted(given[key].keys() ^ expected[key].keys())
                return Difference(float("inf"), f"{key}: names {names}")
            pairs = {fqn: (given[key][fqn], tensor) for fqn, tensor in expected[key].items()}
        else:
            pairs = {key: (given[key], expected[key][-len(given[key]) :])}
        largest = max(float(tensor.abs().max()) for _, tensor in pairs.values())
        for name, (value, tensor) in pairs.items():
            if value.shape != tensor.shape:
                return Difference(float("inf"), f"{key}: {name} has shape {list(value.shape)}")
            ratio = float((value - tensor).abs().max()) / largest
            found.append(Difference(ratio if ratio == ratio else float("inf"), f"{key}: {name}"))
    return max(found)
