"""Which experts a token goes to, with which weight, and what keeps them evenly used.

The k largest logits of a token are its experts, their softmax the weights. Two losses act on all of a token's logits.
The balance loss of a sequence (DeepSeek-V2, 2405.04434) is n * balance * the sum over E experts of f * P: P is the mean
of an expert's probability, f is E times the share of the choices that fell on it, n the number of the sequence's
targets. The router z-loss (ST-MoE, 2202.08906) is n * z * the mean of lse^2. With the factor n both are sums over
targets like every loss here, so a split of the batch into micro-batches shows in nothing. Their upstream gradient is 1
by the rule of sums: the backward adds their gradient, and the losses themselves leave as numbers without a graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.choice import TRITON, choose

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without it, and the reference is all they use.
    triton = None

TILE = 2048
"""Logits of a program."""


@dataclass
class Routing:
    """Where N rows, each copied to its k experts, go. A copy is numbered row * k + choice."""

    experts: Tensor
    """(N, k) uint8."""
    weights: Tensor
    """(N, k) FP32 (FP64 for FP64 rows), summing to 1."""
    order: Tensor
    """(N k) int32: the copy at each place, places being sorted by expert and, within one, by copy."""
    tokens: Tensor
    """(N k) int32: the row of that copy."""
    places: Tensor
    """(N k) int32: the place of each copy."""
    ends: Tensor
    """(E,) int32: where each expert's places end."""


@dataclass
class Balance:
    """What the two losses of a sequence come from; all of B sequences."""

    targets: Tensor
    """(B,) targets that count."""
    balance: float
    """Weight of the balance loss."""
    z: float
    """Weight of the z-loss."""


def route_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits: (N, E), FP32 or FP64 -> experts (N, k) uint8, of equal ones the first, and weights (N, k)."""
    # NaN counts as the smallest: whatever the logits are, k different experts come out, and the weights say the rest.
    known = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    experts = known.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return experts.to(torch.uint8), logits.gather(1, experts).softmax(-1)


def statistics_reference(logits: Tensor, experts: Tensor, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of B sequences of T rows: the mean probability (B, E), choices of each expert (B, E), mean lse^2 (B,)."""
    n, n_experts = logits.shape
    lse = logits.logsumexp(-1)
    mean = (logits - lse[:, None]).exp().view(sequences, -1, n_experts).mean(1)
    chosen = torch.zeros_like(logits).scatter_(1, experts.long(), 1.0)
    return mean, chosen.view(sequences, -1, n_experts).sum(1), lse.square().view(sequences, -1).mean(1)


def route_backward_reference(
    d_weights: Tensor, logits: Tensor, experts: Tensor, weights: Tensor, shares: Tensor | None, pulls: Tensor | None
) -> Tensor:
    """d_weights: (N, k) -> the gradient of logits (N, E).

    shares: (B, E), what a unit of an expert's probability adds to the losses of a row of that sequence; pulls: (B,), of
    lse^2; None where there are no such losses.
    """
    inner = (d_weights * weights).sum(-1, keepdim=True)
    gradient = torch.zeros_like(logits).scatter_(1, experts.long(), weights * (d_weights - inner))
    if shares is not None and pulls is not None:
        lse = logits.logsumexp(-1, keepdim=True)
        p = (logits - lse).exp()
        rows = len(logits) // len(shares)
        share = shares.repeat_interleave(rows, 0)
        pull = pulls.repeat_interleave(rows)[:, None]
        gradient += p * (share - (p * share).sum(-1, keepdim=True) + 2 * pull * lse)
    return gradient


if triton is not None:

    @triton.jit
    def _route_kernel(
        logits, experts, weights, sums, squares, n_rows, tiles,
        E: tl.constexpr, K: tl.constexpr, STATISTICS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
        CHOICES: tl.constexpr,
    ):  # fmt: skip
        # Tiles of rows never cross a sequence, whose statistics are sums over its tiles.
        sequence = (tl.program_id(0) // tiles).to(tl.int64)
        row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
        inside = row < n_rows
        col = tl.arange(0, BLOCK)[None, :]
        mask = inside[:, None] & (col < E)
        flat = sequence * n_rows + row
        x = tl.load(logits + flat[:, None] * E + col, mask=mask, other=float("-inf"))
        x = tl.where(inside[:, None], x, 0.0)
        left = tl.where(x != x, float("-inf"), x)
        free = tl.broadcast_to(col < E, (ROWS, BLOCK))
        slot = tl.arange(0, CHOICES)[None, :]
        picked = tl.full((ROWS, CHOICES), 0, tl.int32)
        values = tl.full((ROWS, CHOICES), float("-inf"), tl.float32)
        for j in tl.static_range(K):
            top = tl.max(tl.where(free, left, float("-inf")), 1)
            at = tl.min(tl.where(free & (left == top[:, None]), col, BLOCK), 1)
            here = col == at[:, None]
            value = tl.sum(tl.where(here, x, 0.0), 1)
            picked = tl.where(slot == j, at[:, None], picked)
            values = tl.where(slot == j, value[:, None], values)
            free = free & (col != at[:, None])
        highest = tl.max(values, 1)
        e = tl.where(slot < K, tl.exp(values - highest[:, None]), 0.0)
        e = e / tl.sum(e, 1)[:, None]
        keep = inside[:, None] & (slot < K)
        tl.store(experts + flat[:, None] * K + slot, picked.to(tl.uint8), mask=keep)
        tl.store(weights + flat[:, None] * K + slot, e, mask=keep)
        if STATISTICS:
            top = tl.max(x, 1)
            p = tl.exp(x - top[:, None])
            total = tl.sum(p, 1)
            lse = top + tl.log(total)
            p = tl.where(mask, p / total[:, None], 0.0)
            tile = tl.program_id(0).to(tl.int64)
            cols = tl.arange(0, BLOCK)
            chosen = tl.where(mask & (free == 0), 1.0, 0.0)
            tl.store(sums + tile * 2 * E + cols, tl.sum(p, 0), mask=cols < E)
            tl.store(sums + tile * 2 * E + E + cols, tl.sum(chosen, 0), mask=cols < E)
            tl.store(squares + tile, tl.sum(tl.where(inside, lse * lse, 0.0), 0))

    @triton.jit
    def _route_backward_kernel(
        d_weights, logits, experts, weights, shares, pulls, d_logits, n_rows, tiles,
        E: tl.constexpr, K: tl.constexpr, LOSSES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        sequence = (tl.program_id(0) // tiles).to(tl.int64)
        row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
        inside = row < n_rows
        col = tl.arange(0, BLOCK)[None, :]
        mask = inside[:, None] & (col < E)
        flat = sequence * n_rows + row
        inner = tl.zeros((ROWS,), tl.float32)
        for j in tl.static_range(K):
            w = tl.load(weights + flat * K + j, mask=inside, other=0.0)
            inner += w * tl.load(d_weights + flat * K + j, mask=inside, other=0.0)
        gradient = tl.zeros((ROWS, BLOCK), tl.float32)
        for j in tl.static_range(K):
            w = tl.load(weights + flat * K + j, mask=inside, other=0.0)
            d = tl.load(d_weights + flat * K + j, mask=inside, other=0.0)
            at = tl.load(experts + flat * K + j, mask=inside, other=0).to(tl.int32)
            gradient = tl.where(col == at[:, None], (w * (d - inner))[:, None], gradient)
        if LOSSES:
            x = tl.load(logits + flat[:, None] * E + col, mask=mask, other=float("-inf"))
            x = tl.where(inside[:, None], x, 0.0)
            top = tl.max(x, 1)
            p = tl.exp(x - top[:, None])
            total = tl.sum(p, 1)
            p = p / total[:, None]
            lse = top + tl.log(total)
            share = tl.load(shares + sequence * E + col, mask=col < E, other=0.0)
            pull = tl.load(pulls + sequence)
            gradient += p * (share - tl.sum(p * share, 1)[:, None] + (2 * pull * lse)[:, None])
        tl.store(d_logits + flat[:, None] * E + col, gradient.to(d_logits.dtype.element_ty), mask=mask)

    @triton.jit
    def _places_kernel(wide, order, tokens, places, n, K: tl.constexpr, BLOCK: tl.constexpr):
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        copy = tl.load(wide + place, mask=place < n, other=0).to(tl.int32)
        tl.store(order + place, copy, mask=place < n)
        tl.store(tokens + place, copy // K, mask=place < n)
        tl.store(places + copy, place, mask=place < n)


def _tiles(n_rows: int, n_experts: int) -> tuple[int, int, int]:
    """(rows of a tile, its width, tiles of a sequence)."""
    block = triton.next_power_of_2(n_experts)
    rows = min(max(1, TILE // block), triton.next_power_of_2(n_rows))
    return rows, block, triton.cdiv(n_rows, rows)


def choose_experts(
    logits: Tensor, k: int, sequences: int, statistics: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """`route_reference` and, where wanted, `statistics_reference`, of logits (N, E), rows of so many sequences."""
    if choose("routing", logits) != TRITON:
        experts, weights = route_reference(logits, k)
        return experts, weights, statistics_reference(logits, experts, sequences) if statistics else None
    n, n_experts = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and n % sequences == 0
    length, kept = n // sequences, sequences if statistics else 0
    rows, block, tiles = _tiles(length, n_experts)
    experts = torch.empty((n, k), dtype=torch.uint8, device=logits.device)
    weights = torch.empty((n, k), dtype=logits.dtype, device=logits.device)
    sums = torch.empty((kept, tiles, 2, n_experts), dtype=logits.dtype, device=logits.device)
    squares = torch.empty((kept, tiles), dtype=logits.dtype, device=logits.device)
    _route_kernel[(sequences * tiles,)](
        logits, experts, weights, sums, squares, length, tiles,
        n_experts, k, statistics, rows, block, triton.next_power_of_2(k),
    )  # fmt: skip
    if not statistics:
        return experts, weights, None
    probabilities, chosen = sums.sum(1).unbind(1)
    return experts, weights, (probabilities / length, chosen, squares.sum(1) / length)


def route(
    logits: Tensor, k: int, balance: Balance | None
) -> tuple[Routing, Tensor | None, tuple[Tensor, Tensor] | None]:
    """logits: (N, E) FP32 or FP64, the rows of whole sequences where `balance` asks for its losses.

    Returns the routing, the sum of the losses (0-d, FP32 or FP64, without a graph), and what `route_backward` needs to
    add their gradient: shares (B, E) and pulls (B,). Waits for nothing.
    """
    n, n_experts = logits.shape
    sequences = 1 if balance is None else len(balance.targets)
    experts, weights, statistics = choose_experts(logits, k, sequences, balance is not None)
    routing = Routing(experts, weights, *sort_by_expert(experts, n_experts))
    if balance is None or statistics is None:
        return routing, None, None
    mean, chosen, square = statistics
    length = n // sequences
    targets = balance.targets.to(logits.dtype)
    # f = chosen * E / (k T); a row adds 1 / T of its probability to P.
    shares = chosen * (targets * (balance.balance * n_experts / (k * length)))[:, None]
    loss = (shares * mean).sum() + balance.z * (targets * square).sum()
    return routing, loss, (shares / length, targets * (balance.z / length))


def sort_by_expert(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """experts (N, k) uint8 -> order, tokens, places and ends, as `Routing` has them. Stable: the same every time."""
    m, k = experts.numel(), experts.shape[1]
    numbers, wide = experts.view(-1).sort(stable=True)
    bounds = torch.arange(n_experts, dtype=torch.uint8, device=experts.device)
    ends = torch.searchsorted(numbers, bounds, right=True, out_int32=True)
    order, tokens, places = (torch.empty(m, dtype=torch.int32, device=experts.device) for _ in range(3))
    if choose("routing", experts) == TRITON:
        _places_kernel[(triton.cdiv(m, TILE),)](wide, order, tokens, places, m, k, TILE)
    else:
        order.copy_(wide)
        torch.div(order, k, rounding_mode="floor", out=tokens)
        places[wide] = torch.arange(m, dtype=torch.int32, device=experts.device)
    return order, tokens, places, ends


def route_backward(
    d_weights: Tensor, logits: Tensor, routing: Routing, losses: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> Tensor:
    """d_weights: (N, k) -> the gradient of logits (N, E), in `dtype`; `losses` from `route`."""
    shares, pulls = losses or (None, None)
    if choose("routing", logits) != TRITON:
        d = route_backward_reference(d_weights, logits, routing.experts, routing.weights, shares, pulls)
        return d.to(dtype)
    n, n_experts = logits.shape
    sequences = 1 if pulls is None else len(pulls)
    rows, block, tiles = _tiles(n // sequences, n_experts)
    d_logits = torch.empty((n, n_experts), dtype=dtype, device=logits.device)
    _route_backward_kernel[(sequences * tiles,)](
        d_weights, logits, routing.experts, routing.weights,
        logits if shares is None else shares, logits if pulls is None else pulls, d_logits, n // sequences, tiles,
        n_experts, routing.experts.shape[1], pulls is not None, rows, block,
    )  # fmt: skip
    return d_logits
