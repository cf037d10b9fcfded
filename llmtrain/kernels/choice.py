"""Which implementation of an op runs, and which one did.

Every op has a `reference` in plain torch, right on any device and dtype, and may have a `triton` kernel. Triton is
taken on CUDA, and elsewhere only when forced (tests do, under TRITON_INTERPRET=1). What ran is recorded, because a
parity test that fell back would otherwise compare the reference with itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

REFERENCE = "reference"
TRITON = "triton"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What rows and weights may be in: numbers in eight bits have scales, and ops of their own."""
AUTO = "auto"
"""Forced, it means that nothing is."""

ran: dict[str, str] = {}
"""Op name -> the implementation that its last call used."""

_forced: dict[str, str] = {}


@contextmanager
def forced(implementation: str, *ops: str) -> Iterator[None]:
    """Inside the block the ops named (all of them when none is) use `implementation`."""
    before = dict(_forced)
    _forced.update({op: implementation for op in ops or ("*",)})
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def named(op: str) -> bool:
    """Whether an implementation is forced for this very op, rather than for all of them."""
    return _forced.get(op, AUTO) != AUTO


def choose(op: str, x: Tensor) -> str:
    """The implementation that `op` uses for `x`; recorded in `ran`."""
    chosen = _forced.get(op, _forced.get("*", AUTO))
    if chosen == AUTO:
        # Kernels are written for 16 and 32 bit floats; FP64 exists to check them. No launch is as small as nothing.
        chosen = TRITON if x.is_cuda and x.dtype != torch.float64 and x.numel() else REFERENCE
    ran[op] = chosen
    return chosen
