"""Sums over rows in two stages: a kernel's programs leave FP32 partial sums, and one small kernel adds those up.

The order is fixed by the shape alone, so the result is the same on every run and every card.
"""

from torch import Tensor

from llmtrain.kernels.weight import delivered, gradient_target

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

ROWS, COLS, WARPS = 2048, 8, 16
"""Tile of the second stage, at most: 32 bytes (one sector) of each of many rows, so that narrow sums still fill the
card, and that one tile is mostly enough."""


if triton is not None:

    @triton.jit
    def _partial_sums_kernel(
        partials, out, n, WIDTH: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):  # fmt: skip
        cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
        inside = cols < WIDTH
        # FP64 costs nothing on so few numbers, and leaves the first stage's rounding as the only one.
        total = tl.zeros((ROWS, COLS), tl.float64)
        for first in range(0, n, ROWS):
            rows = first + tl.arange(0, ROWS)
            mask = (rows < n)[:, None] & inside[None, :]
            total += tl.load(partials + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float64)
        result = tl.sum(total, 0) / SCALE
        if ADD:
            result += tl.load(out + cols, mask=inside, other=0.0).to(tl.float64)
        tl.store(out + cols, result.to(tl.float32), mask=inside)


def add_partials(partials: Tensor, out: Tensor, add: bool, scale: float = 1.0) -> None:
    """The sum over rows of `partials` (P, H), FP32, which are `scale` times what they stand for, into `out` (H,), or
    added to it."""
    n, width = partials.shape
    rows = min(ROWS, max(128, triton.next_power_of_2(n)))
    _partial_sums_kernel[(triton.cdiv(width, COLS),)](partials, out, n, width, add, scale, rows, COLS, num_warps=WARPS)


def deliver_partials(weight: Tensor, partials: Tensor) -> Tensor | None:
    """Puts the sum over rows of `partials` (P, H), FP32, where the gradient of `weight` (H,) belongs: overwrites its
    buffer or adds to it. Returns what autograd should get."""
    target, add = gradient_target(weight)
    add_partials(partials, target, add)
    return delivered(weight, target)
