"""Rotary positions (Su et al. 2021, halves convention) on a packed qkv, with the split into heads and QK-norm."""

import math
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import FLOATS, TRITON, choose
from llmtrain.kernels.derivatives import first_derivative
from llmtrain.kernels.partials import deliver_partials
from llmtrain.kernels.rmsnorm import rmsnorm
from llmtrain.kernels.weight import version

# In kernels tuples of tensors grow while a loop is unrolled.
# mypy: disable-error-code="assignment, var-annotated"

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

HEADS = 4
"""Heads, at most, whose loads are on their way before the first of them is rotated."""

PAIRS, NORMED_BACKWARD_PAIRS = 8, 4
"""Pairs of elements a lane rotates of one head: two loads of 16 bytes. The backward of the norms sums as well, and
would have no registers left for the loads of four heads."""

TINY = 2e-38
"""The least epsilon: rows of zeros are normed too, where a tile is not full, and a card takes 1 / sqrt of what is no
normal FP32 number for infinite."""

FEW_TOKENS = 16384
"""Up to here a program is one warp instead of four, so that programs are many."""


def rotary_tables(max_seq_len: int, head_dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim): two (max_seq_len, head_dim / 2) FP32 tables. Raises ValueError
    where heads have an odd width."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: an even width wanted, not {head_dim}")
    # FP64 until the end: positions beyond 2^15 times FP32 frequencies would lose the low bits of the angle.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angles = torch.arange(max_seq_len, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (B, T, H, D); cos, sin: (T, D/2) or (B, T, D/2) -> the rotated x, computed in FP32."""
    wide = x if x.dtype == torch.float64 else x.float()
    cos, sin = (t.to(wide.dtype).unsqueeze(-2) for t in (cos, sin))  # (.., T, 1, D/2)
    first, second = wide.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


if triton is not None:
    # A tile is (tokens, pairs): lane i of a head pairs element i with i + HALF. A program keeps the cosines of its
    # tokens in registers and walks over the heads, HEADS at a time: all of their loads come before the first store,
    # because no load may pass a store that might be to the same address.

    @triton.jit
    def _rotate_heads(
        qkv, dst, weight, row, lane, inside, c, s, eps, WIDTH: tl.constexpr, FIRST: tl.constexpr,
        N_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    ):  # fmt: skip
        if weight is not None:
            w1 = tl.load(weight + lane, mask=lane < HALF, other=0.0)
            w2 = tl.load(weight + HALF + lane, mask=lane < HALF, other=0.0)
        for first in tl.range(0, N_HEADS, HEADS):
            firsts = ()
            seconds = ()
            for j in tl.static_range(HEADS):
                at = qkv + row * WIDTH + (FIRST + first + j) * (2 * HALF) + lane
                mask = inside & (first + j < N_HEADS)
                firsts += (tl.load(at, mask=mask, other=0.0),)
                seconds += (tl.load(at + HALF, mask=mask, other=0.0),)
            for j in tl.static_range(HEADS):
                x1 = firsts[j].to(tl.float32)
                x2 = seconds[j].to(tl.float32)
                if weight is not None:
                    square = tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True) / (2 * HALF)
                    scale = tl.rsqrt(square + eps)
                    x1 = x1 * scale * w1
                    x2 = x2 * scale * w2
                to = dst + row * (N_HEADS * 2 * HALF) + (first + j) * (2 * HALF) + lane
                mask = inside & (first + j < N_HEADS)
                tl.store(to, (x1 * c - x2 * s).to(dst.dtype.element_ty), mask=mask)
                tl.store(to + HALF, (x2 * c + x1 * s).to(dst.dtype.element_ty), mask=mask)

    @triton.jit
    def _rotary_forward_kernel(
        qkv, cos, sin, q_weight, k_weight, q, k, t_len, blocks, table_batch, table_row, eps,
        N_Q: tl.constexpr, N_KV: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    ):  # fmt: skip
        batch = (tl.program_id(0) // blocks).to(tl.int64)
        t = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)[:, None]
        # As many rows of lanes as of tokens, here and below: what is read for every token is laid out as tokens are.
        lane = tl.broadcast_to(tl.arange(0, LANES)[None, :], (TOKENS, LANES))
        inside = (t < t_len) & (lane < HALF)
        table = batch * table_batch + t * table_row + lane
        c = tl.load(cos + table, mask=inside, other=0.0)
        s = tl.load(sin + table, mask=inside, other=0.0)
        row = batch * t_len + t
        WIDTH: tl.constexpr = (N_Q + 2 * N_KV) * 2 * HALF
        _rotate_heads(qkv, q, q_weight, row, lane, inside, c, s, eps, WIDTH, 0, N_Q, HALF, Q_HEADS)
        _rotate_heads(qkv, k, k_weight, row, lane, inside, c, s, eps, WIDTH, N_Q, N_KV, HALF, KV_HEADS)

    @triton.jit
    def _rotate_heads_back(
        d, d_head, d_qkv, qkv, weight, row, lane, inside, c, s, eps, dw1, dw2, WIDTH: tl.constexpr,
        FIRST: tl.constexpr, N_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    ):  # fmt: skip
        if weight is not None:
            w1 = tl.load(weight + lane, mask=lane < HALF, other=0.0)
            w2 = tl.load(weight + HALF + lane, mask=lane < HALF, other=0.0)
        for first in tl.range(0, N_HEADS, HEADS):
            firsts = ()
            seconds = ()
            x1 = ()
            x2 = ()
            for j in tl.static_range(HEADS):
                mask = inside & (first + j < N_HEADS)
                at = d + (first + j) * d_head + lane
                firsts += (tl.load(at, mask=mask, other=0.0),)
                seconds += (tl.load(at + HALF, mask=mask, other=0.0),)
                if weight is not None:
                    at = qkv + row * WIDTH + (FIRST + first + j) * (2 * HALF) + lane
                    x1 += (tl.load(at, mask=mask, other=0.0),)
                    x2 += (tl.load(at + HALF, mask=mask, other=0.0),)
            for j in tl.static_range(HEADS):
                d1 = firsts[j].to(tl.float32)
                d2 = seconds[j].to(tl.float32)
                g1 = d1 * c + d2 * s
                g2 = d2 * c - d1 * s
                if weight is not None:
                    n1 = x1[j].to(tl.float32)
                    n2 = x2[j].to(tl.float32)
                    # Once more: to keep it would cost the forward two barriers a head, for a tensor of one column.
                    scale = tl.rsqrt(tl.sum(n1 * n1 + n2 * n2, 1, keep_dims=True) / (2 * HALF) + eps)
                    n1 *= scale
                    n2 *= scale
                    dw1 += g1 * n1
                    dw2 += g2 * n2
                    g1 *= w1
                    g2 *= w2
                    mean = tl.sum(g1 * n1 + g2 * n2, 1, keep_dims=True) / (2 * HALF)
                    g1 = scale * (g1 - n1 * mean)
                    g2 = scale * (g2 - n2 * mean)
                to = d_qkv + row * WIDTH + (FIRST + first + j) * (2 * HALF) + lane
                mask = inside & (first + j < N_HEADS)
                tl.store(to, g1.to(d_qkv.dtype.element_ty), mask=mask)
                tl.store(to + HALF, g2.to(d_qkv.dtype.element_ty), mask=mask)
        return dw1, dw2

    @triton.jit
    def _store_partial(partials, dw1, dw2, HALF: tl.constexpr, LANES: tl.constexpr):
        lane = tl.arange(0, LANES)
        to = partials + tl.program_id(0) * (2 * HALF) + lane
        tl.store(to, tl.sum(dw1, 0), mask=lane < HALF)
        tl.store(to + HALF, tl.sum(dw2, 0), mask=lane < HALF)

    @triton.jit
    def _rotary_backward_kernel(
        dq, dk, dv, d_qkv, qkv, cos, sin, q_weight, k_weight, q_partials, k_partials,
        t_len, blocks, table_batch, table_row, eps,
        dq_batch, dq_t, dq_head, dk_batch, dk_t, dk_head, dv_batch, dv_t, dv_head,
        N_Q: tl.constexpr, N_KV: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, STEPS: tl.constexpr,
    ):  # fmt: skip
        WIDTH: tl.constexpr = (N_Q + 2 * N_KV) * 2 * HALF
        batch = (tl.program_id(0) // blocks).to(tl.int64)
        lane = tl.broadcast_to(tl.arange(0, LANES)[None, :], (TOKENS, LANES))
        q1 = tl.zeros((TOKENS, LANES), tl.float32)
        q2 = tl.zeros((TOKENS, LANES), tl.float32)
        k1 = tl.zeros((TOKENS, LANES), tl.float32)
        k2 = tl.zeros((TOKENS, LANES), tl.float32)
        for step in tl.range(0, STEPS):
            t = (tl.program_id(0) % blocks * STEPS + step) * TOKENS + tl.arange(0, TOKENS)[:, None]
            inside = (t < t_len) & (lane < HALF)
            table = batch * table_batch + t * table_row + lane
            c = tl.load(cos + table, mask=inside, other=0.0)
            s = tl.load(sin + table, mask=inside, other=0.0)
            row = batch * t_len + t
            wide_t = t.to(tl.int64)
            q1, q2 = _rotate_heads_back(
                dq + batch * dq_batch + wide_t * dq_t, dq_head, d_qkv, qkv, q_weight,
                row, lane, inside, c, s, eps, q1, q2, WIDTH, 0, N_Q, HALF, Q_HEADS,
            )  # fmt: skip
            k1, k2 = _rotate_heads_back(
                dk + batch * dk_batch + wide_t * dk_t, dk_head, d_qkv, qkv, k_weight,
                row, lane, inside, c, s, eps, k1, k2, WIDTH, N_Q, N_KV, HALF, KV_HEADS,
            )  # fmt: skip
            for first in tl.range(0, N_KV, KV_HEADS):
                firsts = ()
                seconds = ()
                for j in tl.static_range(KV_HEADS):
                    mask = inside & (first + j < N_KV)
                    at = dv + batch * dv_batch + wide_t * dv_t + (first + j) * dv_head + lane
                    firsts += (tl.load(at, mask=mask),)
                    seconds += (tl.load(at + HALF, mask=mask),)
                for j in tl.static_range(KV_HEADS):
                    mask = inside & (first + j < N_KV)
                    to = d_qkv + row * WIDTH + (N_Q + N_KV + first + j) * (2 * HALF) + lane
                    tl.store(to, firsts[j], mask=mask)
                    tl.store(to + HALF, seconds[j], mask=mask)
        if q_weight is not None:
            _store_partial(q_partials, q1, q2, HALF, LANES)
            _store_partial(k_partials, k1, k2, HALF, LANES)


def _tile(n_tokens: int, head_dim: int, pairs: int) -> tuple[int, int, int, int]:
    """(half of head_dim, lanes, tokens a tile, warps) where a lane takes `pairs` of a head."""
    half = head_dim // 2
    lanes = triton.next_power_of_2(half)
    warps = 4 if n_tokens > FEW_TOKENS else 1
    return half, lanes, max(1, warps * 32 * pairs // lanes), warps


def _at_once(n_heads: int, most: int) -> int:
    """Heads a turn, in as few and as equal turns as `most` allows."""
    return -(-n_heads // -(-n_heads // most))


def _steps(n_tokens: int, tokens: int) -> int:
    """Tiles a program takes where it sums: at most 64 tokens, fewer where programs would be few, by the shape alone."""
    return max(1, min(64, triton.next_power_of_2(max(1, n_tokens // 1024))) // tokens)


def _dense(*weights: Tensor | None) -> list[Tensor | None]:
    """As a kernel reads them; gradients are delivered to the weights themselves."""
    return [None if weight is None else weight.detach().contiguous() for weight in weights]


def _table_strides(table: Tensor) -> tuple[int, int]:
    """Strides between batches and between tokens of a contiguous (T, D/2) or (B, T, D/2) table."""
    return (table.stride(0) if table.dim() == 3 else 0), table.stride(-2)


class _RotaryQKV(torch.autograd.Function):
    """The Triton path: q and k are new, v is a view of qkv, where attention reads it without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        n_heads: int,
        n_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        b, t, width = qkv.shape
        heads = qkv.view(b, t, n_heads + 2 * n_kv_heads, -1)
        head_dim = heads.shape[-1]
        q = torch.empty((b, t, n_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        k = torch.empty((b, t, n_kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        half, lanes, tokens, warps = _tile(b * t, head_dim, PAIRS)
        blocks = triton.cdiv(t, tokens)
        _rotary_forward_kernel[(b * blocks,)](
            qkv, cos, sin, *_dense(q_norm, k_norm), q, k, t, blocks, *_table_strides(cos), max(eps, TINY),
            n_heads, n_kv_heads, half, lanes, tokens, _at_once(n_heads, HEADS), _at_once(n_kv_heads, HEADS),
            num_warps=warps,
        )  # fmt: skip
        ctx.weights = (q_norm, k_norm)
        ctx.versions = [None if w is None else version(w) for w in ctx.weights]
        ctx.heads = (n_heads, n_kv_heads)
        ctx.eps = eps
        ctx.save_for_backward(cos, sin, None if q_norm is None or k_norm is None else qkv)
        return q, k, heads[:, :, n_heads + n_kv_heads :]

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        cos, sin, qkv = ctx.saved_tensors
        q_norm, k_norm = ctx.weights
        if [None if w is None else version(w) for w in ctx.weights] != ctx.versions:
            raise RuntimeError("rotary_qkv: a norm's weight was modified in place between the forward and the backward")
        n_heads, n_kv_heads = ctx.heads
        # The kernel's offsets of heads are 32 bits wide.
        near = [d.stride(-1) == 1 and d.shape[2] * d.stride(2) < 1 << 31 for d in (dq, dk, dv)]
        dq, dk, dv = (d if fits else d.contiguous() for d, fits in zip((dq, dk, dv), near, strict=True))
        b, t, _, head_dim = dq.shape
        d_qkv = torch.empty((b, t, (n_heads + 2 * n_kv_heads) * head_dim), dtype=dq.dtype, device=dq.device)
        half, lanes, tokens, warps = _tile(b * t, head_dim, PAIRS if qkv is None else NORMED_BACKWARD_PAIRS)
        steps = 1 if qkv is None else _steps(b * t, tokens)
        q_partials = k_partials = None
        blocks = triton.cdiv(t, tokens * steps)
        if qkv is not None:
            q_partials = torch.empty((b * blocks, head_dim), dtype=torch.float32, device=dq.device)
            k_partials = torch.empty_like(q_partials)
        strides = [d.stride(i) for d in (dq, dk, dv) for i in range(3)]
        _rotary_backward_kernel[(b * blocks,)](
            dq, dk, dv, d_qkv, qkv, cos, sin, *_dense(q_norm, k_norm), q_partials, k_partials,
            t, blocks, *_table_strides(cos), max(ctx.eps, TINY), *strides,
            n_heads, n_kv_heads, half, lanes, tokens, _at_once(n_heads, HEADS), _at_once(n_kv_heads, HEADS), steps,
            num_warps=warps,
        )  # fmt: skip
        dw: list[Tensor | None] = [None, None]
        if q_partials is not None and k_partials is not None:
            dw = [deliver_partials(q_norm, q_partials), deliver_partials(k_norm, k_partials)]
        return d_qkv, None, None, None, None, *dw, None


def require_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Raise ValueError naming the argument of `rotary_qkv` that does not fit."""
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: must be 0 or more, not {eps}")
    for name, number in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        if number < 1:
            raise ValueError(f"{name}: must be at least 1, not {number}")
    heads = n_heads + 2 * n_kv_heads
    if qkv.dtype not in FLOATS:
        raise ValueError(f"qkv: a floating-point tensor wanted, not {qkv.dtype}")
    if qkv.dim() != 3 or not qkv.shape[-1] or qkv.shape[-1] % (2 * heads):
        raise ValueError(f"qkv: (B, T, {heads} heads of an even width) wanted, not {tuple(qkv.shape)}")
    b, t, width = qkv.shape
    head_dim = width // heads
    tables = [(t, head_dim // 2), (b, t, head_dim // 2)]
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) not in tables:
            raise ValueError(f"{name}: {tables[0]} or {tables[1]} wanted, not {tuple(table.shape)}")
        if table.dtype not in FLOATS:
            raise ValueError(f"{name}: floating-point numbers wanted, not {table.dtype}")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: {tuple(cos.shape)} wanted, as cos is, not {tuple(sin.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{'q_norm' if q_norm is None else 'k_norm'}: given for one of q and k, it is wanted for both")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (head_dim,) or weight.dtype not in FLOATS):
            raise ValueError(f"{name}: ({head_dim},) of floats wanted, not {tuple(weight.shape)} of {weight.dtype}")
    for name, other in (("cos", cos), ("sin", sin), ("q_norm", q_norm), ("k_norm", k_norm)):
        if other is not None and other.device != qkv.device:
            raise ValueError(f"{name}: on {other.device}, but qkv is on {qkv.device}")


def rotary_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv (B, T, (n_heads + 2 n_kv_heads) * D) into heads, normalises q and k where weights (D,) are given,
    and rotates them. cos, sin: (T, D/2) or (B, T, D/2), as of `rotary_tables`. Returns q (B, T, n_heads, D), k, v (B,
    T, n_kv_heads, D). Raises ValueError naming the argument that does not fit."""
    require_qkv(qkv, cos, sin, n_heads, n_kv_heads, q_norm, k_norm, eps)
    if choose("rotary", qkv) == TRITON:
        return _RotaryQKV.apply(qkv, cos, sin, n_heads, n_kv_heads, q_norm, k_norm, float(eps))
    b, t, width = qkv.shape
    n = n_heads + 2 * n_kv_heads
    heads = qkv.view(b, t, n, width // n)
    q, k, v = heads.split([n_heads, n_kv_heads, n_kv_heads], 2)
    if q_norm is not None and k_norm is not None:
        q, k = rmsnorm(q, q_norm, eps), rmsnorm(k, k_norm, eps)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin), v
