"""Grouped matmuls and the routed feed-forward built of them, against a dense computation in FP64."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.kernels import choice
from llmtrain.kernels.experts import routed_experts
from llmtrain.kernels.grouped import deliver_grouped_product, grouped_linear
from llmtrain.kernels.routing import Balance
from tests.kernels.exactness import assert_rounded

BOTH = pytest.mark.parametrize("implementation", [choice.REFERENCE, choice.TRITON])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def master(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An FP32 weight whose values are exact in `dtype`, with a buffer that must be overwritten."""
    weight = torch.randn(shape).to(dtype).float().requires_grad_()
    weight.grad = torch.full_like(weight, float("nan"))
    weight.grad_stale = True
    return weight


# Rows of each expert: none at the ends and between, one, more than a tile of 128, all on one.
COUNTS = st.one_of(
    st.lists(st.sampled_from([0, 0, 1, 2, 17, 130]), min_size=1, max_size=6).filter(any),
    st.sampled_from([[1], [0, 0, 1], [0, 140, 0, 0], [129, 127]]),
)


@settings(max_examples=12)
@given(
    counts=COUNTS,
    shape=st.sampled_from([(8, 16), (24, 40), (136, 72)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    implementation=st.sampled_from([choice.REFERENCE, choice.TRITON]),
)
def test_grouped_products_are_those_of_each_expert(counts, shape, dtype, implementation):
    torch.manual_seed(sum(counts))
    n_out, n_in = shape
    ends, m = ends_of(counts), sum(counts)
    weight = master(len(counts), n_out, n_in, dtype=dtype)
    n = max(1, m // 2)  # rows that the places are copies of
    x, dy, rows = torch.randn(n, n_in).to(dtype), torch.randn(m, n_out).to(dtype), torch.randint(0, n, (m,)).int()
    with choice.forced(implementation):
        y = grouped_linear(x[rows], weight, ends)
        dx = grouped_linear(dy, weight, ends, transposed=True)
        for _ in range(2):
            assert deliver_grouped_product(weight, dy, x, ends, x_rows=rows) is None
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    w = weight.detach().double()
    assert_rounded(y, torch.einsum("mi,moi->mo", x[rows].double(), w[owner]))
    assert_rounded(dx, torch.einsum("mo,moi->mi", dy.double(), w[owner]))
    want = torch.zeros_like(w).index_add_(0, owner, torch.einsum("mo,mi->moi", dy.double(), x[rows].double()))
    # The loop rounds the sum over a micro-batch's rows to bf16 before it is added; the kernel never does.
    loose = implementation == choice.REFERENCE and dtype == torch.bfloat16
    torch.testing.assert_close(
        weight.grad.double(), 2 * want, rtol=1e-2 if loose else 1e-5, atol=1e-1 if loose else 1e-3
    )
    idle = [e for e, count in enumerate(counts) if not count]
    assert not weight.grad[idle].any(), "an expert without rows has a gradient of zero"


def dense(x, router, gate_up, down, into, k, balance):
    """(result, loss) with every expert applied to every row, and all that is not chosen weighted by zero."""
    rows = x.reshape(-1, x.shape[-1])
    logits = rows @ router.T
    top = logits.topk(k)
    weights = torch.zeros_like(logits).scatter(1, top.indices, top.values.softmax(-1))
    gate, up = torch.einsum("nd,efd->nef", rows, gate_up).chunk(2, -1)
    y = torch.einsum("nef,edf->ned", torch.nn.functional.silu(gate) * up, down)
    out = into + torch.einsum("ned,ne->nd", y, weights).view(into.shape)
    shares = (weights > 0).double().view(*x.shape[:2], -1).mean(1) * logits.shape[1] / k
    p = logits.softmax(-1).view(*x.shape[:2], -1).mean(1)
    square = logits.logsumexp(-1).square().view(x.shape[:2]).mean(1)
    return out, (balance.targets * (balance.balance * (shares * p).sum(1) + balance.z * square)).sum()


def inputs(dtype, b=2, t=5, d=16, f=24, n_experts=4):
    torch.manual_seed(1)
    x, into, dy = (torch.randn(b, t, d).to(dtype) for _ in range(3))
    weights = [
        master(n_experts, d, dtype=dtype),
        master(n_experts, 2 * f, d, dtype=dtype),
        master(n_experts, d, f, dtype=dtype),
    ]
    return x.requires_grad_(), into.requires_grad_(), dy, weights, Balance(torch.tensor([t, 2])[:b], 0.2, 0.05)


@BOTH
@DTYPES
@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("case", ["even", "one expert for all", "one token"])
def test_results_losses_and_gradients_are_those_of_all_experts_in_fp64(implementation, dtype, k, case):
    x, into, dy, weights, balance = inputs(dtype, *((1, 1) if case == "one token" else ()))
    if case == "one expert for all":
        with torch.no_grad():
            x[..., 0] = 8
            weights[0][:, 0] = 0
            weights[0][1, 0] = 8
    wide = [t.detach().double().requires_grad_() for t in (x, into, *weights)]
    with choice.forced(implementation):
        y, loss = routed_experts(x, *weights, into * 1.0, k, balance)
        y.backward(dy)
    assert choice.ran["experts"] == choice.ran["grouped"] == choice.ran["grouped_gradient"] == implementation
    want, want_loss = dense(wide[0], *wide[2:], wide[1], k, balance)
    (want_loss + (want * dy.double()).sum()).backward()
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-5 if dtype == torch.float32 else 1e-2)
    pairs = [(y.detach(), want.detach()), (x.grad, wide[0].grad), (into.grad, wide[1].grad)]
    pairs += [(weight.grad, other.grad) for weight, other in zip(weights, wide[2:], strict=True)]
    for got, exact in pairs:
        assert (got.double() - exact).norm() <= bound * exact.norm().clamp_min(1e-9)


@BOTH
def test_what_is_made_again_gives_the_same_bits_and_without_a_result_there_is_the_gradient(implementation):
    grads = []
    for again in (False, True):
        x, into, dy, weights, balance = inputs(torch.bfloat16)
        before = into.detach().clone()
        with choice.forced(implementation):
            y, _ = routed_experts(
                x, *weights, into * 1.0, 2, balance, remake=(lambda x=x: x.detach()) if again else None,
                keep_product=not again, result=not again,
            )  # fmt: skip
            y.backward(dy)
        grads.append([x.grad, *[weight.grad for weight in weights]])
        assert torch.equal(y.detach(), before) == again
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_weight_without_a_buffer_gets_its_gradient_through_autograd():
    x, into, dy, weights, balance = inputs(torch.float32)
    routed_experts(x, *weights, into * 1.0, 2, balance)[0].backward(dy)
    kept = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    routed_experts(x, *weights, into * 1.0, 2, balance)[0].backward(dy)
    assert all(torch.allclose(weight.grad, other) for weight, other in zip(weights, kept, strict=True))
