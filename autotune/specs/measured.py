"""From what ``engine.probe --measure`` says of a machine to figures of its devices and links, by small fits.

Each fit minimises relative errors and resists outliers, since a machine is rarely quiet: a sample that another process
disturbed is only ever too slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.specs.figures import DeviceFigures, LinkFigures, MatmulFigures, links_of
from engine import collective_cost
from engine.collective_cost import Group, Link
from engine.errors import UserError
from engine.measurement import AttentionSample, CollectiveSample, MatmulSample, Measurement, StreamSample
from engine.units import GIB

TILES = ((128, 128), (128, 256), (256, 128), (64, 128))
"""Rows and columns of the tiles that GPU libraries use most."""
ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
FULL_HEAD, HEAD_EXPONENT = 128, 0.3
"""Smaller heads are slower: attention's rate goes with this power of their dimensions below the full ones."""
RATIOS = ("all_gather_ratio", "reduce_scatter_ratio", "all_to_all_ratio", "send_ratio")
"""Fields of LinkFigures that say how operations depart from their forms; all-reduce is what they are relative to."""
RATIO_PULL = 0.1
"""Weight of an operation that follows its form, relative to one sample."""
LARGE_RANGE = 2
"""The bandwidth is fitted to operands from this part of the largest on: smaller ones lie in the caches."""
MIN_INTERVAL, MAX_INTERVAL = 0.1, 1.0
LEAST_LATENCY, LEAST_RATE = 1e-9, 1e-3


def device_figures(found: Measurement) -> tuple[DeviceFigures, dict[str, float]]:
    """Figures of one device.

    Args:
        found: The measurement.

    Returns:
        The figures, and the median relative error of each fit by its name.

    Raises:
        UserError: Nothing was measured that figures could be made of.
    """
    words = list(dict.fromkeys(sample.precision for sample in found.matmul))
    adds = [sample for sample in found.stream if sample.operator == "add"]
    adds = [sample for sample in adds if sample.elements >= max(add.elements for add in adds) / LARGE_RANGE]
    if not words or not adds:
        raise UserError("the measurement has no matrix products or no memory-bound operators", hint="measure again")
    launch = found.launch_seconds
    synchronous = found.machine.device == "cpu"
    fixed = launch if synchronous else 0.0
    tiles, units = ((1, 1), 1) if synchronous else (_best_tiles(found), found.machine.num_units)
    errors: dict[str, float] = {}
    matmul = {}
    for word in words:
        samples = [sample for sample in found.matmul if sample.precision == word]
        matmul[word], errors[f"matmul {word}"] = fit_matmul(samples, tiles, units, fixed)
    bandwidth, errors["memory"] = fit_bandwidth(adds, fixed)
    attention = fit_attention([sample for sample in found.attention if sample.precision == words[0]])
    errors["attention"] = attention.error
    overlap = found.overlap
    slowdown = 0.0
    if overlap:
        hidden = min(overlap.compute_seconds, overlap.collective_seconds)
        slowdown = (overlap.both_seconds - max(overlap.compute_seconds, overlap.collective_seconds)) / hidden
    spread = float(np.median(list(errors.values()))) + found.noise_ratio
    figures = DeviceFigures(
        matmul=matmul,
        tile_rows=tiles[0],
        tile_columns=tiles[1],
        num_units=units,
        attention_ratio=min(attention.rate / (1e12 * matmul[words[0]].tflops), 1.0),
        memory_gb_per_second=bandwidth / 1e9,
        launch_us=launch * 1e6,
        host_link_gb_per_second=(found.host_link_bytes_per_second or 20e9) / 1e9,
        overhead_gib=found.machine.context_bytes / GIB,
        overlap_slowdown_ratio=float(np.clip(slowdown, 0, 1)),
        interval_ratio=float(np.clip(2 * spread, MIN_INTERVAL, MAX_INTERVAL)),
    )
    return figures, errors


def fit_matmul(
    samples: Sequence[MatmulSample], tiles: tuple[int, int], num_units: int, fixed_seconds: float = 0.0
) -> tuple[MatmulFigures, float]:
    """Rate and half depth of ``seconds = fixed + tiled area * 2 (depth + half) / rate`` (``autotune.cost.compute``).

    Args:
        samples: Of one precision.
        tiles: Rows and columns of a tile.
        num_units: Units that compute tiles at the same time; tiles come in whole waves of them.
        fixed_seconds: Part of each sample that does not depend on its shape.

    Returns:
        The figures and the median relative error.
    """
    rows, columns, depth, seconds = _columns(samples, "rows", "columns", "depth", "seconds")
    waves = np.ceil(np.ceil(rows / tiles[0]) * np.ceil(columns / tiles[1]) / num_units)
    area = 2 * waves * num_units * tiles[0] * tiles[1]
    (per_flop, start), error = relative_fit([area * depth, area], _without(seconds, fixed_seconds))
    per_flop = max(per_flop, 1e-18)
    return MatmulFigures(tflops=1 / per_flop / 1e12, half_depth=start / per_flop), error


def _best_tiles(found: Measurement) -> tuple[int, int]:
    """The tile size that explains the fastest precision's products best."""
    word = found.matmul[-1].precision
    samples = [sample for sample in found.matmul if sample.precision == word]
    return min(TILES, key=lambda tiles: fit_matmul(samples, tiles, found.machine.num_units)[1])


def fit_bandwidth(samples: Sequence[StreamSample], fixed_seconds: float = 0.0) -> tuple[float, float]:
    """Bytes per second of ``add``, which reads two tensors and writes a new one, and the median relative error."""
    elements, seconds = _columns(samples, "elements", "seconds")
    widths = np.array([ELEMENT_BYTES[sample.precision] for sample in samples])
    (per_byte,), error = relative_fit([3 * elements * widths], _without(seconds, fixed_seconds))
    return 1 / per_byte, error


@dataclass(frozen=True)
class AttentionFit:
    """Rate of fused causal attention as ``autotune.cost.compute`` writes it."""

    rate: float
    """FLOP/s over long contexts with heads of ``FULL_HEAD`` dimensions."""
    half_length: float
    """Context at which half of the rate is reached."""
    backward_ratio: float
    """Time of the backward pass over that of 2.5 forward passes."""
    error: float
    """Median relative error of the forward pass."""


def fit_attention(samples: Sequence[AttentionSample]) -> AttentionFit:
    """Rate and half length of ``seconds = 2 tokens * width * (context + half) / rate``, context the causal mean.

    Args:
        samples: Of one precision.
    """
    batch, heads, dim, length = _columns(samples, "batch", "num_heads", "head_dim", "length")
    forward, backward = _columns(samples, "forward_seconds", "backward_seconds")
    context = (length + 1) / 2
    per_context = 2 * batch * length * heads * 2 * dim / np.minimum(dim / FULL_HEAD, 1) ** HEAD_EXPONENT
    (per_flop, start), error = relative_fit([per_context * context, per_context], forward)
    per_flop = max(per_flop, 1e-18)
    ratio = float(np.median(backward / forward)) / 2.5
    return AttentionFit(1 / per_flop, start / per_flop, ratio, error)


def link_figures(found: Measurement) -> tuple[tuple[LinkFigures, ...], dict[str, float]]:
    """Figures of every level of the network that was measured: a node, and all nodes.

    A machine of one device gets one level that nothing crosses.

    Returns:
        The levels from the closest devices outwards, and the median relative error of each fit.
    """
    machine = found.machine
    local = max(machine.num_ranks // machine.num_nodes, 1)
    inside = [s for s in found.collectives if s.num_ranks <= local and s.stride == 1]
    across = [s for s in found.collectives if s.num_ranks > local or s.stride > 1]
    if not found.collectives:
        return (LinkFigures(gb_per_second=1.0, latency_us=10.0),), {}
    levels: list[LinkFigures] = []
    errors: dict[str, float] = {}
    for name, size, samples in (("links in a node", local, inside), ("links between nodes", None, across)):
        if samples:
            last = size is None or machine.num_nodes == 1
            figures, errors[name] = fit_link(samples, tuple(levels), None if last else size, machine.num_ranks)
            levels.append(figures)
    return tuple(levels), errors


def fit_link(
    samples: Sequence[CollectiveSample], below: tuple[LinkFigures, ...], num_devices: int | None, world_size: int
) -> tuple[LinkFigures, float]:
    """Bandwidth, latency, start and half message of one level, with which ``engine.collective_cost`` gives the samples.

    Args:
        samples: Of groups that reach this level.
        below: Levels within it.
        num_devices: Consecutive devices that it joins; None for all.
        world_size: Ranks in all.

    Returns:
        The figures and the median relative error.
    """
    from scipy.optimize import least_squares

    measured = np.array([sample.seconds for sample in samples])
    per_node = (below[0].num_devices if below else num_devices) or world_size
    largest = max(samples, key=lambda sample: sample.bytes)
    smallest = min(samples, key=lambda sample: (sample.bytes, sample.num_ranks))

    def figures(logs: np.ndarray) -> LinkFigures:
        rate, latency, start, half, *ratios = np.exp(logs)
        return LinkFigures(
            num_devices=num_devices,
            gb_per_second=rate / 1e9,
            latency_us=latency * 1e6,
            start_us=start * 1e6,
            half_mb=half / 1e6,
            **dict(zip(RATIOS, ratios, strict=True)),
        )

    def deviations(logs: np.ndarray) -> np.ndarray:
        links = links_of((*below, figures(logs)), per_node)
        predicted = np.array([collective_seconds(sample, links, world_size) for sample in samples])
        logs_of_ratio: np.ndarray = np.log(np.maximum(predicted, 1e-12) / measured)
        return logs_of_ratio

    def residuals(logs: np.ndarray) -> np.ndarray:
        pulled: np.ndarray = np.concatenate([deviations(logs), RATIO_PULL * logs[-len(RATIOS) :]])
        return pulled

    none = np.ones(len(RATIOS))
    guess = np.log([largest.bytes / largest.seconds, smallest.seconds / 4, smallest.seconds / 2, 1e4, *none])
    low = np.log([1e5, LEAST_LATENCY, LEAST_LATENCY, 1.0, *none / 10])
    high = np.log([1e13, 1.0, 1.0, 1e9, *none * 10])
    fitted = least_squares(residuals, np.clip(guess, low + 0.1, high - 0.1), bounds=(low, high), loss="soft_l1")
    return figures(fitted.x), float(np.median(np.abs(np.expm1(deviations(fitted.x)))))


def collective_seconds(sample: CollectiveSample, links: Sequence[Link], world_size: int) -> float:
    """What ``engine.collective_cost`` says of a measured call; a sample of ``send`` is one way there and one back."""
    group = Group.along(links, float(world_size), (float(sample.num_ranks), float(sample.stride)))
    if sample.operation == "send":
        pair = Group.along(links, float(world_size), (2.0, float(sample.stride)))
        return float(2 * collective_cost.send(sample.bytes, pair, links))
    formula: Callable[..., object] = getattr(collective_cost, sample.operation)
    return float(formula(float(sample.bytes), group, links))  # type: ignore[arg-type]


def relative_fit(columns: Iterable[np.ndarray], target: np.ndarray, num_rounds: int = 12) -> tuple[np.ndarray, float]:
    """Non-negative factors of columns whose sum comes closest to a target in relative terms, outliers aside.

    Least absolute relative deviations, by least squares weighted again and again.

    Args:
        columns: ``[n]`` each.
        target: ``[n]``, positive.
        num_rounds: Rounds of weighting.

    Returns:
        One factor per column, and the median relative error.
    """
    from scipy.optimize import nnls

    table = np.stack(list(columns), axis=1) / target[:, None]
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    weights = np.ones(len(target))
    for _ in range(num_rounds):
        factors, _ = nnls(table / scale * weights[:, None], weights)
        errors = np.abs(table / scale @ factors - 1)
        weights = 1 / np.sqrt(np.maximum(errors, 0.02))
    return factors / scale, float(np.median(errors))


def _columns(samples: Sequence[object], *names: str) -> list[np.ndarray]:
    return [np.array([float(getattr(sample, name)) for sample in samples]) for name in names]


def _without(seconds: np.ndarray, fixed: float) -> np.ndarray:
    """Seconds beyond a fixed part, of which at least a tenth is always left."""
    return np.maximum(seconds - fixed, seconds / 10)
