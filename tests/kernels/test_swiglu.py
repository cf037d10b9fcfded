"""SwiGLU's product, forward and backward, against FP64."""

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

from llmtrain.kernels import choice
from llmtrain.kernels.swiglu import swiglu
from tests.kernels.exactness import assert_rounded


def exact(gate_up, dy):
    """(y, d_gate_up) in FP64, through torch's own derivative."""
    gate_up = gate_up.double().requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    y = gate / (1 + torch.exp(-gate)) * up
    y.backward(dy.double())
    return y.detach(), gate_up.grad


def run(implementation, gate_up, dy):
    gate_up = gate_up.detach().requires_grad_()
    with choice.forced(implementation):
        y = swiglu(gate_up)
        y.backward(dy)
    assert choice.ran["swiglu"] == implementation
    return y.detach(), gate_up.grad


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 5, 96), (11, 1408), (2, 3000)], ids=str)
def test_the_product_and_its_gradient_are_those_of_fp64(implementation, dtype, shape):
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype)
    dy = torch.randn(shape).to(dtype)
    y, gradient = run(implementation, gate_up, dy)
    exact_y, exact_gradient = exact(gate_up, dy)
    assert_rounded(y, exact_y)
    assert_rounded(gradient, exact_gradient)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_strided_inputs_and_gradients_will_do(implementation):
    torch.manual_seed(0)
    gate_up, dy = torch.randn(6, 40, 5).transpose(1, 2), torch.randn(20, 5, 6).permute(2, 1, 0)
    y, gradient = run(implementation, gate_up, dy)
    exact_y, exact_gradient = exact(gate_up, dy)
    assert_rounded(y, exact_y)
    assert_rounded(gradient, exact_gradient)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_saturated_gate_neither_overflows_nor_turns_to_nan(implementation):
    gate_up = torch.tensor([[-200.0, -90.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    y, gradient = run(implementation, gate_up, torch.ones(1, 4))
    assert torch.allclose(y, torch.tensor([[0.0, 0.0, 90.0, 200.0]]))
    assert torch.isfinite(gradient).all()
    assert torch.allclose(gradient[0, :4], torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_runs_counted_in_64_bits_give_the_same(monkeypatch):
    gate_up, dy = torch.randn(5, 2 * 24), torch.randn(5, 24)
    found = []
    for reach in (1 << 31, 1):
        monkeypatch.setattr(sys.modules["llmtrain.kernels.swiglu"], "NARROW_REACH", reach)
        x = gate_up.clone().requires_grad_()
        with choice.forced("triton"):
            y = swiglu(x)
            y.backward(dy)
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
