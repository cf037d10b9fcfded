"""Eight-bit operands with scales finer than one a tensor, of the operand's own values, so that none has a history.

Each of a linear's three products sums over another side, and an operand is scaled along that side: by one scale a row
("rowwise"), or by one for every 128 numbers of it ("block"); a weight then has one for each tile of 128 x 128, the same
both ways round (DeepSeek-V3, 2412.19437). All numbers are E4M3: scales this fine need no more exponents than it has.
Scales are powers of two, as in fp8.py.

Of blocks one pass finds the magnitudes, casts and transposes: a tile of 128 x 128 holds whole blocks both ways round.
Of rows the magnitudes are found in a pass of their own; where no transpose is wanted, one pass suffices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.fp8 import E4M3, FORM, LARGEST, MULTIPLE, Operand
from llmtrain.kernels.fp8_grouped import quantise_rows, quantise_rows_reference

try:
    import triton
    import triton.language as tl

    from llmtrain.kernels.fp8 import _fp8_bits, _fp8_power, _fp8_power_of_two
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

ROWWISE, BLOCK, TILES = "rowwise", "block", "tiles"
SIDE, WARPS = 128, 8
"""Numbers of a block, and either side of a tile: also that of a program."""


def multiple_for(scaling: str) -> int:
    """Of which the sides of a matrix, and the rows summed over for dW, must be, of any of --fp8-scaling."""
    return SIDE if scaling == BLOCK else MULTIPLE


def inverse_shape(rows: int, columns: int, by: str) -> tuple[int, int]:
    """How the inverse scales of a matrix (rows, columns) lie in memory, as the matmuls take them. Of rows: a column. Of
    blocks: a row of them for each place of a block. Of tiles: as the tiles lie, a row padded to a multiple of 4."""
    if by == ROWWISE:
        return rows, 1
    if by == BLOCK:
        return columns // SIDE, rows
    return rows // SIDE, -(-columns // SIDE // 4) * 4


def quantise_reference(x: Tensor, by: str) -> tuple[Tensor, Tensor]:
    """x: (N, M) -> E4M3 (N, M) and its inverse scales, of `inverse_shape` but for the padding. Sides that are cut into
    blocks are multiples of SIDE."""
    if by == ROWWISE:
        narrow, inverse = quantise_rows_reference(x, None)
        return narrow, inverse[:, None]
    if by == BLOCK:
        narrow, inverse = quantise_rows_reference(x.reshape(-1, SIDE), None)
        return narrow.view(x.shape), inverse.view(len(x), -1).T
    across = x.shape[1] // SIDE
    tiles = x.reshape(-1, SIDE, across, SIDE).transpose(1, 2)  # (tile's row, tile's column, SIDE, SIDE)
    narrow, inverse = quantise_rows_reference(tiles.reshape(-1, SIDE * SIDE), None)
    return narrow.view(tiles.shape).transpose(1, 2).reshape(x.shape), inverse.view(-1, across)


def dequantised(operand: Operand, by: str) -> Tensor:
    """What an operand (N, M) stands for, in FP32: exact, within FP32's exponents."""
    narrow, inverse = operand
    wide = narrow.float()
    if by == ROWWISE:
        return wide * inverse
    if by == BLOCK:
        return (wide.view(len(wide), -1, SIDE) * inverse.T[:, :, None]).view(wide.shape)
    across = wide.shape[1] // SIDE
    return (wide.view(-1, SIDE, across, SIDE) * inverse[:, None, :across, None]).view(wide.shape)


if triton is not None:

    @triton.jit
    def _fp8_quantise_largest_kernel(
        x, of_rows, of_columns, n_rows, n_cols, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
        wide = tl.load(x + row[:, None] * n_cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
        bits = tl.abs(wide).to(tl.int32, bitcast=True)  # ordered as the magnitudes are
        if BY_ROW:
            tl.atomic_max(of_rows + row, tl.max(bits, 1), mask=row < n_rows, sem="relaxed")
        if BY_COLUMN:
            tl.atomic_max(of_columns + col, tl.max(bits, 0), mask=col < n_cols, sem="relaxed")

    @triton.jit
    def _fp8_narrow(
        wide, scale, BY_HAND: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LIMIT: tl.constexpr
    ):
        """wide times scale, which broadcasts with it, in eight bits."""
        scaled = tl.minimum(tl.maximum(wide * scale, -LIMIT), LIMIT)
        scaled = tl.where(tl.abs(wide) < float("inf"), scaled, float("nan"))
        return _fp8_bits(scaled, MANTISSA, LOWEST) if BY_HAND else scaled.to(tl.float8e4nv)

    @triton.jit
    def _fp8_quantise_fine_kernel(
        x, of_rows, of_columns, y, y_inverse, y_t, y_t_inverse, n_rows, n_cols, BY: tl.constexpr,
        ROW_MAJOR: tl.constexpr, TRANSPOSED: tl.constexpr, BY_HAND: tl.constexpr, MANTISSA: tl.constexpr,
        LOWEST: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ):  # fmt: skip
        down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        row, col = down * ROWS + tl.arange(0, ROWS), across * COLS + tl.arange(0, COLS)
        in_rows, in_cols = row < n_rows, col < n_cols
        mask = in_rows[:, None] & in_cols[None, :]
        wide = tl.load(x + row[:, None] * n_cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
        bits = tl.abs(wide).to(tl.int32, bitcast=True)
        if BY == "tiles":
            power = _fp8_power(tl.max(tl.max(bits, 1), 0))
            narrow = _fp8_narrow(wide, _fp8_power_of_two(power), BY_HAND, MANTISSA, LOWEST, LIMIT)
            inverse = _fp8_power_of_two(-power)
            tl.store(y + row[:, None] * n_cols + col[None, :], narrow, mask=mask)
            tl.store(y_inverse + down * ((n_cols // COLS + 3) // 4 * 4) + across, inverse)
            tl.store(y_t + col[:, None] * n_rows + row[None, :], tl.trans(narrow), mask=tl.trans(mask))
            tl.store(y_t_inverse + across * ((n_rows // ROWS + 3) // 4 * 4) + down, inverse)
        else:
            if ROW_MAJOR:
                if BY == "block":
                    power = _fp8_power(tl.max(bits, 1))
                    tl.store(y_inverse + across * n_rows + row, _fp8_power_of_two(-power), mask=in_rows)
                else:
                    power = _fp8_power(tl.load(of_rows + row, mask=in_rows, other=0))
                    tl.store(y_inverse + row, _fp8_power_of_two(-power), mask=in_rows & (across == 0))
                narrow = _fp8_narrow(wide, _fp8_power_of_two(power)[:, None], BY_HAND, MANTISSA, LOWEST, LIMIT)
                tl.store(y + row[:, None] * n_cols + col[None, :], narrow, mask=mask)
            if TRANSPOSED:
                if BY == "block":
                    power = _fp8_power(tl.max(bits, 0))
                    tl.store(y_t_inverse + down * n_cols + col, _fp8_power_of_two(-power), mask=in_cols)
                else:
                    power = _fp8_power(tl.load(of_columns + col, mask=in_cols, other=0))
                    tl.store(y_t_inverse + col, _fp8_power_of_two(-power), mask=in_cols & (down == 0))
                narrow = _fp8_narrow(wide, _fp8_power_of_two(power)[None, :], BY_HAND, MANTISSA, LOWEST, LIMIT)
                tl.store(y_t + col[:, None] * n_rows + row[None, :], tl.trans(narrow), mask=tl.trans(mask))


def empty_operand(rows: int, columns: int, by: str, device: torch.device) -> Operand:
    """The inverse scales begin at 0, as those that are padding have to."""
    inverse = torch.zeros if by == TILES else torch.empty
    narrow = torch.empty((rows, columns), dtype=E4M3, device=device)
    return narrow, inverse(inverse_shape(rows, columns, by), dtype=torch.float32, device=device)


def _by_kernels(x: Tensor, by: str, rows: Operand | None, columns: Operand | None) -> None:
    n, m = x.shape
    by_hand = not x.is_cuda
    grid = triton.cdiv(n, SIDE), triton.cdiv(m, SIDE)
    bits = torch.uint8 if by_hand else E4M3
    unused = torch.empty(0, dtype=torch.int32, device=x.device)
    of_rows = of_columns = unused
    if by == ROWWISE:
        largest = torch.zeros(n + m, dtype=torch.int32, device=x.device)
        of_rows, of_columns = largest[:n], largest[n:]
        both = rows is not None, columns is not None
        _fp8_quantise_largest_kernel[grid](x, of_rows, of_columns, n, m, *both, SIDE, SIDE, num_warps=WARPS)
    y, y_inverse = (unused, unused) if rows is None else (rows[0].view(bits), rows[1])
    y_t, y_t_inverse = (unused, unused) if columns is None else (columns[0].view(bits), columns[1])
    _fp8_quantise_fine_kernel[grid](
        x, of_rows, of_columns, y, y_inverse, y_t, y_t_inverse, n, m, by, rows is not None, columns is not None,
        by_hand, *FORM[E4M3], LARGEST[E4M3], SIDE, SIDE, num_warps=WARPS,
    )  # fmt: skip


def quantise_fine(
    x: Tensor, by: str, *, row_major: bool = True, transposed: bool = True, out: tuple[Operand, Operand] | None = None
) -> tuple[Operand | None, Operand | None]:
    """x (N, M) as an operand (N, M), scaled along its rows, and as one (M, N), scaled along its columns, those that are
    asked for; in `out`, which holds both, where it is given. The sides along which blocks lie are multiples of SIDE."""
    x = x.contiguous()
    n, m = x.shape
    rows, columns = out or (
        empty_operand(n, m, by, x.device) if row_major else None,
        empty_operand(m, n, by, x.device) if transposed else None,
    )
    # The scales of a block that is cut would be written beyond their end.
    assert by == ROWWISE or not (rows and m % SIDE or columns and n % SIDE), (x.shape, by)
    if choose("fp8", x) != TRITON:
        for operand, turned in ((rows, x), (columns, x.T)):
            if operand is not None:
                narrow, inverse = quantise_reference(turned, by)
                operand[0].copy_(narrow)
                operand[1][:, : inverse.shape[1]].copy_(inverse)
    elif by == ROWWISE and columns is None:
        assert rows is not None
        quantise_rows(x, out=(rows[0], rows[1].view(-1)))
    else:
        _by_kernels(x, by, rows, columns)
    return rows, columns


def fine_mm(a: Operand, b: Operand, by: str, of_weight: bool, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """a (N, K) @ b (M, K).T in `dtype`; `of_weight`: b is a weight, which in blocks has tiles. With scales for rows the
    card's quickest sums are taken where b is a weight, as in fp8.py; sums of blocks are always in FP32. Elsewhere the
    product is emulated, for tests: products of the same numbers, summed in FP32."""
    tiles = TILES if by == BLOCK and of_weight else by
    (x, x_inverse), (y, y_inverse) = a, b
    if not x.is_cuda:
        product = (dequantised(a, by) @ dequantised(b, tiles).T).to(dtype)
    elif by == ROWWISE:
        return torch._scaled_mm(
            x, y.t(), scale_a=x_inverse, scale_b=y_inverse.view(1, -1), out_dtype=dtype, use_fast_accum=of_weight,
            out=out,
        )  # fmt: skip
    else:
        of_y = F.ScalingType.BlockWise128x128 if of_weight else F.ScalingType.BlockWise1x128
        scales = x_inverse.t(), F.ScalingType.BlockWise1x128, y_inverse.t(), of_y
        product = F.scaled_mm(x, y.t(), *scales, output_dtype=dtype)
    return product if out is None else out.copy_(product)


class FineWeight:
    """An EightBitWeight (see fp8.py) with scales of its own for rows or blocks."""

    def __init__(self, weight: Tensor, by: str) -> None:
        self.by = by
        own, (out, n_in) = TILES if by == BLOCK else by, weight.shape
        self.rows = empty_operand(out, n_in, own, weight.device)
        self.columns = empty_operand(n_in, out, own, weight.device)

    def refresh(self, weight: Tensor) -> None:
        """Quantises the matrix anew, both ways round; once an optimizer step."""
        quantise_fine(weight, TILES if self.by == BLOCK else self.by, out=(self.rows, self.columns))

    def quantise_input(
        self, x: Tensor, *, row_major: bool, transposed: bool, record: bool = False
    ) -> tuple[Operand | None, Operand | None]:
        if not (row_major or transposed):
            return None, None
        return quantise_fine(x, self.by, row_major=row_major, transposed=transposed)

    def quantise_gradient(self, dy: Tensor, *, transposed: bool) -> tuple[Operand | None, Operand | None]:
        return quantise_fine(dy, self.by, transposed=transposed)

    def multiply(self, x: Operand, dtype: torch.dtype) -> Tensor:
        return fine_mm(x, self.rows, self.by, True, dtype)

    def input_gradient(self, dy: Operand, dtype: torch.dtype) -> Tensor:
        return fine_mm(dy, self.columns, self.by, True, dtype)

    def weight_gradient(self, dy_t: Operand, x_t: Operand, out: Tensor | None = None) -> Tensor:
        return fine_mm(dy_t, x_t, self.by, False, torch.float32, out)


def refusal(by: str, device: torch.device) -> str | None:
    """Why this torch cannot multiply so on this device, in its own words, or None where it does: both kinds of product
    are tried on a few zeros."""
    x, own = empty_operand(SIDE, SIDE, by, device), empty_operand(SIDE, SIDE, TILES if by == BLOCK else by, device)
    for tensor in (*x, *own):
        tensor.view(torch.uint8).zero_()
    try:
        fine_mm(x, own, by, True, torch.bfloat16)
        fine_mm(x, x, by, False, torch.float32)
    except (RuntimeError, ValueError, AttributeError) as error:  # by the version of torch
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
