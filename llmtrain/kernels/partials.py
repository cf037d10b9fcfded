"""Sums over rows in two stages: a kernel's programs leave FP32 partial sums, and one small kernel adds those up.

The order is fixed by the shape alone, so the result is the same on every run and every card. A backward has such sums
in every layer, each a few microseconds and as long a launch: inside `in_one_launch` they are made together at the end.
Elsewhere the small kernel is launched while the one before it still runs, on cards that know how (compute capability 9
on), and waits there for its end: that hides the launch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.weight import delivered, gradient_target, is_in_place

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

ROWS, WARPS = 2048, 16
"""Of a program of the second stage, at most; one tile is mostly enough."""

LEAST_COLS, MOST_COLS, PROGRAMS = 8, 32, 256
"""Columns of a program: 32 bytes (one sector) of a row, so that narrow sums still fill the card; more where there would
be more programs than a card runs at once."""

MOST_SUMS = 64
"""In one launch: each is two arguments of the kernel."""


if triton is not None:

    @triton.jit
    def _partial_sums_kernel(
        partials, outs, n, SUMS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr,
        ROWS: tl.constexpr, COLS: tl.constexpr, WAITS: tl.constexpr,
    ):  # fmt: skip
        if WAITS:
            tl.extra.cuda.gdc_wait()  # for all that the kernel before has written
        mine = partials[0]
        out = outs[0]
        for i in tl.static_range(1, SUMS):
            mine = tl.where(tl.program_id(1) == i, partials[i], mine)
            out = tl.where(tl.program_id(1) == i, outs[i], out)
        cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
        inside = cols < WIDTH
        # FP64 costs nothing on so few numbers, and leaves the first stage's rounding as the only one.
        total = tl.zeros((ROWS, COLS), tl.float64)
        for first in range(0, n, ROWS):
            rows = (first + tl.arange(0, ROWS)).to(tl.int64)
            mask = (rows < n)[:, None] & inside[None, :]
            total += tl.load(mine + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float64)
        result = tl.sum(total, 0) / SCALE
        if ADD:
            result += tl.load(out + cols, mask=inside, other=0.0).to(tl.float64)
        tl.store(out + cols, result.to(tl.float32), mask=inside)


@dataclass(frozen=True)
class _Kind:
    """What sums of one launch have in common: rows and columns of the partial sums, and how they are put down."""

    n: int
    width: int
    add: bool
    scale: float


Sum = tuple[Tensor, Tensor]
"""Partial sums (P, H), and where they are added up (H,)."""

_waiting: dict[_Kind, list[Sum]] | None = None


@contextmanager
def in_one_launch() -> Iterator[None]:
    """Sums into gradient buffers are made at the end of the block, those of one shape in one launch."""
    global _waiting
    assert _waiting is None
    _waiting = {}  # not by thread: the backward on a card runs in another
    try:
        yield
        _make_up(_waiting)
    finally:
        _waiting = None


def _make_up(waiting: dict[_Kind, list[Sum]]) -> None:
    for kind, sums in waiting.items():
        for begin in range(0, len(sums), MOST_SUMS):
            _launch(kind, sums[begin : begin + MOST_SUMS])
    waiting.clear()


def launches_early(x: Tensor) -> bool:
    """Whether a kernel on x's card may be launched before the one in front of it has ended."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _launch(kind: _Kind, sums: list[Sum], early: bool = False) -> None:
    rows = min(ROWS, max(128, triton.next_power_of_2(kind.n)))
    cols = min(MOST_COLS, max(LEAST_COLS, triton.next_power_of_2(kind.width) // PROGRAMS))
    partials, outs = zip(*sums, strict=True)
    _partial_sums_kernel[(triton.cdiv(kind.width, cols), len(sums))](
        partials, outs, kind.n, len(sums), kind.width, kind.add, kind.scale, rows, cols, early, num_warps=WARPS,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def add_partials(partials: Tensor, out: Tensor, add: bool, scale: float = 1.0, may_wait: bool = False) -> None:
    """The sum over rows of `partials` (P, H), FP32, which are `scale` times what they stand for, into `out` (H,), or
    added to it. may_wait: nobody reads `out` before the end of `in_one_launch`, where this runs inside one."""
    n, width = partials.shape
    kind = _Kind(n, width, add, scale)
    if _waiting is None or not may_wait:
        _launch(kind, [(partials, out)], launches_early(partials))
        return
    if any(out.data_ptr() == other.data_ptr() for sums in _waiting.values() for _, other in sums):
        _make_up(_waiting)  # a weight that is used twice: its sums must not meet in one launch, nor change places
    _waiting.setdefault(kind, []).append((partials, out))


def deliver_partials(weight: Tensor, partials: Tensor) -> Tensor | None:
    """Puts the sum over rows of `partials` (P, H), FP32, where the gradient of `weight` (H,) belongs: overwrites its
    buffer or adds to it. Returns what autograd should get."""
    target, add = gradient_target(weight)
    add_partials(partials, target, add, may_wait=is_in_place(weight, target))
    return delivered(weight, target)
