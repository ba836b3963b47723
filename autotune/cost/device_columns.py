"""Figures of devices and training stacks in the form that the formulas take: one number, or one per row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import numpy as np

from autotune.cost.columns import code, words_of
from autotune.cost.shapes import Number
from autotune.specs.figures import DeviceFigures, SoftwareFigures
from engine.errors import UserError

FP8 = code("precision", "fp8")
FP8_RECIPES = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4")
"""How products of 8 bits and fewer are scaled: one scale per tensor, per row or block, per 32 elements; 4 bits."""
ELEMENT_BYTES = np.array([{"fp64": 8, "fp32": 4}.get(word, 2) for word in words_of("precision")], dtype=np.float64)
"""Bytes of an activation by precision code; 8-bit plans keep activations in 16 bits."""


@dataclass(frozen=True)
class DeviceColumns:
    """A device's figures for the precision of each row. Seconds, bytes and FLOP, not their multiples."""

    matmul_flops: Number
    """Attained FLOP/s in the plan's precision."""
    half_depth: Number
    wide_flops: Number
    """Attained FLOP/s of what an 8-bit plan leaves in 16 bits (attention, head); else as ``matmul_flops``."""
    wide_half_depth: Number
    element_bytes: Number
    is_fp8: Number
    """1 where products are in 8 bits."""
    recipe: int | np.ndarray
    """Code (``FP8_RECIPES``) of how 8-bit products are scaled."""
    tile_rows: Number
    tile_columns: Number
    num_units: Number
    attention_ratio: Number
    memory_bytes_per_second: Number
    launch_seconds: Number
    host_link_bytes_per_second: Number
    overlap_slowdown_ratio: Number

    @classmethod
    def of(cls, figures: DeviceFigures, precision: np.ndarray, recipe: int = 0) -> Self:
        """One device for all rows.

        Args:
            figures: The device.
            precision: ``[n]`` codes.
            recipe: Code of ``FP8_RECIPES``.

        Raises:
            UserError: The device has no figures for a precision that the rows have.
        """
        return cls.rows([figures], np.zeros(np.shape(precision), dtype=np.int64), precision, recipe)

    @classmethod
    def rows(
        cls, devices: Sequence[DeviceFigures], index: np.ndarray, precision: np.ndarray, recipe: int | np.ndarray = 0
    ) -> Self:
        """One device per row.

        Args:
            devices: The devices.
            index: ``[n]``: which of them each row has.
            precision: ``[n]`` codes.
            recipe: Code of ``FP8_RECIPES``, or ``[n]``.

        Raises:
            UserError: A device has no figures for a precision that its rows have.
        """
        words = words_of("precision")
        flops = np.full((len(devices), len(words)), np.nan)
        depth = np.zeros((len(devices), len(words)))
        for row, device in enumerate(devices):
            for place, word in enumerate(words):
                if (figures := device.matmul.get(word)) is not None:  # type: ignore[call-overload]
                    flops[row, place] = figures.tflops * 1e12 * device.sustained_ratio
                    depth[row, place] = figures.half_depth
        wide = np.where(precision == FP8, code("precision", "bf16"), precision)
        matmul_flops, wide_flops = flops[index, precision], flops[index, wide]
        missing = np.isnan(matmul_flops) | np.isnan(wide_flops)
        if missing.any():
            row = int(np.argmax(missing))
            known = ", ".join(devices[index.flat[row]].matmul)
            raise UserError(
                f"the device has no figures for precision '{words[precision.flat[row]]}'",
                hint=f"it has them for {known}",
            )
        one = len(devices) == 1

        def column(name: str, scale: float = 1.0) -> Number:
            values = np.array([getattr(device, name) for device in devices], dtype=np.float64) * scale
            return float(values[0]) if one else values[index]

        return cls(
            matmul_flops=matmul_flops,
            half_depth=depth[index, precision],
            wide_flops=wide_flops,
            wide_half_depth=depth[index, wide],
            element_bytes=ELEMENT_BYTES[precision],
            is_fp8=(precision == FP8).astype(np.float64),
            recipe=recipe,
            tile_rows=column("tile_rows"),
            tile_columns=column("tile_columns"),
            num_units=column("num_units"),
            attention_ratio=column("attention_ratio"),
            memory_bytes_per_second=column("memory_gb_per_second", 1e9) * column("sustained_memory_ratio"),
            launch_seconds=column("launch_us", 1e-6),
            host_link_bytes_per_second=column("host_link_gb_per_second", 1e9),
            overlap_slowdown_ratio=column("overlap_slowdown_ratio"),
        )

    def take(self, rows: np.ndarray) -> DeviceColumns:
        """Some of the rows."""
        return _take(self, rows)


@dataclass(frozen=True)
class SoftwareColumns:
    """A training stack's factors."""

    compute_ratio: Number
    attention_ratio: Number
    attention_tflops: Number
    memory_bound_ratio: Number
    half_precision_ratio: Number
    communication_ratio: Number
    host_ratio: Number
    tp_launches: Number
    shard_launches: Number
    gather_launches: Number
    pp_launches: Number
    tp_communication_ratio: Number
    dp_communication_ratio: Number
    pp_communication_ratio: Number
    fp8_ratio: Number
    pads_vocabulary: Number
    recomputes: Number
    recompute_ratio: Number
    expert_ratio: Number
    expert_launches: Number
    imbalance_ratio: Number
    fused_attention: Number
    """1 where attention is one kernel."""
    narrow_gradients: Number
    """1 where true, here and below."""
    regathers: Number
    shares_sends: Number
    sums_from_second: Number
    sends_once: Number
    gathers_keys: Number
    wide_key_gradients: Number
    sums_whole_gradients: Number
    sums_replicas_once: Number
    dispatches_whole: Number
    sums_tied_shards: Number
    split_backward_keeps_gathered: Number

    @classmethod
    def of(cls, figures: SoftwareFigures) -> Self:
        """One stack for all rows."""
        return cls(**{f.name: float(getattr(figures, f.name)) for f in fields(cls)})

    @classmethod
    def rows(cls, stacks: Sequence[SoftwareFigures], index: np.ndarray) -> Self:
        """One stack per row. ``index``: ``[n]``: which of ``stacks`` each row has."""
        return cls(**{f.name: np.array([float(getattr(s, f.name)) for s in stacks])[index] for f in fields(cls)})

    def take(self, rows: np.ndarray) -> SoftwareColumns:
        """Some of the rows."""
        return _take(self, rows)


Columns = TypeVar("Columns", DeviceColumns, SoftwareColumns)


def _take(columns: Columns, rows: np.ndarray) -> Columns:
    values = {f.name: getattr(columns, f.name) for f in fields(columns)}
    return type(columns)(**{name: v[rows] if np.ndim(v) else v for name, v in values.items()})
