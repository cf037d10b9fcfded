"""The quantiser against the formats' definitions, bit by bit, and the three products of a layer."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmtrain.kernels import choice, mxfp8
from llmtrain.kernels.linear import linear, linear_add
from llmtrain.kernels.mxfp8 import BLOCK, MxWeight, dequantise, elements, quantise, rounded, scale_exponents

EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE = EVERY[EVERY.isfinite()]


@pytest.fixture(params=[choice.REFERENCE, choice.TRITON])
def implementation(request):
    """Of `rounded`, for the whole test."""
    choice.ran.clear()
    with choice.forced(request.param, "mxfp8"):
        yield request.param
    assert choice.ran["mxfp8"] == request.param


def e4m3_reference(bits: np.ndarray, exponent: int) -> np.ndarray:
    """E4M3 bytes of bf16 bits over 2^exponent, by integers alone: 1 sign, 4 exponent (bias 7), 3 mantissa; the largest
    is 0x7E = 448, 0x7F is NaN. To the nearest, ties to even, saturating."""
    sign, field, fraction = bits >> 15, (bits >> 7) & 0xFF, bits & 0x7F
    significand = np.where(field > 0, fraction | 0x80, fraction).astype(np.int64)  # value = significand * 2^power
    power = np.where(field > 0, field, 1) - 127 - 7 - exponent
    # In units of the last place that E4M3 has at that magnitude: 2^(top - 3), but at least 2^-9.
    top = power + np.floor(np.log2(np.maximum(significand, 1))).astype(np.int64)
    unit = np.maximum(top, -6) - 3
    shift = unit - power
    left = np.minimum(np.maximum(-shift, 0), 40)
    right = np.minimum(np.maximum(shift, 0), 40)
    whole = (significand << left) >> right
    rest = (significand << left) - (whole << right)
    half = np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), 1)
    up = (right > 0) & ((rest > half) | ((rest == half) & (whole & 1 == 1)))
    whole = whole + up
    # Subnormal numbers and normal ones count on without a gap.
    code = np.where(unit == -9, whole, ((unit + 9) << 3) + whole)
    code = np.minimum(code, 0x7E)
    code = np.where(field == 0xFF, 0x7F, code)
    return (code | (sign << 7)).astype(np.uint8)


def test_every_bf16_number_with_every_scale_has_the_bits_of_the_definition():
    bits = np.arange(65536, dtype=np.int64)
    for exponent in range(-127, 128):
        mine = elements(EVERY, torch.tensor(exponent, dtype=torch.int32)).view(torch.uint8).numpy()
        expected = e4m3_reference(bits, exponent)
        nan = (bits >> 7) & 0xFF == 0xFF
        assert ((mine & 0x7F)[nan] == 0x7F).all()
        assert np.array_equal(mine[~nan], expected[~nan]), exponent


@pytest.mark.parametrize("along", [0, 1])
def test_in_a_block_of_every_scale_every_number_is_rounded_as_the_definition_says(implementation, along, monkeypatch):
    monkeypatch.setattr(mxfp8, "SIDE_BY_SIDE", 512)  # the interpreter takes as long for a small program
    bits = np.arange(65536, dtype=np.int64)
    magnitudes = EVERY.double().abs()  # as 448 * 2^120 is beyond FP32
    for exponent in range(-127 + along, 121, 2):  # every second one along either side, for time
        fits = magnitudes <= 448 * 2.0**exponent
        largest = EVERY[fits][magnitudes[fits].argmax()]
        inside = torch.nn.functional.pad(EVERY[fits], (0, -int(fits.sum()) % (BLOCK - 1))).view(-1, BLOCK - 1)
        blocks = torch.cat([inside, largest.expand(len(inside), 1)], 1)
        found = rounded(blocks if along == 1 else blocks.T, along)
        found = (found if along == 1 else found.T)[:, :-1].flatten()[: fits.sum()]
        codes = torch.from_numpy(e4m3_reference(bits[fits.numpy()], exponent)).view(torch.float8_e4m3fn)
        expected = (codes.double() * 2.0**exponent).bfloat16()
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), exponent


@pytest.mark.parametrize("shape", [(32, 1), (96, 37), (64, 200), (32, 320), (1, 32), (37, 96), (130, 64)])
def test_sides_that_no_tile_fills_and_blocks_with_what_is_not_finite(implementation, shape):
    g = torch.Generator().manual_seed(shape[0])
    x = EVERY[torch.randint(0, 65536, shape, generator=g)]
    x = torch.where(x.isfinite() | (torch.rand(shape, generator=g) < 0.3), x, 0)
    for along in (side for side in (0, 1) if shape[side] % BLOCK == 0):
        found = rounded(x, along)
        narrow, scales = quantise(x if along == 1 else x.T)
        expected = dequantise(narrow, scales) if along == 1 else dequantise(narrow, scales).T
        assert found.is_contiguous() and torch.equal(found.isnan(), expected.isnan())
        finite = expected.isfinite()
        assert torch.equal(found[finite].view(torch.int16), expected[finite].view(torch.int16))
        into = torch.empty_like(found)
        assert rounded(x, along, into) is into
        assert torch.equal(into.view(torch.int16)[finite], found.view(torch.int16)[finite])
    with pytest.raises(AssertionError):
        rounded(torch.zeros(33, 33, dtype=torch.bfloat16), 0)


def test_every_largest_magnitude_has_the_smallest_scale_that_holds_it():
    magnitudes = FINITE[FINITE >= 0].sort().values
    exponents = scale_exponents(magnitudes)
    assert exponents[0] == -127
    for value, e in zip(magnitudes[1::17].tolist(), exponents[1::17].tolist(), strict=True):
        exact = Fraction(value)
        assert exact <= 448 * Fraction(2) ** e
        assert e == -127 or exact > 448 * Fraction(2) ** (e - 1)
    assert (exponents[1:] >= exponents[:-1]).all() and exponents.max() == 120
    assert scale_exponents(torch.tensor([448.0, 449.0, 896.0, 1.75, 1.7500001])).tolist() == [0, 1, 1, -8, -7]


def test_no_block_saturates_and_a_block_without_numbers_is_nan():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1] = 0
    x[2, 40] = torch.inf
    narrow, scales = quantise(x)
    assert narrow.dtype == torch.float8_e4m3fn and scales.shape == (8, 2)
    blocks = narrow.float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    sound = torch.ones(8, 2, dtype=torch.bool)
    sound[1], sound[2, 1] = False, False
    assert (blocks[sound] <= 448).all() and (blocks[sound] > 208).all()  # the largest is above 224 before it is rounded
    assert scales[1].tolist() == [0, 0] and scales[2, 1] == 255
    back = dequantise(narrow, scales)
    assert back[2, 32:].isnan().all() and back[2, :32].isfinite().all() and not back[1].any()


@pytest.mark.parametrize("by", [choice.REFERENCE, choice.TRITON])
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(-100, 100), st.sampled_from([0, 1]))
def test_rounding_is_idempotent_relative_to_the_block_and_blind_to_powers_of_two(
    by: str, seed: int, power: int, along: int
):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with choice.forced(by):
        once = rounded(x, along)
        assert torch.equal(rounded(once, along), once)
        assert torch.equal(rounded(x * 2.0**power, along), once * 2.0**power)
        assert torch.equal(rounded(x.T, 1 - along), once.T)
    largest = x.float().unflatten(along, (-1, BLOCK)).abs().amax(along + 1, keepdim=True)
    error = (once.float() - x.float()).unflatten(along, (-1, BLOCK)).abs()
    assert (error <= torch.maximum(x.float().unflatten(along, (-1, BLOCK)).abs() / 16, largest / 2**17)).all()


def test_pieces_change_nothing(monkeypatch):
    x = torch.randn(160, 64).bfloat16()
    whole = [rounded(x, along) for along in (0, 1)]
    monkeypatch.setattr(mxfp8, "PIECE", 64 * 64)
    assert all(torch.equal(rounded(x, along), whole[along]) for along in (0, 1))


def layer(out: int = 64, n_in: int = 96) -> torch.nn.Parameter:
    g = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(out, n_in, generator=g))
    weight.operand_cache = weight.detach().bfloat16()
    weight.mx = MxWeight(weight.operand_cache)
    weight.mx.refresh()
    return weight


def mx(x: Tensor, along: int) -> Tensor:
    """Rounded, by the definition: E4M3 and a scale a block."""
    narrow, scales = quantise(x if along == 1 else x.T)
    exact = narrow.double() * torch.exp2(scales.double() - 127).repeat_interleave(BLOCK, -1)
    return exact if along == 1 else exact.T


@pytest.mark.parametrize("remade", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_the_three_products_are_those_of_rounded_operands(implementation: str, adds: bool, remade: bool):
    weight = layer()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(2, 32, 96, generator=g).bfloat16().requires_grad_()
    dy = torch.randn(2, 32, 64, generator=g).bfloat16()
    into = torch.randn(2, 32, 64, generator=g).bfloat16()
    remake = (lambda: x.detach()) if remade else None
    y = linear_add(x, weight, into.clone(), remake) if adds else linear(x, weight, remake)
    y.backward(dy)
    rows, narrow, flat_dy = x.detach().view(64, 96), weight.operand_cache, dy.view(64, 64)
    forward = mx(rows, 1) @ mx(narrow, 1).T + (into.view(64, 64).double() if adds else 0)
    assert torch.allclose(y.detach().view(64, 64).double(), forward, rtol=2**-7, atol=1e-2)
    assert torch.allclose(x.grad.view(64, 96).double(), mx(flat_dy, 1) @ mx(narrow, 0), rtol=2**-7, atol=1e-2)
    # On a CPU the product of one micro-batch is rounded to bf16.
    assert torch.allclose(weight.grad.double(), mx(flat_dy, 0).T @ mx(rows, 0), rtol=2**-7, atol=1e-2)
    plain = rows.double() @ narrow.double().T + (into.view(64, 64).double() if adds else 0)
    away = (y.detach().view(64, 64).double() - plain).norm() / plain.norm()
    assert 0.01 < away < 0.06  # of E4M3's 3 bits, and no bf16 product
