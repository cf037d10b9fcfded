"""The language-model head: logits, cross-entropy and their gradients, a chunk of rows at a time.

Logits are never whole. Each chunk's matmul is followed by one pass that turns logits into losses and, in place, into
their own gradient; dX and dW are formed at once, so nothing is kept or recomputed. This rests on the rule of sums:
the loss is a sum over targets whose upstream gradient is 1.
"""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.weight import deliver_product, operand

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

IGNORED = -100
"""A target that counts for nothing."""

LOG2_E = 1.4426950408889634

LOGITS_BYTES = {"cuda": 1008 << 20, "cpu": 64 << 20}
"""What a chunk of logits may take. A GPU wants few large matmuls, a CPU's cores want their part in the cache."""

CHUNKS = (16384, 5632)
"""Rows of logits that a GPU's matmuls like. One H200, ms of the whole head by chunk: 65536 x 768 x 32000 5632: 17.6,
8192: 17.7, 11008: 18.4, 16384: 17.2; 32768 x 960 x 49152 5632: 16.3, 8192: 17.6, 16384: 16.1; 32768 x 2048 x 32000
5632: 21.6, 11008: 21.3, 16384: 20.5. 5632 is 44 tiles of 128, which tile 132 processors evenly."""


def cross_entropy_in_place_reference(
    logits: Tensor, targets: Tensor, z_loss: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """logits: (N, V), targets: (N,) int64 -> losses (N,) and z-losses (N,) in FP32 (FP64 for FP64 logits).

    loss = lse - logit[target], z = z_loss * lse^2 (PaLM, Chowdhery et al. 2022); both 0 where the target is ignored.
    With a gradient, logits is overwritten by d(loss + z)/d logits = softmax * (1 + 2 z_loss lse) - onehot.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    counted = targets != IGNORED
    index = targets.clamp_min(0)[:, None]
    lse = wide.logsumexp(-1)
    losses = torch.where(counted, lse - wide.gather(1, index)[:, 0], 0.0)
    z = torch.where(counted, z_loss * lse.square(), 0.0)
    if with_gradient:
        gradient = (wide - lse[:, None]).exp_() * (1 + 2 * z_loss * lse)[:, None]
        gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=wide.dtype))
        logits.copy_(gradient * counted[:, None])
    return losses, z


if triton is not None:

    @triton.jit
    def _cross_entropy_kernel(
        logits, targets, losses, zs, stride, n_columns, n_padded, z_loss,
        WITH_GRADIENT: tl.constexpr, IGNORED: tl.constexpr, LOG2_E: tl.constexpr, PADDED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        counted = target != IGNORED
        x_row = logits + row * stride
        x_target = x_row + tl.where(counted, target, 0)
        # Read before the first store into this row: the reductions below are barriers in between.
        at_target = tl.load(x_target).to(tl.float32)
        # Products with LOG2_E are not rounded before what is subtracted from them is: a logit beyond 1e4 would show it.
        # A maximum and a sum for every 8 columns of a block, which lie in one thread: no barrier before the end.
        tops = tl.full((BLOCK // 8,), -1e38, tl.float32)
        totals = tl.zeros((BLOCK // 8,), tl.float32)
        n_read = tl.where(counted, n_padded, 0)  # an ignored row is not read
        ahead = tl.load(x_row + columns, columns < n_read, float("-inf"), eviction_policy="evict_last")
        for begin in range(0, n_columns, BLOCK):
            x = ahead.to(tl.float32)
            after = begin + BLOCK + columns
            ahead = tl.load(x_row + after, after < n_read, float("-inf"), eviction_policy="evict_last")
            if PADDED:
                x = tl.where(begin + columns < n_columns, x, float("-inf"))
            x = tl.reshape(x, (BLOCK // 8, 8))
            higher = tl.maximum(tops, tl.max(x, 1))
            scaled = higher * LOG2_E
            # Not tops * LOG2_E - scaled: where 8 columns are all padding, the rounding of that product, which a fused
            # multiply-add takes into account, is 2e30, and exp2 of it infinite.
            shrunk = totals * tl.exp2((tops - higher) * LOG2_E)
            totals = shrunk + tl.sum(tl.exp2(x * LOG2_E - scaled[:, None]), 1)
            tops = higher
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp2((tops - top) * LOG2_E), 0)
        lse = tl.where(counted, top + tl.log(tl.where(counted, total, 1.0)), 0.0)
        tl.store(losses + row, tl.where(counted, lse - at_target, 0.0))
        tl.store(zs + row, z_loss * lse * lse)
        if WITH_GRADIENT:
            # The row is read a second time, from L2. Nothing but the exponential is done a column: the one at the
            # target is put right by itself, and an ignored row is exp2(-inf) * 0.
            shift = lse * LOG2_E
            factor = tl.where(counted, 1 + 2 * z_loss * lse, 0.0)
            for begin in range(0, n_columns, BLOCK):
                at = begin + columns
                x = tl.load(x_row + at, at < n_read, float("-inf"), eviction_policy="evict_first")
                g = tl.exp2(x.to(tl.float32) * LOG2_E - shift) * factor
                if PADDED:
                    g = tl.where(at < n_columns, g, 0.0)
                tl.store(x_row + at, g.to(logits.dtype.element_ty), at < n_padded, eviction_policy="evict_first")
            g = tl.where(counted, tl.exp2(at_target * LOG2_E - shift) * factor - 1.0, 0.0)
            tl.debug_barrier()  # another thread stored the same column
            tl.store(x_target, g.to(logits.dtype.element_ty))


def configuration(n_columns: int) -> tuple[int, int]:
    """(block, warps) for rows of `n_columns` logits."""
    # Long rows take the large block, so that fewer are in work at a time and all of those stay in L2, but not where
    # much of their last one would be empty. One H200, 16384 rows, ms with a block of 8192 and 8 warps, of 16384 and 16:
    # 32000 wide 0.516, 0.541; 49152 wide 0.943, 0.779; 50257 wide 1.015, 1.178.
    most = 8192
    if n_columns > 40960 and triton.cdiv(n_columns, 16384) * 16384 < 1.1 * triton.cdiv(n_columns, 8192) * 8192:
        most = 16384
    block = min(max(256, triton.next_power_of_2(n_columns)), most)
    return block, max(1, block // 1024)


def cross_entropy_triton(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    zs: Tensor,
    z_loss: float,
    with_gradient: bool,
    config: tuple[int, int] | None = None,
) -> None:
    """As `cross_entropy_in_place`; `config` as from `configuration`, for measuring others."""
    n, n_columns = logits.shape
    block, warps = config or configuration(n_columns)
    assert logits.stride(1) == 1
    if n == 0:
        return
    # Accesses are only as wide as the last column's mask is aligned.
    padded = -(-n_columns // 16) * 16
    if padded > logits.stride(0) or logits.stride(0) % 16:
        padded = n_columns
    _cross_entropy_kernel[(n,)](
        logits, targets.contiguous(), losses, zs, logits.stride(0), n_columns, padded, z_loss,
        WITH_GRADIENT=with_gradient, IGNORED=IGNORED, LOG2_E=LOG2_E, PADDED=padded != n_columns, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, losses: Tensor, zs: Tensor, z_loss: float, with_gradient: bool
) -> None:
    """As the reference, into losses and zs (N,). The rows of logits (N, V) may lie further apart than V: where there is
    room up to the next 16 columns, what lies there becomes 0."""
    if choose("cross_entropy", logits) == TRITON:
        cross_entropy_triton(logits, targets, losses, zs, z_loss, with_gradient)
    else:
        loss, z = cross_entropy_in_place_reference(logits, targets, z_loss, with_gradient)
        losses.copy_(loss)
        zs.copy_(z)


def chunk_rows(n: int, n_columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of logits to hold at once: on a GPU the first of CHUNKS that LOGITS_BYTES allows, elsewhere what it allows.
    Where the last chunk would be small, all are about equal instead."""
    allowed = LOGITS_BYTES.get(device.type, LOGITS_BYTES["cpu"]) // (n_columns * dtype.itemsize)
    rows = max(128, allowed // 128 * 128)  # whole tiles of the matmuls
    if device.type == "cuda":
        rows = next((chunk for chunk in CHUNKS if chunk <= allowed), rows)
    chunks = max(1, -(-n // rows))
    if n - (chunks - 1) * rows < rows // 2:
        rows = -(-n // chunks // 128) * 128
    return max(1, min(n, rows))


def logits_buffer(rows: int, n_columns: int, x: Tensor) -> Tensor:
    """(rows, n_columns) for logits of x's dtype, unwritten, rows as far apart as matmuls and kernel like it."""
    # A row stride of whole 64s keeps 16-byte accesses, the matmuls' and the kernel's, aligned for any vocabulary.
    buffer = torch.empty(rows, -(-n_columns // 64) * 64, dtype=x.dtype, device=x.device)
    if buffer.shape[1] != n_columns:
        # The kernel reads some of it, and on a CPU with AMX oneDNN reads bf16 in pairs: beyond an odd row it meets what
        # lies there, times 0.
        buffer[:, n_columns:] = 0
    return buffer[:, :n_columns]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, chunk: int, train: bool) -> Any:
        w = operand(weight, x.dtype)
        total = torch.float64 if x.dtype == torch.float64 else torch.float32
        losses = torch.empty(len(x), dtype=total, device=x.device)
        zs = torch.empty_like(losses)
        dx = torch.empty_like(x) if train else None
        dw = None
        buffer = logits_buffer(min(chunk, len(x)), len(w), x)
        for begin in range(0, len(x), chunk):
            part = slice(begin, min(begin + chunk, len(x)))
            logits = buffer[: part.stop - begin]
            torch.mm(x[part], w.T, out=logits)
            cross_entropy_in_place(logits, targets[part], losses[part], zs[part], z_loss, train)
            if dx is not None:
                torch.mm(logits, w, out=dx[part])
                more = deliver_product(weight, logits, x[part])
                dw = more if dw is None or more is None else dw + more
        ctx.dx, ctx.dw = dx, dw
        return losses.sum(), zs.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        # Upstream is 1 by contract: the optimizer divides once, by the number of targets.
        dx, dw = ctx.dx, ctx.dw
        ctx.dx = ctx.dw = None
        return dx, dw, None, None, None, None


def head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The model's head. x: (N, d), weight: (V, d) FP32 master, targets: (N,) int64, IGNORED where nothing is to be
    predicted. With plain tensors use `llmtrain.kernels.linear_cross_entropy`.

    Returns (sum of cross-entropies, sum of z-losses), FP32 scalars. Their gradients are those of the plain sum of the
    two: call backward on it, unscaled. `chunk`: rows of logits at a time, by default as many as LOGITS_BYTES allows.
    """
    if chunk is None:
        chunk = chunk_rows(len(x), len(weight), x.dtype, x.device)
    train = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(x, weight, targets, z_loss, chunk, train)
