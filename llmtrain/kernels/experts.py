"""A routed feed-forward: SwiGLU experts, of which each token meets its k best (Shazeer 2017; dropless as MegaBlocks).

Rows are copied to their experts' places, multiplied there, weighted within SwiGLU's pass and added up per token as they
go back into the residual stream. No copy of a token's row is kept for the backward: it is gathered again.
"""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose
from llmtrain.kernels.fp8_grouped import Fp8Experts, quantise_rows
from llmtrain.kernels.grouped import deliver_grouped_product, grouped_linear
from llmtrain.kernels.linear import Remake
from llmtrain.kernels.routing import Balance, Routing, route, route_backward
from llmtrain.kernels.swiglu import swiglu_backward_reference
from llmtrain.kernels.weight import deliver_product, operand

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

TILE, WIDEST = 4096, 2048
"""Elements of a program, and of a row that it takes at a time."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def gather_reference(x: Tensor, tokens: Tensor) -> Tensor:
    """x: (N, d), tokens: (M,) -> x[tokens] (M, d)."""
    return x[tokens]


def combine_reference(y: Tensor, places: Tensor, into: Tensor | None, n: int) -> Tensor:
    """y: (N k, d), places: (N k,) -> (N, d), the sum over a row's k copies, to which `into` is added before the one
    rounding; in the memory of `into` where there is one."""
    total = _wide(y[places]).view(n, -1, y.shape[1]).sum(1)
    return total.to(y.dtype) if into is None else into.copy_(total.add_(_wide(into)))


def weighted_swiglu_reference(gate_up: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """gate_up: (M, 2F), weights of all copies, order: (M,) -> silu(gate) * up * weight (M, F)."""
    gate, up = _wide(gate_up).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up * weights.view(-1)[order, None]).to(gate_up.dtype)


def weighted_swiglu_backward_reference(
    dy: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """dy: (M, F) -> the gradients of gate_up (M, 2F) and of the weights, in their shape."""
    gate, up = _wide(gate_up).chunk(2, -1)
    w = weights.view(-1)[order, None]
    d_weights = torch.empty_like(weights).view(-1)
    d_weights[order] = (_wide(dy) * torch.nn.functional.silu(gate) * up).sum(-1)
    d = swiglu_backward_reference(_wide(dy) * w, _wide(gate_up))
    return d.to(gate_up.dtype), d_weights.view(weights.shape)


if triton is not None:

    @triton.jit
    def _expert_gather_kernel(x, tokens, out, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        token = tl.load(tokens + row, mask=row < n, other=0).to(tl.int64)[:, None]
        mask = (row < n)[:, None] & (col < WIDTH)
        tl.store(out + row.to(tl.int64)[:, None] * WIDTH + col, tl.load(x + token * WIDTH + col, mask=mask), mask=mask)

    @triton.jit
    def _expert_combine_kernel(
        y, places, into, out, n, WIDTH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (row < n)[:, None] & (col < WIDTH)
        at = row.to(tl.int64)[:, None] * WIDTH + col
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for j in tl.static_range(K):
            place = tl.load(places + row * K + j, mask=row < n, other=0).to(tl.int64)[:, None]
            total += tl.load(y + place * WIDTH + col, mask=mask, other=0.0).to(tl.float32)
        if into is not None:
            total += tl.load(into + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def _expert_swiglu_forward_kernel(
        gate_up, weights, order, y, n, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (row < n)[:, None] & (col < F)
        at = row.to(tl.int64)[:, None]
        copy = tl.load(order + row, mask=row < n, other=0)
        w = tl.load(weights + copy, mask=row < n, other=0.0)[:, None]
        gate = tl.load(gate_up + at * (2 * F) + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at * (2 * F) + F + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + at * F + col, (gate * tl.sigmoid(gate) * up * w).to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _expert_swiglu_backward_kernel(
        dy, gate_up, weights, order, d_gate_up, d_weights, n, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        copy = tl.load(order + row, mask=row < n, other=0)
        w = tl.load(weights + copy, mask=row < n, other=0.0)[:, None]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for begin in range(0, F, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            mask = (row < n)[:, None] & (col < F)
            g = tl.load(dy + at * F + col, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(gate_up + at * (2 * F) + col, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up + at * (2 * F) + F + col, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            total += g * gate * sigmoid * up
            g *= w
            d_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
            d_up = g * gate * sigmoid
            tl.store(d_gate_up + at * (2 * F) + col, d_gate.to(d_gate_up.dtype.element_ty), mask=mask)
            tl.store(d_gate_up + at * (2 * F) + F + col, d_up.to(d_gate_up.dtype.element_ty), mask=mask)
        tl.store(d_weights + copy, tl.sum(total, 1), mask=row < n)


def _tile(width: int) -> tuple[int, int]:
    """(rows, columns) of a program."""
    block = min(WIDEST, triton.next_power_of_2(width))
    return max(1, TILE // block), block


def _fused(x: Tensor) -> bool:
    return choose("experts", x) == TRITON


def gather(x: Tensor, tokens: Tensor) -> Tensor:
    """As `gather_reference`."""
    if not _fused(x):
        return gather_reference(x, tokens)
    m, width = len(tokens), x.shape[1]
    x = x.contiguous()
    out = torch.empty((m, width), dtype=x.dtype, device=x.device)
    rows, block = _tile(width)
    _expert_gather_kernel[(triton.cdiv(m, rows), triton.cdiv(width, block))](x, tokens, out, m, width, rows, block)
    return out


def combine(y: Tensor, places: Tensor, into: Tensor | None, n: int) -> Tensor:
    """As `combine_reference`; `into` is contiguous."""
    if not _fused(y):
        return combine_reference(y, places, into, n)
    width = y.shape[1]
    out = torch.empty((n, width), dtype=y.dtype, device=y.device) if into is None else into
    rows, block = _tile(width)
    grid = (triton.cdiv(n, rows), triton.cdiv(width, block))
    _expert_combine_kernel[grid](y, places, into, out, n, width, len(places) // n, rows, block)
    return out


def weighted_swiglu(gate_up: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """As `weighted_swiglu_reference`."""
    if not _fused(gate_up):
        return weighted_swiglu_reference(gate_up, weights, order)
    m, width = len(gate_up), gate_up.shape[1] // 2
    y = torch.empty((m, width), dtype=gate_up.dtype, device=gate_up.device)
    rows, block = _tile(width)
    grid = (triton.cdiv(m, rows), triton.cdiv(width, block))
    _expert_swiglu_forward_kernel[grid](gate_up, weights, order, y, m, width, rows, block)
    return y


def weighted_swiglu_backward(dy: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """As `weighted_swiglu_backward_reference`."""
    if not _fused(gate_up):
        return weighted_swiglu_backward_reference(dy, gate_up, weights, order)
    m, width = dy.shape
    d_gate_up, d_weights = torch.empty_like(gate_up), torch.empty_like(weights)
    rows, block = _tile(width)
    _expert_swiglu_backward_kernel[(triton.cdiv(m, rows),)](
        dy, gate_up, weights, order, d_gate_up, d_weights, m, width, rows, block
    )
    return d_gate_up, d_weights


def product_of_experts(x: Tensor, weight: Tensor, ends: Tensor, rows: Tensor | None = None, transposed: bool = False
                       ) -> Tensor:  # fmt: skip
    """`grouped_linear` of x, or of its `rows` (M,), in eight bits where the weight has such operands."""
    eight: Fp8Experts | None = getattr(weight, "eight_bit", None) if x.dtype == torch.bfloat16 else None
    if eight is not None:
        return eight.multiply(*quantise_rows(x, rows), ends, transposed)
    return grouped_linear(x if rows is None else gather(x, rows), weight, ends, transposed)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x: (N, d), weight: (E, d) -> (N, E), in FP32 from the matmul's accumulator (FP64 for FP64 rows)."""
    w = operand(weight, x.dtype)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, w.T, out_dtype=torch.float32)
    return _wide(x) @ _wide(w).T


class _IntoExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor, gate_up: Tensor, k: int, balance: Balance | None, remake: Remake | None
    ) -> tuple[Any, ...]:
        rows = x.reshape(-1, x.shape[-1])
        logits = router_logits(rows, router)
        routing, loss, losses = route(logits, k, balance)
        hidden = product_of_experts(rows, gate_up, routing.ends, routing.tokens)
        ctx.weights, ctx.remake, ctx.shape = (router, gate_up), remake, x.shape
        indices = routing.experts, routing.order, routing.tokens, routing.places, routing.ends
        kept = [*(losses or (None, None)), *([] if remake else [x])]
        ctx.save_for_backward(logits, routing.weights, *indices, *kept)
        ctx.mark_non_differentiable(*indices, *([] if loss is None else [loss]))
        return hidden, routing.weights, *indices, loss

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor, d_weights: Tensor, *_: Any) -> Any:
        logits, weights, experts, order, tokens, places, ends, shares, pulls, *kept = ctx.saved_tensors
        router, gate_up = ctx.weights
        x = ctx.remake() if ctx.remake else kept[0]
        ctx.remake = None
        rows = x.reshape(-1, x.shape[-1])
        d_gate_up = deliver_grouped_product(gate_up, d_hidden, rows, ends, x_rows=tokens)
        routing = Routing(experts, weights, order, tokens, places, ends)
        losses = None if pulls is None else (shares, pulls)
        d_logits = route_backward(d_weights, logits, routing, losses, rows.dtype)
        d_router = deliver_product(router, d_logits, rows)
        del x, rows, kept
        dx = None
        if ctx.needs_input_grad[0]:
            copies = product_of_experts(d_hidden, gate_up, ends, transposed=True)
            dx = combine(copies, places, None, len(logits))
            dx = dx.addmm_(d_logits, operand(router, dx.dtype)).view(ctx.shape)
        return dx, d_router, d_gate_up, None, None, None


class _ExpertSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weights, order)
        return weighted_swiglu(hidden, weights, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return *weighted_swiglu_backward(dy, *ctx.saved_tensors), None


class _OutOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Tensor, down: Tensor, into: Tensor, tokens: Tensor, places: Tensor, ends: Tensor,
        remake: Remake | None, result: bool,
    ) -> Tensor:  # fmt: skip
        ctx.mark_dirty(into)
        ctx.weight, ctx.remake = down, remake
        ctx.save_for_backward(tokens, ends, *([product] if not remake else []))
        if result:
            rows = into.view(-1, into.shape[-1])
            combine(product_of_experts(product, down, ends), places, rows, len(rows))
        return into

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        tokens, ends, *kept = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        d_product = product_of_experts(rows, ctx.weight, ends, tokens, transposed=True)
        product = ctx.remake() if ctx.remake else kept[0]
        ctx.remake = None
        d_down = deliver_grouped_product(ctx.weight, rows, product, ends, dy_rows=tokens)
        return d_product, d_down, dy, None, None, None, None, None


def routed_experts(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    into: Tensor,
    k: int,
    balance: Balance | None = None,
    *,
    remake: Remake | None = None,
    keep_product: bool = True,
    result: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """into (..., d) + the weighted sum over each row's k experts of down[e] (silu(gate[e] x) * up[e] x), rounded once.

    x: (..., d), router: (E, d), gate_up: (E, 2F, d) with gate's rows first, down: (E, d, F), FP32 masters; `into` is
    overwritten as in `linear_add`. Returns it and the sum of the router's losses that `balance` asks for, None without:
    a number without a graph, whose gradient the backward adds with an upstream of 1. For it x holds whole sequences.

    `remake`, `result`: as in `linear_add`; without `keep_product` SwiGLU's product is made again in the backward.
    """
    hidden, weights, _, order, tokens, places, ends, loss = _IntoExperts.apply(x, router, gate_up, k, balance, remake)
    product = _ExpertSwiGLU.apply(hidden, weights, order)
    again = None if keep_product else lambda: weighted_swiglu(hidden, weights, order)
    return _OutOfExperts.apply(product, down, into, tokens, places, ends, again, result), loss
