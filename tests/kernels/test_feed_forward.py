"""The feed-forward in eight bits against the ops that it stands for, to the bit."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import choice
from llmtrain.kernels.feed_forward import (
    eight_bit_feed_forward,
    feed_forward_add,
    quantise_swiglu,
    quantise_swiglu_gradient,
)
from llmtrain.kernels.fp8 import E4M3, E5M2, Fp8Weight, Scaling, quantise
from llmtrain.kernels.linear import linear, linear_add
from llmtrain.kernels.swiglu import swiglu, swiglu_backward_reference, swiglu_forward_reference
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.step import TrainStep

BOTH = pytest.mark.parametrize("implementation", [choice.REFERENCE, choice.TRITON])
D, F, N = 32, 80, 48


def scales(x: float, dy: float) -> Scaling:
    scaling = Scaling(2, "cpu")
    scaling.scale.copy_(torch.tensor([x, dy, x, dy]))
    scaling.inverse.copy_(scaling.scale.reciprocal())
    return scaling


def same(got: Tensor | None, wanted: Tensor | None) -> bool:
    assert got is not None and wanted is not None and got.shape == wanted.shape
    return torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@BOTH
@pytest.mark.parametrize("n, width", [(N, F), (1, 16), (70, 65), (129, 64)])
def test_the_product_and_its_gradient_have_the_bits_of_what_is_rounded_twice(implementation, n, width):
    torch.manual_seed(0)
    gate_up, dy = (30 * torch.randn(n, 2 * width)).bfloat16(), torch.randn(n, width).bfloat16()
    gate_up[0, 0], gate_up[-1, -1] = float("nan"), float("inf")
    of_x, of_dy, _ = scales(0.5, 256.0).of(0)
    alone, alone_dy, _ = scales(0.5, 256.0).of(0)
    wanted = quantise(swiglu_forward_reference(gate_up), alone, E4M3, record=True)
    wanted_d = quantise(swiglu_backward_reference(dy, gate_up), alone_dy, E5M2, record=True)
    with choice.forced(implementation):
        got = quantise_swiglu(gate_up, of_x, row_major=True, transposed=True, record=True)
        got_d = quantise_swiglu_gradient(dy, gate_up, of_dy, transposed=True)
        one_way = quantise_swiglu(gate_up, of_x, row_major=False, transposed=True, record=False)
    assert all(map(same, (*got, *got_d), (*wanted, *wanted_d)))
    assert one_way[0] is None and same(one_way[1], wanted[1])
    for here, there in ((of_x, alone), (of_dy, alone_dy)):
        assert torch.equal(here.largest.view(torch.int32), there.largest.view(torch.int32)) or (
            here.largest.isnan().all() and there.largest.isnan().all()
        )


def weights(scaling: Scaling) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    made = [torch.nn.Parameter(torch.randn(*shape) / 4) for shape in ((2 * F, D), (D, F))]
    for i, weight in enumerate(made):
        weight.eight_bit = Fp8Weight(weight, scaling, i)
    scaling.quantise_weights([(weight.detach(), weight.eight_bit) for weight in made])
    return made[0], made[1]


def run(fused: bool, keep_product: bool, remade: bool, result: bool = True) -> tuple[list[Tensor], Scaling]:
    """(the outcome, every gradient), and the scales with what was noted."""
    scaling = scales(16.0, 1024.0)
    gate_up, down = weights(scaling)
    torch.manual_seed(2)
    x, stream = torch.randn(2, N // 2, D).bfloat16().requires_grad_(), torch.randn(2, N // 2, D).bfloat16()
    stream.requires_grad_()
    h, remake = stream.clone(), (lambda: x.detach()) if remade else None
    if fused:
        operands = eight_bit_feed_forward(gate_up, down, x)
        assert operands is not None
        y = feed_forward_add(x, gate_up, down, h, operands, remake, keep_product, result)
    else:
        hidden = linear(x, gate_up, remake)
        y = linear_add(swiglu(hidden), down, h, None if keep_product else lambda: swiglu(hidden), result)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, stream.grad, gate_up.grad, down.grad], scaling


@BOTH
@pytest.mark.parametrize(
    "keep_product, remade, result", [(True, False, True), (False, True, True), (True, False, False)]
)
def test_it_is_linear_swiglu_and_linear_in_a_row(implementation, keep_product, remade, result):
    with choice.forced(implementation):
        (wanted, noted), (got, noted_here) = (run(fused, keep_product, remade, result) for fused in (False, True))
    assert all(map(torch.equal, got, wanted))
    assert torch.equal(noted_here.largest, noted.largest) and noted.largest.all()


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_gradients_that_are_asked_for_are_made(wanted):
    scaling = scales(16.0, 1024.0)
    made = (torch.randn(N, D).bfloat16(), *weights(scaling))
    for tensor, wants in zip(made, wanted, strict=True):
        tensor.requires_grad_(wants)
    operands = eight_bit_feed_forward(made[1], made[2], made[0])
    feed_forward_add(*made, torch.zeros(N, D).bfloat16(), operands).sum().backward()
    assert [tensor.grad is not None for tensor in made] == list(wanted)


def test_without_gradients_nothing_is_noted():
    scaling = scales(16.0, 1024.0)
    gate_up, down = weights(scaling)
    x = torch.randn(N, D).bfloat16()
    with torch.no_grad():
        feed_forward_add(x, gate_up, down, torch.zeros_like(x), eight_bit_feed_forward(gate_up, down, x))
    assert not scaling.largest.any()


def test_it_is_not_for_scales_that_wait_for_the_tensor_nor_for_other_precisions():
    scaling = scales(16.0, 1024.0)
    gate_up, down = weights(scaling)
    x = torch.randn(N, D).bfloat16()
    assert eight_bit_feed_forward(gate_up, down, x) and not eight_bit_feed_forward(gate_up, down, x.float())
    scaling.calibrating = True
    assert not eight_bit_feed_forward(gate_up, down, x)
    assert not eight_bit_feed_forward(torch.randn(2 * F, D), down, x)


def test_a_step_in_eight_bits_makes_no_product_in_bf16_once_it_has_a_history(monkeypatch):
    config = ModelConfig(
        vocab_size=64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48, max_seq_len=32
    )
    called = []
    monkeypatch.setattr("llmtrain.model.transformer.swiglu", lambda x: called.append(1) or swiglu(x))
    step = TrainStep.build(config, OptimizerConfig(), batch_size=1, seq_len=32, precision="fp8")
    ids = torch.randint(0, 64, (1, 33), generator=torch.Generator().manual_seed(0))
    counts = []
    for _ in range(3):
        step.micro_step(ids[:, :-1], ids[:, 1:], first=True)
        step.optimizer_step(1e-3)
        counts.append(len(called))
    assert counts[0] > 0 and counts[1:] == counts[:1] * 2
