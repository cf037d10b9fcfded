"""Root mean square normalisation with the residual add in front of it (Zhang and Sennrich 2019).

h = x + residual, y = h / sqrt(mean(h^2) + eps) * weight. Statistics are FP32 whatever the rows are.

`rmsnorm` is the op under autograd, `rmsnorm_forward` and `rmsnorm_backward` are its two halves without it: the second
gives dw in FP32, which autograd rounds to the weight's dtype. `rmsnorm_fork` is what a pre-norm block uses: it hands on
a copy of x for the branch's last matmul to add its result to. The copy leaves from registers, and the matmul reads it
hidden under its arithmetic: one pass over memory less than a norm that adds.
"""

import math
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import FLOATS, TRITON, choose
from llmtrain.kernels.derivatives import first_derivative
from llmtrain.kernels.partials import add_partials, launches_early
from llmtrain.kernels.rmsnorm_routes import (
    ATOMIC,
    COLUMNS,
    DEEP,
    SHRINK,
    BackwardRoute,
    backward_route,
    block_of,
    forward_route,
)
from llmtrain.kernels.weight import deliver_gradient, delivered, gradient_target, is_in_place, version

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

MOST_IN_FLIGHT = 96 << 10
"""Bytes of the rows that a program of the backward has on their way: GeForce cards have 99 KB of shared memory for one,
which rows of FP32 beyond 4096 pass in three stages."""


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
        row = (rows % GROUP).to(tl.int64)[:, None]
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
    #
    # dw is summed in blocks: FOLD rows in one running FP32 sum, some such blocks in a second, and all of those in FP64
    # (partials.py). Sums are kept times SHRINK, a power of two: that costs no bit, and rows near the largest FP32 that
    # cancel do not overflow on the way.

    @triton.jit
    def _normed_gradient(dy, h, scale, rows, cols, mask, dy_group, dy_row, h_group, h_row, GROUP: tl.constexpr):
        """The gradient and the normed rows, FP32, at a tile of rows and columns."""
        group = (rows // GROUP).to(tl.int64)[:, None]
        row = (rows % GROUP).to(tl.int64)[:, None]
        x = tl.load(h + group * h_group + row * h_row + cols, mask=mask, other=0.0)
        g = tl.load(dy + group * dy_group + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        return g, x.to(tl.float32) * scale

    @triton.jit
    def _rows_back(
        dy, dh, h, w, rstd, dx, dw, rows, cols, n_rows, dy_group, dy_row, dh_group, dh_row, h_group, h_row,
        H: tl.constexpr, GROUP: tl.constexpr, SHRINK: tl.constexpr,
    ):  # fmt: skip
        """Writes dx of whole rows and returns dw with their share added, row by row."""
        mask = (rows < n_rows)[:, None] & (cols < H)
        scale = tl.load(rstd + rows, mask=rows < n_rows, other=0.0)[:, None]
        g, normed = _normed_gradient(dy, h, scale, rows, cols, mask, dy_group, dy_row, h_group, h_row, GROUP)
        if dh is not None:
            group = (rows // GROUP).to(tl.int64)[:, None]
            row = (rows % GROUP).to(tl.int64)[:, None]
            past = tl.load(dh + group * dh_group + row * dh_row + cols, mask=mask, other=0.0)
        product = g * normed
        dw += SHRINK * product  # here, where the product is at hand: later it would have been kept in registers
        mean = tl.sum(product * w, 1)[:, None] / H
        result = scale * (g * w - normed * mean)
        if dh is not None:
            result += past.to(tl.float32)
        tl.store(dx + rows.to(tl.int64)[:, None] * H + cols, result.to(dx.dtype.element_ty), mask=mask)
        return dw

    @triton.jit
    def _rmsnorm_backward_kernel(
        dy, dh, h, weight, rstd, dx, sums, n_rows, dy_group, dy_row, dh_group, dh_row, h_group, h_row,
        H: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
        FOLD: tl.constexpr, SHRINK: tl.constexpr, ATOMIC: tl.constexpr, FOLLOWED: tl.constexpr,
    ):  # fmt: skip
        if FOLLOWED:  # the kernel that adds up the sums may take its place now; it waits there for all of this
            tl.extra.cuda.gdc_launch_dependents()
        # As many rows of columns as a tile has: the weight is laid out as the rows are, not shuffled into that layout.
        cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
        w = tl.load(weight + cols, mask=cols < H, other=0.0).to(tl.float32)
        dw = tl.zeros((ROWS, BLOCK), tl.float32)
        if FOLD:
            folded = tl.zeros((ROWS, BLOCK), tl.float32)
            count = 0
        for first in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            rows = first + tl.arange(0, ROWS)
            dw = _rows_back(
                dy, dh, h, w, rstd, dx, dw, rows, cols, n_rows, dy_group, dy_row, dh_group, dh_row, h_group, h_row,
                H, GROUP, SHRINK,
            )  # fmt: skip
            if FOLD:
                count += 1
                if count % FOLD == 0:
                    folded += dw
                    dw = tl.zeros((ROWS, BLOCK), tl.float32)
        if FOLD:
            dw += folded
        total = tl.sum(dw, 0)
        col = tl.arange(0, BLOCK)
        if ATOMIC:
            tl.atomic_add(sums + col, total / SHRINK, mask=col < H, sem="relaxed")
        else:
            tl.store(sums + tl.program_id(0) * H + col, total, mask=col < H)

    # Of few rows dw is summed by programs of their own, each over all rows of some columns: rstd is known, so no column
    # needs another. That reads the rows twice, the second time from the cache, and saves a launch.

    @triton.jit
    def _rmsnorm_backward_columns_kernel(
        dy, dh, h, weight, rstd, dx, sums, n_rows, dy_group, dy_row, dh_group, dh_row, h_group, h_row,
        H: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
        STRIPS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr, SHRINK: tl.constexpr, ADD: tl.constexpr,
    ):  # fmt: skip
        # A name has one type in both branches, so the strips have names of their own.
        if tl.program_id(0) < STRIPS:  # they take longest, so they begin first
            strip = tl.program_id(0) * COLS + tl.broadcast_to(tl.arange(0, COLS)[None, :], (DEEP, COLS))
            dw = tl.zeros((DEEP, COLS), tl.float32)
            for first in tl.range(0, n_rows, DEEP, num_stages=STAGES):
                deep = first + tl.arange(0, DEEP)
                mask = (deep < n_rows)[:, None] & (strip < H)
                scale = tl.load(rstd + deep, mask=deep < n_rows, other=0.0)[:, None]
                g, normed = _normed_gradient(dy, h, scale, deep, strip, mask, dy_group, dy_row, h_group, h_row, GROUP)
                dw += SHRINK * (g * normed)
            col = tl.program_id(0) * COLS + tl.arange(0, COLS)
            total = tl.sum(dw.to(tl.float64), 0) / SHRINK
            if ADD:
                total += tl.load(sums + col, mask=col < H, other=0.0).to(tl.float64)
            tl.store(sums + col, total.to(tl.float32), mask=col < H)
        else:
            cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
            w = tl.load(weight + cols, mask=cols < H, other=0.0).to(tl.float32)
            rows = (tl.program_id(0) - STRIPS) * ROWS + tl.arange(0, ROWS)
            _rows_back(
                dy, dh, h, w, rstd, dx, w, rows, cols, n_rows, dy_group, dy_row, dh_group, dh_row, h_group, h_row,
                H, GROUP, SHRINK,
            )  # fmt: skip


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
        group = next(x.shape[-2] if x.dim() > 1 else 1 for x in tensors if x is not None)
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


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, copy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rmsnorm_forward_reference`; with `copy`, h is a copy of x."""
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty_like(y) if copy or residual is not None else x
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    group, (x_rows, residual_rows), strides = _as_rows([x, residual])
    route = forward_route(rstd.numel(), width)
    _rmsnorm_forward_kernel[(triton.cdiv(rstd.numel(), route.rows),)](
        x_rows, residual_rows, weight.contiguous(), y, h, rstd, rstd.numel(), *strides, eps,
        width, group, copy, route.rows, block_of(width), num_warps=route.warps,
    )  # fmt: skip
    return y, h, rstd


def _backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dw: Tensor,
    add: bool,
    route: BackwardRoute,
    may_wait: bool = False,
) -> Tensor:
    """As `rmsnorm_backward_reference`, but dw is written into a tensor (H,), or added to it; may_wait: as of
    `add_partials`."""
    n_rows, width, block = rstd.numel(), h.shape[-1], block_of(h.shape[-1])
    group, (dy_rows, dh_rows, h_rows), strides = _as_rows([dy, dh, h])
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    given = (dy_rows, dh_rows, h_rows, weight.contiguous(), rstd, dx)
    programs = route.programs(n_rows)
    if route.program == COLUMNS:
        strips = triton.cdiv(width, route.cols)
        _rmsnorm_backward_columns_kernel[(strips + programs,)](
            *given, dw, n_rows, *strides,
            width, group, route.rows, block, route.stages, strips, route.cols, DEEP, SHRINK, add, num_warps=route.warps,
        )  # fmt: skip
        return dx
    atomic = route.program == ATOMIC
    if atomic and not add:
        dw.zero_()
    sums = dw if atomic else torch.empty((programs, width), dtype=torch.float32, device=h.device)
    row_bytes = block * sum(x.element_size() for x in (dy, dh, h) if x is not None)
    stages = min(route.stages, 1 + MOST_IN_FLIGHT // (route.rows * row_bytes))
    limit = {} if route.registers is None else {"maxnreg": route.registers}
    _rmsnorm_backward_kernel[(programs,)](
        *given, sums, n_rows, *strides,
        width, group, route.rows, block, stages, route.fold(n_rows), SHRINK, atomic, launches_early(dx),
        num_warps=route.warps, **limit,
    )  # fmt: skip
    if not atomic:
        add_partials(sums, dw, add, SHRINK, may_wait)
    return dx


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, fork: bool, deterministic: bool
    ) -> Any:
        ctx.chosen = choose("rmsnorm", x)
        if ctx.chosen == TRITON:
            y, h, rstd = _forward(x, residual, weight.detach(), eps, fork)
        else:
            y, h, rstd = rmsnorm_forward_reference(x, residual, weight.detach(), eps)
            h = h.clone() if fork else h
        ctx.weight, ctx.weight_version, ctx.deterministic = weight, version(weight), deterministic
        ctx.save_for_backward(x if fork else h, rstd)
        return (y, h) if fork or residual is not None else y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor, dh: Tensor | None = None) -> Any:
        h, rstd = ctx.saved_tensors
        weight = ctx.weight
        # Not saved as the rows are: what is delivered to must be the very parameter, not what a hook unpacks.
        if version(weight) != ctx.weight_version:
            raise RuntimeError("rmsnorm: the weight was modified in place between the forward and the backward")
        if ctx.chosen == TRITON:
            target, add = gradient_target(weight)
            route = backward_route(rstd.numel(), h.shape[-1], ctx.deterministic)
            dx = _backward(dy, dh, h, weight.detach(), rstd, target, add, route, is_in_place(weight, target))
            dw = delivered(weight, target)
        else:
            dx, whole = rmsnorm_backward_reference(dy, dh, h, weight.detach(), rstd)
            dw = deliver_gradient(weight, whole)
        return dx, (dx if ctx.needs_input_grad[1] else None), dw, None, None, None


def require_rows(x: Tensor, weight: Tensor, eps: float, name: str = "x", **like_x: Tensor | None) -> None:
    """Raise ValueError naming the argument that does not fit; `like_x` must have the shape, dtype and device of x,
    whose name is `name`."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name}: floating-point rows wanted, not {x.dtype}")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{name}: shape {tuple(x.shape)} has no last dimension to norm over")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, but rows of {name} are {x.shape[-1]} wide")
    if weight.dtype not in FLOATS:
        raise ValueError(f"weight: a floating-point weight wanted, not {weight.dtype}")
    if weight.device != x.device:
        raise ValueError(f"weight: on {weight.device}, but {name} is on {x.device}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: must be 0 or more, not {eps}")
    for other, tensor in like_x.items():
        if tensor is None:
            continue
        for what in ("shape", "dtype", "device"):
            if getattr(tensor, what) != getattr(x, what):
                raise ValueError(f"{other}: {what} {getattr(tensor, what)}, but that of {name} is {getattr(x, what)}")


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None, deterministic: bool = True
) -> Any:
    """x: (..., H), weight: (H,) -> y (..., H), or (y, h = x + residual) where a residual (..., H) is given.

    x is bf16, FP16 or FP32 (FP64 on the reference); so is the weight, which need not have x's dtype. Strides of any
    kind will do; heads (T, heads, D) of a packed tensor are read where they lie. y and h have x's dtype. With
    `deterministic` the backward gives the same bits on every run and every card; without, it may add up dw in whatever
    order programs finish, where that was measured to be faster. Raises ValueError naming the argument that does not
    fit.
    """
    require_rows(x, weight, eps, residual=residual)
    return _RMSNorm.apply(x, residual, weight, float(eps), False, bool(deterministic))


def rmsnorm_fork(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x: (..., H), weight: (H,) -> y (..., H), and a copy of x (..., H) that may be written."""
    return _RMSNorm.apply(x, None, weight, eps, True, True)


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y (..., H), h = x + residual (x itself where there is none), rstd (...) in FP32; arguments as of `rmsnorm`."""
    require_rows(x, weight, eps, residual=residual)
    with torch.no_grad():
        if choose("rmsnorm", x) == TRITON:
            return _forward(x, residual, weight, float(eps))
        return rmsnorm_forward_reference(x, residual, weight, float(eps))


def rmsnorm_backward(
    dy: Tensor, h: Tensor, weight: Tensor, rstd: Tensor, dh: Tensor | None = None, deterministic: bool = True
) -> tuple[Tensor, Tensor]:
    """dx (..., H) in h's dtype and dw (H,) in FP32, of what `rmsnorm_forward` returned.

    dy: (..., H), dh: the gradient that reaches h past the norm, or None; the gradient of a residual is dx too. Raises
    ValueError naming the argument that does not fit.
    """
    require_rows(h, weight, 0.0, name="h", dy=dy, dh=dh)
    if rstd.shape != h.shape[:-1] or rstd.device != h.device:
        raise ValueError(f"rstd: {tuple(rstd.shape)} on {rstd.device}, but {tuple(h.shape[:-1])} on {h.device} wanted")
    if rstd.dtype not in FLOATS:
        raise ValueError(f"rstd: floating-point numbers wanted, not {rstd.dtype}")
    with torch.no_grad():
        if choose("rmsnorm", h) != TRITON:
            return rmsnorm_backward_reference(dy, dh, h, weight, rstd)
        dw = torch.empty(weight.shape, dtype=torch.float32, device=h.device)
        route = backward_route(rstd.numel(), h.shape[-1], bool(deterministic))
        return _backward(dy, dh, h, weight, rstd.float().contiguous(), dw, False, route), dw
