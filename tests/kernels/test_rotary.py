"""Rotary positions, the split of a packed qkv and QK-norm, forward and backward, against FP64."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import choice
from llmtrain.kernels.rotary import rotary_qkv, rotary_tables
from tests.kernels.exactness import assert_rounded, assert_summed

EPS = 1e-6
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
SHAPES = pytest.mark.parametrize(
    ("b", "t", "n_heads", "n_kv_heads", "head_dim"),
    [(1, 1, 1, 1, 16), (2, 9, 4, 2, 16), (1, 21, 5, 1, 20), (3, 6, 6, 3, 64), (1, 5, 8, 8, 128)],
)


def exact(qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: list, gradients: list):
    """([q, k, v], d_qkv, [d_q_norm, d_k_norm]) in FP64, by complex multiplication and torch's own derivatives."""
    packed = qkv.double().requires_grad_()
    weights = [None if w is None else w.detach().double().requires_grad_() for w in norms]
    b, t, _ = qkv.shape
    parts = list(packed.view(b, t, heads[0] + 2 * heads[1], -1).split([heads[0], heads[1], heads[1]], 2))
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(-2)  # (.., T, 1, D/2)
    for i in (0, 1):
        x = parts[i]
        if weights[i] is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weights[i]
        turned = torch.complex(*x.chunk(2, -1)) * turn
        parts[i] = torch.cat([turned.real, turned.imag], -1)
    torch.autograd.backward(parts, [g.double() for g in gradients])
    return [p.detach() for p in parts], packed.grad, [None if w is None else w.grad for w in weights]


def run(implementation: str, qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: list, gradients):
    qkv = qkv.detach().requires_grad_()
    with choice.forced(implementation):
        parts = rotary_qkv(qkv, cos, sin, *heads, *norms, EPS)
        torch.autograd.backward(parts, gradients)
    assert choice.ran["rotary"] == implementation
    return [p.detach() for p in parts], qkv.grad


def random(b: int, t: int, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype):
    torch.manual_seed(0)
    qkv = torch.randn(b, t, (n_heads + 2 * n_kv_heads) * head_dim).to(dtype)
    gradients = [torch.randn(b, t, n, head_dim).to(dtype) for n in (n_heads, n_kv_heads, n_kv_heads)]
    norms = [torch.nn.Parameter(1 + 0.3 * torch.randn(head_dim)) for _ in range(2)]
    cos, sin = rotary_tables(64, head_dim, 10000.0, "cpu")
    return qkv, gradients, norms, cos, sin


@BOTH
@DTYPES
@SHAPES
def test_heads_are_turned_by_their_positions(implementation, dtype, b, t, n_heads, n_kv_heads, head_dim):
    qkv, gradients, _, cos, sin = random(b, t, n_heads, n_kv_heads, head_dim, dtype)
    cos, sin = cos[7 : 7 + t], sin[7 : 7 + t]
    parts, d_qkv = run(implementation, qkv, cos, sin, (n_heads, n_kv_heads), [None, None], gradients)
    exact_parts, exact_gradient, _ = exact(qkv, cos, sin, (n_heads, n_kv_heads), [None, None], gradients)
    for part, exact_part in zip(parts, exact_parts, strict=True):
        assert_rounded(part, exact_part)
    assert_rounded(d_qkv, exact_gradient)


@DTYPES
@SHAPES
def test_normed_heads_are_turned_in_the_same_pass(dtype, b, t, n_heads, n_kv_heads, head_dim):
    qkv, gradients, norms, cos, sin = random(b, t, n_heads, n_kv_heads, head_dim, dtype)
    cos, sin = cos[:t], sin[:t]
    parts, d_qkv = run("triton", qkv, cos, sin, (n_heads, n_kv_heads), norms, gradients)
    exact_parts, exact_gradient, exact_dw = exact(qkv, cos, sin, (n_heads, n_kv_heads), norms, gradients)
    for part, exact_part in zip(parts, exact_parts, strict=True):
        assert_rounded(part, exact_part)
    assert_rounded(d_qkv, exact_gradient)
    for norm, dw in zip(norms, exact_dw, strict=True):
        assert_summed(norm.grad, dw)


def test_the_reference_norms_heads_too():
    qkv, gradients, norms, cos, sin = random(2, 9, 4, 2, 16, torch.float32)
    parts, d_qkv = run("reference", qkv, cos[:9], sin[:9], (4, 2), norms, gradients)
    exact_parts, exact_gradient, exact_dw = exact(qkv, cos[:9], sin[:9], (4, 2), norms, gradients)
    for part, exact_part in zip(parts, exact_parts, strict=True):
        assert_rounded(part, exact_part)
    assert_rounded(d_qkv, exact_gradient)
    for norm, dw in zip(norms, exact_dw, strict=True):
        assert_summed(norm.grad, dw)


@BOTH
def test_each_sequence_may_have_its_own_positions(implementation):
    qkv, gradients, _, cos, sin = random(3, 6, 4, 2, 16, torch.float32)
    positions = torch.randint(0, 64, (3, 6))
    args = (qkv, cos[positions], sin[positions], (4, 2), [None, None], gradients)
    parts, d_qkv = run(implementation, *args)
    exact_parts, exact_gradient, _ = exact(*args)
    for part, exact_part in zip(parts, exact_parts, strict=True):
        assert_rounded(part, exact_part)
    assert_rounded(d_qkv, exact_gradient)


@pytest.mark.parametrize("normed", [False, True])
def test_gradients_come_with_whatever_strides_attention_gives_them(normed):
    qkv, gradients, norms, cos, sin = random(2, 9, 4, 2, 16, torch.float32)
    norms = norms if normed else [None, None]
    args = (qkv, cos[:9], sin[:9], (4, 2), norms)
    head_first, packed, odd = gradients
    strided = [
        head_first.transpose(1, 2).contiguous().transpose(1, 2),  # (B, H, T, D) memory
        torch.cat([packed, packed], -1)[..., :16],
        odd.transpose(-1, -2).contiguous().transpose(-1, -2),  # elements of a head not adjacent
    ]
    _, d_qkv = run("triton", *args, strided)
    _, exact_gradient, exact_dw = exact(*args, gradients)
    assert_rounded(d_qkv, exact_gradient)
    if normed:
        for norm, dw in zip(norms, exact_dw, strict=True):
            assert_summed(norm.grad, dw)


def test_norm_weights_are_right_when_a_program_takes_several_tiles(monkeypatch):
    import llmtrain.kernels.rotary as module

    monkeypatch.setattr(module, "_steps", lambda n_tokens, tokens: 3)
    monkeypatch.setattr(module, "_tile", lambda n_tokens, head_dim, pairs: (8, 8, 4, 4))
    qkv, gradients, norms, cos, sin = random(2, 19, 4, 2, 16, torch.float32)
    args = (qkv, cos[:19], sin[:19], (4, 2), norms, gradients)
    _, d_qkv = run("triton", *args)
    _, exact_gradient, exact_dw = exact(*args)
    assert_rounded(d_qkv, exact_gradient)
    for norm, dw in zip(norms, exact_dw, strict=True):
        assert_summed(norm.grad, dw)


def test_v_is_not_copied():
    qkv, _, _, cos, sin = random(2, 9, 4, 2, 16, torch.bfloat16)
    with choice.forced("triton"):
        v = rotary_qkv(qkv, cos[:9], sin[:9], 4, 2)[2]
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


@BOTH
def test_norm_weights_of_any_stride_will_do(implementation):
    qkv, gradients, norms, cos, sin = random(2, 5, 2, 1, 16, torch.float32)
    spaced = [torch.stack([w.detach(), torch.full_like(w, 9.0)], 1)[:, 0].requires_grad_() for w in norms]
    assert all(w.stride() == (2,) for w in spaced)
    wanted = run("reference", qkv, cos[:5], sin[:5], (2, 1), norms, gradients)
    got = run(implementation, qkv, cos[:5], sin[:5], (2, 1), spaced, gradients)
    for ours, theirs in zip((*got[0], got[1], *(w.grad for w in spaced)), (*wanted[0], wanted[1],
                            *(w.grad for w in norms)), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_fill_up_a_tile_are_in_no_gradient_without_an_epsilon():
    qkv, gradients, norms, cos, sin = random(1, 5, 2, 1, 16, torch.float32)
    qkv.requires_grad_()
    with choice.forced("triton"):
        torch.autograd.backward(rotary_qkv(qkv, cos[:5], sin[:5], 2, 1, *norms, 0.0), gradients)
    assert all(torch.isfinite(x.grad).all() for x in (qkv, *norms))


def test_tables_of_two_shapes_are_refused():
    qkv, _, _, cos, sin = random(2, 5, 2, 1, 16, torch.float32)
    with pytest.raises(ValueError, match=r"sin: \(5, 8\) wanted, as cos is, not \(2, 5, 8\)"):
        rotary_qkv(qkv, cos[:5], sin[:5].expand(2, 5, 8), 2, 1)
