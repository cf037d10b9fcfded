"""Rows of the embedding matrix, and the sum of their gradients."""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.weight import gradient_buffer, gradient_dtype, operand

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

TILE, WARPS = 4096, 4
"""Elements of a program of the lookup."""
ATOMIC_TILE = 1024
"""Elements of a program of the atomic sum."""
RUN = 32
"""Sorted rows that one program of the deterministic sum adds up."""
COLS, CHUNK = 256, 8


def embedding_backward_reference(dy: Tensor, ids: Tensor, buffer: Tensor) -> None:
    """Adds each row of dy (N, d) to buffer[ids] (V, d), in the buffer's precision."""
    buffer.index_add_(0, ids, dy.to(buffer.dtype))


if triton is not None:

    @triton.jit
    def _embedding_lookup_kernel(
        ids, weight, y, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, BLOCK)[None, :]
        mask = (rows < n) & (cols < WIDTH)
        id = tl.load(ids + rows, mask=rows < n, other=0).to(tl.int64)
        values = tl.load(weight + id * WIDTH + cols, mask=mask)
        tl.store(y + rows.to(tl.int64) * WIDTH + cols, values, mask=mask)

    @triton.jit
    def _embedding_atomic_kernel(
        dy, ids, out, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, BLOCK)[None, :]
        mask = (rows < n) & (cols < WIDTH)
        id = tl.load(ids + rows, mask=rows < n, other=0).to(tl.int64)
        g = tl.load(dy + rows.to(tl.int64) * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        tl.atomic_add(out + id * WIDTH + cols, g, mask=mask, sem="relaxed")

    # The deterministic sum: with equal ids side by side, a program adds up the segments in its RUN sorted rows. One
    # that lies inside goes to its row at once, for nobody else writes there. One that crosses a border leaves a part:
    # in `opening` where it began earlier, in `closing` where it goes on. The second kernel joins the parts, in order.

    @triton.jit
    def _embedding_segments_kernel(
        dy, order, ids, out, opening, closing, n, WIDTH: tl.constexpr, COLS: tl.constexpr, RUN: tl.constexpr
    ):  # fmt: skip
        run = tl.program_id(0)
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
        mask = cols < WIDTH
        begin = run * RUN
        end = tl.minimum(begin + RUN, n)
        before = tl.load(ids + begin - 1, mask=begin > 0, other=-1)
        total = tl.zeros((COLS,), tl.float32)
        for step in range(RUN):
            at = begin + step
            known = at < n
            id = tl.load(ids + at, mask=known, other=-2)
            after = tl.load(ids + at + 1, mask=at + 1 < n, other=-1)
            row = tl.load(order + at, mask=known, other=0)  # beyond the end any row will do: nothing is stored there
            total += tl.load(dy + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
            if known & ((after != id) | (at + 1 == end)):
                if before == id:
                    tl.store(opening + run.to(tl.int64) * WIDTH + cols, total, mask=mask)
                elif after == id:
                    tl.store(closing + run.to(tl.int64) * WIDTH + cols, total, mask=mask)
                else:
                    to = out + id.to(tl.int64) * WIDTH + cols
                    tl.store(to, tl.load(to, mask=mask, other=0.0) + total, mask=mask)
                total = tl.zeros((COLS,), tl.float32)
                before = tl.full((), -1, tl.int32)

    @triton.jit
    def _embedding_join_kernel(
        ids, out, opening, closing, n, WIDTH: tl.constexpr, COLS: tl.constexpr, RUN: tl.constexpr, CHUNK: tl.constexpr
    ):  # fmt: skip
        run = tl.program_id(0)
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
        mask = cols < WIDTH
        begin = run * RUN
        end = tl.minimum(begin + RUN, n)
        id = tl.load(ids + end - 1)
        before = tl.load(ids + begin - 1, mask=begin > 0, other=-1)
        after = tl.load(ids + end, mask=end < n, other=-1)
        if (after == id) & (before != id):
            total = tl.load(closing + run.to(tl.int64) * WIDTH + cols, mask=mask, other=0.0)
            first = run + 1
            joined = CHUNK
            while joined == CHUNK:
                runs = first + tl.arange(0, CHUNK)
                same = tl.load(ids + runs * RUN, mask=runs * RUN < n, other=-1) == id
                parts = tl.load(
                    opening + runs.to(tl.int64)[:, None] * WIDTH + cols[None, :],
                    mask=same[:, None] & mask[None, :],
                    other=0.0,
                )
                total += tl.sum(parts, 0)
                joined = tl.sum(same.to(tl.int32), 0)
                first += CHUNK
            to = out + id.to(tl.int64) * WIDTH + cols
            tl.store(to, tl.load(to, mask=mask, other=0.0) + total, mask=mask)


def _lookup(ids: Tensor, weight: Tensor) -> Tensor:
    """ids: (N,), weight: (V, d) -> (N, d)."""
    n, width = len(ids), weight.shape[1]
    y = torch.empty((n, width), dtype=weight.dtype, device=weight.device)
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    _embedding_lookup_kernel[(triton.cdiv(n, rows),)](ids, weight, y, n, width, rows, block, num_warps=WARPS)
    return y


def _add_atomically(dy: Tensor, ids: Tensor, buffer: Tensor) -> None:
    n, width = dy.shape
    block = triton.next_power_of_2(width)
    rows = max(1, ATOMIC_TILE // block)
    _embedding_atomic_kernel[(triton.cdiv(n, rows),)](dy, ids, buffer, n, width, rows, block, num_warps=WARPS)


def _add_in_order(dy: Tensor, ids: Tensor, buffer: Tensor) -> None:
    """The same sum with its order fixed by the ids alone: bit-equal from run to run and card to card."""
    n, width = dy.shape
    sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
    runs = triton.cdiv(n, RUN)
    opening = torch.empty((runs, width), dtype=torch.float32, device=dy.device)
    closing = torch.empty_like(opening)
    grid = (runs, triton.cdiv(width, COLS))
    _embedding_segments_kernel[grid](dy, order, sorted_ids, buffer, opening, closing, n, width, COLS, RUN, num_warps=1)
    _embedding_join_kernel[grid](sorted_ids, buffer, opening, closing, n, width, COLS, RUN, CHUNK, num_warps=4)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        narrow = operand(weight, dtype)
        ctx.chosen = choose("embedding", narrow)
        ctx.weight = weight
        ctx.save_for_backward(ids)
        if ctx.chosen == TRITON:
            return _lookup(ids.reshape(-1).contiguous(), narrow).view(*ids.shape, -1)
        return narrow[ids]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        buffer, overwrite = gradient_buffer(ctx.weight)
        target = buffer
        if target is None:
            target = torch.zeros(ctx.weight.shape, dtype=gradient_dtype(ctx.weight), device=dy.device)
        if overwrite:
            target.zero_()
        add = embedding_backward_reference
        if ctx.chosen == TRITON:
            add = _add_in_order if torch.are_deterministic_algorithms_enabled() else _add_atomically
        add(dy.reshape(-1, dy.shape[-1]).contiguous(), ids.reshape(-1).contiguous(), target)
        return None, (target if buffer is None else None), None


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """ids: (B, T) int64, weight: (V, d) FP32 master -> (B, T, d) in `dtype`."""
    return _Embedding.apply(ids, weight, dtype)
