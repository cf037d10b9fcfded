"""Every op's reference against autograd of its formula, written out in FP64: values, input and weight gradients.

These run on the CPU, where the references are what runs; the Triton kernels are compared with the references.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import choice
from llmtrain.kernels.attention import attention
from llmtrain.kernels.cross_entropy import IGNORED, head_loss
from llmtrain.kernels.embedding import embedding
from llmtrain.kernels.linear import linear, linear_add
from llmtrain.kernels.rmsnorm import rmsnorm, rmsnorm_fork
from llmtrain.kernels.rotary import rotary_qkv, rotary_tables
from llmtrain.kernels.swiglu import swiglu

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

# Relative error in norm against FP64. bf16 rows carry 8 bits, and an op rounds a few times.
BOUND = {F64: 1e-12, F32: 2e-6, BF16: 1.5e-2}

DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=["fp64", "fp32", "bf16"])
DELIVERIES = pytest.mark.parametrize("delivery", ["returned", "returned twice", "overwritten", "added"])


@pytest.fixture(autouse=True)
def references():
    torch.manual_seed(0)
    with choice.forced(choice.REFERENCE):
        yield


def randn(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=F64) * scale).to(dtype).requires_grad_()


def master(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """A weight as training holds it: FP32, or FP64 for FP64 rows, with its cached copy for bf16 rows. Its values are
    exact in `dtype`, so that the narrow operand is no source of error."""
    values = randn(*shape, dtype=dtype, scale=scale).detach()
    weight = values.to(F64 if dtype == F64 else F32, copy=True).requires_grad_()
    if dtype == BF16:
        weight.operand_cache = values  # type: ignore[attr-defined]
    return weight


def wide(x: Tensor) -> Tensor:
    """A leaf of the same values in FP64."""
    return x.detach().to(F64).requires_grad_()


def close(got: Tensor, want: Tensor, bound: float, floor: float = 1e-30) -> None:
    """Relative in norm; `floor` is the norm below which `want` counts as rounding noise."""
    assert got.shape == want.shape
    error = (got.detach().to(F64) - want.detach()).norm() / want.detach().norm().clamp_min(floor)
    assert error <= bound, f"relative error {error:.3e} > {bound:.1e}"


def weight_gradient(run: Callable[[], Any], weight: Tensor, delivery: str) -> Tensor:
    """The gradient that one `run` (forward and backward) brings to `weight`, delivered in one of the ways there are."""
    weight.grad = None
    if delivery in ("overwritten", "added"):
        weight.grad = torch.full_like(weight, float("nan"))
        weight.grad_stale = True  # type: ignore[attr-defined]
        buffer = weight.grad
    run()
    if delivery == "returned":
        assert weight.grad is not None
        return weight.grad
    if delivery == "overwritten":
        assert weight.grad is buffer and not weight.grad_stale  # type: ignore[attr-defined]
        return weight.grad
    run()
    if delivery == "added":
        assert weight.grad is buffer
    assert weight.grad is not None
    return weight.grad / 2


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


# --- rotary -----------------------------------------------------------------------------------------------------------


def test_rotary_tables_are_exact_angles_even_far_out():
    cos, sin = rotary_tables(40_000, 64, 10_000.0, "cpu")
    assert cos.shape == sin.shape == (40_000, 32) and cos.dtype == F32
    position = torch.tensor([0, 1, 777, 39_999], dtype=F64)
    for i in (0, 1, 13, 31):
        angle = position * 10_000.0 ** (-2 * i / 64)
        close(cos[position.long(), i], angle.cos(), 1e-7)
        close(sin[position.long(), i] + 1, angle.sin() + 1, 1e-7)


def rotated_by_complex_numbers(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: (B, T, H, D) FP64; the pair (i, i + D/2) as one complex number, times exp(1j * position * theta^(-2i/D))."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=F64) / half)
    turn = torch.polar(torch.ones((), dtype=F64), positions.to(F64)[..., None] * frequency)  # (B, T, D/2)
    z = torch.complex(x[..., :half], x[..., half:]) * turn[:, :, None]
    return torch.cat([z.real, z.imag], -1)


@DTYPES
@pytest.mark.parametrize("per_row", [False, True], ids=["shared positions", "positions by row"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
def test_rotary_qkv(dtype, per_row, qk_norm):
    b, t, n_heads, n_kv, d, eps = 2, 6, 4, 2, 8, 1e-5
    cos, sin = rotary_tables(50, d, 100.0, "cpu")
    if dtype == F64:
        angles = torch.arange(50, dtype=F64)[:, None] * 100.0 ** (-torch.arange(0, d, 2, dtype=F64) / d)
        cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([[0, 1, 2, 40, 41, 3], [9, 8, 7, 0, 0, 49]]) if per_row else torch.arange(5, 11)
    cos, sin = cos[positions], sin[positions]
    qkv = randn(b, t, (n_heads + 2 * n_kv) * d, dtype=dtype)
    q_norm, k_norm = master(d, dtype=dtype), master(d, dtype=dtype)
    weights = (q_norm, k_norm) if qk_norm else (None, None)
    upstream = [randn(b, t, h, d, dtype=dtype).detach() for h in (n_heads, n_kv, n_kv)]

    qkv64, qn64, kn64 = wide(qkv), wide(q_norm), wide(k_norm)
    q, k, v = qkv64.view(b, t, -1, d).split([n_heads, n_kv, n_kv], 2)
    if qk_norm:
        q = q / (q.square().mean(-1, keepdim=True) + eps).sqrt() * qn64
        k = k / (k.square().mean(-1, keepdim=True) + eps).sqrt() * kn64
    full = positions.expand(b, t)
    want = rotated_by_complex_numbers(q, full, 100.0), rotated_by_complex_numbers(k, full, 100.0), v
    torch.autograd.backward(want, [u.to(F64) for u in upstream])

    got = rotary_qkv(qkv, cos, sin, n_heads, n_kv, *weights, eps)
    torch.autograd.backward(got, upstream)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        close(one, other, BOUND[dtype])
    close(qkv.grad, qkv64.grad, BOUND[dtype])
    if qk_norm:
        close(q_norm.grad, qn64.grad, BOUND[dtype])
        close(k_norm.grad, kn64.grad, BOUND[dtype])


# --- attention --------------------------------------------------------------------------------------------------------


def attended(
    q: Tensor, k: Tensor, v: Tensor, offset: int, doc_start: Tensor | None, window: int | None
) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Attention by loops over rows, queries and heads; also the (row, query, key) triples that met."""
    b, t, n_heads, d = q.shape
    group = n_heads // k.shape[2]
    rows, met = [], []
    for row in range(b):
        for i in range(t):
            here = offset + i
            first = 0 if doc_start is None else int(doc_start[row, i])
            if window is not None:
                first = max(first, here - window + 1)
            met += [(row, i, key) for key in range(first, here + 1)]
            for head in range(n_heads):
                keys, values = k[row, first : here + 1, head // group], v[row, first : here + 1, head // group]
                weights = torch.exp(keys @ q[row, i, head] / d**0.5)
                rows.append((weights / weights.sum()) @ values)
    return torch.stack(rows).view(b, t, n_heads, d), met


DOCS = torch.tensor([[0, 0, 2, 2, 2, 5, 5], [0, 1, 2, 3, 3, 3, 3]], dtype=torch.int32)


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("n_kv", [1, 2, 4])
def test_attention(dtype, window, documents, offset, n_kv):
    b, t, n_heads, d = 2, 7, 4, 8
    q, dy = randn(b, t, n_heads, d, dtype=dtype), randn(b, t, n_heads, d, dtype=dtype).detach()
    k, v = randn(b, offset + t, n_kv, d, dtype=dtype), randn(b, offset + t, n_kv, d, dtype=dtype)
    # With a cache the second row's first document reaches back into it.
    doc_start = (DOCS + torch.tensor([[offset], [0]], dtype=torch.int32)) if documents else None
    leaves, leaves64 = (q, k, v), tuple(wide(x) for x in (q, k, v))
    y64, _ = attended(*leaves64, offset, doc_start, window)
    y64.backward(dy.to(F64))
    y = attention(q, k, v, offset=offset, doc_start=doc_start, window=window)
    assert y.dtype == dtype
    y.backward(dy)
    close(y, y64, BOUND[dtype])
    for leaf, leaf64 in zip(leaves, leaves64, strict=True):
        # A window of one key leaves q and k no gradient at all.
        close(leaf.grad, leaf64.grad, BOUND[dtype], floor=10.0)


def test_attention_of_one_query_behind_a_cache_sees_all_of_it():
    q, k, v = randn(2, 1, 4, 8), randn(2, 6, 2, 8), randn(2, 6, 2, 8)
    y64, met = attended(wide(q), wide(k), wide(v), 5, None, None)
    assert len(met) == 2 * 6
    close(attention(q, k, v, offset=5), y64, BOUND[F32])


# --- head -------------------------------------------------------------------------------------------------------------

TARGETS = torch.tensor([3, IGNORED, 0, 28, 3, IGNORED, 7, 7, 11, 1, IGNORED])


@DTYPES
@DELIVERIES
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 1000])
def test_linear_cross_entropy(dtype, delivery, z_loss, chunk):
    n, d, vocab = len(TARGETS), 16, 29
    x, w = randn(n, d, dtype=dtype), master(vocab, d, dtype=dtype)
    x64, w64 = wide(x), wide(w)
    logits = x64 @ w64.T
    lse = torch.log(torch.exp(logits).sum(-1))
    rows = [i for i in range(n) if TARGETS[i] != IGNORED]
    want = torch.stack([lse[i] - logits[i, TARGETS[i]] for i in rows]).sum()
    want_z = z_loss * torch.stack([lse[i] ** 2 for i in rows]).sum()
    (want + want_z).backward()

    def run():
        x.grad = None
        lm, z = head_loss(x, w, TARGETS, z_loss, chunk)
        assert lm.dtype == z.dtype == (F64 if dtype == F64 else F32)
        close(lm, want, BOUND[dtype])
        close(z, want_z, BOUND[dtype])
        (lm + z).backward()

    # Without a buffer each chunk's product is rounded by itself and the sum lives in FP32; bf16's bound covers it.
    close(weight_gradient(run, w, delivery), w64.grad, BOUND[dtype])
    close(x.grad, x64.grad, BOUND[dtype])
    ignored = TARGETS == IGNORED
    assert torch.equal(x.grad[ignored], torch.zeros_like(x.grad[ignored]))


def test_the_loss_of_a_batch_without_targets_is_zero_and_so_is_its_gradient():
    x, w = randn(5, 8), master(7, 8, dtype=F32)
    lm, z = head_loss(x, w, torch.full((5,), IGNORED), 1e-3, 2)
    (lm + z).backward()
    assert lm.item() == z.item() == 0
    assert not x.grad.any() and not w.grad.any()


def test_the_loss_of_huge_logits_is_finite_and_right():
    x = torch.tensor([[1e4, 0.0], [0.0, 1e4]]).requires_grad_()
    w = torch.eye(2).requires_grad_()
    lm, _ = head_loss(x, w, torch.tensor([0, 0]))
    lm.backward()
    assert lm.item() == 1e4
    assert torch.equal(x.grad, torch.tensor([[0.0, 0.0], [-1.0, 1.0]]))


def test_the_loss_without_gradients_touches_no_gradient_buffer():
    x, w = randn(5, 8), master(7, 8, dtype=F32)
    w.grad = torch.full_like(w, 3.0)
    w.grad_stale = True
    with torch.no_grad():
        lm, _ = head_loss(x, w, torch.tensor([1, 2, 3, 4, 5]))
    assert not lm.requires_grad and w.grad_stale and torch.equal(w.grad, torch.full_like(w, 3.0))


def test_a_gradient_delivered_by_several_ops_is_their_sum():
    """A tied matrix: the head overwrites what was stale, the embedding adds."""
    w, ids, targets = master(13, 8, dtype=F32), torch.tensor([[1, 2, 2, 12]]), torch.tensor([2, 2, 12, IGNORED])
    w64 = wide(w)
    torch.nn.functional.cross_entropy(w64[ids[0]] @ w64.T, targets, reduction="sum").backward()
    w.grad = torch.full_like(w, float("nan"))
    w.grad_stale = True
    lm, _ = head_loss(embedding(ids, w, F32)[0], w, targets)
    lm.backward()
    close(w.grad, w64.grad, BOUND[F32])
