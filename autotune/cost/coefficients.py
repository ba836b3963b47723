"""What the formulas of the cost model need besides model, plan, device and software: one set of figures for all.

They are fitted to published runs together with the figures of devices and stacks (``calibrate.py``).
"""

from __future__ import annotations

import functools
from pathlib import Path

from autotune.specs.cluster import ClusterSpec
from engine.schema import Schema, parse
from engine.spec import NonNegative, Positive, Ratio
from engine.yaml_file import read_yaml

COEFFICIENTS_FILE = Path(__file__).with_name("coefficients.yaml")


class Coefficients(Schema):
    """Figures of the formulas, in the order in which they are used."""

    wave_share: Ratio = 0.6
    """How much of the last wave's idle units shows: 0 none (tiles are cut to fit), 1 all."""
    half_tile_ratio: Positive = 0.85
    """Rate of a product in tiles of half the width, relative to whole tiles; the faster is taken."""
    misalignment: NonNegative = 0.06
    """Extra time of a matrix product per halving of a dimension's alignment below 64 elements, down to 8, relative."""
    scalar_access: NonNegative = 1.5
    """Extra time where a dimension is no multiple of 8 elements, relative."""
    gradient_product_ratio: Positive = 1.0
    """Time of the backward pass's matrix products, relative to the same shapes forward."""
    grouped_ratio: Positive = 1.3
    """Time of the experts' grouped products, relative to as many single ones."""
    attention_half_length: NonNegative = 400.0
    """Context length at which a fused attention kernel reaches half of its rate."""
    attention_backward_ratio: Positive = 1.2
    """Time of fused attention's backward pass, relative to its 2.5 times as many products at the forward rate."""
    score_bytes_forward: Positive = 10.0
    """Bytes moved per attention score where attention is not fused, forward."""
    score_bytes_backward: Positive = 10.0
    """The same, backward."""
    memory_bound_ratio: Positive = 1.3
    """Time of element-wise kernels, relative to one pass over their operands at the attained bandwidth."""
    permute_ratio: Positive = 2.0
    """Time of moving tokens to their experts and back, relative to the same."""
    loss_ratio: Positive = 2.0
    """Time of cross-entropy, relative to the same."""
    cast_bytes: Positive = 6.0
    """Bytes moved per element that is cast to 8 bits, the search for its scale included."""
    rowwise_ratio: Positive = 0.9
    """Rate of 8-bit products with a scale per row or block, relative to one per tensor."""
    mxfp8_ratio: Positive = 0.95
    """The same with a scale per 32 elements."""
    nvfp4_ratio: Positive = 1.5
    """The same of products of 4 bits."""
    kernel_us: NonNegative = 3.0
    """Device time of each kernel beyond its work, microseconds."""
    backward_launch_ratio: Positive = 1.4
    """Kernels of a backward pass over those of the forward pass."""
    step_kernels: NonNegative = 40.0
    """Kernels of an optimizer step."""
    host_sharpness: Positive = 4.0
    """How sharply the slower of host and device sets the pace: exponent of the smooth maximum."""
    framework_ratio: Positive = 2.0
    """Host time of a kernel, framework and interpreter included, over the launch alone."""
    host_skew: NonNegative = 0.05
    """Host time that each further tensor-parallel rank adds, relative: a collective waits for the slowest host."""
    optimizer_bytes: Positive = 34.0
    """Bytes moved per parameter in an optimizer step."""
    accumulate_bytes: Positive = 8.0
    """Bytes moved per parameter and micro-batch to add its gradient to the sum."""
    dp_hidden_ratio: Ratio = 0.8
    """Share of the compute beside which data-parallel communication may run that hides it."""
    tp_hidden_ratio: Ratio = 0.5
    """The same of tensor-parallel communication."""
    ep_hidden_ratio: Ratio = 0.0
    """Share of the expert all-to-all that runs beside compute."""
    cp_hidden_ratio: Ratio = 0.7
    """Share of the context-parallel communication that runs beside compute."""
    straggler_ratio: NonNegative = 0.01
    """Extra step time per doubling of the number of devices above a node, relative."""


@functools.cache
def coefficients() -> Coefficients:
    """The fitted figures."""
    document = read_yaml(COEFFICIENTS_FILE)
    return parse(Coefficients, document.data, document=document)


def coefficients_on(cluster: ClusterSpec) -> Coefficients:
    """The fitted figures, with those that were measured on the cluster's own machine in their place.

    Raises:
        UserError: The cluster's file names figures that there are none of.
    """
    measured = cluster.measured.coefficients if cluster.measured else {}
    return parse(Coefficients, coefficients().to_data() | measured) if measured else coefficients()
