"""bf16 products through fp32: the same values and gradients as the plain way, up to bf16's rounding."""

import pytest
import torch
import torch.nn.functional as F

from engine.precision import linear as module
from engine.precision.linear import linear

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_through_fp32_equal_the_rounded_exact_ones(monkeypatch, shape, with_bias: bool) -> None:
    monkeypatch.setattr(module, "has_fast_bf16", lambda: False)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size).bfloat16().requires_grad_() for size in (shape, (16, 24), (16,)))
    output = linear(x, weight, bias if with_bias else None)
    upstream = torch.randn(output.shape).bfloat16()
    output.backward(upstream)

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    expected = F.linear(exact[0], exact[1], exact[2] if with_bias else None)
    expected.backward(upstream.double())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    for tensor, reference in zip((x, weight, bias) if with_bias else (x, weight), exact, strict=False):
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-2, atol=5e-2)


def test_what_is_kept_for_the_backward_pass_stays_bf16(monkeypatch) -> None:
    monkeypatch.setattr(module, "has_fast_bf16", lambda: False)
    kept: list[torch.dtype] = []
    x, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(6, 8).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.dtype), t)[1], lambda t: t):
        linear(x, weight)
    assert set(kept) == {torch.bfloat16}
