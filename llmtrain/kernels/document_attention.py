"""Causal attention within documents and windows, in Triton: FlashAttention-2's algorithm (Dao 2023).

What a query may see is one range of keys: from `start` of that query, which a document's or a window's begin gives, up
to the query itself. Keys outside the range are not visited, and the mask is only computed where a range begins or ends.
Nothing is added with atomics: two calls give the same bits.

The query heads that share keys are worked on together: row r of a block is head r % GROUP of token r // GROUP. So a
block of 128 rows spans 128 / GROUP tokens, which is what documents waste at their borders, and keys are read once for
all heads of the group. Blocks of keys begin at the first key that a block of rows sees, wherever that is.
"""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention_blocks import DKV, DQ, FORWARD, Blocks, blocks_for
from llmtrain.kernels.choice import TRITON, choose

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

LOG2_E = 1.4426950408889634


def first_seen(t: int, batch: int, doc_start: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """(B, T) int32: the first key that each query sees. Never falls along T, as documents follow one another."""
    if window is None:
        if doc_start is None:
            return torch.zeros(batch, t, dtype=torch.int32, device=device)
        return doc_start.to(torch.int32)
    begin = (torch.arange(t, dtype=torch.int32, device=device) - (window - 1)).clamp_min(0)
    if doc_start is None:
        return begin.expand(batch, t).contiguous()
    return torch.maximum(doc_start.to(torch.int32), begin)


def end_seen(start: Tensor) -> Tensor:
    """start: (B, T) as from `first_seen` -> (B, T) int32: behind the last query that sees each key."""
    keys = torch.arange(start.shape[1], dtype=torch.int32, device=start.device).expand_as(start).contiguous()
    return torch.searchsorted(start, keys, right=True, out_int32=True)


def document_attention_reference(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
    """As `document_attention`, from whole score matrices."""
    t = q.shape[1]
    column = torch.arange(t, device=q.device)
    seen = (column <= column[:, None]) & (column >= start[:, :, None])  # (B, T, T)
    nothing = ~seen.any(-1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=(seen | nothing[:, :, None])[:, None],  # a row without any key would be NaN
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).masked_fill(nothing[:, :, None, None], 0.0)


if triton is not None:

    @triton.jit
    def _load(base, at, offset, stride, inside, D: tl.constexpr, WIDE: tl.constexpr, CHECKED: tl.constexpr):
        """(rows, D): row i lies at base + at[i] * stride + offset[i]; 0 where not inside."""
        if WIDE:
            at = at.to(tl.int64)
        pointers = base + (at * stride + offset)[:, None] + tl.arange(0, D)[None, :]
        if CHECKED:
            return tl.load(pointers, inside[:, None], 0.0)
        return tl.load(pointers)

    @triton.jit
    def _range(begins, inside, first_token, end, BLOCK_N: tl.constexpr):
        """Of the keys that a block of rows sees, [begin, end): those in [full, diagonal) are seen by every row."""
        begin = tl.min(begins, 0)
        latest = tl.max(tl.where(inside, begins, 0), 0)
        full = tl.minimum(begin + (tl.maximum(latest - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
        diagonal = full + tl.maximum(first_token + 1 - full, 0) // BLOCK_N * BLOCK_N
        return begin, full, diagonal

    @triton.jit
    def _forward_part(
        accumulator, total, top, q, k_base, v_base, k_t, v_t, n, tokens, begins, scale, begin, end,
        MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            k = _load(k_base, columns, 0, k_t, columns < n, D, WIDE, MASKED)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if MASKED:
                # A finite -inf: what a row that sees nothing in this block adds is scaled away by its first real key.
                seen = (columns[None, :] <= tokens[:, None]) & (columns[None, :] >= begins[:, None])
                s = tl.where(seen, s * scale, -1e30)
                higher = tl.maximum(top, tl.max(s, 1))
                p = tl.exp2(s - higher[:, None])
            else:
                higher = tl.maximum(top, tl.max(s, 1) * scale)
                p = tl.exp2(s * scale - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            v = _load(v_base, columns, 0, v_t, columns < n, D, WIDE, MASKED)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * shrink[:, None], input_precision=PRECISION)
            top = higher
        return accumulator, total, top

    @triton.jit
    def _document_attention_forward_kernel(
        q, k, v, start, out, lse, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n, scale,
        H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        SPLIT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        H_KV: tl.constexpr = H // GROUP
        # The last rows see the most keys: they go first, so that the short ones fill the gaps.
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        row_of_batch = tl.program_id(2).to(tl.int64)
        kv_head = tl.program_id(1).to(tl.int64)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        n_rows = n * GROUP
        inside = rows < n_rows
        tokens = rows // GROUP
        members = rows % GROUP
        if WIDE:
            members = members.to(tl.int64)
        begins = tl.load(start + row_of_batch * n + tokens, inside, n)
        q_base = q + row_of_batch * q_b + kv_head * GROUP * q_h
        queries = _load(q_base, tokens, members * q_h, q_t, inside, D, WIDE, True)
        k_base = k + row_of_batch * k_b + kv_head * k_h
        v_base = v + row_of_batch * v_b + kv_head * v_h

        end = (tl.minimum((block + 1) * BLOCK_M, n_rows) - 1) // GROUP + 1
        begin, full, diagonal = _range(begins, inside, block * BLOCK_M // GROUP, end, BLOCK_N)
        accumulator = tl.zeros((BLOCK_M, D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), -1e30, tl.float32)
        if SPLIT:
            accumulator, total, top = _forward_part(
                accumulator, total, top, queries, k_base, v_base, k_t, v_t, n, tokens, begins, scale, begin, full,
                True, D, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
            accumulator, total, top = _forward_part(
                accumulator, total, top, queries, k_base, v_base, k_t, v_t, n, tokens, begins, scale, full, diagonal,
                False, D, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
            begin = diagonal
        accumulator, total, top = _forward_part(
            accumulator, total, top, queries, k_base, v_base, k_t, v_t, n, tokens, begins, scale, begin, end,
            True, D, BLOCK_N, WIDE, PRECISION,
        )  # fmt: skip
        some = begins <= tokens  # a row behind the last document sees nothing
        result = tl.where(some[:, None], accumulator / tl.where(some, total, 1.0)[:, None], 0.0)
        if WIDE:
            tokens = tokens.to(tl.int64)
        at = (row_of_batch * n * H + kv_head * GROUP) * D + (tokens * H + members)[:, None] * D
        tl.store(out + at + tl.arange(0, D)[None, :], result.to(out.dtype.element_ty), inside[:, None])
        per_row = (row_of_batch * H_KV + kv_head) * n_rows + rows
        tl.store(lse + per_row, tl.where(some, top + tl.log2(total), 0.0), inside)

    @triton.jit
    def _dq_part(
        dq, q, dy, k_base, v_base, k_t, v_t, n, tokens, begins, lse, delta, scale, begin, end,
        MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            k = _load(k_base, columns, 0, k_t, columns < n, D, WIDE, MASKED)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
            if MASKED:
                seen = (columns[None, :] <= tokens[:, None]) & (columns[None, :] >= begins[:, None])
                p = tl.where(seen, p, 0.0)
            v = _load(v_base, columns, 0, v_t, columns < n, D, WIDE, MASKED)
            dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        return dq

    @triton.jit
    def _document_attention_dq_kernel(
        q, k, v, start, out, lse, dy, delta, dq, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n, scale,
        H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        SPLIT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        H_KV: tl.constexpr = H // GROUP
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        row_of_batch = tl.program_id(2).to(tl.int64)
        kv_head = tl.program_id(1).to(tl.int64)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        n_rows = n * GROUP
        inside = rows < n_rows
        tokens = rows // GROUP
        members = rows % GROUP
        if WIDE:
            members = members.to(tl.int64)
        begins = tl.load(start + row_of_batch * n + tokens, inside, n)
        q_base = q + row_of_batch * q_b + kv_head * GROUP * q_h
        queries = _load(q_base, tokens, members * q_h, q_t, inside, D, WIDE, True)
        k_base = k + row_of_batch * k_b + kv_head * k_h
        v_base = v + row_of_batch * v_b + kv_head * v_h
        dense = (row_of_batch * n * H + kv_head * GROUP) * D  # out, dy, dq: (B, T, H, D) contiguous
        dy_rows = _load(dy + dense, tokens, members * D, H * D, inside, D, WIDE, True)
        out_rows = _load(out + dense, tokens, members * D, H * D, inside, D, WIDE, True)
        per_row = (row_of_batch * H_KV + kv_head) * n_rows + rows
        deltas = tl.sum(dy_rows.to(tl.float32) * out_rows.to(tl.float32), 1)
        tl.store(delta + per_row, deltas, inside)
        lses = tl.load(lse + per_row, inside, 0.0)

        end = (tl.minimum((block + 1) * BLOCK_M, n_rows) - 1) // GROUP + 1
        begin, full, diagonal = _range(begins, inside, block * BLOCK_M // GROUP, end, BLOCK_N)
        gradient = tl.zeros((BLOCK_M, D), tl.float32)
        if SPLIT:
            gradient = _dq_part(
                gradient, queries, dy_rows, k_base, v_base, k_t, v_t, n, tokens, begins, lses, deltas, scale,
                begin, full, True, D, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
            gradient = _dq_part(
                gradient, queries, dy_rows, k_base, v_base, k_t, v_t, n, tokens, begins, lses, deltas, scale,
                full, diagonal, False, D, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
            begin = diagonal
        gradient = _dq_part(
            gradient, queries, dy_rows, k_base, v_base, k_t, v_t, n, tokens, begins, lses, deltas, scale,
            begin, end, True, D, BLOCK_N, WIDE, PRECISION,
        )  # fmt: skip
        gradient = (gradient * (scale / 1.4426950408889634)).to(dq.dtype.element_ty)
        if WIDE:
            tokens = tokens.to(tl.int64)
        at = (tokens * H + members)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(dq + dense + at, gradient, inside[:, None])

    @triton.jit
    def _dkv_part(
        dk, dv, k, v, q_base, dy_base, lse, delta, q_t, q_h, n_rows, columns, ends, scale, begin, end,
        MASKED: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
        WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            inside = rows < n_rows
            tokens = rows // GROUP
            members = rows % GROUP
            if WIDE:
                members = members.to(tl.int64)
            q = _load(q_base, tokens, members * q_h, q_t, inside, D, WIDE, MASKED)
            lses = tl.load(lse + rows, inside, 0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lses[None, :])  # (N, M)
            if MASKED:
                seen = (columns[:, None] <= tokens[None, :]) & (ends[:, None] > tokens[None, :])
                p = tl.where(seen, p, 0.0)
            dy = _load(dy_base, tokens, members * D, H * D, inside, D, WIDE, MASKED)
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            ds = p * (dp - tl.load(delta + rows, inside, 0.0)[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        return dk, dv

    @triton.jit
    def _document_attention_dkv_kernel(
        q, k, v, end_of, lse, dy, delta, dk, dv, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n, scale,
        H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        SPLIT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        H_KV: tl.constexpr = H // GROUP
        block = tl.program_id(0)
        row_of_batch = tl.program_id(2).to(tl.int64)
        kv_head = tl.program_id(1).to(tl.int64)
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < n
        keys = _load(k + row_of_batch * k_b + kv_head * k_h, columns, 0, k_t, inside, D, WIDE, True)
        values = _load(v + row_of_batch * v_b + kv_head * v_h, columns, 0, v_t, inside, D, WIDE, True)
        ends = tl.load(end_of + row_of_batch * n + columns, inside, n)
        q_base = q + row_of_batch * q_b + kv_head * GROUP * q_h
        dy_base = dy + (row_of_batch * n * H + kv_head * GROUP) * D
        n_rows = n * GROUP
        of_head = (row_of_batch * H_KV + kv_head) * n_rows

        # Rows are (query, head) as above; those in [full, earliest) see every key of the block.
        begin = block * BLOCK_N * GROUP
        end = tl.max(tl.where(inside, ends, 0), 0) * GROUP
        full = tl.minimum(begin + ((BLOCK_N - 1) * GROUP + BLOCK_M - 1) // BLOCK_M * BLOCK_M, end)
        earliest = full + tl.maximum(tl.min(ends, 0) * GROUP - full, 0) // BLOCK_M * BLOCK_M
        dk_sum = tl.zeros((BLOCK_N, D), tl.float32)
        dv_sum = tl.zeros((BLOCK_N, D), tl.float32)
        if SPLIT:
            dk_sum, dv_sum = _dkv_part(
                dk_sum, dv_sum, keys, values, q_base, dy_base, lse + of_head, delta + of_head, q_t, q_h, n_rows,
                columns, ends, scale, begin, full, True, H, GROUP, D, BLOCK_M, WIDE, PRECISION,
            )  # fmt: skip
            dk_sum, dv_sum = _dkv_part(
                dk_sum, dv_sum, keys, values, q_base, dy_base, lse + of_head, delta + of_head, q_t, q_h, n_rows,
                columns, ends, scale, full, earliest, False, H, GROUP, D, BLOCK_M, WIDE, PRECISION,
            )  # fmt: skip
            begin = earliest
        dk_sum, dv_sum = _dkv_part(
            dk_sum, dv_sum, keys, values, q_base, dy_base, lse + of_head, delta + of_head, q_t, q_h, n_rows,
            columns, ends, scale, begin, end, True, H, GROUP, D, BLOCK_M, WIDE, PRECISION,
        )  # fmt: skip
        if WIDE:
            columns = columns.to(tl.int64)
        at = (row_of_batch * n * H_KV + kv_head) * D + columns[:, None] * (H_KV * D) + tl.arange(0, D)[None, :]
        dk_sum = dk_sum * (scale / 1.4426950408889634)
        tl.store(dk + at, dk_sum.to(dk.dtype.element_ty), inside[:, None])
        tl.store(dv + at, dv_sum.to(dv.dtype.element_ty), inside[:, None])


NARROW_REACH = 1 << 31
"""Elements that offsets of 32 bits reach."""

MOST_SEQUENCES = 65535
"""Of a launch: its third dimension."""


def _strides(*heads: Tensor) -> list[int]:
    for x in heads:
        assert x.stride(3) == 1, x.stride()
    return [stride for x in heads for stride in x.stride()[:3]]


def _arguments(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """What all three kernels take: strides, length and scale; constants of the shapes."""
    b, t, h, d = q.shape
    if b > MOST_SEQUENCES:
        raise ValueError(f"q: {b} sequences, but attention within documents takes {MOST_SEQUENCES} at most")
    # Offsets within a sequence are 32 bits wide where that is enough.
    reach = max(extent for x in (q, k, v) for extent in (t * x.stride(1), x.shape[2] * x.stride(2)))
    wide = max(reach, t * h * d) >= NARROW_REACH
    constants = dict(H=h, GROUP=h // k.shape[2], D=d, WIDE=wide)
    return [*_strides(q, k, v), t, LOG2_E / d**0.5], constants


def _form(blocks: Blocks, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, SPLIT=blocks.split, num_warps=blocks.warps, num_stages=blocks.stages,
        maxnreg=blocks.registers, PRECISION="ieee" if dtype == torch.float32 else "tf32",
    )  # fmt: skip


def forward_triton(q: Tensor, k: Tensor, v: Tensor, start: Tensor, keys_seen: int) -> tuple[Tensor, Tensor]:
    """(out, lse): out (B, T, H, D); lse (B, Hkv, T * GROUP) FP32, base 2, the heads of a group side by side."""
    b, t, h, d = q.shape
    h_kv = k.shape[2]
    out = torch.empty(b, t, h, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h_kv, t * (h // h_kv), dtype=torch.float32, device=q.device)
    blocks = blocks_for(FORWARD, d, keys_seen, q.dtype == torch.float32)
    common, constants = _arguments(q, k, v)
    _document_attention_forward_kernel[(triton.cdiv(lse.shape[2], blocks.rows), h_kv, b)](
        q, k, v, start, out, lse, *common, **constants, **_form(blocks, q.dtype)
    )
    return out, lse


def dq_triton(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, out: Tensor, lse: Tensor, dy: Tensor, keys_seen: int
) -> tuple[Tensor, Tensor]:
    """(dq, delta): delta, shaped as lse, holds the sums of dy * out, which dk needs; dy contiguous."""
    b, _, _, d = q.shape
    dq, delta = torch.empty_like(out), torch.empty_like(lse)
    blocks = blocks_for(DQ, d, keys_seen, q.dtype == torch.float32)
    common, constants = _arguments(q, k, v)
    _document_attention_dq_kernel[(triton.cdiv(lse.shape[2], blocks.rows), k.shape[2], b)](
        q, k, v, start, out, lse, dy, delta, dq, *common, **constants, **_form(blocks, q.dtype)
    )
    return dq, delta


def dkv_triton(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, lse: Tensor, dy: Tensor, delta: Tensor, keys_seen: int
) -> tuple[Tensor, Tensor]:
    """(dk, dv); end as from `end_seen`, delta as from `dq_triton`, dy contiguous."""
    b, t, h_kv, d = k.shape
    dk = torch.empty(b, t, h_kv, d, dtype=k.dtype, device=k.device)
    dv = torch.empty_like(dk)
    blocks = blocks_for(DKV, d, keys_seen, q.dtype == torch.float32)
    common, constants = _arguments(q, k, v)
    _document_attention_dkv_kernel[(triton.cdiv(t, blocks.keys), h_kv, b)](
        q, k, v, end, lse, dy, delta, dk, dv, *common, **constants, **_form(blocks, q.dtype)
    )
    return dk, dv


def backward_triton(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, out: Tensor, lse: Tensor, dy: Tensor, keys_seen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous; out and lse as from `forward_triton`."""
    dy = dy.contiguous()
    dq, delta = dq_triton(q, k, v, start, out, lse, dy, keys_seen)
    return dq, *dkv_triton(q, k, v, end_seen(start), lse, dy, delta, keys_seen)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, start: Tensor, keys_seen: int) -> Tensor:
        out, lse = forward_triton(q, k, v, start, keys_seen)
        ctx.keys_seen = keys_seen
        ctx.save_for_backward(q, k, v, start, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, start, out, lse = ctx.saved_tensors
        return *backward_triton(q, k, v, start, out, lse, dy, ctx.keys_seen), None, None


def document_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, keys_seen: int | None = None) -> Tensor:
    """q: (B, T, H, D), k, v: (B, T, Hkv, D), any strides but the last; start: (B, T) int32 -> (B, T, H, D).

    Query i sees the keys from start[i] to i, and its result is 0 where start[i] > i; start never falls along T (see
    `first_seen`). keys_seen, about how many keys a query sees at most, by default T, is for the speed alone.
    """
    if choose("document_attention", q) == TRITON:
        return _DocumentAttention.apply(q, k, v, start.contiguous(), keys_seen or q.shape[1])
    return document_attention_reference(q, k, v, start)
