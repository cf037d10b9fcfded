"""RMSNorm with the residual add, forward and backward, against FP64."""

import dataclasses
import importlib
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import choice, partials
from llmtrain.kernels.rmsnorm import rmsnorm, rmsnorm_fork
from llmtrain.kernels.rmsnorm_routes import BackwardRoute
from tests.kernels.exactness import assert_rounded, assert_summed

module = importlib.import_module("llmtrain.kernels.rmsnorm")  # its name in the package is the function's

EPS = 1e-6
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays by the program, not by the element."""
    monkeypatch.setattr(partials, "LEAST_COLS", 128)
    monkeypatch.setattr(partials, "MOST_COLS", 128)
    routes = module.backward_route

    def wide_strips(n_rows: int, width: int, deterministic: bool) -> BackwardRoute:
        route = routes(n_rows, width, deterministic)
        return dataclasses.replace(route, cols=1024) if route.program == "columns" else route

    monkeypatch.setattr(module, "backward_route", wide_strips)


def run(implementation: str, x: Tensor, weight: Tensor, residual: Tensor | None, dy: Tensor, dh: Tensor | None):
    """(y, h, dx) through autograd; the gradient of the weight is in weight.grad."""
    x = x.detach().requires_grad_()
    with choice.forced(implementation):
        if residual is None:
            y, h = rmsnorm(x, weight, EPS), x
            torch.autograd.backward([y], [dy])
        else:
            y, h = rmsnorm(x, weight, EPS, residual)
            torch.autograd.backward([y, h], [dy, dh]) if dh is not None else y.backward(dy)
    assert choice.ran["rmsnorm"] == implementation
    return y.detach(), h.detach(), x.grad


def exact(h: Tensor, weight: Tensor, dy: Tensor, dh: Tensor | None):
    """(y, dx, dw) in FP64, through torch's own derivative of the formula."""
    h = h.double().requires_grad_()
    w = weight.detach().double().requires_grad_()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * w
    y.backward(dy.double())
    dx = h.grad if dh is None else h.grad + dh.double()
    return y.detach(), dx, w.grad


def weight_of(width: int) -> Tensor:
    return torch.nn.Parameter(1 + 0.3 * torch.randn(width))


@BOTH
@DTYPES
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (70, 33), (37, 768), (3, 1000), (2, 5000)])
def test_the_norm_and_its_gradients_are_those_of_fp64(implementation, dtype, with_residual, rows, width):
    torch.manual_seed(0)
    x, residual, dy, dh = (torch.randn(rows, width).to(dtype) for _ in range(4))
    weight = weight_of(width)
    if not with_residual:
        residual = dh = None
    y, h, dx = run(implementation, x, weight, residual, dy, dh)
    if residual is not None:
        assert torch.equal(h, x + residual)  # rounded once, from FP32
    exact_y, exact_dx, exact_dw = exact(h, weight, dy, dh)
    assert_rounded(y, exact_y)
    assert_rounded(dx, exact_dx)
    assert_summed(weight.grad, exact_dw)


@BOTH
@DTYPES
@pytest.mark.parametrize("read_further", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (7, 10, 33), (37, 768), (2, 5000)], ids=str)
def test_a_fork_hands_on_a_copy_whose_gradient_comes_back_with_the_norms(implementation, dtype, read_further, shape):
    torch.manual_seed(0)
    x, dy, dh = (torch.randn(shape).to(dtype) for _ in range(3))
    x.requires_grad_()
    weight = weight_of(shape[-1])
    with choice.forced(implementation):
        y, copy = rmsnorm_fork(x, weight, EPS)
        assert torch.equal(copy, x) and copy.is_contiguous()
        with torch.no_grad():
            copy.fill_(float("nan"))  # whose copy it is may write it: the backward must not read it
        torch.autograd.backward([y, copy], [dy, dh]) if read_further else y.backward(dy)
    assert choice.ran["rmsnorm"] == implementation
    exact_y, exact_dx, exact_dw = exact(x.detach(), weight, dy, dh if read_further else None)
    assert_rounded(y.detach(), exact_y)
    assert_rounded(x.grad, exact_dx)
    assert_summed(weight.grad, exact_dw)


@BOTH
def test_a_fork_of_rows_that_lie_apart_copies_them_together(implementation):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 40)[:, 1]
    with choice.forced(implementation):
        y, copy = rmsnorm_fork(x, weight_of(40), EPS)
    assert choice.ran["rmsnorm"] == implementation
    assert copy.is_contiguous() and torch.equal(copy, x)


@BOTH
def test_no_gradient_past_the_norm_is_no_gradient(implementation):
    torch.manual_seed(0)
    x, residual, dy = (torch.randn(5, 48) for _ in range(3))
    weight = weight_of(48)
    _, h, dx = run(implementation, x, weight, residual, dy, None)
    assert_rounded(dx, exact(h, weight, dy, None)[1])


@BOTH
@DTYPES
def test_heads_of_a_packed_qkv_are_normed_where_they_lie(implementation, dtype):
    torch.manual_seed(0)
    packed, gradient = (torch.randn(2, 5, 7, 32).to(dtype) for _ in range(2))
    x, dy = packed[:, :, 1:4], gradient[:, :, 2:5]  # (B, T, heads, D), rows that cannot be viewed as one
    weight = weight_of(32)
    y, _, dx = run(implementation, x, weight, None, dy, None)
    exact_y, exact_dx, exact_dw = exact(x, weight, dy, None)
    assert_rounded(y, exact_y)
    assert_rounded(dx, exact_dx)
    assert_summed(weight.grad, exact_dw)


@BOTH
def test_any_strides_will_do(implementation):
    torch.manual_seed(0)
    x, residual, dy, dh = (torch.randn(6, 40, 9).transpose(1, 2) for _ in range(4))  # columns that are not adjacent
    weight = weight_of(40)
    y, h, dx = run(implementation, x, weight, residual, dy, dh)
    exact_y, exact_dx, exact_dw = exact(h, weight, dy, dh)
    assert_rounded(y, exact_y)
    assert_rounded(dx, exact_dx)
    assert_summed(weight.grad, exact_dw)


@BOTH
def test_a_stale_buffer_is_overwritten_once_and_then_added_to(implementation):
    torch.manual_seed(0)
    x, dy = torch.randn(9, 24), torch.randn(9, 24)
    weight = weight_of(24)
    weight.grad = torch.full((24,), float("nan"))
    weight.grad_stale = True
    buffer = weight.grad
    dw = exact(x, weight, dy, None)[2]
    for times in (1, 2, 3):
        run(implementation, x, weight, None, dy, None)
        assert weight.grad is buffer
        assert_summed(buffer, times * dw)


@pytest.mark.parametrize(
    ("processors", "route"),
    [
        (1, BackwardRoute("partials", 2, 4, 1)),
        (3, BackwardRoute("partials", 16, 4, 1)),
        (132, BackwardRoute("partials", 4, 4, 1, stages=1, registers=64)),
        (1, BackwardRoute("columns", 8, 4, cols=16)),
        (1, BackwardRoute("columns", 16, 4, cols=64)),
        (1, BackwardRoute("atomic", 2, 4, 1)),
        (5, BackwardRoute("atomic", 1, 4, 1)),
    ],
    ids=str,
)
def test_gradients_are_right_however_rows_are_shared_out(monkeypatch, processors, route):
    torch.manual_seed(0)
    monkeypatch.setattr("llmtrain.kernels.rmsnorm_routes.PROCESSORS", processors)
    monkeypatch.setattr(module, "backward_route", lambda n_rows, width, deterministic: route)
    x, dy = torch.randn(75, 20), torch.randn(75, 20)
    weight = weight_of(20)
    _, exact_dx, exact_dw = exact(x, weight, dy, None)
    for times in (1, 2):  # the second time into a buffer that is added to
        weight.grad_stale = times == 1
        weight.grad = torch.full((20,), float("nan")) if times == 1 else weight.grad
        _, _, dx = run("triton", x, weight, None, dy, None)
        assert_rounded(dx, exact_dx)
        assert_summed(weight.grad, times * exact_dw)
