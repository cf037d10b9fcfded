"""The head by itself against FP64 autograd: loss, gradients, what is upstream of it, and wrong inputs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.kernels import choice, head
from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.kernels.head import linear_cross_entropy, rows_at_once


def inputs(n: int, d: int, v: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n * d + v)
    x = torch.randn(n, d, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=generator) * 0.3).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=generator)
    targets[1::3] = IGNORED
    return x, weight, targets


def exact(x, weight, targets, z_loss, reduction, upstream):
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = x @ weight.T
    counted = targets != IGNORED
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    loss = loss + z_loss * logits.logsumexp(-1).square()[counted].sum()
    if reduction == "mean":
        loss = loss / counted.sum()
    return [loss.detach(), *torch.autograd.grad(loss * upstream, (x, weight))]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    v=st.integers(1, 90),
    chunk=st.sampled_from([None, 1, 7, 64]),
    reduction=st.sampled_from(["sum", "mean"]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    upstream=st.sampled_from([1.0, -0.25]),
    implementation=st.sampled_from(["reference", "triton"]),
)
def test_loss_and_gradients_are_those_of_fp64(n, v, chunk, reduction, z_loss, upstream, implementation):
    x, weight, targets = inputs(n, 8, v)
    wanted = exact(x, weight, targets, z_loss, reduction, upstream)
    with choice.forced(implementation):
        loss = linear_cross_entropy(x, weight, targets, reduction=reduction, z_loss=z_loss, chunk=chunk)
    assert loss.dtype == torch.float32 and loss.shape == ()
    (loss * upstream).backward()
    for ours, theirs in zip((loss.detach(), x.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


def test_16_bit_inputs_give_an_fp32_loss_and_gradients_of_their_own_dtype():
    x, weight, targets = inputs(300, 16, 64, torch.bfloat16)
    loss = linear_cross_entropy(x, weight, targets, chunk=128)
    loss.backward()
    wanted = exact(x, weight, targets, 0.0, "mean", 1.0)
    assert loss.dtype == torch.float32 and x.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert abs(loss.item() / wanted[0].item() - 1) < 1e-3
    for ours, theirs in ((x.grad, wanted[1]), (weight.grad, wanted[2])):
        assert (ours.double() - theirs).norm() < 1e-2 * theirs.norm()


def test_a_weight_in_fp16_has_room_for_the_gradient_of_a_mean_over_many():
    x, weight = torch.full((1000, 8), 100.0).half(), (torch.randn(64, 8) * 0.01).half().requires_grad_()
    targets = torch.zeros(1000, dtype=torch.int64)
    linear_cross_entropy(x, weight, targets).backward()
    wide = weight.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(x.double() @ wide.T, targets).backward()
    assert weight.grad.dtype == torch.float16 and (weight.grad.double() - wide.grad).norm() < 1e-2 * wide.grad.norm()


def test_a_weight_in_fp32_gets_its_gradient_in_fp32():
    x, weight, targets = inputs(50, 16, 30, torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    linear_cross_entropy(x, weight, targets).backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.any()


def test_it_is_one_term_among_others_and_its_graph_may_be_kept():
    x, weight, targets = inputs(20, 8, 30)
    loss = linear_cross_entropy(x, weight, targets, reduction="sum")
    total = 3 * loss + weight.square().sum()
    once = torch.autograd.grad(total, (x, weight), retain_graph=True)
    again = torch.autograd.grad(total, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    wanted = exact(x, weight, targets, 0.0, "sum", 3.0)
    torch.testing.assert_close(once[0].double(), wanted[1], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(once[1].double(), wanted[2] + 2 * weight.detach().double(), rtol=2e-5, atol=2e-5)


def test_only_what_is_asked_for_is_computed():
    x, weight, targets = inputs(20, 8, 30)
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), targets), x)
    (dw,) = torch.autograd.grad(linear_cross_entropy(x.detach(), weight, targets), weight)
    wanted = exact(x, weight, targets, 0.0, "mean", 1.0)
    torch.testing.assert_close(dx.double(), wanted[1], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(dw.double(), wanted[2], rtol=2e-5, atol=2e-5)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_accumulate", None)  # no product without a gradient
        assert not linear_cross_entropy(x, weight, targets).requires_grad


def test_no_target_at_all_is_a_sum_of_zero():
    x, weight, _ = inputs(4, 8, 30)
    nothing = torch.full((4,), IGNORED)
    loss = linear_cross_entropy(x, weight, nothing, reduction="sum")
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not weight.grad.any()
    assert linear_cross_entropy(x, weight, nothing).isnan()


def test_chunks_on_a_card_leave_room_for_the_gradients():
    card = torch.device("cuda")
    rows = rows_at_once(16384, 65536, 1280, torch.bfloat16, card)
    assert rows == 4096
    assert 2 * 65536 * rows + 16384 * 1280 * 2 + 4 * 65536 * 1280 <= head.MEMORY_BYTES
    assert rows_at_once(300, 65536, 1280, torch.bfloat16, card) == 300
    assert rows_at_once(16384, 65536, 8192, torch.bfloat16, card) == head.LEAST_ROWS


X, W, T = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 8, -100, 3, 3, 1])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("x", {"x": torch.randn(2, 3, 4)}),
        ("x", {"x": torch.ones(6, 4, dtype=torch.int64)}),
        ("x", {"x": X.to(torch.float8_e4m3fn)}),
        ("weight", {"weight": torch.randn(9, 5)}),
        ("weight", {"weight": torch.randn(9)}),
        ("weight", {"weight": W.to("meta")}),
        ("targets", {"targets": T[:5]}),
        ("targets", {"targets": T.int()}),
        ("targets", {"targets": T.to("meta")}),
        ("targets", {"targets": T + 1}),
        ("targets", {"targets": T.clamp_min(-1)}),
        ("z_loss", {"z_loss": -1.0}),
        ("reduction", {"reduction": "none"}),
        ("chunk", {"chunk": 0}),
    ],
)
def test_what_is_wrong_is_named(name, changed):
    with pytest.raises(ValueError, match=f"^{name}: "):
        linear_cross_entropy(**({"x": X, "weight": W, "targets": T} | changed))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_targets_of_any_stride_will_do(implementation):
    x, weight, targets = inputs(9, 8, 21)
    pairs = torch.stack([targets, torch.full_like(targets, 20)], 1)
    with choice.forced(implementation):
        losses = [linear_cross_entropy(x, weight, t) for t in (targets, pairs[:, 0])]
    assert losses[0].item() == losses[1].item()
