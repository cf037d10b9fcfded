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

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.weight import deliver_product, waits

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

BLOCK = 32
"""Numbers that share a scale."""
LARGEST = 448.0
"""Of E4M3: 0.875 * 2^9."""
LOWEST, HIGHEST = -127, 127
"""Exponents that E8M0 holds; its byte is the exponent + 127, and 255 is NaN."""
PIECE = 1 << 24
"""Numbers that the reference rounds at a time: what a step holds of them in FP32 for a moment."""
SIDE_BY_SIDE, WARPS = 128, 4
"""Blocks of a program."""


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


def rounded_reference(x: Tensor, along: int, out: Tensor) -> Tensor:
    """As `rounded`, by the definition and in any dtype."""
    rows = max(1, PIECE // (x.shape[1] * BLOCK)) * BLOCK
    for piece, into in zip(x.split(rows), out.split(rows), strict=True):
        if along == 1:
            into.copy_(dequantise(*quantise(piece), x.dtype))
        else:
            into.copy_(dequantise(*quantise(piece.T), x.dtype).T)
    return out


if triton is not None:

    @triton.jit
    def _mxfp8_round_kernel(
        x, y, n_rows, n_cols, ALONG: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
    ):
        """x, y: the bits of bf16. A tile is as long as a block on the side ALONG. By integers alone: a card may take
        for 0 what is no normal number, and Triton's interpreter casts to eight bits wrong."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
        at = row[:, None] * n_cols + col[None, :]
        bits = tl.load(x + at, mask=mask, other=0).to(tl.int32)
        magnitude = bits & 0x7FFF  # ordered as the numbers are; what is not finite is above all
        largest = tl.max(magnitude, ALONG, keep_dims=True)
        # 448 is 1.75 * 2^8: one power more where the mantissa is larger.
        exponent = tl.maximum((largest >> 7) - 135 + ((largest & 0x7F) > 0x60).to(tl.int32), LOWEST)

        # A number is significand * 2^(field - 134). Of its bits the rounding leaves 4, and none below 2^(exponent - 9),
        # E4M3's last place; so it stays a bf16 number.
        field = magnitude >> 7
        significand = magnitude & 0x7F | (field > 0).to(tl.int32) << 7
        width = (significand.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126  # in bits; negative for 0
        drop = tl.maximum(tl.maximum(width - 4, exponent + 125 - tl.maximum(field, 1)), 0)
        drop = tl.minimum(drop, 9)  # from there on nothing is left
        # To the nearest, ties to even; with a bit more, so that 0 may be dropped.
        twice = 2 * significand
        kept = (twice + (1 << drop) - 1 + ((significand >> drop) & 1)) >> (drop + 1) << drop
        # What is carried out of the mantissa raises the exponent, as it should.
        result = tl.where(kept == 0, 0, magnitude + kept - significand)
        result = tl.where(largest >= 0x7F80, 0x7FC0, result | bits & 0x8000)
        tl.store(y + at, result.to(tl.int16), mask=mask)


def rounded(x: Tensor, along: int, out: Tensor | None = None) -> Tensor:
    """x (N, K) rounded to what MXFP8 holds, in x's dtype, in `out` (contiguous) where it is given; blocks lie along
    dimension 0 or 1, whose size is a multiple of BLOCK. The kernel is for bf16, which is all that training rounds."""
    assert x.shape[along] % BLOCK == 0, (x.shape, along)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.dtype != torch.bfloat16 or choose("mxfp8", x) != TRITON:
        return rounded_reference(x, along, out)
    # Rows that whole blocks fill are as many rows of a block each.
    n, m = x.shape if along == 0 else (x.numel() // BLOCK, BLOCK)
    tile = (BLOCK, SIDE_BY_SIDE) if along == 0 else (SIDE_BY_SIDE, BLOCK)
    _mxfp8_round_kernel[(triton.cdiv(n, tile[0]), triton.cdiv(m, tile[1]))](
        x.contiguous().view(torch.int16), out.view(torch.int16), n, m, along, LOWEST, *tile, num_warps=WARPS
    )
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
        rounded(self.narrow, 1, self.rows)
        rounded(self.narrow, 0, self.columns)


def rounding_bytes(n: int, columns: int, references: bool) -> int:
    """What `rounded` takes beside x (n, columns): its result, and the reference a piece of it in FP32 three times, in
    E4M3 once."""
    return 2 * n * columns + (13 * min(n * columns, PIECE) if references else 0)


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
