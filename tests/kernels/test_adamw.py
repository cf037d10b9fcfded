"""AdamW against torch.optim.AdamW and FP64."""

import pytest
import torch

from llmtrain.kernels import choice
from llmtrain.kernels.adamw import adamw_step

BETAS = (0.9, 0.95)
EPS = 1e-8
DECAY = 0.1
LR = 3e-3


def scalars(step: int, dtype: torch.dtype, lr: float = LR, grad_scale: float = 1.0, apply: float = 1.0):
    return torch.tensor([lr, grad_scale, 1 - BETAS[0] ** step, 1 - BETAS[1] ** step, apply], dtype=dtype)


def run(implementation: str, state: list, n_decayed: int, numbers: torch.Tensor) -> None:
    with choice.forced(implementation):
        adamw_step(
            *state, n_decayed=n_decayed, scalars=numbers, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY
        )
    assert choice.ran["adamw"] == implementation


def fresh(n: int, dtype: torch.dtype) -> list:
    torch.manual_seed(0)
    master = torch.randn(n, dtype=dtype)
    narrow = torch.full((n,), float("nan"), dtype=torch.bfloat16)
    return [master, torch.empty_like(master), torch.zeros_like(master), torch.zeros_like(master), narrow]


@pytest.mark.parametrize(
    ("implementation", "dtype", "bound"),
    [("reference", torch.float64, 1e-13), ("reference", torch.float32, 4e-7), ("triton", torch.float32, 4e-7)],
)
# None decayed, all decayed, a border inside a block, more than one of the reference's pieces.
@pytest.mark.parametrize(("n", "n_decayed"), [(1, 0), (1000, 1000), (2048, 7), (140_001, 132_000)])
def test_five_steps_are_those_of_torch_adamw(implementation, dtype, bound, n, n_decayed):
    state = fresh(n, dtype)
    wide = state[0].double()
    parts = [wide[:n_decayed].clone().requires_grad_(), wide[n_decayed:].clone().requires_grad_()]
    groups = [{"params": [parts[0]], "weight_decay": DECAY}, {"params": [parts[1]], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, foreach=False)
    for step in range(1, 6):
        grad = torch.randn(n, dtype=dtype) * 10.0 ** torch.randint(-6, 3, (n,))
        state[1].copy_(grad)
        run(implementation, state, n_decayed, scalars(step, dtype, grad_scale=0.25))
        parts[0].grad, parts[1].grad = (0.25 * grad.double()).split([n_decayed, n - n_decayed])
        theirs.step()
    error = (state[0].double() - torch.cat(parts)).abs() / (1 + wide.abs())
    assert error.max() < bound
    assert torch.equal(state[4], state[0].bfloat16())


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_small_updates_survive(implementation):
    # With weights of 0 there is nothing for the update to round away in: relative error of the update itself.
    state = fresh(3000, torch.float32)
    state[0].zero_()
    state[1].copy_(torch.randn(3000) * 10.0 ** torch.randint(-5, 3, (3000,)))
    run(implementation, state, 1500, scalars(1, torch.float32))
    g = state[1].double()
    expected = -LR * g / (g.abs() + EPS)
    assert ((state[0].double() - expected).abs() <= 1e-6 * expected.abs()).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_step_that_is_not_applied_changes_nothing(implementation):
    state = fresh(3000, torch.float32)
    state[2].normal_()
    state[3].normal_().abs_()
    state[4].copy_(state[0])
    state[1].fill_(float("nan"))
    before = [t.clone() for t in state]
    run(implementation, state, 1500, scalars(1, torch.float32, apply=0.0))
    for now, then in zip(state[:1] + state[2:], before[:1] + before[2:], strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_without_a_operand_cache(implementation):
    with_narrow, without = fresh(5000, torch.float32), fresh(5000, torch.float32)
    without[4] = None
    for state in (with_narrow, without):
        torch.manual_seed(1)
        state[1].normal_()
        run(implementation, state, 100, scalars(1, torch.float32))
    assert torch.equal(with_narrow[0], without[0])
