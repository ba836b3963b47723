"""Fits of measurements find the figures that made them."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.specs.figures import LinkFigures, links_of
from autotune.specs.measured import (
    collective_seconds,
    fit_attention,
    fit_bandwidth,
    fit_link,
    fit_matmul,
    relative_fit,
)
from engine.measurement import AttentionSample, CollectiveSample, MatmulSample, StreamSample

SHAPES = [(64, 128, 128), (256, 512, 128), (512, 256, 704), (1024, 1408, 512), (2048, 64, 768), (300, 500, 96)]


def matmul_samples(rate: float, half: float, tiles: tuple[int, int] = (1, 1), units: int = 1) -> list[MatmulSample]:
    samples = []
    for rows, columns, depth in SHAPES:
        waves = -(-(-(-rows // tiles[0]) * -(-columns // tiles[1])) // units)
        seconds = 2 * waves * units * tiles[0] * tiles[1] * (depth + half) / rate
        samples.append(
            MatmulSample(precision="fp32", part="forward", rows=rows, columns=columns, depth=depth, seconds=seconds)
        )
    return samples


@pytest.mark.unit
@pytest.mark.parametrize(("tiles", "units"), [((1, 1), 1), ((128, 128), 108)])
def test_matmul_rate_and_half_depth(tiles: tuple[int, int], units: int) -> None:
    figures, error = fit_matmul(matmul_samples(80e9, 40.0, tiles, units), tiles, units)
    assert figures.tflops == pytest.approx(0.08, rel=1e-3)
    assert figures.half_depth == pytest.approx(40, rel=1e-2)
    assert error < 1e-3


@pytest.mark.unit
def test_a_disturbed_sample_does_not_move_the_rate() -> None:
    samples = matmul_samples(80e9, 0.0)
    samples[2] = samples[2].changed(seconds=3 * samples[2].seconds)
    figures, _ = fit_matmul(samples, (1, 1), 1)
    assert figures.tflops == pytest.approx(0.08, rel=0.03)


@pytest.mark.unit
def test_time_that_every_call_takes_is_no_part_of_the_rate() -> None:
    samples = [sample.changed(seconds=sample.seconds + 5e-6) for sample in matmul_samples(80e9, 20.0)]
    figures, error = fit_matmul(samples, (1, 1), 1, 5e-6)
    assert figures.tflops == pytest.approx(0.08, rel=1e-3)
    assert error < 1e-3


@pytest.mark.unit
def test_bandwidth_counts_the_bytes_of_each_precision() -> None:
    samples = [
        StreamSample(operator="add", precision=word, elements=n, seconds=1e-6 + 3 * n * width / 12e9)
        for word, width in (("fp32", 4), ("bf16", 2))
        for n in (2**18, 2**20, 2**22)
    ]
    bandwidth, error = fit_bandwidth(samples, 1e-6)
    assert bandwidth == pytest.approx(12e9, rel=1e-6)
    assert error < 1e-6


@pytest.mark.unit
def test_attention_rate_length_and_backward() -> None:
    def sample(batch: int, length: int) -> AttentionSample:
        context = (length + 1) / 2
        seconds = 2 * batch * length * 4 * 2 * 64 * (context + 90) / (50e9 * 0.5**0.3)
        return AttentionSample(
            precision="fp32", batch=batch, num_heads=4, head_dim=64, length=length,
            forward_seconds=seconds, backward_seconds=3 * seconds,
        )  # fmt: skip

    fit = fit_attention([sample(4, 128), sample(2, 256), sample(1, 512), sample(1, 1024)])
    assert (fit.rate, fit.half_length) == pytest.approx((50e9, 90), rel=1e-3)
    assert fit.backward_ratio == pytest.approx(1.2)


def collectives(levels: tuple[LinkFigures, ...], groups: list[tuple[int, int]], world: int) -> list[CollectiveSample]:
    samples = []
    for size, stride in groups:
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
            for num_bytes in (2**8, 2**14, 2**18, 2**22, 2**26):
                sample = CollectiveSample.model_validate(
                    {"operation": operation, "num_ranks": size, "stride": stride, "bytes": num_bytes, "seconds": 1.0}
                )
                samples.append(
                    sample.changed(
                        seconds=collective_seconds(sample, links_of(levels, levels[0].num_devices or world), world)
                    )
                )
    return samples


@pytest.mark.unit
def test_a_link_predicts_what_it_was_fitted_to() -> None:
    planted = LinkFigures(gb_per_second=9.0, latency_us=12.0, start_us=30.0, half_mb=0.02)
    samples = collectives((planted,), [(2, 1), (4, 1), (8, 1)], 8)
    found, error = fit_link(samples, (), None, 8)
    assert error < 0.01
    assert found.gb_per_second == pytest.approx(9.0, rel=0.02)
    assert found.latency_us == pytest.approx(12.0, rel=0.1)


@pytest.mark.unit
def test_the_network_between_nodes_is_fitted_above_the_node() -> None:
    node = LinkFigures(num_devices=4, gb_per_second=200.0, latency_us=2.0, start_us=8.0, half_mb=0.5)
    outer = LinkFigures(gb_per_second=12.0, latency_us=10.0, start_us=20.0, half_mb=0.1)
    samples = collectives((node, outer), [(8, 1), (2, 4)], 8)
    found, error = fit_link(samples, (node,), None, 8)
    assert error < 0.02
    assert found.gb_per_second == pytest.approx(12.0, rel=0.05)


@pytest.mark.unit
def test_relative_fit_is_never_negative() -> None:
    x = np.array([1.0, 2.0, 3.0])
    factors, _ = relative_fit([x, np.ones(3)], 2 * x - 0.5)
    assert (factors >= 0).all()
