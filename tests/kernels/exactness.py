"""What a result may differ from its FP64 value by."""

import torch
from torch import Tensor

ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""Relative: one unit in the last place of bf16; FP32 results went through a few dozen roundings."""


def assert_rounded(result: Tensor, exact: Tensor) -> None:
    """`result` is `exact` to a unit in its last place, or to FP32's rounding of the largest value beside it."""
    assert result.shape == exact.shape
    error = (result.double() - exact).abs()
    allowed = ULP[result.dtype] * exact.abs() + 2e-6 * exact.abs().max()
    worst = (error - allowed).max().item()
    assert worst <= 0, f"{worst} beyond the tolerance, error up to {error.max().item()}"  # NaN fails too


def assert_summed(result: Tensor, exact: Tensor) -> None:
    """An FP32 sum over rows: relative to the largest element."""
    assert result.shape == exact.shape and result.dtype == torch.float32
    error = (result.double() - exact).abs().max() / exact.abs().max()
    assert error <= 1e-5, f"relative error {error}"
