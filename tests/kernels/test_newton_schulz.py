import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmtrain.kernels.newton_schulz import BOUND, POLYNOMIALS, SMALLEST, orthogonalise

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.06}
"""By which singular values may leave the bound."""


def matrix(rows: int, columns: int, values: Tensor, seed: int = 0) -> Tensor:
    """A random matrix with these singular values."""
    g = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, generator=g, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, rows, generator=g, dtype=torch.float64))
    return left @ torch.diag(values) @ right.T


def singular(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x.double())


def test_the_bound_is_what_the_polynomials_make_of_every_value():
    x = torch.logspace(-3, 0, 300_001, dtype=torch.float64)
    for a, b, c in POLYNOMIALS:
        x = a * x + b * x**3 + c * x**5
    assert BOUND[0] < x.min() < BOUND[0] + 0.02 and BOUND[1] - 0.02 < x.max() < BOUND[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (48, 176), (1, 64), (96, 96), (64, 65)])
def test_random_matrices_come_out_orthogonal(rows: int, columns: int, dtype: torch.dtype):
    x = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    values = singular(orthogonalise(x.clone()))
    # The smallest value of a square random matrix lies below what the bound speaks of.
    large = singular(x) >= SMALLEST * torch.linalg.matrix_norm(x.double())[:, None]
    assert values[large].min() > BOUND[0] - ROUNDING[dtype]
    assert values.max() < BOUND[1] + ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ill_conditioned_matrices_do_too_down_to_the_smallest_value_of_the_bound(dtype: torch.dtype):
    values = torch.logspace(-2.9, 0, 64, dtype=torch.float64)  # as shares of the norm, 1.2e-3 / 3.3 of it and more
    values = torch.where(values < SMALLEST * values.norm() * 1.02, SMALLEST * values.norm() * 1.02, values)
    x = matrix(64, 128, values).to(dtype)[None]
    out = orthogonalise(x.clone())[0].double()
    assert singular(out).max() < BOUND[1] + ROUNDING[dtype]
    if dtype == torch.bfloat16:  # rounding the entries to 8 bits has changed the small values as such
        u, s, v = torch.linalg.svd(matrix(64, 128, values), full_matrices=False)
        kept = (u.T @ out @ v.T).diagonal()
        assert kept[s > 0.02 * values.norm()].min() > BOUND[0] - ROUNDING[dtype]
    else:
        assert singular(out).min() > BOUND[0] - ROUNDING[dtype]


def test_the_directions_are_those_of_the_matrix():
    values = torch.logspace(-2, 0, 32, dtype=torch.float64)
    x = matrix(32, 80, values)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    across = u.T @ orthogonalise(x.clone()[None])[0] @ v.T
    assert torch.allclose(across, across.diagonal().diag(), atol=1e-9)
    assert across.diagonal().min() > BOUND[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_stays_zero_and_a_lost_direction_stays_small(dtype: torch.dtype):
    stack = torch.zeros(2, 16, 32, dtype=dtype)
    stack[1, 0] = 1.0  # of rank 1
    out = orthogonalise(stack.clone())
    assert not out[0].any()
    assert singular(out[1])[0] == pytest.approx(1.0, abs=0.2) and singular(out[1])[1:].max() < 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 24), st.integers(0, 24), st.integers(-60, 60))
def test_neither_scale_nor_neighbours_in_the_stack_count(seed: int, rows: int, more: int, exponent: int):
    x = torch.randn(2, rows, rows + more, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    both = orthogonalise(x.clone())
    # Powers of 2 scale exactly. What is below TINY is zero as far as training goes.
    assert torch.allclose(orthogonalise(x[:1] * 2.0**exponent)[0], both[0], rtol=1e-9, atol=1e-9)
    assert torch.allclose(orthogonalise(-x[1:])[0], -both[1], rtol=1e-9, atol=1e-9)
