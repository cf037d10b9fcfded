"""Root mean square normalisation with the residual add in front of it (Zhang and Sennrich 2019).

h = x + residual, y = h / sqrt(mean(h^2) + eps) * weight. Statistics are FP32 whatever the rows are.
"""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.weight import deliver_gradient


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rmsnorm_forward_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual: (N, H) -> y (N, H), h (N, H), both in x's dtype, rstd (N,) in FP32 (FP64 for FP64 rows)."""
    h = x if residual is None else x + residual
    wide = _wide(h)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = (wide * rstd[:, None] * weight.to(wide.dtype)).to(x.dtype)
    return y, h, rstd


def rmsnorm_backward_reference(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """dy, h: (N, H), dh: the gradient that reaches h past the norm -> dx (N, H) in h's dtype, dw (H,) in FP32.

    dx = rstd * (g - n * mean(g * n)) + dh with n = h * rstd, g = dy * weight; dw = sum over rows of dy * n.
    """
    g = _wide(dy)
    normed = _wide(h) * rstd[:, None]
    dw = (g * normed).sum(0)
    g = g * weight.to(g.dtype)
    dx = rstd[:, None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + _wide(dh)
    return dx.to(h.dtype), dw


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        shape = x.shape
        rows = x.reshape(-1, shape[-1])
        residual_rows = None if residual is None else residual.reshape(-1, shape[-1])
        y, h, rstd = rmsnorm_forward_reference(rows, residual_rows, weight.detach(), eps)
        ctx.weight = weight
        ctx.save_for_backward(h, rstd)
        if residual is None:
            return y.view(shape)
        return y.view(shape), h.view(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor | None = None) -> Any:
        h, rstd = ctx.saved_tensors
        shape = dy.shape
        dh_rows = None if dh is None else dh.reshape(-1, shape[-1])
        dx, dw = rmsnorm_backward_reference(dy.reshape(-1, shape[-1]), dh_rows, h, ctx.weight.detach(), rstd)
        dx = dx.view(shape)
        return dx, (dx if ctx.needs_input_grad[1] else None), deliver_gradient(ctx.weight, dw), None


def rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    """x: (..., H), weight: (H,) -> y (..., H), or (y, h = x + residual) where a residual is given."""
    return _RMSNorm.apply(x, residual, weight, eps)
