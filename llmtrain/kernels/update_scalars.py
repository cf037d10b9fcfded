"""The single numbers of an update: its figures, whether it is applied, and what the optimizer's kernel multiplies by.

All of it stays on the device, in FP64: some three dozen operations on one number each. In a captured step each of them
is a launch, so there they are one kernel. A rule that has a say in whether the update is applied (spikes) is asked in
the middle, which only the reference does.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

Veto = Callable[[Tensor, Tensor], Tensor]
"""Of lm_loss and gradient norm (2,) FP64 and whether the update may be applied (0-d bool): whether it is."""

CLIP_EPS = 1e-6
NO_POWER = -1e300
"""In place of the logarithm of 0."""


def update_scalars_reference(
    sums: Tensor, norm: Tensor, tally: Tensor, bad: Tensor, lr: Tensor, *, grad_clip: float, max_bad_steps: int,
    beta1: float, beta2: float, veto: Veto | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `update_scalars`, by torch's operations."""
    count, skipped, in_a_row = tally.unbind()
    n_targets = sums[2]
    norm = norm / n_targets
    means = sums[:2] / n_targets
    figures = torch.stack([means[0], means[1], norm, n_targets])
    apply = torch.isfinite(figures.sum()) & (in_a_row <= max_bad_steps)
    if veto is not None:
        apply = veto(figures[0:3:2], apply)
    skip = ~apply
    number = (count + skipped + 1).double()
    # Number 0: this process has seen none yet, which may have been resumed in the middle of a row.
    first = skip & ((in_a_row == 0) | (bad[0] == 0))
    torch.where(first, torch.cat([number.view(1), figures[:3]]), bad, out=bad)
    count.add_(apply)
    skipped.add_(skip)
    in_a_row.add_(1).mul_(skip)
    scale = 1.0 / n_targets
    if grad_clip > 0:
        scale = scale * (grad_clip / (norm + CLIP_EPS)).clamp(max=1.0)
    correction1 = 1 - torch.pow(torch.full_like(scale, beta1), count)
    correction2 = 1 - torch.pow(torch.full_like(scale, beta2), count)
    return figures, torch.stack([lr, scale, correction1, correction2, apply.double()])


if triton is not None:

    @triton.jit
    def _update_scalars_kernel(
        sums, norm, tally, bad, lr, figures, scalars,
        CLIP: tl.constexpr, CLIP_EPS: tl.constexpr, MOST_BAD: tl.constexpr,
        LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    ):  # fmt: skip
        one = tl.full((), 1, tl.float64)  # constants are FP64 by their own word: else they would be rounded to FP32
        n_targets = tl.load(sums + 2)
        lm_loss = tl.load(sums) / n_targets
        aux_loss = tl.load(sums + 1) / n_targets
        of_mean = tl.load(norm) / n_targets
        tl.store(figures, lm_loss)
        tl.store(figures + 1, aux_loss)
        tl.store(figures + 2, of_mean)
        tl.store(figures + 3, n_targets)
        in_a_row = tl.load(tally + 2)
        apply = (tl.abs(lm_loss + aux_loss + of_mean + n_targets) < float("inf")) & (in_a_row <= MOST_BAD)
        applied = apply.to(tl.int64)
        count = tl.load(tally)
        skipped = tl.load(tally + 1)
        first = (applied == 0) & ((in_a_row == 0) | (tl.load(bad) == 0))
        tl.store(bad, (count + skipped + 1).to(tl.float64), mask=first)
        tl.store(bad + 1, lm_loss, mask=first)
        tl.store(bad + 2, aux_loss, mask=first)
        tl.store(bad + 3, of_mean, mask=first)
        count += applied
        tl.store(tally, count)
        tl.store(tally + 1, skipped + 1 - applied)
        tl.store(tally + 2, (in_a_row + 1) * (1 - applied))
        scale = one / n_targets
        if CLIP > 0:
            scale *= tl.minimum(tl.full((), CLIP, tl.float64) / (of_mean + tl.full((), CLIP_EPS, tl.float64)), one)
        t = count.to(tl.float64)
        tl.store(scalars, tl.load(lr))
        tl.store(scalars + 1, scale)
        tl.store(scalars + 2, one - tl.exp(t * tl.full((), LOG_BETA1, tl.float64)))
        tl.store(scalars + 3, one - tl.exp(t * tl.full((), LOG_BETA2, tl.float64)))
        tl.store(scalars + 4, applied.to(tl.float64))


def update_scalars(
    master: Tensor, sums: Tensor, norm: Tensor, tally: Tensor, bad: Tensor, lr: Tensor, *, grad_clip: float,
    max_bad_steps: int, beta1: float, beta2: float, veto: Veto | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The figures of a step (4,): its two losses as means, the norm of the mean gradient before clipping, and the
    number of targets; and the scalars of `adamw_step` (5,): lr, grad_scale, 1 - beta1^t, 1 - beta2^t, apply. All FP64.

    sums (3,): of lm_loss, aux_loss and targets; norm (0-d): of the gradients' sum; both FP64. The update is applied
    where the figures are finite, no more than `max_bad_steps` before it were not, and `veto` has nothing against it.
    Counted in place: tally (3,) int64, updates applied, which is t, skipped, and skipped in a row; bad (4,) FP64, the
    number and the figures of the step that the last such row began with; number 0 is none. master: the weights, whose
    device and dtype decide what runs.
    """
    assert all(x.dtype == torch.float64 for x in (sums, norm, bad, lr)) and tally.dtype == torch.int64
    if veto is not None or choose("update_scalars", master) != TRITON:
        return update_scalars_reference(
            sums, norm, tally, bad, lr,
            grad_clip=grad_clip, max_bad_steps=max_bad_steps, beta1=beta1, beta2=beta2, veto=veto,
        )  # fmt: skip
    figures, scalars = sums.new_empty(4), sums.new_empty(5)
    log_beta1, log_beta2 = (math.log(beta) if beta > 0 else NO_POWER for beta in (beta1, beta2))
    _update_scalars_kernel[(1,)](
        sums, norm, tally, bad, lr, figures, scalars,
        grad_clip, CLIP_EPS, max_bad_steps, log_beta1, log_beta2, num_warps=1,
    )  # fmt: skip
    return figures, scalars
