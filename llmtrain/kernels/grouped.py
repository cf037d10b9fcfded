"""Matmuls of rows that are sorted by expert, each expert with a matrix of its own.

Where an expert's rows end is known on the device alone: shapes are static, nothing waits, and no row is left out. Two
products are all that is needed: y = x @ w[e].T (or x @ w[e], for the gradient of x), and the gradient of w, which
accumulates in its FP32 buffer. Of the first, `F.grouped_mm` is taken where the card has it (Hopper and later); the
second is a kernel of our own everywhere, as torch's rounds each micro-batch's gradient to bf16, and takes rows by
index, so that copies of a token's row for its experts need not be kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels import choice
from llmtrain.kernels.choice import REFERENCE, TRITON, choose
from llmtrain.kernels.weight import gradient_buffer, gradient_dtype, operand, waits

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

GROUPED_MM = "grouped_mm"
"""torch's own, by CUTLASS."""

ROWS, COLS, DEPTH = 128, 128, 64
"""The tile of a product, and how much of the sum is taken at a time: of FP32 half, or what is on its way takes 128 KB
of shared memory, where GeForce cards have 99."""


def _segments(ends: Tensor) -> list[tuple[int, int, int]]:
    """(expert, begin, end) of experts with rows. Waits for the device: for the references alone."""
    bounds = [0, *ends.tolist()]
    return [(e, a, b) for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)) if b > a]


def grouped_reference(x: Tensor, w: Tensor, ends: Tensor, out: Tensor) -> None:
    """out[r] = x[r] @ w[e] for each row r of expert e; x: (M, K), w: (E, K, N), out: (M, N). A loop over experts."""
    for e, begin, end in _segments(ends):
        torch.mm(x[begin:end], w[e], out=out[begin:end])


def grouped_gradient_reference(dy: Tensor, x: Tensor, ends: Tensor, out: Tensor, add: bool) -> None:
    """out[e] (+)= dy[rows of e].T @ x[rows of e]; dy: (M, N), x: (M, K), out: (E, N, K). A loop over experts."""
    if not add:
        out.zero_()
    for e, begin, end in _segments(ends):
        one, other = dy[begin:end].T, x[begin:end]
        if out.dtype == dy.dtype:
            out[e].addmm_(one, other)
        else:
            out[e] += one @ other


if triton is not None:

    @triton.jit
    def _of_tile(tile, ends, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
        """(expert, first row, end of the expert's rows) of the tile-th block of rows, counted through all experts; an
        expert of E where there are fewer."""
        e = tl.arange(0, EXPERTS)
        end = tl.load(ends + e, mask=e < E, other=0)
        begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
        last = tl.cumsum(tl.where(e < E, (end - begin + ROWS - 1) // ROWS, 0), 0)
        expert = tl.sum(((last <= tile) & (e < E)).to(tl.int32), 0)
        before = tl.max(tl.where(last <= tile, last, 0), 0)
        first = tl.sum(tl.where(e == expert, begin, 0), 0) + (tile - before) * ROWS
        return expert, first, tl.sum(tl.where(e == expert, end, 0), 0)

    @triton.jit
    def _grouped_kernel(
        x, w, ends, y, n_out, depth, w_expert, w_depth, w_out,
        E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
        WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        blocks = tl.cdiv(n_out, COLS)
        expert, first, end = _of_tile(tl.program_id(0) // blocks, ends, E, EXPERTS, ROWS)
        if expert < E:
            row = first + tl.arange(0, ROWS)
            inside = row < end
            row = row.to(tl.int64)[:, None]
            col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
            total = tl.zeros((ROWS, COLS), tl.float32)
            matrix = w + expert.to(tl.int64) * w_expert + col * w_out
            for begin in range(0, depth, DEPTH):
                at = begin + tl.arange(0, DEPTH)
                a = tl.load(x + row * depth + at[None, :], mask=inside[:, None] & (at < depth)[None, :], other=0.0)
                b = tl.load(matrix + at[:, None] * w_depth, mask=(at < depth)[:, None] & (col < n_out), other=0.0)
                if WIDE:
                    a, b = a.to(tl.float32), b.to(tl.float32)
                total = tl.dot(a, b, total, input_precision=PRECISION)
            tl.store(y + row * n_out + col, total.to(y.dtype.element_ty), mask=inside[:, None] & (col < n_out))

    @triton.jit
    def _grouped_gradient_kernel(
        dy, x, dy_rows, x_rows, ends, dw, n_out, n_in,
        DY_BY_INDEX: tl.constexpr, X_BY_INDEX: tl.constexpr, ADD: tl.constexpr,
        ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        expert = tl.program_id(1)
        blocks = tl.cdiv(n_in, COLS)
        out = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
        into = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        total = tl.zeros((ROWS, COLS), tl.float32)
        for at in range(begin, end, DEPTH):
            place = at + tl.arange(0, DEPTH)
            inside = place < end
            a_row = place
            if DY_BY_INDEX:
                a_row = tl.load(dy_rows + place, mask=inside, other=0)
            b_row = place
            if X_BY_INDEX:
                b_row = tl.load(x_rows + place, mask=inside, other=0)
            a = tl.load(
                dy + a_row.to(tl.int64)[:, None] * n_out + out[None, :],
                mask=inside[:, None] & (out < n_out)[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                x + b_row.to(tl.int64)[:, None] * n_in + into[None, :],
                mask=inside[:, None] & (into < n_in)[None, :], other=0.0,
            )  # fmt: skip
            if WIDE:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
        # An expert without rows gets here too, and writes zeros.
        to = dw + expert.to(tl.int64) * n_out * n_in + out[:, None] * n_in + into[None, :]
        mask = (out < n_out)[:, None] & (into < n_in)[None, :]
        if ADD:
            total += tl.load(to, mask=mask, other=0.0)
        tl.store(to, total, mask=mask)


def _arithmetic(x: Tensor) -> tuple[bool, str]:
    """Whether a tile is widened before it is multiplied, and the precision of FP32 products."""
    return not x.is_cuda, "ieee"  # Triton's interpreter multiplies the bits of bf16 numbers as integers


def _block(size: int, most: int) -> int:
    """A power of two that a tile of `most` need not exceed for so small a size."""
    return max(16, min(most, triton.next_power_of_2(size)))


def _grouped(x: Tensor, w: Tensor, ends: Tensor, out: Tensor) -> None:
    (m, depth), n_experts, n_out = x.shape, len(w), w.shape[2]
    rows, cols = _block(m, ROWS), _block(n_out, COLS)
    at_a_time = _block(depth, DEPTH if x.itemsize < 4 else DEPTH // 2)
    # Every expert may end in a block that is not full.
    grid = (triton.cdiv(n_out, cols) * (triton.cdiv(m, rows) + n_experts),)
    _grouped_kernel[grid](
        x, w, ends, out, n_out, depth, *w.stride(),
        n_experts, triton.next_power_of_2(n_experts), rows, cols, at_a_time, *_arithmetic(x),
        num_warps=8, num_stages=3,
    )  # fmt: skip


def _grouped_gradient(
    dy: Tensor, x: Tensor, dy_rows: Tensor | None, x_rows: Tensor | None, ends: Tensor, out: Tensor, add: bool
) -> None:
    n_experts, n_out, n_in = out.shape
    rows, cols = _block(n_out, ROWS), _block(n_in, COLS)
    grid = (triton.cdiv(n_out, rows) * triton.cdiv(n_in, cols), n_experts)
    _grouped_gradient_kernel[grid](
        dy, x, ends if dy_rows is None else dy_rows, ends if x_rows is None else x_rows, ends, out, n_out, n_in,
        dy_rows is not None, x_rows is not None, add, rows, cols, DEPTH, *_arithmetic(x), num_warps=8, num_stages=3,
    )  # fmt: skip


def implementation(x: Tensor, n_out: int) -> str:
    """What multiplies x (M, K) into (M, n_out); recorded."""
    chosen = choose("grouped", x)
    if chosen == TRITON and x.is_cuda and not choice.named("grouped"):
        # Its tensors are read in pieces of 16 bytes; on cards before Hopper it is a loop that waits for the device.
        whole = x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and n_out % 8 == 0
        if whole and torch.cuda.get_device_capability(x.device)[0] == 9:
            choice.ran["grouped"] = chosen = GROUPED_MM
    return chosen


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """x (M, in), sorted by expert, weight (E, out, in) FP32 master, ends (E,) int32 -> x @ weight[e].T (M, out) in x's
    dtype; `transposed`: x (M, out) @ weight[e] -> (M, in)."""
    w = operand(weight, x.dtype)
    w = w if transposed else w.transpose(1, 2)  # (E, depth, columns)
    x = x.contiguous()
    chosen = implementation(x, w.shape[2])
    if chosen == GROUPED_MM:
        return F.grouped_mm(x, w, offs=ends)
    out = torch.empty((len(x), w.shape[2]), dtype=x.dtype, device=x.device)
    (_grouped if chosen == TRITON else grouped_reference)(x, w, ends, out)
    return out


def deliver_grouped_product(
    weight: Tensor, dy: Tensor, x: Tensor, ends: Tensor, dy_rows: Tensor | None = None, x_rows: Tensor | None = None
) -> Tensor | None:
    """The gradient of weight (E, out, in): of each expert, the sum over its places of dy (M, out) times x (M, in), put
    where it belongs; an expert without any gets zeros. `dy_rows`, `x_rows` (M,) int32: the row of dy, of x, at each
    place, where they are not in that order themselves. Returns what autograd should get."""
    if waits(weight, lambda: deliver_grouped_product(weight, dy, x, ends, dy_rows, x_rows)):
        return None
    buffer, overwrite = gradient_buffer(weight)
    out = torch.empty(weight.shape, dtype=gradient_dtype(weight), device=dy.device) if buffer is None else buffer
    add = buffer is not None and not overwrite
    if choose("grouped_gradient", dy) != REFERENCE:
        _grouped_gradient(dy.contiguous(), x.contiguous(), dy_rows, x_rows, ends, out, add)
    else:
        dy = dy if dy_rows is None else dy[dy_rows]
        x = x if x_rows is None else x[x_rows]
        grouped_gradient_reference(dy, x, ends, out, add)
    return out if buffer is None else None
