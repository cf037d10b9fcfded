"""References of the rotation, attention and the head, against autograd of their formulas in FP64.

These run on the CPU, where the references are what runs; the Triton kernels are compared with the references.
"""

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import choice
from llmtrain.kernels.attention import attention
from llmtrain.kernels.cross_entropy import IGNORED, head_loss
from llmtrain.kernels.embedding import embedding
from llmtrain.kernels.rotary import rotary_qkv, rotary_tables
from tests.kernels.fp64 import BOUND, DELIVERIES, DTYPES, F32, F64, close, master, randn, weight_gradient, wide


@pytest.fixture(autouse=True)
def references():
    torch.manual_seed(0)
    with choice.forced(choice.REFERENCE):
        yield


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
