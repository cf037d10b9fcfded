"""The language-model head: logits, cross-entropy and their gradients, a chunk of rows at a time.

Logits are never whole. Each chunk's matmul is followed by one pass that turns logits into losses and, in place, into
their own gradient; dX and dW are formed at once, so nothing is kept or recomputed. This rests on the rule of sums:
the loss is a sum over targets whose upstream gradient is 1.
"""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.weight import deliver_product, operand

IGNORED = -100
"""A target that counts for nothing."""


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


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, chunk: int, train: bool) -> Any:
        w = operand(weight, x.dtype)
        total = torch.float64 if x.dtype == torch.float64 else torch.float32
        losses = torch.empty(len(x), dtype=total, device=x.device)
        zs = torch.empty_like(losses)
        dx = torch.empty_like(x) if train else None
        dw = None
        for begin in range(0, len(x), chunk):
            part = slice(begin, min(begin + chunk, len(x)))
            logits = x[part] @ w.T
            losses[part], zs[part] = cross_entropy_in_place_reference(logits, targets[part], z_loss, train)
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


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, chunk: int = 16384
) -> tuple[Tensor, Tensor]:
    """x: (N, d), weight: (V, d) FP32 master, targets: (N,) int64, IGNORED where nothing is to be predicted.

    Returns (sum of cross-entropies, sum of z-losses), FP32 scalars. Their gradients are those of the plain sum of the
    two: call backward on it, unscaled.
    """
    train = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(x, weight, targets, z_loss, chunk, train)
