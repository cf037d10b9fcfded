"""The ops as a library: plain tensors, torch's own autograd, and errors that name the argument."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmtrain.kernels import (
    choice,
    linear_cross_entropy,
    rmsnorm,
    rmsnorm_backward,
    rmsnorm_forward,
    rotary_qkv,
    rotary_tables,
    swiglu,
)
from tests.kernels.exactness import assert_rounded

BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def exact_rmsnorm(h: Tensor, weight: Tensor, dy: Tensor, dh: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    h, w = (t.detach().double().requires_grad_() for t in (h, weight))
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w
    y.backward(dy.double())
    return y.detach(), h.grad if dh is None else h.grad + dh.double(), w.grad


def close(got: Tensor, exact: Tensor, beside: float = 0.0) -> bool:
    """To a unit in the last place, or to FP32's rounding of the largest value that was added up (`beside`, or more)."""
    allowed = 1.01 * ULP[got.dtype] * exact.abs() + 4e-6 * max(exact.abs().max().item(), beside)
    if got.dtype == torch.float16:
        allowed = allowed + 2.0**-24  # denormal numbers
    return bool(((got.double() - exact).abs() <= allowed).all())


@BOTH
def test_gradients_go_through_autograd_and_add_up_there(implementation):
    torch.manual_seed(0)
    x, dy = torch.randn(6, 40), torch.randn(6, 40)
    weight = torch.randn(40, requires_grad=True)
    expected = exact_rmsnorm(x, weight, dy)[2]
    with choice.forced(implementation):
        for times in (1, 2):
            rmsnorm(x, weight).backward(dy)
            assert close(weight.grad, times * expected)
        before = weight.grad.clone()
        (asked,) = torch.autograd.grad(rmsnorm(x, weight), weight, dy)
        assert close(asked, expected)
        (scaled,) = torch.autograd.grad(rmsnorm(x, 2 * weight), weight, dy)  # a weight that is no leaf
        assert close(scaled, 2 * expected)
    assert torch.equal(weight.grad, before)


@BOTH
@pytest.mark.parametrize("deterministic", [True, False])
def test_dw_of_a_narrow_weight_is_fp32_without_autograd_and_its_own_dtype_with_it(implementation, deterministic):
    torch.manual_seed(0)
    x, u, dy, dh = (torch.randn(9, 64).bfloat16() for _ in range(4))
    weight = torch.randn(64).bfloat16().requires_grad_()
    with choice.forced(implementation):
        y, h, rstd = rmsnorm_forward(x, weight, residual=u)
        dx, dw = rmsnorm_backward(dy, h, weight, rstd, dh, deterministic)
        u.requires_grad_()
        torch.autograd.backward(rmsnorm(x, weight, residual=u, deterministic=deterministic), [dy, dh])
    exact_y, exact_dx, exact_dw = exact_rmsnorm(h, weight, dy, dh)
    assert y.dtype == h.dtype == dx.dtype == torch.bfloat16 and rstd.dtype == dw.dtype == torch.float32
    assert torch.equal(h, x + u)
    assert close(y, exact_y) and close(dx, exact_dx) and close(dw, exact_dw)
    assert weight.grad.dtype == torch.bfloat16 and close(weight.grad, exact_dw)
    assert torch.equal(u.grad, dx)


@BOTH
@pytest.mark.parametrize("heads", [24, 4])
def test_heads_of_a_packed_tensor_share_one_weight(implementation, heads):
    torch.manual_seed(0)
    packed = torch.randn(5, 32, 256).bfloat16()
    x, dy = packed[:, 32 - heads :], torch.randn(5, heads, 256).bfloat16()
    weight = torch.randn(256)
    with choice.forced(implementation):
        y, h, rstd = rmsnorm_forward(x, weight)
        dx, dw = rmsnorm_backward(dy, h, weight, rstd)
    assert h is x and y.shape == dx.shape == x.shape and rstd.shape == x.shape[:-1]
    exact_y, exact_dx, exact_dw = exact_rmsnorm(x, weight, dy)
    assert close(y, exact_y) and close(dx, exact_dx) and close(dw, exact_dw)


@BOTH
def test_no_rows_and_a_single_row(implementation):
    weight = torch.randn(8, requires_grad=True)
    with choice.forced(choice.AUTO):
        x = torch.randn(0, 8, requires_grad=True)
        rmsnorm(x, weight).sum().backward()
        assert x.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros(8))
    with choice.forced(implementation):
        x = torch.randn(16)[::2]  # one row, whose columns are not adjacent
        assert_rounded(rmsnorm(x, weight).detach(), exact_rmsnorm(x, weight, torch.ones(8))[0])


@BOTH
def test_a_weight_that_was_modified_before_the_backward_is_an_error(implementation):
    weight = torch.randn(8, requires_grad=True)
    with choice.forced(implementation):
        y = rmsnorm(torch.randn(3, 8), weight)
        with torch.no_grad():
            weight += 1
        with pytest.raises(RuntimeError, match="weight was modified"):
            y.sum().backward()


SECOND = {
    "rmsnorm": lambda x: rmsnorm(x, torch.ones(8)),
    "swiglu": swiglu,
    "head": lambda x: linear_cross_entropy(x, torch.ones(9, 8), torch.tensor([0, 5, 8])),
}


@BOTH
@pytest.mark.parametrize("upstream", [Tensor.sum, lambda y: y.square().sum()], ids=["sum", "squares"])
@pytest.mark.parametrize("op", SECOND.values(), ids=SECOND)
def test_a_second_derivative_is_refused_rather_than_wrong(implementation, op, upstream):
    x = torch.randn(3, 8, requires_grad=True)
    with choice.forced(implementation), pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(upstream(op(x)), x, create_graph=True)


@BOTH
def test_ops_run_in_inference_mode(implementation):
    x, qkv = torch.randn(3, 8), torch.randn(2, 5, 64)
    with torch.inference_mode(), choice.forced(implementation):
        assert torch.equal(rmsnorm(x.clone(), torch.ones(8)), rmsnorm_forward(x, torch.ones(8))[0])
        assert len(rotated(qkv=qkv, q_norm=torch.ones(8), k_norm=torch.ones(8))) == 3


@BOTH
def test_settings_may_be_numbers_of_any_kind(implementation):
    x = torch.randn(3, 8)
    with choice.forced(implementation):
        for eps in (np.float32(1e-6), torch.tensor(1e-6)):
            assert torch.equal(rmsnorm(x, torch.ones(8), eps), rmsnorm(x, torch.ones(8), float(eps)))


def test_a_rotation_of_no_tokens_is_empty():
    q, k, v = rotated(qkv=torch.randn(0, 5, 64))
    assert q.shape == (0, 5, 4, 8) and k.shape == v.shape == (0, 5, 2, 8)


def wrong(name: str, call, **changed):
    return pytest.param(call, changed, name, id=f"{name} {changed.get(name)!r:.30}")


def norm(**changed):
    given = {"x": torch.randn(3, 8), "weight": torch.ones(8), "eps": 1e-6, "residual": torch.randn(3, 8)} | changed
    return rmsnorm(**given)


def norm_back(**changed):
    given = {"dy": torch.randn(3, 8), "h": torch.randn(3, 8), "weight": torch.ones(8), "rstd": torch.ones(3)}
    return rmsnorm_backward(**given | {"dh": torch.randn(3, 8)} | changed)


def rotated(**changed):
    cos, sin = rotary_tables(5, 8, 1e4, "cpu")
    given = {"qkv": torch.randn(2, 5, 64), "cos": cos, "sin": sin, "n_heads": 4, "n_kv_heads": 2}
    return rotary_qkv(**given | changed)


@pytest.mark.parametrize(
    ("call", "changed", "name"),
    [
        wrong("x", norm, x=torch.ones(3, 8, dtype=torch.int64)),
        wrong("x", norm, x=torch.tensor(1.0)),
        wrong("weight", norm, weight=torch.ones(7)),
        wrong("weight", norm, weight=torch.ones(1, 8)),
        wrong("weight", norm, weight=torch.ones(8, dtype=torch.int32)),
        wrong("weight", norm, weight=torch.ones(8, device="meta")),
        wrong("eps", norm, eps=-1.0),
        wrong("eps", norm, eps=float("nan")),
        wrong("residual", norm, residual=torch.ones(8)),
        wrong("residual", norm, residual=torch.ones(3, 8).bfloat16()),
        wrong("residual", norm, residual=torch.ones(3, 8, device="meta")),
        wrong("dy", norm_back, dy=torch.ones(4, 8)),
        wrong("dh", norm_back, dh=torch.ones(3, 8).double()),
        wrong("rstd", norm_back, rstd=torch.ones(3, 1)),
        wrong("x", norm, x=torch.ones(3, 8).to(torch.float8_e4m3fn)),
        wrong("rstd", norm_back, rstd=torch.ones(3, dtype=torch.int64)),
        wrong("gate_up", swiglu, gate_up=torch.ones(3, 8).to(torch.float8_e5m2)),
        wrong("gate_up", swiglu, gate_up=torch.ones(3, 7)),
        wrong("gate_up", swiglu, gate_up=torch.ones(3, 8, dtype=torch.int32)),
        wrong("qkv", rotated, qkv=torch.ones(2, 5, 60)),
        wrong("qkv", rotated, qkv=torch.ones(10, 64)),
        wrong("qkv", rotated, qkv=torch.ones(2, 5, 64, dtype=torch.int32)),
        wrong("cos", rotated, cos=torch.ones(4, 4)),
        wrong("sin", rotated, sin=torch.ones(5, 4, device="meta")),
        wrong("cos", rotated, cos=torch.ones(5, 4, dtype=torch.int32)),
        wrong("qkv", rotated, qkv=torch.ones(2, 5, 0)),
        wrong("eps", rotated, eps=-1.0),
        wrong("q_norm", rotated, q_norm=torch.ones(8, dtype=torch.int64), k_norm=torch.ones(8)),
        wrong("h", norm_back, h=torch.ones(3, 8, dtype=torch.int64)),
        wrong("head_dim", lambda head_dim: rotary_tables(5, head_dim, 1e4, "cpu"), head_dim=15),
        wrong("n_heads", rotated, n_heads=0),
        wrong("n_kv_heads", rotated, n_kv_heads=-1),
        wrong("k_norm", rotated, q_norm=torch.ones(8)),
        wrong("q_norm", rotated, q_norm=torch.ones(4), k_norm=torch.ones(8)),
    ],
)
def test_what_does_not_fit_is_named(call, changed, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        call(**changed)


def laid_out(tensor: Tensor, how: str) -> Tensor:
    """The same values with other strides."""
    if how == "rows apart":
        wider = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype)
        wider[..., 1:-2] = tensor
        return wider[..., 1:-2]
    if how == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "heads of more":
        wider = torch.full((tensor.shape[0], tensor.shape[1] + 2, *tensor.shape[2:]), float("nan"), dtype=tensor.dtype)
        wider[:, 1:-1] = tensor
        return wider[:, 1:-1]
    return tensor


LAYOUTS = st.sampled_from(["contiguous", "rows apart", "transposed", "heads of more"])


@settings(max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 100)),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    layouts=st.lists(LAYOUTS, min_size=4, max_size=4),
    with_residual=st.booleans(),
    deterministic=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rmsnorm_of_any_shape_dtype_and_layout(shape, dtype, weight_dtype, layouts, with_residual, deterministic, seed):
    torch.manual_seed(seed)
    x, u, dy, dh = (laid_out(torch.randn(shape).to(dtype), how) for how in layouts)
    u, dh = (u, dh) if with_residual else (None, None)
    weight = torch.randn(shape[-1]).to(weight_dtype)
    with choice.forced(choice.TRITON):
        y, h, rstd = rmsnorm_forward(x, weight, residual=u)
        dx, dw = rmsnorm_backward(dy, h, weight, rstd, dh, deterministic)
        again = rmsnorm_backward(dy, h, weight, rstd, dh, deterministic)
    assert torch.equal(h, x if u is None else x + u)
    exact_y, exact_dx, exact_dw = exact_rmsnorm(h, weight, dy, dh)
    exact_rstd = (h.double().square().mean(-1) + 1e-6).rsqrt()
    terms = (dy * weight * exact_rstd[..., None]).abs().max().item()  # of dx, which may cancel
    assert close(y, exact_y) and close(dx, exact_dx, terms) and close(dw, exact_dw)
    assert ((rstd - exact_rstd).norm() <= 1e-5 * exact_rstd.norm()).all()
    if deterministic:
        assert torch.equal(dx, again[0]) and torch.equal(dw, again[1])


@settings(max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 200)),
    dtype=st.sampled_from(DTYPES),
    layouts=st.lists(LAYOUTS, min_size=2, max_size=2),
    seed=st.integers(0, 2**31),
)
def test_swiglu_of_any_shape_dtype_and_layout(shape, dtype, layouts, seed):
    torch.manual_seed(seed)
    *rows, width = shape
    gate_up = laid_out((3 * torch.randn(*rows, 2 * width)).to(dtype), layouts[0])
    dy = laid_out(torch.randn(shape).to(dtype), layouts[1])
    leaf = gate_up.detach().requires_grad_()
    with choice.forced(choice.TRITON):
        y = swiglu(leaf)
        y.backward(dy)
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    exact_y = gate * torch.sigmoid(gate) * up
    exact_y.backward(dy.double())
    assert close(y.detach(), exact_y.detach()) and close(leaf.grad, wide.grad)


@settings(max_examples=5)
@given(
    b=st.integers(1, 3), t=st.integers(1, 9), n_kv=st.integers(1, 3), groups=st.integers(1, 3), half=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES), normed=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rotary_of_any_shape_and_dtype(b, t, n_kv, groups, half, dtype, normed, seed):
    torch.manual_seed(seed)
    n_heads, dim = n_kv * groups, 2 * half
    qkv = torch.randn(b, t, (n_heads + 2 * n_kv) * dim).to(dtype)
    cos, sin = rotary_tables(t, dim, 1e4, "cpu")
    norms = [torch.randn(dim) for _ in "qk"] if normed else [None, None]
    gradients = [torch.randn(b, t, heads, dim).to(dtype) for heads in (n_heads, n_kv, n_kv)]

    def run(implementation: str, qkv: Tensor, norms: list, gradients: list) -> list[Tensor]:
        qkv = qkv.detach().requires_grad_()
        norms = [w if w is None else w.detach().requires_grad_() for w in norms]
        with choice.forced(implementation):
            parts = rotary_qkv(qkv, cos, sin, n_heads, n_kv, *norms)
            torch.autograd.backward(parts, gradients)
        return [part.detach() for part in parts] + [qkv.grad] + [w.grad for w in norms if w is not None]

    ours = run(choice.TRITON, qkv, norms, gradients)
    exact = run(
        choice.REFERENCE, qkv.double(), [w if w is None else w.double() for w in norms],
        [d.double() for d in gradients],
    )  # fmt: skip
    assert all(close(got, truth) for got, truth in zip(ours, exact, strict=True))
