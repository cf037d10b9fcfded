"""Documents laid end to end: what each token sees and is seen by, and the rows behind the last document."""

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None


def document_ranges_reference(cu_seqlens: Tensor, total: int, window: int | None) -> Tensor:
    """As `document_ranges`."""
    token = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)  # 1 for those of the first
    inside = document < len(cu_seqlens)
    begin = cu_seqlens[document - 1].int()
    end = cu_seqlens[document.clamp_max(len(cu_seqlens) - 1)].int()
    if window is not None:
        window = min(window, total)
        begin = torch.maximum(begin, token - (window - 1))
        end = torch.minimum(end, token + window)
    return torch.stack([begin.where(inside, total), end])


if triton is not None:

    @triton.jit
    def _attention_ranges_kernel(cu_seqlens, ranges, n, last, window, STEPS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        # The last border at or before the token, by halving: borders[low] <= token < borders[high].
        low = tl.zeros((BLOCK,), tl.int32)
        high = tl.full((BLOCK,), 0, tl.int32) + last + 1
        for _ in range(STEPS):
            middle = (low + high) // 2
            before = tl.load(cu_seqlens + tl.minimum(middle, last)) <= token
            open_ = high - low > 1
            low = tl.where(open_ & before, middle, low)
            high = tl.where(open_ & ~before, middle, high)
        inside = low < last
        begin = tl.maximum(tl.load(cu_seqlens + low).to(tl.int32), token - (window - 1))
        end = tl.load(cu_seqlens + tl.minimum(low + 1, last)).to(tl.int32)
        end = tl.where(inside, tl.minimum(end, token + window), end)
        tl.store(ranges + token, tl.where(inside, begin, n), token < n)
        tl.store(ranges + n + token, end, token < n)

    @triton.jit
    def _attention_clear_behind_kernel(x, border, n, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        first = tl.program_id(0) * ROWS
        behind = tl.load(border).to(tl.int32)
        if first + ROWS > behind:
            rows = first + tl.arange(0, ROWS)
            inside = (rows >= behind) & (rows < n)
            for column in range(0, width, BLOCK):
                at = column + tl.arange(0, BLOCK)
                pointers = x + rows.to(tl.int64)[:, None] * width + at[None, :]
                zeros = tl.zeros((ROWS, BLOCK), x.dtype.element_ty)
                tl.store(pointers, zeros, inside[:, None] & (at < width)[None, :])


def document_ranges(cu_seqlens: Tensor, total: int, window: int | None) -> Tensor:
    """cu_seqlens: (slots + 1,) borders of documents, from 0, the last ones perhaps equal -> (2, total) int32: the first
    key that each token sees, and behind the last token that sees it. A token behind the last document sees nothing:
    its first key is `total`."""
    if choose("document_ranges", cu_seqlens) != TRITON:
        return document_ranges_reference(cu_seqlens, total, window)
    cu_seqlens = cu_seqlens.contiguous()
    ranges = torch.empty(2, total, dtype=torch.int32, device=cu_seqlens.device)
    last = len(cu_seqlens) - 1
    block = 256
    _attention_ranges_kernel[(triton.cdiv(total, block),)](
        cu_seqlens, ranges, total, last, min(window or total, total), STEPS=(last + 1).bit_length(), BLOCK=block
    )
    return ranges


def clear_behind(x: Tensor, border: Tensor) -> None:
    """Zeros into the rows of x (total, ...), contiguous, from `border`, an integer tensor of one element, on."""
    if choose("clear_behind", x) != TRITON:
        x[int(border) :] = 0
        return
    rows = 64
    width = x[0].numel()
    _attention_clear_behind_kernel[(triton.cdiv(len(x), rows),)](x, border, len(x), width, ROWS=rows, BLOCK=64)
