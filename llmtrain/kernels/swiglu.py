"""SwiGLU's product, silu(gate) * up (Shazeer 2020), on the two halves of one matmul's output."""

from typing import Any

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def swiglu_forward_reference(gate_up: Tensor) -> Tensor:
    """gate_up: (N, 2F), gate in the first half -> (N, F)."""
    gate, up = _wide(gate_up).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward_reference(dy: Tensor, gate_up: Tensor) -> Tensor:
    """dy: (N, F), gate_up: (N, 2F) -> the gradient of gate_up (N, 2F)."""
    gate, up = _wide(gate_up).chunk(2, -1)
    g = _wide(dy)
    sigmoid = torch.sigmoid(gate)
    d_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, g * gate * sigmoid], -1).to(gate_up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows = gate_up.reshape(-1, gate_up.shape[-1])
        return swiglu_forward_reference(rows).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows = gate_up.reshape(-1, gate_up.shape[-1])
        return swiglu_backward_reference(dy.reshape(-1, dy.shape[-1]), rows).view(gate_up.shape)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up: (..., 2F) -> silu(gate) * up: (..., F)."""
    return _SwiGLU.apply(gate_up)
