"""Causal attention within documents and windows, in Triton: FlashAttention-2's algorithm (Dao 2023).

What a query may see is one range of keys: from `start` of that query, which a document's or a window's begin gives, up
to the query itself. Blocks of keys outside the range are not visited, and the mask is only computed where a range
begins or ends. Nothing is added with atomics: two calls give the same bits.
"""

from typing import Any

import torch
from torch import Tensor

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
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen[:, None],
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


if triton is not None:

    @triton.jit
    def _rows(base, at, stride, n, D: tl.constexpr):
        """Rows `at` of a (n, D) matrix; 0 beyond it."""
        return tl.load(base + at[:, None] * stride + tl.arange(0, D)[None, :], at[:, None] < n, 0.0)

    @triton.jit
    def _forward_part(
        accumulator, total, top, q, k_base, v_base, k_t, v_t, n, rows, start, scale, begin, end,
        MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            k = _rows(k_base, columns, k_t, n, D)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if MASKED:
                # A finite -inf: what a row that sees nothing in this block adds is scaled away by its first real key.
                seen = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= start[:, None])
                s = tl.where(seen, s, -1e30)
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            v = _rows(v_base, columns, v_t, n, D)
            accumulator = tl.dot(p.to(v.dtype), v, accumulator * shrink[:, None], input_precision=PRECISION)
            top = higher
        return accumulator, total, top

    @triton.jit
    def _document_attention_forward_kernel(
        q, k, v, start, out, lse, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n, scale,
        H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        # The last rows see the most keys: they go first, so that the short ones fill the gaps.
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        row_of_batch = (tl.program_id(1) // H).to(tl.int64)
        head = tl.program_id(1) % H
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = rows < n
        begins = tl.load(start + row_of_batch * n + rows, inside, n)
        queries = _rows(q + row_of_batch * q_b + head * q_h, rows, q_t, n, D)
        k_base = k + row_of_batch * k_b + (head // GROUP) * k_h
        v_base = v + row_of_batch * v_b + (head // GROUP) * v_h

        end = tl.minimum((block + 1) * BLOCK_M, n)
        begin = tl.min(begins, 0) // BLOCK_N * BLOCK_N
        latest = tl.max(tl.where(inside, begins, 0), 0)
        # Keys in [full, diagonal) are seen by every row of the block.
        full = tl.minimum((latest + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
        diagonal = tl.maximum(full, tl.minimum(block * BLOCK_M // BLOCK_N * BLOCK_N, end))
        accumulator = tl.zeros((BLOCK_M, D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), -1e30, tl.float32)
        accumulator, total, top = _forward_part(
            accumulator, total, top, queries, k_base, v_base, k_t, v_t, n, rows, begins, scale, begin, full,
            True, D, BLOCK_N, PRECISION,
        )  # fmt: skip
        accumulator, total, top = _forward_part(
            accumulator, total, top, queries, k_base, v_base, k_t, v_t, n, rows, begins, scale, full, diagonal,
            False, D, BLOCK_N, PRECISION,
        )  # fmt: skip
        accumulator, total, top = _forward_part(
            accumulator, total, top, queries, k_base, v_base, k_t, v_t, n, rows, begins, scale, diagonal, end,
            True, D, BLOCK_N, PRECISION,
        )  # fmt: skip
        result = (accumulator / total[:, None]).to(out.dtype.element_ty)
        out_base = out + (row_of_batch * n * H + head) * D
        tl.store(out_base + rows[:, None] * (H * D) + tl.arange(0, D)[None, :], result, inside[:, None])
        tl.store(lse + (row_of_batch * H + head) * n + rows, top + tl.log2(total), inside)

    @triton.jit
    def _dq_part(
        dq, q, dy, k_base, v_base, k_t, v_t, n, rows, start, lse, delta, scale, begin, end,
        MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            k = _rows(k_base, columns, k_t, n, D)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
            if MASKED:
                seen = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= start[:, None])
                p = tl.where(seen, p, 0.0)
            v = _rows(v_base, columns, v_t, n, D)
            dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        return dq

    @triton.jit
    def _document_attention_dq_kernel(
        q, k, v, start, out, lse, dy, delta, dq, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n, scale,
        H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        row_of_batch = (tl.program_id(1) // H).to(tl.int64)
        head = tl.program_id(1) % H
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = rows < n
        begins = tl.load(start + row_of_batch * n + rows, inside, n)
        queries = _rows(q + row_of_batch * q_b + head * q_h, rows, q_t, n, D)
        k_base = k + row_of_batch * k_b + (head // GROUP) * k_h
        v_base = v + row_of_batch * v_b + (head // GROUP) * v_h
        dense = (row_of_batch * n * H + head) * D  # out, dy, dq: (B, T, H, D) contiguous
        dy_rows = _rows(dy + dense, rows, H * D, n, D)
        out_rows = _rows(out + dense, rows, H * D, n, D)
        per_row = (row_of_batch * H + head) * n + rows
        deltas = tl.sum(dy_rows.to(tl.float32) * out_rows.to(tl.float32), 1)
        tl.store(delta + per_row, deltas, inside)
        lses = tl.load(lse + per_row, inside, 0.0)

        end = tl.minimum((block + 1) * BLOCK_M, n)
        begin = tl.min(begins, 0) // BLOCK_N * BLOCK_N
        latest = tl.max(tl.where(inside, begins, 0), 0)
        full = tl.minimum((latest + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
        diagonal = tl.maximum(full, tl.minimum(block * BLOCK_M // BLOCK_N * BLOCK_N, end))
        gradient = tl.zeros((BLOCK_M, D), tl.float32)
        gradient = _dq_part(
            gradient, queries, dy_rows, k_base, v_base, k_t, v_t, n, rows, begins, lses, deltas, scale, begin, full,
            True, D, BLOCK_N, PRECISION,
        )  # fmt: skip
        gradient = _dq_part(
            gradient, queries, dy_rows, k_base, v_base, k_t, v_t, n, rows, begins, lses, deltas, scale, full, diagonal,
            False, D, BLOCK_N, PRECISION,
        )  # fmt: skip
        gradient = _dq_part(
            gradient, queries, dy_rows, k_base, v_base, k_t, v_t, n, rows, begins, lses, deltas, scale, diagonal, end,
            True, D, BLOCK_N, PRECISION,
        )  # fmt: skip
        gradient = (gradient * (scale / 1.4426950408889634)).to(dq.dtype.element_ty)
        tl.store(dq + dense + rows[:, None] * (H * D) + tl.arange(0, D)[None, :], gradient, inside[:, None])

    @triton.jit
    def _dkv_part(
        dk, dv, k, v, q_base, dy_base, lse, delta, start, q_t, n, columns, scale, begin, end,
        MASKED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            inside = rows < n
            q = _rows(q_base, rows, q_t, n, D)
            lses = tl.load(lse + rows, inside, 0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lses[None, :])  # (N, M)
            if MASKED:
                begins = tl.load(start + rows, inside, n)
                seen = (columns[:, None] <= rows[None, :]) & (columns[:, None] >= begins[None, :])
                p = tl.where(seen, p, 0.0)
            dy = _rows(dy_base, rows, H * D, n, D)
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            ds = p * (dp - tl.load(delta + rows, inside, 0.0)[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        return dk, dv

    @triton.jit
    def _document_attention_dkv_kernel(
        q, k, v, start, end_of, lse, dy, delta, dk, dv, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n, scale,
        H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0)
        row_of_batch = (tl.program_id(1) // (H // GROUP)).to(tl.int64)
        kv_head = tl.program_id(1) % (H // GROUP)
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        keys = _rows(k + row_of_batch * k_b + kv_head * k_h, columns, k_t, n, D)
        values = _rows(v + row_of_batch * v_b + kv_head * v_h, columns, v_t, n, D)
        ends = tl.load(end_of + row_of_batch * n + columns, columns < n, n)
        begin = block * BLOCK_N // BLOCK_M * BLOCK_M
        end = tl.max(tl.where(columns < n, ends, 0), 0)
        # Queries in [full, earliest) see every key of the block.
        full = tl.minimum(((block + 1) * BLOCK_N + BLOCK_M - 1) // BLOCK_M * BLOCK_M, end)
        earliest = tl.maximum(full, tl.min(ends, 0) // BLOCK_M * BLOCK_M)
        dk_sum = tl.zeros((BLOCK_N, D), tl.float32)
        dv_sum = tl.zeros((BLOCK_N, D), tl.float32)
        for member in range(0, GROUP):
            head = kv_head * GROUP + member
            q_base = q + row_of_batch * q_b + head * q_h
            dy_base = dy + (row_of_batch * n * H + head) * D
            lse_base = lse + (row_of_batch * H + head) * n
            delta_base = delta + (row_of_batch * H + head) * n
            start_base = start + row_of_batch * n
            dk_sum, dv_sum = _dkv_part(
                dk_sum, dv_sum, keys, values, q_base, dy_base, lse_base, delta_base, start_base, q_t, n, columns, scale,
                begin, full, True, H, D, BLOCK_M, PRECISION,
            )  # fmt: skip
            dk_sum, dv_sum = _dkv_part(
                dk_sum, dv_sum, keys, values, q_base, dy_base, lse_base, delta_base, start_base, q_t, n, columns, scale,
                full, earliest, False, H, D, BLOCK_M, PRECISION,
            )  # fmt: skip
            dk_sum, dv_sum = _dkv_part(
                dk_sum, dv_sum, keys, values, q_base, dy_base, lse_base, delta_base, start_base, q_t, n, columns, scale,
                earliest, end, True, H, D, BLOCK_M, PRECISION,
            )  # fmt: skip
        H_KV: tl.constexpr = H // GROUP
        at = (row_of_batch * n * H_KV + kv_head) * D + columns[:, None] * (H_KV * D) + tl.arange(0, D)[None, :]
        dk_sum = dk_sum * (scale / 1.4426950408889634)
        tl.store(dk + at, dk_sum.to(dk.dtype.element_ty), columns[:, None] < n)
        tl.store(dv + at, dv_sum.to(dv.dtype.element_ty), columns[:, None] < n)


# head_dim -> (BLOCK_M, BLOCK_N, warps, stages) of the forward, dq and dk/dv kernels: none of them spills registers.
_FORWARD = {16: (64, 64, 4, 2), 32: (128, 64, 4, 3), 64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}
_DQ = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (128, 64, 8, 2), 128: (64, 64, 4, 2)}
_DKV = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 128, 8, 2), 128: (32, 128, 8, 2)}


def supports(head_dim: int) -> bool:
    """Whether there is a kernel for heads of this size."""
    return head_dim in _FORWARD


def _strides(*heads: Tensor) -> list[int]:
    for x in heads:
        assert x.stride(3) == 1, x.stride()
    return [stride for x in heads for stride in x.stride()[:3]]


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        b, t, h, d = q.shape
        out = torch.empty(b, t, h, d, dtype=q.dtype, device=q.device)
        lse = torch.empty(b, h, t, dtype=torch.float32, device=q.device)
        block_m, block_n, warps, stages = _FORWARD[d]
        ctx.precision = "ieee" if q.dtype == torch.float32 else "tf32"
        _document_attention_forward_kernel[(triton.cdiv(t, block_m), b * h)](
            q, k, v, start, out, lse, *_strides(q, k, v), t, LOG2_E / d**0.5,
            H=h, GROUP=h // k.shape[2], D=d, BLOCK_M=block_m, BLOCK_N=block_n, PRECISION=ctx.precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, start, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, start, out, lse = ctx.saved_tensors
        b, t, h, d = q.shape
        h_kv = k.shape[2]
        dy = dy.contiguous()
        dq, dk = torch.empty_like(out), torch.empty(b, t, h_kv, d, dtype=q.dtype, device=q.device)
        dv, delta = torch.empty_like(dk), torch.empty_like(lse)
        common = dict(H=h, GROUP=h // h_kv, D=d, PRECISION=ctx.precision)
        strides, scale = _strides(q, k, v), LOG2_E / d**0.5
        # dq first: it leaves the sums of dy * out that dk needs.
        block_m, block_n, warps, stages = _DQ[d]
        _document_attention_dq_kernel[(triton.cdiv(t, block_m), b * h)](
            q, k, v, start, out, lse, dy, delta, dq, *strides, t, scale,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, **common,
        )  # fmt: skip
        block_m, block_n, warps, stages = _DKV[d]
        _document_attention_dkv_kernel[(triton.cdiv(t, block_n), b * h_kv)](
            q, k, v, start, end_seen(start), lse, dy, delta, dk, dv, *strides, t, scale,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, **common,
        )  # fmt: skip
        return dq, dk, dv, None


def document_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
    """q: (B, T, H, D), k, v: (B, T, Hkv, D), any strides but the last; start: (B, T) int32 -> (B, T, H, D).

    Query i sees the keys from start[i] to i; start never falls along T (see `first_seen`).
    """
    if choose("document_attention", q) == TRITON:
        return _DocumentAttention.apply(q, k, v, start.contiguous())
    return document_attention_reference(q, k, v, start)
