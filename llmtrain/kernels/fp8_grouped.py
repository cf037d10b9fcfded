"""Eight-bit operands of grouped matmuls: one scale a row, of the row's own largest value, so that none has a history.

An expert sees other tokens every step, and how many is not known; a scale of its own for each row needs neither. Rows
are gathered and cast in one pass. Forward and dX run in E4M3; dW stays in bf16, because its sum runs over an expert's
tokens, whose number is no multiple of what eight-bit matmuls need.
"""

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.fp8 import E4M3, FORM, LARGEST, MULTIPLE, largest_of_rows, quantise_reference, scale_for

try:
    import triton
    import triton.language as tl

    from llmtrain.kernels.fp8 import _fp8_bits, _fp8_power, _fp8_power_of_two
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

TILE, WIDEST = 4096, 4096
"""Elements of a program, and of a row that it takes at a time."""


def quantise_rows_reference(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """x: (N, d), rows: (M,) of x, all in order without -> (M, d) E4M3 and the inverse scale of each, (M,) FP32."""
    x = x if rows is None else x[rows]
    largest = largest_of_rows(x)
    scale = scale_for(torch.where(largest.isfinite(), largest, 1.0), torch.full((), LARGEST[E4M3], device=x.device))
    return quantise_reference(x, scale[:, None], E4M3), scale.reciprocal()


if triton is not None:

    @triton.jit
    def _fp8_quantise_rows_kernel(
        x, rows, y, inverse, n, WIDTH: tl.constexpr, BY_INDEX: tl.constexpr, BY_HAND: tl.constexpr,
        MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = at < n
        source = at
        if BY_INDEX:
            source = tl.load(rows + at, mask=inside, other=0)
        source = source.to(tl.int64)[:, None] * WIDTH
        largest = tl.zeros((ROWS,), tl.int32)
        for begin in range(0, WIDTH, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            mask = inside[:, None] & (col < WIDTH)
            wide = tl.load(x + source + col, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(wide).to(tl.int32, bitcast=True), 1))
        power = _fp8_power(largest)
        scale = _fp8_power_of_two(power)
        tl.store(inverse + at, _fp8_power_of_two(-power), mask=inside)
        for begin in range(0, WIDTH, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            mask = inside[:, None] & (col < WIDTH)
            wide = tl.load(x + source + col, mask=mask, other=0.0).to(tl.float32)
            scaled = tl.minimum(tl.maximum(wide * scale[:, None], -LIMIT), LIMIT)
            scaled = tl.where(tl.abs(wide) < float("inf"), scaled, float("nan"))
            narrow = _fp8_bits(scaled, MANTISSA, LOWEST) if BY_HAND else scaled.to(y.dtype.element_ty)
            tl.store(y + at.to(tl.int64)[:, None] * WIDTH + col, narrow, mask=mask)


def quantise_rows(
    x: Tensor, rows: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference, in `out` where it is given."""
    m, width = len(x) if rows is None else len(rows), x.shape[1]
    if out is None:
        out = torch.empty((m, width), dtype=E4M3, device=x.device), torch.empty(m, device=x.device)
    y, inverse = out
    if choose("fp8", x) != TRITON:
        for into, made in zip(out, quantise_rows_reference(x, rows), strict=True):
            into.copy_(made)
        return out
    x = x.contiguous()
    block = min(WIDEST, triton.next_power_of_2(width))
    n_rows = max(1, TILE // block)
    by_hand = not x.is_cuda
    _fp8_quantise_rows_kernel[(triton.cdiv(m, n_rows),)](
        x, inverse if rows is None else rows, y.view(torch.uint8) if by_hand else y, inverse, m,
        width, rows is not None, by_hand, *FORM[E4M3], LARGEST[E4M3], n_rows, block,
    )  # fmt: skip
    return y, inverse


class Fp8Experts:
    """What the matrices (E, out, in) of a layer's experts bring along whose products run in eight bits."""

    def __init__(self, weight: Tensor) -> None:
        n, out, n_in = weight.shape
        self.rows = torch.zeros(n, out, n_in, dtype=E4M3, device=weight.device)
        self.columns = torch.zeros(n, n_in, out, dtype=E4M3, device=weight.device)
        self.rows_inverse = torch.ones(n, out, device=weight.device)
        self.columns_inverse = torch.ones(n, n_in, device=weight.device)

    def refresh(self, weight: Tensor) -> None:
        """Quantises the matrices anew, both ways round; once an optimizer step."""
        for turned, narrow, inverse in (
            (weight, self.rows, self.rows_inverse),
            (weight.transpose(1, 2).contiguous(), self.columns, self.columns_inverse),
        ):
            quantise_rows(turned.flatten(0, 1), out=(narrow.flatten(0, 1), inverse.flatten()))

    def multiply(self, x: Tensor, inverse: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        """x (M, in) E4M3, sorted by expert, times each one's matrix, as `grouped_linear`, in bf16."""
        w, w_inverse = (self.columns, self.columns_inverse) if transposed else (self.rows, self.rows_inverse)
        if x.is_cuda:
            return torch._scaled_grouped_mm(
                x, w.transpose(1, 2), inverse, w_inverse, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        out = torch.zeros(len(x), w.shape[1], dtype=torch.bfloat16)
        begin = 0
        for e, end in enumerate(ends.tolist()):
            product = x[begin:end].float() @ w[e].float().T
            out[begin:end] = product * inverse[begin:end, None] * w_inverse[e]
            begin = end
        return out


def experts_take(weight: Tensor) -> bool:
    """Whether the experts' matrices have sides that their products can run in eight bits with."""
    return weight.dim() == 3 and all(size % MULTIPLE == 0 for size in weight.shape[1:])
