"""Operands with a scale a row, or for 128 numbers: bits, scales, layouts and the three products of a linear."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import numpy as np
import pytest
import torch

from llmtrain.kernels import choice, fp8_fine
from llmtrain.kernels.fp8_fine import BLOCK, ROWWISE, SIDE, TILES, FineWeight, dequantised, quantise_fine, refusal
from llmtrain.kernels.linear import linear, linear_add
from llmtrain.model.cards import card_of
from llmtrain.storage.errors import UsageError
from llmtrain.training import devices
from tests.kernels.formats import EVERY, bits_by_hand

BOTH = pytest.mark.parametrize("implementation", [choice.REFERENCE, choice.TRITON])
KINDS = pytest.mark.parametrize("by", [ROWWISE, BLOCK, TILES])
SCALINGS = pytest.mark.parametrize("by", [ROWWISE, BLOCK])
EDGES = [1.0, 448.0, 450.0, 0.875, 0.8789, float(EVERY[EVERY.isfinite()].max()), 2.0**-118, 2.0**-126, 2.0**-133]
"""Largest magnitudes whose scales are at an edge: of a binade, of what fits, of FP32's exponents."""


def both_ways(x: torch.Tensor, by: str, **which) -> tuple:
    """Of a matrix that need not be contiguous; tiles are made for memory that is there."""
    n, m = x.shape
    out = None
    if by == TILES:
        out = fp8_fine.empty_operand(n, m, by, x.device), fp8_fine.empty_operand(m, n, by, x.device)
    return quantise_fine(x, by, out=out, **which)


def factors(operand: tuple, by: str) -> np.ndarray:
    """The scale of each number, as bits_by_hand takes it."""
    ones = torch.ones(operand[0].shape).to(torch.float8_e4m3fn)
    return 1 / dequantised((ones, operand[1]), by).double().numpy()


def check_bits(operand: tuple, x: torch.Tensor, by: str) -> None:
    factor = factors(operand, by)
    got, finite = operand[0].view(torch.uint8).numpy(), x.isfinite().numpy()
    assert np.array_equal(got[finite], bits_by_hand(x, factor, torch.float8_e4m3fn)[finite])
    assert operand[0].float()[~x.isfinite()].isnan().all(), "what is not finite shows"


@BOTH
@KINDS
@pytest.mark.parametrize("largest", EDGES)
def test_every_bf16_value_gets_the_bits_of_the_format_under_edge_scales(implementation, by, largest):
    values = EVERY[EVERY.isfinite() & (EVERY.abs() <= largest)]
    values = values if largest in (448.0, EDGES[5]) else values[::7]  # at scale 1 and over all exponents, every one
    rows = -(-len(values) // (SIDE * (SIDE - 1))) * SIDE
    x = torch.zeros(rows, SIDE - 1, dtype=torch.bfloat16)
    x.view(-1)[: len(values)] = values
    x = torch.cat([torch.full((rows, 1), largest).bfloat16(), x], 1)  # so that each row has this one for its largest
    with choice.forced(implementation):
        along, _ = both_ways(x, by)
        _, across = both_ways(x.T, by)  # whose columns are these rows
    for operand in (along, across):
        check_bits(operand, x, by)
        top = largest * factors(operand, by)
        assert (top <= 448).all() and ((top > 224) | (factors(operand, by) == 2.0**126)).all(), "the largest that fits"


@BOTH
@KINDS
def test_what_is_not_finite_becomes_nan_and_spoils_nothing_else(implementation, by):
    x = EVERY.clone()
    with choice.forced(implementation):
        along, across = both_ways(x, by)
    check_bits(along, x, by)
    check_bits(across, x.T, by)
    assert along[1].isfinite().all() and across[1].isfinite().all()


@BOTH
@KINDS
def test_zeros_have_the_scale_one(implementation, by):
    with choice.forced(implementation):
        along, across = both_ways(torch.zeros(SIDE, SIDE).bfloat16(), by)
    for narrow, inverse in (along, across):
        assert not narrow.view(torch.uint8).any() and inverse.view(-1)[0] == 1


@BOTH
@SCALINGS
def test_what_is_made_alone_is_what_is_made_together(implementation, by):
    torch.manual_seed(0)
    x = (torch.randn(128, 256) * 2.0 ** torch.randint(-20, 20, (128, 256))).bfloat16()
    with choice.forced(implementation):
        along, across = quantise_fine(x, by)
        only_along, none = quantise_fine(x, by, transposed=False)
        other_none, only_across = quantise_fine(x, by, row_major=False)
    assert none is None and other_none is None
    for one, other in ((along, only_along), (across, only_across)):
        assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8)) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("rows", [16, 144])
def test_rows_need_not_be_whole_tiles(rows):
    torch.manual_seed(0)
    x = torch.randn(rows, 176).bfloat16()
    made = []
    for implementation in (choice.REFERENCE, choice.TRITON):
        with choice.forced(implementation):
            made.append(quantise_fine(x, ROWWISE))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8)) and torch.equal(one[1], other[1])
    with choice.forced(choice.TRITON):  # blocks lie along 128 columns; rows may be any
        along, _ = quantise_fine(x[:, :SIDE], BLOCK, transposed=False)
    check_bits(along, x[:, :SIDE], BLOCK)


@BOTH
def test_the_tiles_of_a_weight_are_the_same_both_ways_round(implementation):
    torch.manual_seed(0)
    weight = torch.randn(384, 256).bfloat16()
    with choice.forced(implementation):
        rows, columns = both_ways(weight, TILES)
    assert torch.equal(rows[0].view(torch.uint8).T, columns[0].view(torch.uint8))
    assert torch.equal(rows[1][:, :2].T, columns[1][:, :3])
    assert rows[1].shape == (3, 4) and columns[1].shape == (2, 4), "rows of scales are padded to four"
    assert not rows[1][:, 2:].any() and not columns[1][:, 3:].any()


@pytest.mark.parametrize("n, k", [(256, 768), (128, 128)])
def test_scales_lie_as_the_cards_matmuls_take_them(n, k):
    """What torch's F.scaled_mm and _scaled_mm check of a: (n, k) and of b: (k, n)."""
    x, weight = torch.randn(n, k).bfloat16(), FineWeight(torch.empty(n, k), BLOCK)
    (_, inverse), _ = quantise_fine(x, BLOCK)
    assert inverse.t().shape == (n, k // SIDE) and inverse.t().stride() == (1, n)
    tiles, padded = weight.rows[1].t(), -(-k // SIDE // 4) * 4
    assert tiles.shape == (padded, n // SIDE) and tiles.stride() == (1, padded)
    (_, inverse), _ = quantise_fine(x, ROWWISE)
    assert inverse.shape == (n, 1) and inverse.view(1, -1).is_contiguous()


@BOTH
@SCALINGS
def test_a_linears_three_products_are_those_of_the_quantised_numbers(implementation, by):
    torch.manual_seed(0)
    master = torch.randn(128, 256).bfloat16().float()
    x = (torch.randn(128, 256) * 2.0 ** torch.randint(-6, 6, (128, 1))).bfloat16()
    dy = (torch.randn(128, 128) * 2.0 ** torch.randint(-12, 2, (128, 1))).bfloat16()
    weight = FineWeight(master, by)
    own = TILES if by == BLOCK else by
    with choice.forced(implementation):
        weight.refresh(master.bfloat16())
        x8, x8_t = weight.quantise_input(x, row_major=True, transposed=True, record=True)
        dy8, dy8_t = weight.quantise_gradient(dy, transposed=True)
    exact_x, exact_dy = dequantised(x8, by).double(), dequantised(dy8, by).double()
    of_rows, of_columns = (dequantised(one, own).double() for one in (weight.rows, weight.columns))
    products = {
        "y": (weight.multiply(x8, torch.float32), exact_x @ of_rows.T, x.double() @ master.double().T),
        "dx": (weight.input_gradient(dy8, torch.float32), exact_dy @ of_columns.T, dy.double() @ master.double()),
        "dw": (weight.weight_gradient(dy8_t, x8_t), dequantised(dy8_t, by).double() @ dequantised(x8_t, by).double().T,
               dy.double().T @ x.double()),
    }  # fmt: skip
    for name, (got, of_quantised, exact) in products.items():
        assert (got.double() - of_quantised).norm() <= 1e-6 * of_quantised.norm(), name
        assert 0.005 < (got.double() - exact).norm() / exact.norm() < 0.05, name


@SCALINGS
def test_a_linear_trains_by_them_and_adds_up_micro_batches(by):
    torch.manual_seed(0)
    weight = torch.randn(128, 256).requires_grad_()
    weight.operand_cache = weight.detach().bfloat16()
    weight.eight_bit = FineWeight(weight, by)
    weight.eight_bit.refresh(weight.operand_cache)
    weight.grad = torch.full_like(weight, 9.0)
    weight.grad_stale = True
    x = torch.randn(2, 64, 256).bfloat16().requires_grad_()
    linear(x, weight).sum().backward()
    dx, first = x.grad.clone(), weight.grad.clone()
    assert (first - x.detach().sum((0, 1))).norm() <= 0.05 * first.norm(), "overwritten"
    x.grad = None
    stream = torch.zeros(2, 64, 128).bfloat16()
    linear_add(x, weight, stream, remake=x.detach).sum().backward()
    assert torch.equal(x.grad, dx) and torch.equal(weight.grad, 2 * first), "the same bits again, added"
    with torch.no_grad():
        assert torch.equal(linear(x, weight), stream)


def test_a_card_or_torch_without_such_products_is_told_in_one_line(monkeypatch):
    assert refusal(ROWWISE, torch.device("cpu")) is None and refusal(BLOCK, torch.device("cpu")) is None

    def lacking(*_):
        raise NotImplementedError("1x128 scaling only supported in CUDA for SM90\nmore")

    monkeypatch.setattr(fp8_fine, "fine_mm", lacking)
    assert refusal(BLOCK, torch.device("cpu")) == "1x128 scaling only supported in CUDA for SM90"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr(devices, "refusal", lambda by, _: "only for SM90" if by == BLOCK else None)
    card = torch.device("cuda")
    devices.check_precision("fp8", "rowwise", 1024, card)
    with pytest.raises(UsageError, match=r"--fp8-scaling block: a card does not multiply so with torch .* \(only"):
        devices.check_precision("fp8", "block", 1024, card)
    with pytest.raises(UsageError, match="--seq-len 1040 is no multiple of 128, as .* needs with --fp8-scaling block"):
        devices.check_precision("fp8", "block", 1040, card)
    devices.check_precision("fp8", "rowwise", 1040, card)
    devices.check_precision("fp8", "block", 1024, card, card_of("NVIDIA H200"))  # which is elsewhere
    with pytest.raises(UsageError, match="--fp8-scaling block: B200 does not .* of compute capability 9 do"):
        devices.check_precision("fp8", "block", 1024, card, card_of("NVIDIA B200"))


def test_a_card_without_eight_bit_products_of_experts_is_told_before_the_first_step(monkeypatch):
    card = torch.device("cuda")
    for name in ("NVIDIA H200", "NVIDIA B200"):
        devices.check_precision("fp8", "tensorwise", 1024, card, card_of(name), routed=True)
    devices.check_precision("fp8", "tensorwise", 1024, card, card_of("NVIDIA GeForce RTX 4090"))
    with pytest.raises(UsageError, match="fp8 with --moe: .*5090 has no 8-bit matmuls of experts: .* --precision bf16"):
        devices.check_precision("fp8", "tensorwise", 1024, card, card_of("NVIDIA GeForce RTX 5090"), routed=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    with pytest.raises(UsageError, match="--precision fp8 with --moe: a card has no 8-bit matmuls of experts"):
        devices.check_precision("fp8", "tensorwise", 1024, card, routed=True)
