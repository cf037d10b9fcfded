"""Root mean square normalisation with the residual add in front of it (Zhang and Sennrich 2019).

h = x + residual, y = h / sqrt(mean(h^2) + eps) * weight. Statistics are FP32 whatever the rows are.

`rmsnorm_fork` is what a pre-norm block uses: it hands on a copy of x for the branch's last matmul to add its result to.
The copy leaves from registers, and the matmul reads it hidden under its arithmetic: one pass over memory less than a
norm that adds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.partials import deliver_partials
from llmtrain.kernels.weight import deliver_gradient

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None


PROCESSORS = 132
"""Of an H200. Not asked of the card: how a sum is shared out, and so rounded, is the same on every card."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rmsnorm_forward_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual: (..., H) -> y (..., H), h (..., H), both in x's dtype, rstd (...) in FP32 (FP64 for FP64 rows)."""
    h = x if residual is None else x + residual
    wide = _wide(h)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = (wide * rstd[..., None] * weight.to(wide.dtype)).to(x.dtype)
    return y, h, rstd


def rmsnorm_backward_reference(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """dy, h: (..., H), dh: the gradient that reaches h past the norm -> dx (..., H) in h's dtype, dw (H,) in FP32.

    dx = rstd * (g - n * mean(g * n)) + dh with n = h * rstd, g = dy * weight; dw = sum over rows of dy * n.
    """
    g = _wide(dy)
    normed = _wide(h) * rstd[..., None]
    dw = (g * normed).flatten(0, -2).sum(0)
    g = g * weight.to(g.dtype)
    dx = rstd[..., None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + _wide(dh)
    return dx.to(h.dtype), dw


if triton is not None:

    @triton.jit
    def _rmsnorm_forward_kernel(
        x, residual, weight, y, h, rstd, n_rows, x_group, x_row, residual_group, residual_row, eps,
        H: tl.constexpr, GROUP: tl.constexpr, COPY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        cols = tl.arange(0, BLOCK)[None, :]
        mask = (rows < n_rows)[:, None] & (cols < H)
        group = (rows // GROUP).to(tl.int64)[:, None]
        row = (rows % GROUP)[:, None]
        flat = rows.to(tl.int64)[:, None] * H + cols
        narrow = tl.load(x + group * x_group + row * x_row + cols, mask=mask, other=0.0)
        if COPY:
            tl.store(h + flat, narrow, mask=mask)
        elif residual is not None:
            other = tl.load(residual + group * residual_group + row * residual_row + cols, mask=mask, other=0.0)
            narrow = (narrow.to(tl.float32) + other.to(tl.float32)).to(narrow.dtype)
            tl.store(h + flat, narrow, mask=mask)
        w = tl.load(weight + cols, mask=cols < H, other=0.0).to(tl.float32)
        wide = narrow.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / H + eps)
        tl.store(rstd + rows, scale, mask=rows < n_rows)
        tl.store(y + flat, (wide * scale[:, None] * w).to(narrow.dtype), mask=mask)

    # Each program of the backward walks over the rows with a stride of all programs, and the pipeline copies the next
    # rows to shared memory meanwhile: loads into registers would be put off by the assembler, for the sake of
    # registers, until half of a row is computed.

    @triton.jit
    def _rmsnorm_backward_kernel(
        dy, dh, h, weight, rstd, dx, partials, n_rows, dy_group, dy_row, dh_group, dh_row, h_group, h_row,
        H: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        # As many rows of columns as a tile has: the weight is laid out as the rows are, not shuffled into that layout.
        cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
        w = tl.load(weight + cols, mask=cols < H, other=0.0).to(tl.float32)
        dw = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            rows = first + tl.arange(0, ROWS)
            mask = (rows < n_rows)[:, None] & (cols < H)
            group = (rows // GROUP).to(tl.int64)[:, None]
            row = (rows % GROUP)[:, None]
            scale = tl.load(rstd + rows, mask=rows < n_rows, other=0.0)[:, None]
            x = tl.load(h + group * h_group + row * h_row + cols, mask=mask, other=0.0)
            g = tl.load(dy + group * dy_group + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
            if dh is not None:
                past = tl.load(dh + group * dh_group + row * dh_row + cols, mask=mask, other=0.0)
            normed = x.to(tl.float32) * scale
            product = g * normed
            dw += product
            mean = tl.sum(product * w, 1)[:, None] / H
            result = scale * (g * w - normed * mean)
            if dh is not None:
                result += past.to(tl.float32)
            tl.store(dx + rows.to(tl.int64)[:, None] * H + cols, result.to(dx.dtype.element_ty), mask=mask)
        col = tl.arange(0, BLOCK)
        tl.store(partials + tl.program_id(0) * H + col, tl.sum(dw, 0), mask=col < H)


def _as_rows(tensors: list[Tensor | None]) -> tuple[int, list[Tensor | None], list[int]]:
    """Tensors of one shape (..., H) as rows without a copy where their strides allow it.

    Returns the rows a group, the tensors as (groups, rows a group, H), and of each its stride between groups and
    between the rows of one. Heads of a packed qkv, (B, T, heads, D), are such groups.
    """

    def view(x: Tensor, group: int) -> Tensor | None:
        if x.stride(-1) != 1:
            return None
        try:
            return x.view(-1, group, x.shape[-1])
        except RuntimeError:  # torch's way to say that the strides do not allow it
            return None

    group = 1
    if any(x is not None and view(x, 1) is None for x in tensors):
        group = next(x.shape[-2] for x in tensors if x is not None)
    views: list[Tensor | None] = []
    strides = []
    for x in tensors:
        rows = None
        if x is not None:
            rows = view(x, group)
            rows = x.contiguous().view(-1, group, x.shape[-1]) if rows is None else rows
        views.append(rows)
        strides += [0, 0] if rows is None else [rows.stride(0), rows.stride(1)]
    return group, views, strides


def _forward_tile(width: int) -> tuple[int, int]:
    """(rows a program, warps)."""
    block = triton.next_power_of_2(width)
    # One H200, times what the bytes need: 4 rows of 768 by 4 warps 1.09, 2 rows 1.13; 2 rows of 2048 1.11, one 1.06.
    return max(1, 4096 // block) if block <= 1024 else 1, max(4, block // 512)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, copy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rmsnorm_forward_reference`; with `copy`, h is a copy of x."""
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty_like(y) if copy or residual is not None else x
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    group, (x_rows, residual_rows), strides = _as_rows([x, residual])
    rows, warps = _forward_tile(width)
    _rmsnorm_forward_kernel[(triton.cdiv(rstd.numel(), rows),)](
        x_rows, residual_rows, weight, y, h, rstd, rstd.numel(), *strides, eps,
        width, group, copy, rows, triton.next_power_of_2(width), num_warps=warps,
    )  # fmt: skip
    return y, h, rstd


@dataclass(frozen=True)
class BackwardTile:
    """How the backward is shared out: by the shape alone, because this decides how dw is rounded."""

    rows: int
    """Rows at a time."""
    warps: int
    programs: int
    stages: int
    """Of the pipeline: rows in flight, and one in work."""


def _backward_tile(n_rows: int, width: int) -> BackwardTile:
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    # Measured on an H200: a row over 4 warps beats a row in one or in two, at every width and number of rows; 8
    # programs a processor are 1.08 times the bytes' time at width 768 (4: 1.17), 4 are 1.11 at 960 (8: 1.14) and 1.05
    # at 2048 (1.14). At most 64 rows in one running sum.
    warps = min(32, max(4, block // 1024))
    programs = PROCESSORS * (8 if width <= 768 else 4)
    programs = max(programs, triton.cdiv(n_rows, 64 * rows))
    stages = 3 if block <= 8192 else 1  # two rows of three FP32 tensors have to fit into shared memory
    return BackwardTile(rows, warps, min(programs, triton.cdiv(n_rows, rows)), stages)


def _backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """As `rmsnorm_backward_reference`, but dw is left in partial sums, (P, H) FP32."""
    n_rows, width = rstd.numel(), h.shape[-1]
    group, (dy_rows, dh_rows, h_rows), strides = _as_rows([dy, dh, h])
    tile = _backward_tile(n_rows, width)
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    partials = torch.empty((tile.programs, width), dtype=torch.float32, device=h.device)
    _rmsnorm_backward_kernel[(tile.programs,)](
        dy_rows, dh_rows, h_rows, weight, rstd, dx, partials, n_rows, *strides,
        width, group, tile.rows, triton.next_power_of_2(width), tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return dx, partials


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, fork: bool) -> Any:
        ctx.chosen = choose("rmsnorm", x)
        if ctx.chosen == TRITON:
            y, h, rstd = _forward(x, residual, weight.detach(), eps, fork)
        else:
            y, h, rstd = rmsnorm_forward_reference(x, residual, weight.detach(), eps)
            h = h.clone() if fork else h
        ctx.weight = weight
        ctx.save_for_backward(x if fork else h, rstd)
        return (y, h) if fork or residual is not None else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor | None = None) -> Any:
        h, rstd = ctx.saved_tensors
        if ctx.chosen == TRITON:
            dx, partials = _backward(dy, dh, h, ctx.weight.detach(), rstd)
            dw = deliver_partials(ctx.weight, partials)
        else:
            dx, whole = rmsnorm_backward_reference(dy, dh, h, ctx.weight.detach(), rstd)
            dw = deliver_gradient(ctx.weight, whole)
        return dx, (dx if ctx.needs_input_grad[1] else None), dw, None, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    """x: (..., H), weight: (H,) -> y (..., H), or (y, h = x + residual) where a residual is given."""
    return _RMSNorm.apply(x, residual, weight, eps, False)


def rmsnorm_fork(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x: (..., H), weight: (H,) -> y (..., H), and a copy of x (..., H) that may be written."""
    return _RMSNorm.apply(x, None, weight, eps, True)
