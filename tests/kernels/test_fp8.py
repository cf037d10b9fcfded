"""Quantisers against a bit-level reference over every bf16 value, and products of eight-bit operands."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import numpy as np
import pytest
import torch

from llmtrain.kernels import choice
from llmtrain.kernels.fp8 import E4M3, E5M2, HISTORY, LARGEST, Scale, Scaling, quantise, scale_for, scaled_mm
from llmtrain.kernels.fp8_grouped import Fp8Experts, quantise_rows
from tests.kernels.formats import EVERY, bits_by_hand

BOTH = pytest.mark.parametrize("implementation", [choice.REFERENCE, choice.TRITON])


def scale(value: float) -> Scale:
    return Scale(torch.tensor([value]), torch.tensor([1 / value]), torch.zeros(1))


@BOTH
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("power", [0, 7, -9, 126, -126])
def test_every_bf16_value_gets_the_bits_of_the_format(implementation, dtype, power):
    of = scale(2.0**power)
    with choice.forced(implementation):
        rows, columns = quantise(EVERY, of, dtype, record=True)
    assert torch.equal(rows.view(torch.uint8).T, columns.view(torch.uint8))
    got, want = rows.view(torch.uint8).numpy(), bits_by_hand(EVERY, 2.0**power, dtype)
    finite = EVERY.isfinite().numpy()
    assert np.array_equal(got[finite], want[finite])
    assert rows.float()[~EVERY.isfinite()].isnan().all(), "what is not finite shows"
    assert not of.largest.isfinite()


@BOTH
def test_the_largest_magnitude_is_kept_and_only_when_asked(implementation):
    of, x = scale(1.0), torch.tensor([[0.5, -3.0], [2.0, 0.0], [1.0, -0.0]]).bfloat16()
    with choice.forced(implementation):
        quantise(x, of, E4M3)
        assert of.largest.item() == 0
        quantise(x, of, E4M3, record=True)
        quantise(x / 4, of, E4M3, record=True)
    assert of.largest.item() == 3 and choice.ran["fp8"] == implementation


@BOTH
def test_only_the_layouts_that_are_asked_for_are_made(implementation):
    x = torch.randn(70, 130).bfloat16()
    with choice.forced(implementation):
        rows, columns = quantise(x, scale(4.0), E4M3)
        assert quantise(x, scale(4.0), E4M3, transposed=False)[1] is None
        (only,) = (quantise(x, scale(4.0), E4M3, row_major=False)[1],)
    assert rows.shape == (70, 130) and columns.shape == (130, 70) and torch.equal(only.float(), rows.float().T)


@pytest.mark.parametrize("limit", LARGEST.values())
def test_a_scale_is_the_largest_power_of_two_that_fits_all(limit):
    largest = torch.tensor([1.0, limit, 448 * 1.001, 0.875, 0.8751, 3e38, 1e-30, 2.0**-133, 0.0])
    scales = scale_for(largest, torch.tensor(limit))
    assert scales[-1] == 1 and (torch.frexp(scales).mantissa == 0.5).all()
    assert (scales.double() * largest.double() <= limit).all()
    inside = largest[:6].double()
    assert (2 * scales[:6].double() * inside > limit).all()
    assert scales.isfinite().all() and (scales.reciprocal() > 0).all()


def test_the_history_decides_and_forgets():
    scaling = Scaling(1, "cpu")
    scaling.largest[:] = torch.tensor([7.0, 2.0])
    scaling.push()
    assert scaling.scale.tolist() == [64, 16384] and not scaling.largest.any()
    for _ in range(HISTORY - 1):
        scaling.largest[:] = torch.tensor([0.7, float("nan")])
        scaling.push()
    assert scaling.scale.tolist() == [64, 16384], "what is not finite is not entered"
    scaling.largest[0] = 0.7
    scaling.push()
    assert scaling.scale[0] == 512 and scaling.inverse[0] == 1 / 512
    before = scaling.scale.clone()
    scaling.rescale()
    assert torch.equal(scaling.scale, before), "scales are a function of the history"


def test_every_scale_lies_where_cublas_takes_it():
    scaling = Scaling(3, "cpu")
    scales = [of.inverse for weight in range(3) for of in scaling.of(weight)]
    assert all(inverse.data_ptr() % 16 == 0 and inverse.shape == (1,) for inverse in scales)
    assert len({inverse.data_ptr() for inverse in scales}) == 9


def test_a_product_is_that_of_the_quantised_numbers():
    torch.manual_seed(0)
    x, w = torch.randn(32, 48).bfloat16(), torch.randn(16, 48).bfloat16()
    sx, sw = scale(64.0), scale(32.0)
    x8, w8 = quantise(x, sx, E5M2)[0], quantise(w, sw, E4M3)[0]
    y = scaled_mm(x8, w8.t(), sx.inverse, sw.inverse, torch.float32, fast=False)
    exact = (x8.double() / 64) @ (w8.double() / 32).T
    assert (y.double() - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (exact - x.double() @ w.double().T).norm() <= 0.1 * exact.norm()
    out = torch.empty(32, 16)
    assert scaled_mm(x8, w8.t(), sx.inverse, sw.inverse, torch.float32, fast=True, out=out) is out


# --- experts: a scale a row -------------------------------------------------------------------------------------------


@BOTH
def test_rows_have_scales_of_their_own_and_the_bits_of_the_format(implementation):
    torch.manual_seed(0)
    x = (torch.randn(40, 72) * 2.0 ** torch.randint(-40, 40, (40, 1))).bfloat16()
    x[3], x[4, 5], x[5, 6], x[6, 0] = 0, float("inf"), float("nan"), 448 * 2.0**20
    rows = torch.randint(0, 40, (50,)).int()
    with choice.forced(implementation):
        y, inverse = quantise_rows(x, rows)
        whole, _ = quantise_rows(x)
    assert torch.equal(whole.view(torch.uint8)[rows], y.view(torch.uint8)), "gathered"
    for i, row in enumerate(rows.tolist()):
        finite = x[row].isfinite()
        assert y[i].float()[~finite].isnan().all()
        if not finite.all():
            continue
        factor = 1 / inverse[i].item()
        assert np.array_equal(y[i].view(torch.uint8).numpy(), bits_by_hand(x[row], factor, E4M3))
        largest = x[row].abs().max().item() * factor
        assert largest == 0 or 224 < largest <= 448, "the largest power of two that fits"


@BOTH
@pytest.mark.parametrize("counts", [(5, 0, 7), (0, 12, 0), (0, 0, 1)], ids=["none for one", "all on one", "one row"])
def test_products_of_experts_in_eight_bits_are_those_of_the_quantised_numbers(implementation, counts):
    torch.manual_seed(0)
    weight, n = torch.randn(3, 32, 48).bfloat16(), sum(counts)
    ends = torch.tensor(counts).cumsum(0).int()
    x, dy = torch.randn(n, 48).bfloat16(), torch.randn(n, 32).bfloat16()
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    with choice.forced(implementation):
        experts = Fp8Experts(weight)
        experts.refresh(weight)
        y = experts.multiply(*quantise_rows(x), ends, transposed=False)
        dx = experts.multiply(*quantise_rows(dy), ends, transposed=True)
    for got, exact in ((y, torch.einsum("mi,moi->mo", x.double(), weight[owner].double())),
                       (dx, torch.einsum("mo,moi->mi", dy.double(), weight[owner].double()))):  # fmt: skip
        error = (got.double() - exact).norm() / exact.norm()
        assert 0.005 < error < 0.05, "of three bits of mantissa"
