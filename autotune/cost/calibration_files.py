"""Fitted figures into the files of the cost model: ``coefficients.yaml``, ``software.yaml``, ``hardware.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autotune.cost.calibrate import DEVICE_SPREAD, SOFTWARE_SPREAD, Calibration
from autotune.cost.coefficients import COEFFICIENTS_FILE, coefficients
from autotune.cost.software import SOFTWARE_FILE, software_catalogue
from autotune.specs.cluster import CATALOGUE_FILE, catalogue
from engine.atomic import write_text
from engine.yaml_file import read_yaml


def write_calibration(
    calibration: Calibration,
    software_intervals: Mapping[str, float],
    device_intervals: Mapping[str, float],
    unseen_interval: float,
) -> None:
    """Write fitted figures and the widths of intervals into the package's files.

    Args:
        calibration: The figures.
        software_intervals: Stack -> half-width of the interval of its step times, relative.
        device_intervals: Device kind -> the same for a stack that is not known.
        unseen_interval: The same for devices that no run was measured on.
    """
    _write_coefficients(calibration)
    _write_software(calibration, software_intervals)
    _write_hardware(calibration, device_intervals, unseen_interval)
    for cached in (coefficients, software_catalogue, catalogue):
        cached.cache_clear()


def _write_coefficients(calibration: Calibration) -> None:
    lines = [f"{name}: {_short(value)}" for name, value in calibration.coefficients.model_dump().items()]
    header = "# Fitted by benchmarks/planner_accuracy.py; what each is: autotune/cost/coefficients.py.\n\n"
    write_text(COEFFICIENTS_FILE, header + "\n".join(lines) + "\n")


def _write_software(calibration: Calibration, intervals: Mapping[str, float]) -> None:
    text = SOFTWARE_FILE.read_text()
    header = text[: text.index("default:")]
    entries: dict[str, dict[str, Any]] = read_yaml(SOFTWARE_FILE).data
    factors = {name: dict(values) for name, values in calibration.software.items()}
    lines = []
    for name, entry in entries.items():
        kept = {key: value for key, value in entry.items() if key not in (*SOFTWARE_SPREAD, "interval_ratio")}
        fitted = {key: _short(value) for key, value in factors.get(name, {}).items() if abs(value - 1) >= 0.005}
        if name in intervals:
            fitted["interval_ratio"] = _short(intervals[name])
        lines.append(f"{name}:")
        lines += [f"  {key}: {_word(value)}" for key, value in (kept | fitted).items()]
    write_text(SOFTWARE_FILE, header + "\n".join(lines) + "\n")


def _write_hardware(calibration: Calibration, intervals: Mapping[str, float], unseen_interval: float) -> None:
    """Replace the fitted lines of each device's figures; those of the CPU, which users measure, stay."""
    lines, kind = [], ""
    for line in CATALOGUE_FILE.read_text().splitlines():
        if match := re.match(r"([a-z0-9-]+):$", line):
            kind = match[1]
        ours = line.startswith("    ") and line.split(":")[0].strip() in (*DEVICE_SPREAD, "is_fitted", "interval_ratio")
        if ours and kind != "cpu":
            continue
        lines.append(line)
        if line == "  figures:" and kind != "cpu":
            fitted = calibration.devices.get(kind)
            if fitted:
                lines += [*(f"    {key}: {_short(value)}" for key, value in fitted.items()), "    is_fitted: true"]
            lines.append(f"    interval_ratio: {_short(intervals.get(kind, unseen_interval))}")
    write_text(CATALOGUE_FILE, "\n".join(lines) + "\n")


def _short(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def _word(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
