"""Work of a device: products by shape, attention, experts, memory-bound operators, launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.cost.coefficients import Coefficients
from autotune.cost.columns import encode
from autotune.cost.compute import Basis, compute_work, matmul_seconds, mean_context
from autotune.cost.device_columns import FP8_RECIPES, DeviceColumns, SoftwareColumns
from autotune.cost.shapes import ModelShape
from autotune.specs.figures import DeviceFigures, MatmulFigures, SoftwareFigures
from engine.errors import UserError
from engine.plan import Plan, plan_table
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

DEVICE = DeviceFigures(
    matmul={
        "bf16": MatmulFigures(tflops=500, half_depth=0),
        "fp8": MatmulFigures(tflops=1000, half_depth=0),
        "fp32": MatmulFigures(tflops=50),
    },
    tile_rows=128,
    tile_columns=128,
    num_units=100,
    memory_gb_per_second=2000,
    launch_us=10,
)
PLAIN = Coefficients(wave_share=1.0, half_tile_ratio=0.5, misalignment=0.0, scalar_access=0.0)
DENSE = ModelSpec(
    num_layers=8, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128000
)
MOE = DENSE.changed(moe={"num_experts": 64, "experts_per_token": 4, "ffn_size": 1536})


def basis(
    *plans: dict[str, Any],
    model: ModelSpec = DENSE,
    software: SoftwareFigures | None = None,
    coefficients: Coefficients = PLAIN,
    length: int = 4096,
    recipe: str = "fp8",
) -> Basis:
    rows = [(Plan(**{"precision": "bf16", **plan}), 512, length) for plan in plans or ({},)]
    c = encode(plan_table(rows), model.num_layers)
    figures = software or SoftwareFigures(title="plain")
    device = DeviceColumns.of(DEVICE, c.precision, FP8_RECIPES.index(recipe))
    return Basis(ModelShape.of(model), device, SoftwareColumns.of(figures), coefficients, c)


def test_a_product_of_whole_waves_runs_at_the_device_s_rate() -> None:
    seconds = matmul_seconds(basis(), 1280, 1280, 8192)
    assert seconds == pytest.approx(2 * 1280 * 1280 * 8192 / 500e12, rel=1e-9)


def test_a_product_pays_for_the_last_wave_as_far_as_the_share_says() -> None:
    columns = 1280 + 128
    full = matmul_seconds(basis(), 1280, columns, 8192)
    assert full == pytest.approx(2 * np.asarray(matmul_seconds(basis(), 1280, 1280, 8192)), rel=1e-9)
    damped = PLAIN.model_copy(update={"wave_share": 0.0})
    seconds = matmul_seconds(basis(coefficients=damped), 1280, columns, 8192)
    assert seconds == pytest.approx(2 * 1280 * columns * 8192 / 500e12, rel=1e-9)


def test_a_thin_product_is_as_slow_as_its_operands_pass_through_memory() -> None:
    seconds = matmul_seconds(basis(), 1, 8192, 8192)
    assert seconds == pytest.approx(2 * (8192 + (1 + 8192) * 8192) / 2000e9, rel=1e-6)


def test_misaligned_dimensions_cost_more_and_odd_ones_most() -> None:
    k = Coefficients(misalignment=0.1, scalar_access=1.0)
    times = [matmul_seconds(basis(coefficients=k), 4096, n, 4096) for n in (50304, 50312, 50257)]
    assert times[0] < times[1] < times[2] / 1.5


def test_tensor_parallelism_splits_products_and_not_the_tokens() -> None:
    work = compute_work(basis({"tp": 1}, {"tp": 4}, {"tp": 8}, coefficients=Coefficients(wave_share=0.0)))
    matmul = np.asarray(work.dense_layer.forward.matmul)
    assert matmul[0] / matmul[1] == pytest.approx(4, rel=0.1)
    assert matmul[0] / matmul[2] == pytest.approx(8, rel=0.2)


def test_work_grows_in_proportion_to_the_micro_batch() -> None:
    work = compute_work(
        basis({"micro_batch_size": 1}, {"micro_batch_size": 4}, coefficients=Coefficients(wave_share=0))
    )
    forward = np.asarray(work.dense_layer.forward.seconds)
    assert 3.5 < forward[1] / forward[0] <= 4.05


def test_a_backward_pass_takes_about_twice_a_forward_pass() -> None:
    work = compute_work(basis())
    ratio = np.asarray(work.dense_layer.backward.seconds / work.dense_layer.forward.seconds)
    assert (ratio > 1.8).all()
    assert (ratio < 2.8).all()


def test_eight_bits_speed_up_products_alone_and_pay_for_casts() -> None:
    wide, narrow = compute_work(basis({})), compute_work(basis({"precision": "fp8"}))
    assert narrow.dense_layer.forward.matmul == pytest.approx(np.asarray(wide.dense_layer.forward.matmul) / 2, rel=0.05)
    assert narrow.dense_layer.forward.attention == pytest.approx(wide.dense_layer.forward.attention)
    assert (np.asarray(narrow.dense_layer.forward.memory) > wide.dense_layer.forward.memory).all()
    assert narrow.head.forward.matmul == pytest.approx(wide.head.forward.matmul)


def test_the_recipe_of_scales_changes_the_rate_of_eight_bit_products() -> None:
    times = {
        name: float(compute_work(basis({"precision": "fp8"}, recipe=name)).dense_layer.forward.matmul[0])  # type: ignore[index]
        for name in FP8_RECIPES
    }
    assert times["fp8-rowwise"] > times["fp8"] > times["nvfp4"]


def test_attention_sees_half_of_the_sequence_or_the_window() -> None:
    shape = ModelShape.of(DENSE)
    assert mean_context(shape, 4096) == pytest.approx(2048.5)
    windowed = ModelShape.of(DENSE.changed(sliding_window=512))
    expected = np.mean([min(token + 1, 512) for token in range(4096)])
    assert mean_context(windowed, 4096) == pytest.approx(expected)


def test_unfused_attention_moves_its_scores_through_memory() -> None:
    old = SoftwareFigures(title="old", fused_attention=False)
    fused, unfused = compute_work(basis()), compute_work(basis(software=old))
    assert (
        np.asarray(unfused.dense_layer.forward.attention) > 2 * np.asarray(fused.dense_layer.forward.attention)
    ).all()
    mixed = basis({}, {})
    software = replace(mixed.software, fused_attention=np.array([1.0, 0.0]))
    both = np.asarray(compute_work(replace(mixed, software=software)).dense_layer.forward.attention)
    assert both[0] == pytest.approx(np.asarray(fused.dense_layer.forward.attention)[0])
    assert both[1] == pytest.approx(np.asarray(unfused.dense_layer.forward.attention)[0])


def test_an_attention_kernel_of_an_older_device_has_a_ceiling() -> None:
    capped = SoftwareFigures(title="old kernel", attention_tflops=100)
    slow, fast = compute_work(basis(software=capped)), compute_work(basis())
    assert slow.dense_layer.forward.attention == pytest.approx(np.asarray(fast.dense_layer.forward.attention) * 3)


def test_experts_do_the_work_of_the_tokens_that_they_get() -> None:
    software = SoftwareFigures(title="balanced", imbalance_ratio=0.0)
    k = Coefficients(wave_share=0.0, grouped_ratio=1.0, half_tile_ratio=1.0, misalignment=0.0)
    alone, split = (
        compute_work(
            basis({"dp_shard": 8, "ep": ep, "micro_batch_size": 8}, model=MOE, software=software, coefficients=k)
        )
        for ep in (1, 8)
    )
    assert alone.moe_layer.forward.matmul == pytest.approx(np.asarray(split.moe_layer.forward.matmul), rel=0.05)
    skewed = software.model_copy(update={"imbalance_ratio": 0.5})
    plan = {"dp_shard": 8, "ep": 8, "micro_batch_size": 8}
    late = compute_work(basis(plan, model=MOE, software=skewed, coefficients=k))
    assert (np.asarray(late.moe_layer.forward.matmul) > np.asarray(split.moe_layer.forward.matmul)).all()


def test_a_precision_without_figures_is_refused() -> None:
    with pytest.raises(UserError, match="fp64"):
        basis({"precision": "fp64"})
