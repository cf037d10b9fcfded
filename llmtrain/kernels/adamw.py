"""AdamW (Loshchilov and Hutter 2019) over flat buffers, in one pass.

Clipping, the division by the number of targets, the bias corrections and the narrow copy are part of that pass: it
reads 16 bytes a parameter and writes 14. What changes from step to step comes as a device tensor, so that the launch
can be captured once and replayed.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

LR, GRAD_SCALE, BIAS_CORRECTION1, BIAS_CORRECTION2, APPLY = range(5)
"""What `scalars` holds where."""

CACHED = 1 << 17
"""Elements the reference takes at a time on a CPU, so that its temporaries stay in the cache (measured: the best)."""

BLOCK = 2048
WARPS = 8


def _pieces(n: int, n_decayed: int, size: int) -> Iterator[tuple[slice, bool]]:
    """[0, n) in slices of at most `size`, none of which crosses `n_decayed`; whether each is decayed."""
    for first, last, decayed in ((0, n_decayed, True), (n_decayed, n, False)):
        for begin in range(first, last, size):
            yield slice(begin, min(begin + size, last)), decayed


def adamw_reference(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    narrow: Tensor | None,
    n_decayed: int,
    scalars: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """As `adamw_step`; FP64 buffers too. No sync on a CUDA device, where a piece is all there is."""
    lr, grad_scale, correction1, correction2, apply = scalars.to(master.dtype).unbind()
    applied = apply != 0
    size = CACHED if master.device.type == "cpu" else max(1, len(master))
    for part, decayed in _pieces(len(master), n_decayed, size):
        p, m, v = master[part], exp_avg[part], exp_avg_sq[part]
        g = grad[part] * grad_scale
        m_new = torch.lerp(m, g, 1 - beta1)
        v_new = (v * beta2).addcmul_(g, g, value=1 - beta2)
        update = (v_new / correction2).sqrt_().add_(eps).reciprocal_().mul_(m_new).mul_(lr / correction1)
        p_new = (p * (1 - lr * weight_decay) if decayed else p) - update
        # A selection, not a product: what is not applied may be NaN.
        for old, new in ((p, p_new), (m, m_new), (v, v_new)):
            torch.where(applied, new, old, out=old)
        if narrow is not None:
            narrow[part].copy_(p)


if triton is not None:

    @triton.jit
    def _adamw_kernel(
        master, grad, exp_avg, exp_avg_sq, narrow, scalars, n, n_decayed,
        beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay,
        HAS_NARROW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        lr = tl.load(scalars)
        grad_scale = tl.load(scalars + 1)
        correction1 = tl.load(scalars + 2)
        correction2 = tl.load(scalars + 3)
        apply = tl.load(scalars + 4)
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        # A step that is not applied touches nothing, so its gradient may be NaN.
        mask = i < tl.where(apply != 0, n, 0)
        p = tl.load(master + i, mask)
        g = tl.load(grad + i, mask) * grad_scale
        m = tl.load(exp_avg + i, mask)
        v = tl.load(exp_avg_sq + i, mask)
        m += (g - m) * one_minus_beta1
        v = v * beta2 + g * g * one_minus_beta2
        p *= 1 - tl.where(i < n_decayed, lr * weight_decay, 0.0)
        p -= lr / correction1 * m / (tl.sqrt(v / correction2) + eps)
        tl.store(master + i, p, mask)
        tl.store(exp_avg + i, m, mask)
        tl.store(exp_avg_sq + i, v, mask)
        if HAS_NARROW:
            tl.store(narrow + i, p.to(narrow.dtype.element_ty), mask)


def adamw_step(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    narrow: Tensor | None,
    *,
    n_decayed: int,
    scalars: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One update in place of master, exp_avg, exp_avg_sq (n,) FP32 by grad (n,) FP32; narrow (n,) becomes master in
    its own dtype (bf16). The first `n_decayed` elements are decayed, apart from the gradient; the others are not.

    scalars: FP32 (5,) on the device: lr, grad_scale, 1 - beta1^t, 1 - beta2^t, apply. The gradient counts as
    grad * grad_scale. Where apply is 0 nothing changes, whatever the gradient holds.
    """
    n = len(master)
    assert scalars.shape == (5,) and 0 <= n_decayed <= n
    for other in (grad, exp_avg, exp_avg_sq) if narrow is None else (grad, exp_avg, exp_avg_sq, narrow):
        assert other.shape == (n,) and other.is_contiguous() and other.device == master.device
    if choose("adamw", master) != TRITON:
        adamw_reference(master, grad, exp_avg, exp_avg_sq, narrow, n_decayed, scalars, beta1, beta2, eps, weight_decay)
        return
    if n == 0:
        return
    # 1 - beta is taken here, in FP64: in FP32 1 - 0.999 is off by 5e-5 of itself.
    _adamw_kernel[(triton.cdiv(n, BLOCK),)](
        master, grad, exp_avg, exp_avg_sq, master if narrow is None else narrow, scalars, n, n_decayed,
        beta2, 1 - beta1, 1 - beta2, eps, weight_decay,
        HAS_NARROW=narrow is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
