"""References of linear layers, embedding, norms and SwiGLU, against autograd of their formulas in FP64.

These run on the CPU, where the references are what runs; the Triton kernels are compared with the references.
"""

import pytest
import torch

from llmtrain.kernels import choice
from llmtrain.kernels.embedding import embedding
from llmtrain.kernels.linear import linear, linear_add
from llmtrain.kernels.rmsnorm import rmsnorm, rmsnorm_fork
from llmtrain.kernels.swiglu import swiglu
from tests.kernels.fp64 import BF16, BOUND, DELIVERIES, DTYPES, F32, F64, close, master, randn, weight_gradient, wide


@pytest.fixture(autouse=True)
def references():
    torch.manual_seed(0)
    with choice.forced(choice.REFERENCE):
        yield


# --- linear -----------------------------------------------------------------------------------------------------------


@DTYPES
@DELIVERIES
def test_linear(dtype, delivery):
    x, w, dy = randn(3, 5, 16, dtype=dtype), master(24, 16, dtype=dtype), randn(3, 5, 24, dtype=dtype).detach()
    x64, w64 = wide(x), wide(w)
    y64 = torch.einsum("bti,oi->bto", x64, w64)
    y64.backward(dy.to(F64))

    def run():
        x.grad = None
        y = linear(x, w)
        assert y.dtype == dtype
        close(y, y64, BOUND[dtype])
        y.backward(dy)

    close(weight_gradient(run, w, delivery), w64.grad, BOUND[dtype])
    close(x.grad, x64.grad, BOUND[dtype])


@DTYPES
@DELIVERIES
def test_linear_add(dtype, delivery):
    x, w, dy = randn(3, 5, 16, dtype=dtype), master(24, 16, dtype=dtype), randn(3, 5, 24, dtype=dtype).detach()
    stream = randn(3, 5, 24, dtype=dtype, scale=4.0)
    x64, w64, stream64 = wide(x), wide(w), wide(stream)
    y64 = stream64 + torch.einsum("bti,oi->bto", x64, w64)
    y64.backward(dy.to(F64))

    def run():
        x.grad = stream.grad = None
        into = stream.clone()
        y = linear_add(x, w, into)
        assert y.dtype == dtype and y.data_ptr() == into.data_ptr()
        close(y, y64, BOUND[dtype])
        y.backward(dy)

    close(weight_gradient(run, w, delivery), w64.grad, BOUND[dtype])
    close(x.grad, x64.grad, BOUND[dtype])
    assert torch.equal(stream.grad, dy)


def test_what_linear_add_adds_to_is_rounded_once():
    # 1 + 2^-8 + 2^-8: each addend alone would be lost in bf16's 1.0, both together are not.
    x, w = torch.full((1, 2), 2.0**-8, dtype=BF16), master(1, 2, dtype=BF16)
    w.operand_cache.fill_(1.0)
    y = linear_add(x, w, torch.ones(1, 1, dtype=BF16))
    assert y.item() == 1 + 2.0**-7


def test_what_linear_add_overwrote_cannot_be_differentiated_unnoticed():
    x, w = randn(4, 3), master(2, 3, dtype=F32)
    into = randn(4, 2) * 1.0
    kept = into.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (linear_add(x, w, into).sum() + kept).backward()


def test_linear_takes_the_cached_operand_where_there_is_one():
    w = master(8, 4, dtype=BF16)
    w.operand_cache = torch.full((8, 4), 2.0, dtype=BF16)
    x = torch.ones(1, 4, dtype=BF16)
    assert torch.equal(linear(x, w), torch.full((1, 8), 8.0, dtype=BF16))
    assert not torch.equal(linear(x.float(), w), torch.full((1, 8), 8.0))


def test_a_weight_without_a_cached_copy_is_cast():
    w = torch.randn(8, 4)
    x = torch.randn(3, 4).bfloat16()
    assert torch.equal(linear(x, w), x @ w.bfloat16().T)


def test_linear_of_an_input_that_needs_no_gradient_still_brings_the_weights():
    x, w = torch.randn(4, 3), master(2, 3, dtype=F32)
    linear(x, w).sum().backward()
    close(w.grad, x.to(F64).sum(0).expand(2, 3), BOUND[F32])


# --- embedding --------------------------------------------------------------------------------------------------------


@DTYPES
@DELIVERIES
def test_embedding_adds_up_the_gradients_of_repeated_ids(dtype, delivery):
    w = master(11, 6, dtype=dtype)
    ids = torch.tensor([[1, 1, 1, 4], [10, 0, 1, 4]])
    dy = randn(2, 4, 6, dtype=dtype).detach()
    want = torch.zeros(11, 6, dtype=F64)
    for row, i in zip(dy.reshape(-1, 6).to(F64), ids.reshape(-1), strict=True):
        want[i] += row

    def run():
        y = embedding(ids, w, dtype)
        assert y.dtype == dtype and torch.equal(y.to(w.dtype), w[ids])
        y.backward(dy)

    close(weight_gradient(run, w, delivery), want, BOUND[F64 if dtype == F64 else F32])


# --- rmsnorm ----------------------------------------------------------------------------------------------------------


@DTYPES
@DELIVERIES
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm(dtype, delivery, with_residual):
    eps = 1e-6
    x, w = randn(2, 7, 32, dtype=dtype), master(32, dtype=dtype)
    # On a coarse grid, so that the sum of two bf16 rows is exact and only the op's own rounding is measured.
    residual = (randn(2, 7, 32, dtype=F64) * 8).round().div(8).to(dtype).detach().requires_grad_()
    with torch.no_grad():
        x.copy_((x * 8).round() / 8)
    dy, dh = randn(2, 7, 32, dtype=dtype).detach(), randn(2, 7, 32, dtype=dtype).detach()

    x64, r64, w64 = wide(x), wide(residual), wide(w)
    h64 = x64 + r64 if with_residual else x64
    y64 = h64 / (h64.square().mean(-1, keepdim=True) + eps).sqrt() * w64
    loss = (y64 * dy.to(F64)).sum() + ((h64 * dh.to(F64)).sum() if with_residual else 0)
    loss.backward()

    def run():
        x.grad = residual.grad = None
        if with_residual:
            y, h = rmsnorm(x, w, eps, residual)
            close(h, h64, BOUND[dtype])
            torch.autograd.backward([y, h], [dy, dh])
        else:
            y = rmsnorm(x, w, eps)
            y.backward(dy)
        assert y.dtype == dtype
        close(y, y64, BOUND[dtype])

    close(weight_gradient(run, w, delivery), w64.grad, BOUND[dtype])
    close(x.grad, x64.grad, BOUND[dtype])
    if with_residual:
        close(residual.grad, r64.grad, BOUND[dtype])


def test_rmsnorm_whose_sum_is_not_read_further_takes_its_gradient_from_the_norm_alone():
    x, r, w = randn(3, 8), randn(3, 8), master(8, dtype=F32)
    x64, r64, w64 = wide(x), wide(r), wide(w)
    h64 = x64 + r64
    (h64 / (h64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w64).sum().backward()
    rmsnorm(x, w, 1e-5, r)[0].sum().backward()
    close(x.grad, x64.grad, BOUND[F32])
    close(r.grad, r64.grad, BOUND[F32])


@DTYPES
@DELIVERIES
@pytest.mark.parametrize("read_further", [False, True])
def test_rmsnorm_fork(dtype, delivery, read_further):
    eps = 1e-6
    x, w = randn(2, 7, 32, dtype=dtype), master(32, dtype=dtype)
    dy, dh = randn(2, 7, 32, dtype=dtype).detach(), randn(2, 7, 32, dtype=dtype).detach()
    x64, w64 = wide(x), wide(w)
    y64 = x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * w64
    ((y64 * dy.to(F64)).sum() + ((x64 * dh.to(F64)).sum() if read_further else 0)).backward()

    def run():
        x.grad = None
        y, copy = rmsnorm_fork(x, w, eps)
        assert y.dtype == copy.dtype == dtype and copy.data_ptr() != x.data_ptr() and torch.equal(copy, x)
        close(y, y64, BOUND[dtype])
        torch.autograd.backward([y, copy], [dy, dh]) if read_further else y.backward(dy)

    close(weight_gradient(run, w, delivery), w64.grad, BOUND[dtype])
    close(x.grad, x64.grad, BOUND[dtype])


def test_a_branch_that_adds_into_the_norms_copy_has_the_gradients_of_the_plain_sum():
    x, g, w = randn(3, 5, 8), master(8, dtype=F32), master(8, 8, dtype=F32)
    x64, g64, w64 = wide(x), wide(g), wide(w)
    y64 = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * g64
    h64 = x64 + y64 @ w64.T
    (h64**3).sum().backward()
    before = x.detach().clone()
    y, h = rmsnorm_fork(x, g, 1e-5)
    h = linear_add(y, w, h)
    (h**3).sum().backward()
    assert torch.equal(x, before)
    close(h, h64, BOUND[F32])
    for one, other in ((x, x64), (g, g64), (w, w64)):
        close(one.grad, other.grad, BOUND[F32])


def test_rmsnorm_keeps_its_statistics_in_fp32():
    # 4096 squares of 1 + 2^-7: a bf16 sum would stop growing at 256.
    x = torch.full((1, 4096), 1 + 2**-7, dtype=BF16)
    close(rmsnorm(x, torch.ones(4096), 0.0), torch.ones(1, 4096, dtype=F64), 4e-3)


# --- swiglu -----------------------------------------------------------------------------------------------------------


@DTYPES
def test_swiglu(dtype):
    gate_up, dy = randn(2, 5, 24, dtype=dtype, scale=3.0), randn(2, 5, 12, dtype=dtype).detach()
    gu64 = wide(gate_up)
    gate, up = gu64[..., :12], gu64[..., 12:]
    y64 = gate / (1 + torch.exp(-gate)) * up
    y64.backward(dy.to(F64))
    y = swiglu(gate_up)
    y.backward(dy)
    assert y.dtype == gate_up.grad.dtype == dtype
    close(y, y64, BOUND[dtype])
    close(gate_up.grad, gu64.grad, BOUND[dtype])


def test_swiglu_of_extreme_gates_is_finite():
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 1.0, 1.0, 1.0]]).requires_grad_()
    y = swiglu(gate_up)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(gate_up.grad).all()
    assert torch.equal(y[0, :2].detach(), torch.tensor([-0.0, 1e4]))
