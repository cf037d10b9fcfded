"""Tools of the tests that hold an op's reference to its formula in FP64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

# Relative error in norm against FP64. bf16 rows carry 8 bits, and an op rounds a few times.
BOUND = {F64: 1e-12, F32: 2e-6, BF16: 1.5e-2}

DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=["fp64", "fp32", "bf16"])
DELIVERIES = pytest.mark.parametrize("delivery", ["returned", "returned twice", "overwritten", "added"])


def randn(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=F64) * scale).to(dtype).requires_grad_()


def master(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """A weight as training holds it: FP32, or FP64 for FP64 rows, with its cached copy for bf16 rows. Its values are
    exact in `dtype`, so that the narrow operand is no source of error."""
    values = randn(*shape, dtype=dtype, scale=scale).detach()
    weight = values.to(F64 if dtype == F64 else F32, copy=True).requires_grad_()
    if dtype == BF16:
        weight.operand_cache = values  # type: ignore[attr-defined]
    return weight


def wide(x: Tensor) -> Tensor:
    """A leaf of the same values in FP64."""
    return x.detach().to(F64).requires_grad_()


def close(got: Tensor, want: Tensor, bound: float, floor: float = 1e-30) -> None:
    """Relative in norm; `floor` is the norm below which `want` counts as rounding noise."""
    assert got.shape == want.shape
    error = (got.detach().to(F64) - want.detach()).norm() / want.detach().norm().clamp_min(floor)
    assert error <= bound, f"relative error {error:.3e} > {bound:.1e}"


def weight_gradient(run: Callable[[], Any], weight: Tensor, delivery: str) -> Tensor:
    """The gradient that one `run` (forward and backward) brings to `weight`, delivered in one of the ways there are."""
    weight.grad = None
    if delivery in ("overwritten", "added"):
        weight.grad = torch.full_like(weight, float("nan"))
        weight.grad_stale = True  # type: ignore[attr-defined]
        buffer = weight.grad
    run()
    if delivery == "returned":
        assert weight.grad is not None
        return weight.grad
    if delivery == "overwritten":
        assert weight.grad is buffer and not weight.grad_stale  # type: ignore[attr-defined]
        return weight.grad
    run()
    if delivery == "added":
        assert weight.grad is buffer
    assert weight.grad is not None
    return weight.grad / 2
