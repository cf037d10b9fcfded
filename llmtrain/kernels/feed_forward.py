"""A feed-forward in eight bits as one op, so that SwiGLU's product and the gradient of gate and up leave their kernels
as the matmuls take them: cast, both ways round, their magnitudes noted. Neither is in memory in bf16 at all.

The bits are those of `linear`, `swiglu` and `linear_add` in a row: both are rounded to bf16 before they are scaled.
"""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.derivatives import first_derivative
from llmtrain.kernels.fp8 import (
    E4M3,
    E5M2,
    FORM,
    LARGEST,
    Fp8Weight,
    Scale,
    deliver_eight_bit_product,
    eight_bit,
    quantise,
)
from llmtrain.kernels.linear import Remake
from llmtrain.kernels.swiglu import swiglu_backward_reference, swiglu_forward_reference

try:
    import triton
    import triton.language as tl

    from llmtrain.kernels.fp8 import _fp8_store
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

ROWS, COLS, WARPS = 64, 64, 8
"""The tile of a program. Gate, up and the product's gradient are in registers together, so it is smaller than fp8.py's:
two sectors of a row both ways round."""


if triton is not None:

    @triton.jit
    def _fp8_swiglu_kernel(
        gate_up, scale, largest, y, y_t, n_rows, F, limit, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
        BY_HAND: tl.constexpr, ROW_MAJOR: tl.constexpr, TRANSPOSED: tl.constexpr, RECORD: tl.constexpr,
        ROWS: tl.constexpr, COLS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        mask = (row < n_rows)[:, None] & (col < F)[None, :]
        at = gate_up + row[:, None] * (2 * F) + col[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
        product = (gate * tl.sigmoid(gate) * up).to(gate_up.dtype.element_ty).to(tl.float32)
        _fp8_store(
            product, scale, largest, y, y_t, row, col, mask, n_rows, F, limit,
            MANTISSA, LOWEST, BY_HAND, ROW_MAJOR, TRANSPOSED, RECORD,
        )  # fmt: skip

    @triton.jit
    def _fp8_swiglu_backward_kernel(
        dy, gate_up, scale, largest, d, d_t, n_rows, F, limit, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
        BY_HAND: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        mask = (row < n_rows)[:, None] & (col < F)[None, :]
        at = gate_up + row[:, None] * (2 * F) + col[None, :]
        g = tl.load(dy + row[:, None] * F + col[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        d_gate = (g * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dy.dtype.element_ty).to(tl.float32)
        d_up = (g * gate * sigmoid).to(dy.dtype.element_ty).to(tl.float32)
        _fp8_store(
            d_gate, scale, largest, d, d_t, row, col, mask, n_rows, 2 * F, limit,
            MANTISSA, LOWEST, BY_HAND, True, TRANSPOSED, True,
        )  # fmt: skip
        _fp8_store(
            d_up, scale, largest, d, d_t, row, F + col, mask, n_rows, 2 * F, limit,
            MANTISSA, LOWEST, BY_HAND, True, TRANSPOSED, True,
        )  # fmt: skip


def _bits(x: Tensor, by_hand: bool) -> Tensor:
    return x.view(torch.uint8) if by_hand else x


def quantise_swiglu(
    gate_up: Tensor, of: Scale, *, row_major: bool, transposed: bool, record: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`quantise` of SwiGLU's product, in E4M3: gate_up (N, 2F) -> (N, F) and (F, N), those that are asked for."""
    if choose("fp8", gate_up) != TRITON:
        product = swiglu_forward_reference(gate_up)
        return quantise(product, of, E4M3, row_major=row_major, transposed=transposed, record=record)
    n, width = len(gate_up), gate_up.shape[1] // 2
    y = torch.empty((n, width) if row_major else 0, dtype=E4M3, device=gate_up.device)
    y_t = torch.empty((width, n) if transposed else 0, dtype=E4M3, device=gate_up.device)
    by_hand = not gate_up.is_cuda
    _fp8_swiglu_kernel[(triton.cdiv(n, ROWS), triton.cdiv(width, COLS))](
        gate_up, of.scale, of.largest.view(torch.int32), _bits(y, by_hand), _bits(y_t, by_hand), n, width,
        LARGEST[E4M3], *FORM[E4M3], by_hand, row_major, transposed, record, ROWS, COLS, num_warps=WARPS,
    )  # fmt: skip
    return (y if row_major else None), (y_t if transposed else None)


def quantise_swiglu_gradient(
    dy: Tensor, gate_up: Tensor, of: Scale, *, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """`quantise` of the gradient of gate and up, in E5M2, its magnitude noted: dy (N, F), that of the product, and
    gate_up (N, 2F) -> (N, 2F) and, if asked for, (2F, N)."""
    if choose("fp8", dy) != TRITON:
        d_gate_up = swiglu_backward_reference(dy, gate_up)
        d, d_t = quantise(d_gate_up, of, E5M2, transposed=transposed, record=True)
        assert d is not None
        return d, d_t
    n, width = dy.shape
    d = torch.empty((n, 2 * width), dtype=E5M2, device=dy.device)
    d_t = torch.empty((2 * width, n) if transposed else 0, dtype=E5M2, device=dy.device)
    by_hand = not dy.is_cuda
    _fp8_swiglu_backward_kernel[(triton.cdiv(n, ROWS), triton.cdiv(width, COLS))](
        dy, gate_up, of.scale, of.largest.view(torch.int32), _bits(d, by_hand), _bits(d_t, by_hand), n, width,
        LARGEST[E5M2], *FORM[E5M2], by_hand, transposed, ROWS, COLS, num_warps=WARPS,
    )  # fmt: skip
    return d, (d_t if transposed else None)


class _EightBitFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, into: Tensor, of_first: Fp8Weight, of_second: Fp8Weight,
        remake: Remake | None, keep_product: bool, train: bool, result: bool,
    ) -> Tensor:  # fmt: skip
        ctx.weights, ctx.eight, ctx.remake, ctx.shape = (gate_up, down), (of_first, of_second), remake, x.shape
        ctx.mark_dirty(into)
        rows = x.reshape(-1, x.shape[-1])
        x8, x8_t = of_first.quantise_input(rows, row_major=True, transposed=train and remake is None, record=train)
        assert x8 is not None
        hidden = of_first.multiply(x8, x.dtype)  # gate and up (N, 2F)
        product, product_t = quantise_swiglu(
            hidden, of_second.x, row_major=result, transposed=train and keep_product, record=train
        )
        # Not saved as tensors are: each is let go of within the backward, as soon as it was used.
        ctx.kept = (x8_t, hidden, product_t) if train else None
        if product is not None:
            y = of_second.multiply((product,), x.dtype)
            into.view(y.shape).add_(y)  # eight-bit matmuls add to nothing, so this is rounded twice
        return into

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate_up, down), (of_first, of_second) = ctx.weights, ctx.eight
        wants_dx, wants_first, wants_second = ctx.needs_input_grad[:3]
        x8_t, hidden, product_t = ctx.kept
        ctx.kept = dx = d_first = d_second = None
        dy8, dy8_t = of_second.quantise_gradient(dy.reshape(-1, dy.shape[-1]), transposed=wants_second)
        d_product = of_second.input_gradient(dy8, dy.dtype)  # (N, F)
        del dy8
        if wants_second:
            if product_t is None:
                product_t = quantise_swiglu(hidden, of_second.x, row_major=False, transposed=True, record=False)[1]
            assert product_t is not None
            d_second = deliver_eight_bit_product(down, of_second, dy8_t, (product_t,))
        del dy8_t, product_t
        d_hidden, d_hidden_t = quantise_swiglu_gradient(d_product, hidden, of_first.dy, transposed=wants_first)
        del d_product, hidden
        if wants_dx:
            dx = of_first.input_gradient((d_hidden,), dy.dtype).view(ctx.shape)
        del d_hidden
        if wants_first:
            if x8_t is None:
                x = ctx.remake()
                ctx.remake = None
                _, x8_t = of_first.quantise_input(x.reshape(-1, x.shape[-1]), row_major=False, transposed=True)
            assert d_hidden_t is not None
            d_first = deliver_eight_bit_product(gate_up, of_first, (d_hidden_t,), x8_t)
        return dx, d_first, d_second, dy, None, None, None, None, None, None


def eight_bit_feed_forward(gate_up: Tensor, down: Tensor, x: Tensor) -> tuple[Fp8Weight, Fp8Weight] | None:
    """The operands of both matrices, where they have one scale a tensor each that is known before the tensor is."""
    first, second = eight_bit(gate_up, x), eight_bit(down, x)
    if isinstance(first, Fp8Weight) and isinstance(second, Fp8Weight) and not second.scaling.calibrating:
        return first, second
    return None


def feed_forward_add(
    x: Tensor, gate_up: Tensor, down: Tensor, into: Tensor, operands: tuple[Fp8Weight, Fp8Weight],
    remake: Remake | None = None, keep_product: bool = True, result: bool = True,
) -> Tensor:  # fmt: skip
    """into (..., d) + down @ SwiGLU(gate_up @ x), of x (..., d) bf16, gate_up (2F, d) and down (d, F), whose `operands`
    are those of `eight_bit_feed_forward`. `into` is overwritten with it and returned. `remake` as of `linear`; without
    `keep_product` SwiGLU's product is made again in the backward. Without `result` there is only the gradient."""
    return _EightBitFeedForward.apply(
        x, gate_up, down, into, *operands, remake, keep_product, torch.is_grad_enabled(), result
    )
