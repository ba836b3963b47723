"""Median and spread that a few outliers do not move."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal data over its median absolute deviation."""


def median_and_sigma(values: Floats, axis: int = -1) -> tuple[Any, Any]:
    """Median and 1.4826 times the median absolute deviation along ``axis``; NaNs are passed over."""
    centre = np.nanmedian(values, axis=axis, keepdims=True)
    sigma = MAD_TO_SIGMA * np.nanmedian(np.abs(values - centre), axis=axis)
    return np.squeeze(centre, axis=axis), sigma
