"""Routing: every token reaches exactly its k experts, and the gradients and losses are those of autograd in FP64."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.kernels import choice
from llmtrain.kernels.routing import Balance, Routing, route, route_backward

BOTH = pytest.mark.parametrize("implementation", [choice.REFERENCE, choice.TRITON])


def check(routing: Routing, n: int, k: int, n_experts: int) -> None:
    """What holds of every routing."""
    experts = routing.experts.long()
    assert experts.shape == routing.weights.shape == (n, k)
    assert all(len(set(row)) == k for row in experts.tolist()) and int(experts.max()) < n_experts
    order, places, ends = routing.order.long(), routing.places.long(), routing.ends.tolist()
    assert torch.equal(order[places], torch.arange(n * k)), "each copy has one place"
    assert torch.equal(routing.tokens.long(), order // k)
    begin = 0
    for expert, end in enumerate(ends):
        assert (experts.view(-1)[order[begin:end]] == expert).all()
        assert (order[begin:end].diff() > 0).all(), "stable"
        begin = end
    assert begin == n * k, "no copy is dropped"


@settings(max_examples=25)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 8),
    more=st.integers(0, 9),
    kind=st.sampled_from("random same one".split()),
    seed=st.integers(0, 99),
    implementation=st.sampled_from([choice.REFERENCE, choice.TRITON]),
)
def test_every_token_reaches_exactly_its_experts(n, k, more, kind, seed, implementation):
    n_experts = k + more
    logits = torch.randn(n, n_experts, generator=torch.Generator().manual_seed(seed))
    if kind == "same":
        logits.zero_()
    elif kind == "one":  # all tokens on the last k, and the others get nothing
        logits[:, more:] += 50
    with choice.forced(implementation):
        routing, loss, _ = route(logits, k, None)
    check(routing, n, k, n_experts)
    assert loss is None
    if kind == "same":
        assert torch.equal(routing.experts, torch.arange(k, dtype=torch.uint8).expand(n, k)), "of equal ones the first"
    if kind == "one":
        assert set(routing.experts.unique().tolist()) == set(range(more, n_experts))
    highest = logits.double().topk(k).values
    torch.testing.assert_close(routing.weights.double(), highest.softmax(-1), rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_routed_somewhere_and_show(implementation, bad):
    logits = torch.randn(6, 5)
    logits[1, 2] = bad
    logits[2] = bad
    with choice.forced(implementation):
        routing, _, _ = route(logits, 3, None)
    check(routing, 6, 3, 5)
    assert routing.weights[0].isfinite().all() and not routing.weights[2].isfinite().all()


def exact(logits, d_weights, k, balance, chosen):
    """(loss, d_logits) in FP64 through autograd, the choice of experts being given."""
    logits = logits.double().requires_grad_()
    weights = logits.gather(1, chosen.long()).softmax(-1)
    n_experts, sequences = logits.shape[1], len(balance.targets)
    p = logits.softmax(-1).view(sequences, -1, n_experts)
    share = torch.nn.functional.one_hot(chosen.long(), n_experts).sum(1).double()
    f = share.view(sequences, -1, n_experts).mean(1) * n_experts / k
    square = logits.logsumexp(-1).square().view(sequences, -1).mean(1)
    loss = (balance.targets * (balance.balance * (f * p.mean(1)).sum(1) + balance.z * square)).sum()
    (loss + (weights * d_weights.double()).sum()).backward()
    return loss.detach(), logits.grad


@BOTH
@pytest.mark.parametrize(
    "sequences, length, n_experts, k", [(1, 1, 2, 1), (3, 7, 5, 2), (2, 300, 64, 8), (1, 5, 200, 3)]
)
def test_losses_and_gradients_are_those_of_fp64(implementation, sequences, length, n_experts, k):
    torch.manual_seed(n_experts)
    logits, d_weights = 2 * torch.randn(sequences * length, n_experts), torch.randn(sequences * length, k)
    balance = Balance(torch.arange(sequences) * length // 2 + 1, 0.3, 0.02)
    with choice.forced(implementation):
        routing, loss, losses = route(logits, k, balance)
        gradient = route_backward(d_weights, logits, routing, losses, torch.float32)
        without = route_backward(d_weights, logits, routing, None, torch.float32)
    assert choice.ran["routing"] == implementation
    want_loss, want = exact(logits, d_weights, k, balance, routing.experts)
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-6)
    nothing = Balance(balance.targets, 0.0, 0.0)
    torch.testing.assert_close(without.double(), exact(logits, d_weights, k, nothing, routing.experts)[1], rtol=1e-4,
                               atol=1e-6)  # fmt: skip


@BOTH
def test_the_balance_loss_of_a_split_batch_is_the_wholes_and_a_missing_sample_has_none(implementation):
    logits, targets = torch.randn(4 * 6, 5), torch.tensor([6, 2, 0, 5])
    with choice.forced(implementation):
        _, whole, _ = route(logits, 2, Balance(targets, 0.1, 0.01))
        parts = [route(logits.view(4, 6, 5)[rows].reshape(-1, 5), 2, Balance(targets[rows], 0.1, 0.01))[1]
                 for rows in (slice(0, 1), slice(1, 4))]  # fmt: skip
        _, nothing, losses = route(logits[12:18], 2, Balance(targets[2:3], 0.1, 0.01))
    assert whole.item() == pytest.approx(sum(parts).item(), rel=1e-6)
    assert nothing.item() == 0 and not any(part.any() for part in losses)


def test_even_use_costs_the_least_balance_loss():
    even = torch.eye(4).repeat(8, 1) * 9
    one = torch.zeros(32, 4)
    one[:, 1] = 9
    costs = [route(logits, 1, Balance(torch.tensor([32]), 1.0, 0.0))[1].item() for logits in (even, one)]
    assert costs[0] == pytest.approx(32) and costs[1] > 3.9 * 32
