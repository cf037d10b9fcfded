"""y = x @ weight.T: where every matmul with a weight, and its precision, lives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.fp8 import EightBitWeight, deliver_eight_bit_product, eight_bit
from llmtrain.kernels.mxfp8 import MxWeight, deliver_mx_product, input_gradient, mx_operands, rounded
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


def _eight_bit_forward(
    ctx: Any, x: Tensor, weight: Tensor, eight: EightBitWeight, remake: Remake | None, train: bool, result: bool = True
) -> Tensor | None:
    """(N, out), of x (..., in). For the backward x is kept in eight bits, as dW takes it."""
    ctx.weight, ctx.eight, ctx.remake, ctx.shape = weight, eight, remake, x.shape
    keeps = train and remake is None
    rows = x.reshape(-1, x.shape[-1])
    x8, x8_t = eight.quantise_input(rows, row_major=result, transposed=keeps, record=train)
    ctx.save_for_backward(*(x8_t or ()))
    if not result:
        return None
    assert x8 is not None
    return eight.multiply(x8, x.dtype)


def _eight_bit_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    eight, wants_dx, wants_dw = ctx.eight, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    dy8, dy8_t = eight.quantise_gradient(dy.reshape(-1, dy.shape[-1]), transposed=wants_dw)
    dx = eight.input_gradient(dy8, dy.dtype).view(ctx.shape) if wants_dx else None
    del dy8
    if not wants_dw:
        return dx, None
    if ctx.remake is None:
        x8_t = ctx.saved_tensors
    else:
        x = ctx.remake()
        ctx.remake = None
        _, x8_t = eight.quantise_input(x.reshape(-1, x.shape[-1]), row_major=False, transposed=True)
    return dx, deliver_eight_bit_product(ctx.weight, eight, dy8_t, x8_t)


class _EightBitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eight: EightBitWeight, remake: Remake | None, train: bool
    ) -> Tensor:
        y = _eight_bit_forward(ctx, x, weight, eight, remake, train)
        assert y is not None
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *_eight_bit_backward(ctx, dy), None, None, None


class _EightBitLinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eight: EightBitWeight, into: Tensor, remake: Remake | None, train: bool,
        result: bool,
    ) -> Tensor:  # fmt: skip
        ctx.mark_dirty(into)
        y = _eight_bit_forward(ctx, x, weight, eight, remake, train, result)
        if y is not None:
            into.view(y.shape).add_(y)  # eight-bit matmuls add to nothing, so this is rounded twice
        return into

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *_eight_bit_backward(ctx, dy), None, dy, None, None, None


class _MxLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mx: MxWeight, remake: Remake | None) -> Tensor:
        ctx.weight, ctx.mx = weight, mx
        _keep(ctx, x, remake)
        y = rounded(x.reshape(-1, x.shape[-1]), 1) @ mx.rows.T
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(ctx.mx, rows).view(*dy.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            x = _kept(ctx)
            dw = deliver_mx_product(ctx.weight, rows, x.reshape(-1, x.shape[-1]))
        return dx, dw, None, None


class _MxLinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, mx: MxWeight, into: Tensor, remake: Remake | None, result: bool
    ) -> Tensor:
        ctx.weight, ctx.mx = weight, mx
        _keep(ctx, x, remake)
        ctx.mark_dirty(into)
        if result:
            into.view(-1, into.shape[-1]).addmm_(rounded(x.reshape(-1, x.shape[-1]), 1), mx.rows.T)
        return into

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dw, _, _ = _MxLinear.backward(ctx, dy)
        return dx, dw, None, dy, None, None


def linear_add(
    x: Tensor, weight: Tensor, into: Tensor, remake: Remake | None = None, result: bool = True
) -> Tensor:
    """into (..., out) + x (..., in) @ weight.T, added in the matmul's FP32 accumulator and rounded once; `into`, which
    must be contiguous and nobody else's, is overwritten with it and returned. `remake` as in `linear`. Without
    `result` there is only the gradient: `into` comes back as it was."""
    if eight := eight_bit(weight, x):
        return _EightBitLinearAdd.apply(x, weight, eight, into, remake, torch.is_grad_enabled(), result)
    if mx := mx_operands(weight, x):
        return _MxLinearAdd.apply(x, weight, mx, into, remake, result)
    return _LinearAdd.apply(x, weight, into, remake, result)


def linear(x: Tensor, weight: Tensor, remake: Remake | None = None) -> Tensor:
    """x: (..., in), weight: (out, in) FP32 master; the product runs, and comes back, in x's dtype: (..., out).

    With `remake`, x is not kept for the backward, which calls that instead and must get the same bits. A weight with
    eight-bit operands (`EightBitWeight`, `MxWeight`) multiplies bf16 rows by those."""
    if eight := eight_bit(weight, x):
        return _EightBitLinear.apply(x, weight, eight, remake, torch.is_grad_enabled())
    if mx := mx_operands(weight, x):
        return _MxLinear.apply(x, weight, mx, remake)
    return _Linear.apply(x, weight, remake)
