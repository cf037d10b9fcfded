"""SwiGLU's product, silu(gate) * up (Shazeer 2020), on the two halves of one matmul's output."""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import FLOATS, TRITON, choose
from llmtrain.kernels.derivatives import first_derivative

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

NARROW_REACH = 1 << 31
"""Runs that 32 bits count."""

BLOCK, LONGEST_RUN, WARPS = 2048, 128, 8


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def swiglu_forward_reference(gate_up: Tensor) -> Tensor:
    """gate_up: (..., 2F), gate in the first half -> (..., F)."""
    gate, up = _wide(gate_up).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward_reference(dy: Tensor, gate_up: Tensor) -> Tensor:
    """dy: (..., F), gate_up: (..., 2F) -> the gradient of gate_up (..., 2F)."""
    gate, up = _wide(gate_up).chunk(2, -1)
    g = _wide(dy)
    sigmoid = torch.sigmoid(gate)
    d_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, g * gate * sigmoid], -1).to(gate_up.dtype)


if triton is not None:
    # A program takes UNITS consecutive runs of RUN elements, whatever rows they are in: RUN divides F, so that loads
    # stay wide, index arithmetic is done once a run, and no lane idles at a d_ff that is no power of two.

    @triton.jit
    def _swiglu_forward_kernel(
        gate_up, y, n_units, F: tl.constexpr, RUN: tl.constexpr, UNITS: tl.constexpr, WIDE: tl.constexpr
    ):  # fmt: skip
        program = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
        unit = program * UNITS + tl.arange(0, UNITS)[:, None]
        lane = tl.arange(0, RUN)[None, :]
        mask = unit < n_units
        row = (unit // (F // RUN)).to(tl.int64)
        at = gate_up + row * (2 * F) + unit % (F // RUN) * RUN + lane
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
        product = gate * tl.sigmoid(gate) * up
        tl.store(y + unit.to(tl.int64) * RUN + lane, product.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _swiglu_backward_kernel(
        dy, gate_up, d_gate_up, n_units, F: tl.constexpr, RUN: tl.constexpr, UNITS: tl.constexpr,
        WIDE: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
        unit = program * UNITS + tl.arange(0, UNITS)[:, None]
        lane = tl.arange(0, RUN)[None, :]
        mask = unit < n_units
        row = (unit // (F // RUN)).to(tl.int64)
        at = row * (2 * F) + unit % (F // RUN) * RUN + lane
        g = tl.load(dy + unit.to(tl.int64) * RUN + lane, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at + F, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        d_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_up = g * gate * sigmoid
        tl.store(d_gate_up + at, d_gate.to(d_gate_up.dtype.element_ty), mask=mask)
        tl.store(d_gate_up + at + F, d_up.to(d_gate_up.dtype.element_ty), mask=mask)


def _launch(kernel: Any, n: int, width: int, *tensors: Tensor) -> None:
    run = min(LONGEST_RUN, width & -width)  # the largest power of two in d_ff
    units = BLOCK // run
    wide = n // run + units >= NARROW_REACH
    kernel[(triton.cdiv(n, BLOCK),)](*tensors, n // run, width, run, units, wide, num_warps=WARPS)


def _forward(gate_up: Tensor) -> Tensor:
    """As `swiglu_forward_reference`."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    _launch(_swiglu_forward_kernel, y.numel(), width, gate_up, y)
    return y


def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """As `swiglu_backward_reference`."""
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    d_gate_up = torch.empty_like(gate_up)
    _launch(_swiglu_backward_kernel, dy.numel(), dy.shape[-1], dy, gate_up, d_gate_up)
    return d_gate_up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.chosen = choose("swiglu", gate_up)
        ctx.save_for_backward(gate_up)
        return (_forward if ctx.chosen == TRITON else swiglu_forward_reference)(gate_up)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return (_backward if ctx.chosen == TRITON else swiglu_backward_reference)(dy, gate_up)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up: (..., 2F), gate in the first half, bf16, FP16 or FP32 -> silu(gate) * up: (..., F), computed in FP32.

    Raises ValueError naming the argument that does not fit.
    """
    if gate_up.dtype not in FLOATS:
        raise ValueError(f"gate_up: a floating-point tensor wanted, not {gate_up.dtype}")
    if gate_up.dim() < 1 or gate_up.shape[-1] < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: the last dimension holds two halves, but the shape is {tuple(gate_up.shape)}")
    return _SwiGLU.apply(gate_up)
