"""The language-model head for use by itself: cross-entropy of x @ weight.T without the logits as a whole.

As in `cross_entropy.head_loss`, a chunk of logits becomes its own gradient in place and dX and dW are formed at once,
in the forward, so nothing is kept or computed again. Here weights are plain tensors, gradients go back through
autograd, and the upstream gradient scales them on the device.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from llmtrain.kernels.choice import FLOATS
from llmtrain.kernels.cross_entropy import IGNORED, chunk_rows, cross_entropy_in_place, logits_buffer
from llmtrain.kernels.derivatives import first_derivative

MEMORY_BYTES = 960 << 20
"""On a GPU: what a chunk of logits, dX and dW take together, where that leaves the chunk LEAST_ROWS."""

LEAST_ROWS = 2048
"""Below that a GPU's matmuls become slow."""


def rows_at_once(n: int, n_columns: int, width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of logits in a chunk, chunks about equal."""
    rows = chunk_rows(n, n_columns, dtype, device)
    if device.type == "cuda":
        left = MEMORY_BYTES - n * width * dtype.itemsize - 4 * n_columns * width
        rows = min(rows, max(LEAST_ROWS, left // (n_columns * dtype.itemsize) // 128 * 128))
    chunks = -(-n // rows)
    return -(-n // chunks // 128) * 128 if chunks > 1 else n


def _accumulate(dw: Tensor, dlogits: Tensor, x: Tensor, first: bool) -> None:
    """dw (V, d), FP32 for 16-bit operands, (+)= dlogits.T @ x."""
    if dw.dtype == x.dtype:
        dw.addmm_(dlogits.T, x, beta=0 if first else 1)
    elif not dw.is_cuda:  # CPU matmuls round what they give to the operands' dtype
        fits = dlogits.dtype != torch.float16  # whose range sums over many rows leave
        product = dlogits.T @ x if fits else dlogits.T.float() @ x.float()
        dw.copy_(product) if first else dw.add_(product)
    elif first:
        torch.mm(dlogits.T, x, out_dtype=dw.dtype, out=dw)
    else:
        torch.addmm(dw, dlogits.T, x, out_dtype=dw.dtype, out=dw)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, mean: bool, chunk: int,
        train: bool,
    ) -> Tensor:  # fmt: skip
        with_dx, with_dw = (train and needed for needed in ctx.needs_input_grad[:2])
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        w = weight.detach().to(x.dtype)
        losses, zs = torch.empty(2, len(x), dtype=wide, device=x.device)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if with_dx else None
        dw = torch.empty(w.shape, dtype=wide, device=x.device) if with_dw else None
        buffer = logits_buffer(min(chunk, len(x)), len(w), x)
        for begin in range(0, len(x), chunk):
            part = slice(begin, min(begin + chunk, len(x)))
            logits = buffer[: part.stop - begin]
            torch.mm(x[part], w.T, out=logits)
            cross_entropy_in_place(logits, targets[part], losses[part], zs[part], z_loss, with_dx or with_dw)
            if dx is not None:
                torch.mm(logits, w, out=dx[part])
            if dw is not None:
                _accumulate(dw, logits, x[part], begin == 0)
        del buffer, logits  # before dW may need a copy in another dtype
        ctx.scale = 1 / (targets != IGNORED).sum().to(wide) if mean else None
        ctx.dtype = weight.dtype
        # Of the mean it is some thousand times as large here as it will be: FP16 has no room for that.
        early = weight.dtype != torch.float16
        ctx.save_for_backward(dx, dw.to(weight.dtype) if early and dw is not None else dw)
        total = losses.sum() + zs.sum()
        return total if ctx.scale is None else total * ctx.scale

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor) -> Any:
        factor = upstream if ctx.scale is None else upstream * ctx.scale
        # In FP32 whatever the gradient's dtype: a scalar does not widen it.
        dx, dw = (None if gradient is None else gradient * factor for gradient in ctx.saved_tensors)
        return dx, None if dw is None else dw.to(ctx.dtype), None, None, None, None, None


def check(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, reduction: str, chunk: int | None) -> None:
    """Raises ValueError for what `linear_cross_entropy` cannot take, naming the argument. Whether targets are below V
    is looked at on a CPU only: on a card that would wait for it."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() != 2 or 0 in tensor.shape:
            raise ValueError(f"{name}: a matrix wanted, not {tuple(tensor.shape)}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name}: floating-point numbers wanted, not {tensor.dtype}")
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: (vocabulary, {x.shape[1]}) wanted, as x is wide, not {tuple(weight.shape)}")
    if targets.shape != x.shape[:1]:
        raise ValueError(f"targets: ({len(x)},) wanted, one for each row of x, not {tuple(targets.shape)}")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets: int64 wanted, not {targets.dtype}")
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != x.device:
            raise ValueError(f"{name}: is on {tensor.device}, x on {x.device}")
    if not x.is_cuda and bool(((targets != IGNORED) & ((targets < 0) | (targets >= len(weight)))).any()):
        raise ValueError(f"targets: from 0 to {len(weight) - 1}, or {IGNORED} for none, wanted")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss: 0 or more wanted, not {z_loss}")
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction: sum or mean wanted, not {reduction!r}: single losses would need logits again")
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk: 1 row or more wanted, not {chunk}")


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, reduction: Literal["sum", "mean"] = "mean", z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of softmax(x @ weight.T) against `targets`, plus z_loss * lse^2 (PaLM), over counting targets.

    x: (N, d), weight: (V, d) of any floating-point dtype, multiplied in x's; targets: (N,) int64, -100 where nothing is
    to be predicted. Returns a scalar in FP32 (FP64 for FP64 x), whatever x is in: the mean over targets that count, NaN
    where none does, or the sum. Gradients for x and weight come in their own dtypes; dW is summed in FP32 and rounded
    once (on a CPU 16-bit products are rounded before they are summed). Logits of 16-bit inputs are rounded to 16 bits,
    so that a single row's loss is off by some 2^-9 of its logits; of many rows that averages out.

    chunk: rows of logits at a time; by default, on a GPU, what keeps logits, dX and dW under 960 MiB together, but no
    fewer than LEAST_ROWS, which a vocabulary of 100,000 and more takes more for. Raises ValueError, which names the
    argument.
    """
    check(x, weight, targets, z_loss, reduction, chunk)
    if chunk is None:
        chunk = rows_at_once(len(x), len(weight), x.shape[1], x.dtype, x.device)
    return _Head.apply(x, weight, targets, float(z_loss), reduction == "mean", chunk, torch.is_grad_enabled())
