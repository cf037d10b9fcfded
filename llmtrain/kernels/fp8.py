"""Eight-bit operands of a matmul: one scale a tensor, taken from what the tensor's largest values were lately.

A number is stored as round(x * scale) in E4M3 (activations, weights) or E5M2 (gradients), and the matmul multiplies by
the scales' inverses. Scales are powers of two, so that scaling itself rounds nothing, and the largest for which the
largest magnitude fits. Of activations and gradients that magnitude is the highest of the last HISTORY optimizer steps
("delayed scaling", Micikevicius et al. 2209.05433, Transformer Engine): it is known before the tensor is, so one pass
casts, transposes and finds the magnitude for later. What is larger than ever before saturates; what is not finite
becomes NaN, so that a bad step shows as it does in bf16. Weights are scaled by their own largest value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.weight import gradient_buffer, waits

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORM = {E4M3: (3, -6), E5M2: (2, -14)}
"""Bits of the mantissa, exponent of the smallest normal number."""
HISTORY = 16
"""Optimizer steps whose largest magnitude decides a scale."""
MULTIPLE = 16
"""Of which both sides of a matmul, and the rows summed over for dW, must be."""
SCALE_BYTES = 16
"""That the address of a matmul's scale is a multiple of: cuBLAS refuses others, with no more than NOT_SUPPORTED."""
ROWS, COLS, WARPS = 64, 64, 8
"""The tile of a program: two sectors of a row both ways round. Of 128 x 128 a processor has registers for one program,
which nothing runs beside while it waits."""
Operand = tuple[Tensor, ...]
"""A matrix in eight bits and, where they are its own, its scales' inverses."""


def scale_for(largest: Tensor, limit: Tensor) -> Tensor:
    """The power of two, FP32, that `largest` (FP32, 0 or more, finite) may be multiplied by to stay within `limit`
    (FP32, on the same device); 1 for 0. Its inverse is a normal number too."""
    (mantissa, exponent), (room, of_limit) = torch.frexp(largest), torch.frexp(limit)
    power = (of_limit - exponent - (mantissa > room).int()).clamp(-126, 126)
    # Made of its bits: a card's pow need not be exact.
    return torch.where(largest > 0, ((power + 127) << 23).view(torch.float32), 1.0)


def quantise_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, times `scale`: to the nearest, ties to even; beyond the largest it is that, inf and NaN are NaN."""
    scaled = x.float() * scale
    limit = LARGEST[dtype]
    return torch.where(x.isfinite(), scaled.clamp(-limit, limit), torch.nan).to(dtype)


if triton is not None:

    @triton.jit
    def _fp8_bits(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
        """The bits of a cast to the nearest, ties to even, of FP32 within the format's range, or NaN, by arithmetic:
        Triton's interpreter casts wrong. LOWEST: exponent of the smallest normal number."""
        magnitude = tl.abs(x)
        u = magnitude.to(tl.int32, bitcast=True)
        u += (1 << (22 - MANTISSA)) - 1 + ((u >> (23 - MANTISSA)) & 1)
        normal = (u >> (23 - MANTISSA)) - ((126 + LOWEST) << MANTISSA)
        units = magnitude * (2.0 ** (MANTISSA - LOWEST)) + 8388608.0  # 2^23, whose last place is 1
        bits = tl.where(magnitude < 2.0**LOWEST, units.to(tl.int32, bitcast=True) & 0xFF, normal)
        bits = tl.where(x != x, 0x7F, bits)
        return (bits | ((x.to(tl.int32, bitcast=True) >> 31) & 1) << 7).to(tl.uint8)

    @triton.jit
    def _fp8_power(largest):
        """The exponent of E4M3's scale for magnitudes up to `largest`, whose bits as FP32 are given: `scale_for` by
        arithmetic. 0 for 0; for what is not finite that of 1."""
        # 448 is 1.75 * 2^8: one power less where the mantissa is larger.
        power = 135 - (largest >> 23) - ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
        power = tl.minimum(tl.maximum(power, -126), 126)
        return tl.where((largest == 0) | (largest >= 0x7F800000), tl.where(largest == 0, 0, 8), power)

    @triton.jit
    def _fp8_power_of_two(power):
        """FP32, of -126 to 127."""
        return ((power + 127) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _fp8_store(
        wide, scale, largest, y, y_t, row, col, mask, n_rows, n_cols, limit, MANTISSA: tl.constexpr,
        LOWEST: tl.constexpr, BY_HAND: tl.constexpr, ROW_MAJOR: tl.constexpr, TRANSPOSED: tl.constexpr,
        RECORD: tl.constexpr,
    ):  # fmt: skip
        """Puts a tile, FP32, down in eight bits, and its largest magnitude where those of all tiles meet."""
        magnitude = tl.abs(wide)
        if RECORD:
            # Bits of numbers that are 0 or more are ordered as these are, NaN above all; so an integer maximum will do,
            # and its order does not matter. Most tiles have nothing larger than was met before and leave it at looking:
            # what they see may be old, but never too large.
            top = tl.max(tl.max(magnitude.to(tl.int32, bitcast=True), 1), 0)
            tl.atomic_max(largest, top, mask=top > tl.load(largest), sem="relaxed")
        scaled = wide * tl.load(scale)
        scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
        scaled = tl.where(magnitude < float("inf"), scaled, float("nan"))
        narrow = _fp8_bits(scaled, MANTISSA, LOWEST) if BY_HAND else scaled.to(y.dtype.element_ty)
        if ROW_MAJOR:
            tl.store(y + row[:, None] * n_cols + col[None, :], narrow, mask=mask)
        if TRANSPOSED:
            tl.store(y_t + col[:, None] * n_rows + row[None, :], tl.trans(narrow), mask=tl.trans(mask))

    @triton.jit
    def _fp8_quantise_kernel(
        x, scale, largest, y, y_t, n_rows, n_cols, limit, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
        BY_HAND: tl.constexpr, ROW_MAJOR: tl.constexpr, TRANSPOSED: tl.constexpr, RECORD: tl.constexpr,
        ROWS: tl.constexpr, COLS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
        wide = tl.load(x + row[:, None] * n_cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
        _fp8_store(
            wide, scale, largest, y, y_t, row, col, mask, n_rows, n_cols, limit,
            MANTISSA, LOWEST, BY_HAND, ROW_MAJOR, TRANSPOSED, RECORD,
        )  # fmt: skip


@dataclass
class Scale:
    """Of one operand; all are views (1,), FP32, of a Scaling's buffers, and a matmul can read `inverse`."""

    scale: Tensor
    inverse: Tensor
    largest: Tensor
    """The largest magnitude met since the last push."""


def quantise(
    x: Tensor, of: Scale, dtype: torch.dtype, *, row_major: bool = True, transposed: bool = True, record: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """x (N, M) in `dtype` as (N, M) and as (M, N), those that are asked for, in `out` where it is given; `record`:
    raises of.largest to x's."""
    x = x.contiguous()
    n, m = x.shape
    if out is None:
        y = torch.empty((n, m) if row_major else 0, dtype=dtype, device=x.device)
        y_t = torch.empty((m, n) if transposed else 0, dtype=dtype, device=x.device)
    else:
        y, y_t = out
    if choose("fp8", x) != TRITON:
        if record:
            torch.maximum(of.largest, largest_of(x), out=of.largest)
        narrow = quantise_reference(x, of.scale, dtype)
        if row_major:
            y.copy_(narrow)
        if transposed:
            y_t.copy_(narrow.T)
        return (y if row_major else None), (y_t if transposed else None)
    by_hand = not x.is_cuda
    bits = torch.uint8 if by_hand else dtype
    _fp8_quantise_kernel[(triton.cdiv(n, ROWS), triton.cdiv(m, COLS))](
        x, of.scale, of.largest.view(torch.int32), y.view(bits), y_t.view(bits), n, m, LARGEST[dtype],
        *FORM[dtype], by_hand, row_major, transposed, record, ROWS, COLS, num_warps=WARPS,
    )  # fmt: skip
    return (y if row_major else None), (y_t if transposed else None)


def largest_of(x: Tensor) -> Tensor:
    """(1,) FP32: the largest magnitude."""
    return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).view(1)


def largest_of_rows(x: Tensor) -> Tensor:
    """(N,) FP32: the largest magnitude of each row."""
    return torch.linalg.vector_norm(x, torch.inf, dim=-1, dtype=torch.float32)


def scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, out_dtype: torch.dtype, *, fast: bool,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a (N, K) @ b (K, M) in eight bits, b being the transpose of a contiguous (M, K), times both inverses.

    `fast`: partial sums may be rounded to fewer bits than FP32's, as the card's quickest kernels do. Elsewhere the
    product is emulated, for tests: exact products of the same bits, summed in FP32.
    """
    if a.is_cuda:
        return torch._scaled_mm(
            a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=out_dtype, use_fast_accum=fast, out=out
        )
    product = (a.float() @ b.float()).mul_(a_inverse * b_inverse).to(out_dtype)
    return product if out is None else out.copy_(product)


def _ones_apart(n: int, device: torch.device | str) -> Tensor:
    """(n,) FP32, each where a matmul can read it as a scale."""
    return torch.ones(n, SCALE_BYTES // 4, device=device)[:, 0]


class Scaling:
    """The scales of a model's operands: an activation and a gradient of each of so many weights, and the weights'.

    Between optimizer steps `largest` is zero, and the scales are a function of `history`, which a checkpoint holds.
    """

    def __init__(self, weights: int, device: torch.device | str) -> None:
        n = 2 * weights
        self.limits = torch.tensor([LARGEST[E4M3], LARGEST[E5M2]], device=device).repeat(weights)
        self.own_largest = torch.zeros(weights, device=device)
        self.own_scale = torch.ones(weights, device=device)
        self.own_inverse = _ones_apart(weights, device)
        self.largest = torch.zeros(n, device=device)
        self.history = torch.zeros(HISTORY, n, device=device)
        self.scale = torch.ones(n, device=device)
        self.inverse = _ones_apart(n, device)
        self.fresh = True
        """There is no history yet, so the next step begins with a pass that calibrates."""
        self.calibrating = False
        """Each operand gets its scale from its own values, for a step without a history."""

    def of(self, weight: int) -> tuple[Scale, Scale, Scale]:
        """Those of the activation, of the gradient and of the weight itself."""
        x, dy, own = slice(2 * weight, 2 * weight + 1), slice(2 * weight + 1, 2 * weight + 2), slice(weight, weight + 1)
        return (
            Scale(self.scale[x], self.inverse[x], self.largest[x]),
            Scale(self.scale[dy], self.inverse[dy], self.largest[dy]),
            Scale(self.own_scale[own], self.own_inverse[own], self.own_largest[own]),
        )

    def push(self) -> None:
        """Ends an optimizer step: its magnitudes enter the history and the scales follow it. What was not finite counts
        as nothing: such a step is skipped, and must not decide the next."""
        self.history.copy_(self.history.roll(1, 0))
        self.history[0] = torch.where(self.largest.isfinite(), self.largest, 0.0)
        self.largest.zero_()
        self.rescale()

    def rescale(self) -> None:
        """The scales of the history."""
        self.scale.copy_(scale_for(self.history.amax(0), self.limits))
        self.inverse.copy_(self.scale.reciprocal())

    def follow_history(self) -> None:
        """After the history was written from outside. Waits for the device."""
        self.largest.zero_()
        self.rescale()
        self.fresh = not self.history.any()

    def calibrate(self, of: Scale, x: Tensor, dtype: torch.dtype) -> None:
        """The scale of x's own values."""
        of.scale.copy_(scale_for(largest_of(x).nan_to_num(0.0, 0.0), self.limits[0 if dtype == E4M3 else 1]))
        of.inverse.copy_(of.scale.reciprocal())

    def quantise_weights(self, weights: Sequence[tuple[Tensor, "Fp8Weight"]]) -> None:
        """All weights anew, both ways round; once an optimizer step."""
        for weight, operands in weights:
            operands.own.largest.copy_(largest_of(weight))
        if weights:
            self.own_scale.copy_(scale_for(self.own_largest.nan_to_num(0.0, 0.0), self.limits[0]))
            self.own_inverse.copy_(self.own_scale.reciprocal())
        for weight, operands in weights:
            quantise(weight, operands.own, E4M3, out=(operands.rows, operands.columns))


class EightBitWeight(Protocol):
    """What a matrix (out, in) brings along, as `weight.eight_bit`, whose three products run in eight bits."""

    def quantise_input(
        self, x: Tensor, *, row_major: bool, transposed: bool, record: bool = False
    ) -> tuple[Operand | None, Operand | None]:
        """x (N, in) for the forward, and (in, N) for the weight's gradient; `record`: it counts for later scales."""

    def quantise_gradient(self, dy: Tensor, *, transposed: bool) -> tuple[Operand | None, Operand | None]:
        """dy (N, out) for the input's gradient, and (out, N) for the weight's."""

    def multiply(self, x: Operand, dtype: torch.dtype) -> Tensor:
        """x (N, in) -> (N, out)."""

    def input_gradient(self, dy: Operand, dtype: torch.dtype) -> Tensor:
        """dy (N, out) -> (N, in)."""

    def weight_gradient(self, dy_t: Operand, x_t: Operand, out: Tensor | None = None) -> Tensor:
        """dy_t (out, N), x_t (in, N) -> (out, in) FP32, in `out` where it is given."""


class Fp8Weight:
    """An EightBitWeight by one scale a tensor."""

    def __init__(self, weight: Tensor, scaling: Scaling, number: int) -> None:
        out, n_in = weight.shape
        self.rows = torch.zeros(out, n_in, dtype=E4M3, device=weight.device)
        self.columns = torch.zeros(n_in, out, dtype=E4M3, device=weight.device)
        self.x, self.dy, self.own = scaling.of(number)
        self.scaling = scaling

    def _quantise(
        self, x: Tensor, of: Scale, dtype: torch.dtype, row_major: bool, transposed: bool, record: bool
    ) -> tuple[Operand | None, Operand | None]:
        if self.scaling.calibrating:
            self.scaling.calibrate(of, x, dtype)
        rows, columns = quantise(x, of, dtype, row_major=row_major, transposed=transposed, record=record)
        return None if rows is None else (rows,), None if columns is None else (columns,)

    def quantise_input(
        self, x: Tensor, *, row_major: bool, transposed: bool, record: bool = False
    ) -> tuple[Operand | None, Operand | None]:
        return self._quantise(x, self.x, E4M3, row_major, transposed, record)

    def quantise_gradient(self, dy: Tensor, *, transposed: bool) -> tuple[Operand | None, Operand | None]:
        return self._quantise(dy, self.dy, E5M2, True, transposed, record=True)

    def multiply(self, x: Operand, dtype: torch.dtype) -> Tensor:
        return scaled_mm(x[0], self.rows.t(), self.x.inverse, self.own.inverse, dtype, fast=True)

    def input_gradient(self, dy: Operand, dtype: torch.dtype) -> Tensor:
        return scaled_mm(dy[0], self.columns.t(), self.dy.inverse, self.own.inverse, dtype, fast=True)

    def weight_gradient(self, dy_t: Operand, x_t: Operand, out: Tensor | None = None) -> Tensor:
        inverses = self.dy.inverse, self.x.inverse
        return scaled_mm(dy_t[0], x_t[0].t(), *inverses, torch.float32, fast=False, out=out)


def takes(weight: Tensor, multiple: int = MULTIPLE) -> bool:
    """Whether a matrix has sides that its products can run in eight bits with."""
    return weight.dim() == 2 and all(size % multiple == 0 for size in weight.shape)


def eight_bit(weight: Tensor, x: Tensor) -> EightBitWeight | None:
    """The eight-bit operands that `weight` multiplies x by, if it has any: `weight.eight_bit`."""
    return getattr(weight, "eight_bit", None) if x.dtype == torch.bfloat16 else None


def deliver_eight_bit_product(weight: Tensor, eight: EightBitWeight, dy_t: Operand, x_t: Operand) -> Tensor | None:
    """As `deliver_product`, of dy_t (out, N) and x_t (in, N) in eight bits. The product leaves the matmul in FP32 and,
    as no eight-bit matmul adds to what is there, is added by a pass of its own from the second micro-batch on."""
    if waits(weight, lambda: deliver_eight_bit_product(weight, eight, dy_t, x_t)):
        return None
    buffer, overwrite = gradient_buffer(weight)
    if buffer is not None and overwrite:
        eight.weight_gradient(dy_t, x_t, out=buffer)
        return None
    product = eight.weight_gradient(dy_t, x_t)
    if buffer is None:
        return product
    buffer.add_(product)
    return None
