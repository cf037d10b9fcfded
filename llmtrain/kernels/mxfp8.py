"""MXFP8 operands of a matmul (OCP Microscaling Formats v1.0): E4M3 numbers, 32 along the sum share one E8M0 scale.

A scale is a power of two, rounded up so that the block's largest magnitude stays within 448 and nothing saturates
(Mishra et al. 2025, arXiv 2506.08027; the OCP's own example rounds down, which clips). Activations, weights and
gradients are all E4M3: within 32 numbers its range suffices. Each of a layer's three products sums over another side,
so each operand is rounded along that side anew.

The numerics are emulated: rounded numbers are E4M3 times a power of two, which bf16 holds exactly, and a bf16 matmul
with FP32 sums multiplies them exactly. So a run shows what MXFP8 does to a loss, on any device, below bf16's speed.
"""

import torch
from torch import Tensor

from llmtrain.kernels.weight import deliver_product, waits

BLOCK = 32
"""Numbers that share a scale."""
LARGEST = 448.0
"""Of E4M3: 0.875 * 2^9."""
LOWEST, HIGHEST = -127, 127
"""Exponents that E8M0 holds; its byte is the exponent + 127, and 255 is NaN."""
PIECE = 1 << 24
"""Numbers that are rounded at a time: what a step holds of them in FP32 for a moment."""


def scale_exponents(largest: Tensor) -> Tensor:
    """largest: the largest magnitude of each block, finite. The smallest exponent e, int32, with largest <= 448 * 2^e,
    from LOWEST on; LOWEST for 0."""
    mantissa, exponent = torch.frexp(largest.float())  # mantissa in [0.5, 1)
    exponent = exponent.int() - 9 + (mantissa > LARGEST / 512).int()
    return torch.where(largest > 0, exponent.clamp(LOWEST, HIGHEST), LOWEST)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in FP32, of int32 exponents from -149 to 127, by its bits: a card's pow need not be exact."""
    normal = (exponent.clamp(min=-126) + 127) << 23
    small = 1 << (exponent.clamp(-149, -127) + 149)
    return torch.where(exponent >= -126, normal, small).view(torch.float32)


def elements(x: Tensor, exponents: Tensor) -> Tensor:
    """x / 2^exponents in E4M3: to the nearest, ties to even; beyond 448 it is that, and what is not finite is NaN.
    exponents: int32, of a shape that x's broadcasts with."""
    # By two factors: 2^-127 is no normal number, which a card may take for 0.
    half = -exponents // 2
    scaled = x.float() * power_of_two(half) * power_of_two(-exponents - half)
    return torch.where(x.isfinite(), scaled.clamp(-LARGEST, LARGEST), torch.nan).to(torch.float8_e4m3fn)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., K), K a multiple of BLOCK -> E4M3 (..., K) and the scales' bytes, uint8 (..., K / BLOCK). A block that
    holds what is not finite has the scale NaN."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).float()
    finite = largest.isfinite()
    exponents = scale_exponents(torch.where(finite, largest, 0.0))
    narrow = elements(blocks, exponents.unsqueeze(-1))
    return narrow.flatten(-2), torch.where(finite, exponents + 127, 255).to(torch.uint8)


def dequantise(narrow: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What `quantise` gave as numbers: exact in bf16 but for blocks whose largest magnitude is below 2^-117."""
    exponents = scales.int().unsqueeze(-1) - 127
    half = exponents // 2
    wide = narrow.unflatten(-1, (-1, BLOCK)).float() * power_of_two(half) * power_of_two(exponents - half)
    return torch.where(scales.unsqueeze(-1) == 255, torch.nan, wide).flatten(-2).to(dtype)


def rounded(x: Tensor, along: int) -> Tensor:
    """x (N, K) rounded to what MXFP8 holds, in x's dtype; blocks lie along dimension 0 or 1, whose size is a multiple
    of BLOCK."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = max(1, PIECE // (x.shape[1] * BLOCK)) * BLOCK
    for piece, into in zip(x.split(rows), out.split(rows), strict=True):
        if along == 1:
            into.copy_(dequantise(*quantise(piece), x.dtype))
        else:
            into.copy_(dequantise(*quantise(piece.T), x.dtype).T)
    return out


class MxWeight:
    """What a matrix (out, in) brings along whose products run in MXFP8: itself rounded along either side, bf16."""

    def __init__(self, narrow: Tensor) -> None:
        self.narrow = narrow
        self.rows = torch.zeros_like(narrow)
        """Blocks along `in`, for the forward."""
        self.columns = torch.zeros_like(narrow)
        """Blocks along `out`, for the gradient of the input."""

    def refresh(self) -> None:
        """After every write of the narrow copy."""
        self.rows.copy_(rounded(self.narrow, 1))
        self.columns.copy_(rounded(self.narrow, 0))


def rounding_bytes(n: int, columns: int) -> int:
    """What `rounded` takes beside x (n, columns): its result, and a piece of it in FP32 three times, in E4M3 once."""
    return 2 * n * columns + 13 * min(n * columns, PIECE)


def takes(weight: Tensor) -> bool:
    """Whether a matrix has sides that whole blocks fill."""
    return weight.dim() == 2 and all(size % BLOCK == 0 for size in weight.shape)


def mx_operands(weight: Tensor, x: Tensor) -> MxWeight | None:
    """The operands that `weight` multiplies x by, if it has any: `weight.mx`."""
    return getattr(weight, "mx", None) if x.dtype == torch.bfloat16 else None


def input_gradient(mx: MxWeight, dy: Tensor) -> Tensor:
    """dy (N, out) -> (N, in)."""
    return rounded(dy, 1) @ mx.columns


def deliver_mx_product(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """As `deliver_product`, of dy (N, out) and x (N, in), both rounded in blocks of rows; N is a multiple of BLOCK."""
    if waits(weight, lambda: deliver_mx_product(weight, dy, x)):
        return None
    return deliver_product(weight, rounded(dy, 0), rounded(x, 0))
