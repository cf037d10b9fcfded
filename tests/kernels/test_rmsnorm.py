"""RMSNorm with the residual add, forward and backward, against FP64."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from torch import Tensor

import llmtrain.kernels.rmsnorm as module
from llmtrain.kernels import choice, partials
from llmtrain.kernels.partials import deliver_partials
from llmtrain.kernels.rmsnorm import BackwardTile, rmsnorm, rmsnorm_fork
from tests.kernels.exactness import assert_rounded, assert_summed

EPS = 1e-6
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays by the program, not by the element."""
    monkeypatch.setattr(partials, "COLS", 128)


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


@pytest.mark.parametrize(("rows", "programs"), [(2, 3), (1, 75), (16, 1), (4, 100)])
def test_dw_is_right_however_rows_are_shared_out(monkeypatch, rows, programs):
    torch.manual_seed(0)
    monkeypatch.setattr(module, "_backward_tile", lambda n_rows, width: BackwardTile(rows, 4, programs, 3))
    x, dy = torch.randn(75, 20), torch.randn(75, 20)
    weight = weight_of(20)
    _, _, dx = run("triton", x, weight, None, dy, None)
    _, exact_dx, exact_dw = exact(x, weight, dy, None)
    assert_rounded(dx, exact_dx)
    assert_summed(weight.grad, exact_dw)


def test_many_partial_sums_are_added_without_loss():
    torch.manual_seed(0)
    sums = torch.randn(1500, 19) * 1000
    weight = torch.nn.Parameter(torch.zeros(19))
    assert torch.equal(deliver_partials(weight, sums), sums.double().sum(0).float())


@pytest.mark.parametrize("width", [1, 64, 257, 768, 960, 1025, 2048, 8192, 20000])
@pytest.mark.parametrize("n_rows", [1, 4096, 65536, 1 << 20])
def test_a_running_sum_is_short_and_partial_sums_are_few(n_rows, width):
    tile = module._backward_tile(n_rows, width)
    assert -(-n_rows // (tile.rows * tile.programs)) <= 64
    assert tile.warps <= 32
    assert tile.programs <= max(n_rows // 64, 8 * module.PROCESSORS)
    assert tile.programs * tile.rows < n_rows + tile.rows, "a program without rows"
    assert (tile.stages - 1) * 3 * tile.rows * width * 4 <= 200 << 10, "shared memory"
