"""y = x @ weight.T: where every matmul with a weight, and its precision, lives."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.weight import deliver_product, operand


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.operand = operand(weight, x.dtype)
        ctx.weight = weight
        ctx.save_for_backward(x)
        return F.linear(x, ctx.operand)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x,) = ctx.saved_tensors
        dx = dy @ ctx.operand if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = deliver_product(ctx.weight, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
        return dx, dw


class _LinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, into: Tensor) -> Tensor:
        ctx.operand = operand(weight, x.dtype)
        ctx.weight = weight
        ctx.save_for_backward(x)
        ctx.mark_dirty(into)
        into.view(-1, into.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), ctx.operand.T)
        return into

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return *_Linear.backward(ctx, dy), dy


def linear_add(x: Tensor, weight: Tensor, into: Tensor) -> Tensor:
    """into (..., out) + x (..., in) @ weight.T, added in the matmul's FP32 accumulator and rounded once; `into`, which
    must be contiguous and nobody else's, is overwritten with it and returned."""
    return _LinearAdd.apply(x, weight, into)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x: (..., in), weight: (out, in) FP32 master; the product runs, and comes back, in x's dtype: (..., out)."""
    return _Linear.apply(x, weight)
