"""y = x @ weight.T: where every matmul with a weight, and its precision, lives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.weight import deliver_product, operand

Remake = Callable[[], Tensor]
"""Gives the same rows again in the backward, so that the forward need not keep them."""


def _keep(ctx: Any, x: Tensor, remake: Remake | None) -> None:
    ctx.remake = remake
    ctx.save_for_backward(*([x] if remake is None else []))


def _kept(ctx: Any) -> Tensor:
    if ctx.remake is None:
        return ctx.saved_tensors[0]
    x = ctx.remake()
    ctx.remake = None  # what it holds is freed as early as a saved tensor would be
    return x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, remake: Remake | None) -> Tensor:
        ctx.operand = operand(weight, x.dtype)
        ctx.weight = weight
        _keep(ctx, x, remake)
        return F.linear(x, ctx.operand)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx = dy @ ctx.operand if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            x = _kept(ctx)
            dw = deliver_product(ctx.weight, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
        return dx, dw, None


class _LinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, into: Tensor, remake: Remake | None, result: bool
    ) -> Tensor:
        ctx.operand = operand(weight, x.dtype)
        ctx.weight = weight
        _keep(ctx, x, remake)
        ctx.mark_dirty(into)
        if result:
            into.view(-1, into.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), ctx.operand.T)
        return into

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None, None]:
        dx, dw, _ = _Linear.backward(ctx, dy)
        return dx, dw, dy, None, None


def linear_add(
    x: Tensor, weight: Tensor, into: Tensor, remake: Remake | None = None, result: bool = True
) -> Tensor:
    """into (..., out) + x (..., in) @ weight.T, added in the matmul's FP32 accumulator and rounded once; `into`, which
    must be contiguous and nobody else's, is overwritten with it and returned. `remake` as in `linear`. Without
    `result` there is only the gradient: `into` comes back as it was."""
    return _LinearAdd.apply(x, weight, into, remake, result)


def linear(x: Tensor, weight: Tensor, remake: Remake | None = None) -> Tensor:
    """x: (..., in), weight: (out, in) FP32 master; the product runs, and comes back, in x's dtype: (..., out).

    With `remake`, x is not kept for the backward, which calls that instead and must get the same bits."""
    return _Linear.apply(x, weight, remake)
