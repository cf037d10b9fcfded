"""Attention within documents: our backends, torch's varlen and FlexAttention on the same tokens, and torch's dense ones
on what a padded batch would have to compute."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.benchmark.ceilings import dtype_of_products
from llmtrain.benchmark.op import Arm, Budget, Case, Judgement, Timed, judge, reason
from llmtrain.benchmark.timing import Work
from llmtrain.kernels import choice
from llmtrain.kernels.attention import attention_mask
from llmtrain.kernels.mxfp8 import rounded
from llmtrain.kernels.packed import (
    check_borders,
    packed_attention,
    packed_attention_backward_reference,
    packed_attention_reference,
    why_not,
)
from llmtrain.model.flops import causal_pairs

DIRECTIONS = ("forward", "forward + backward")
TOLERANCE = 5.6e-3
"""Relative L2 of the output and of each gradient, against FP64: a rounding to bf16 of what goes into the products."""
JUDGED_TOKENS = 8192
"""Of the first documents: whole score matrices in FP64 of all of them would take longer than the timing."""
PACKED, PADDED = "packed", "padded"

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Documents and heads."""

    documents: str
    """What they are called in the table."""
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    slots: int | None = None
    """Of cu_seqlens; default: as many as documents."""
    padded: int | None = None
    """Length of the rows that a padded batch would have; default: the longest document's."""

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def row(self) -> int:
        return self.padded or max(self.lengths)

    def judged(self) -> "Shape":
        """The first documents, or the beginning of the first."""
        lengths, left = [], JUDGED_TOKENS
        for length in self.lengths:
            if length > left:
                break
            lengths.append(length)
            left -= length
        lengths = lengths or [JUDGED_TOKENS // 2]
        return replace(self, lengths=tuple(lengths), slots=None, padded=max(self.row if self.padded else 0, *lengths))

    def flops(self, backward: bool) -> int:
        """That the op must do: two products forward, five backward, for pairs that attend."""
        pairs = sum(causal_pairs(length, self.window) for length in self.lengths)
        return 4 * self.heads * self.head_dim * pairs * (7 if backward else 2) // 2

    def nbytes(self, backward: bool) -> int:
        """That the op must move, in 16 bits: forward q, k, v and out; backward these, dy and three gradients."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * self.total * (2 * q + 2 * kv + (backward and 4 * q + 4 * kv))

    def columns(self) -> dict[str, Any]:
        share = 1 - self.total / (len(self.lengths) * self.row)
        return {
            "documents": self.documents,
            "tokens": self.total,
            "heads": f"{self.heads}+{self.kv_heads} of {self.head_dim}",
            "cache B/token": 4 * self.kv_heads * self.head_dim,
            "window": self.window or "none",
            "padding": f"{share:.2f}",
        }


@dataclass(frozen=True)
class Implementation:
    """How an arm computes it."""

    function: Function
    layout: str = PACKED
    """(total, H, D), or padded rows (B, T, H, D)."""
    ours: bool = False
    compiled: bool = False
    lacks: tuple[str, ...] = ()


def borders(shape: Shape, device: torch.device) -> Tensor:
    """cu_seqlens: (slots + 1,) int32."""
    ends = torch.tensor([0, *shape.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    unused = (shape.slots or len(shape.lengths)) - len(shape.lengths)
    return torch.cat([ends, ends[-1:].expand(unused)]).to(device)


def operands(shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dy, packed; v is a view of a packed qkv, as in the model."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = dtype_of_products(device)
    heads = shape.heads + 2 * shape.kv_heads
    qkv = torch.randn(shape.total, heads, shape.head_dim, device=device, generator=generator).to(dtype)
    q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    dy = torch.randn(q.shape, device=device, generator=generator).to(dtype)
    return q.contiguous(), k.contiguous(), v, dy


def pad(x: Tensor, shape: Shape) -> Tensor:
    """(total, H, D) -> (B, row, H, D), zeros behind each document."""
    parts = [F.pad(part, (0, 0, 0, 0, 0, shape.row - len(part))) for part in x.split(list(shape.lengths))]
    return torch.stack(parts)


def unpad(x: Tensor, shape: Shape) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(x, shape.lengths, strict=True)])


def dense(backend: SDPBackend | None, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention on rows; a window is a mask, which only the slower backends take."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None
    if window is not None:
        mask = attention_mask(q.shape[2], q.shape[2], 0, None, window, q.device)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH] if backend is None else [backend]
    with sdpa_kernel(backends):
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def eight_bit(x: Tensor) -> Tensor:
    """x rounded as MXFP8 holds it (blocks of 32, a power of two each, E4M3), in its own dtype; the gradient passes."""
    narrow = rounded(x.detach().reshape(-1, x.shape[-1]), 1).view(x.shape)
    return x + (narrow - x.detach())


def flex(shape: Shape, cu_seqlens: Tensor) -> Function:
    """FlexAttention, compiled; its map of blocks is made here, once for all layers and so outside what is timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    token = torch.arange(shape.total, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)
    window = shape.window or shape.total

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j) & (i - j < window)

    torch._dynamo.reset()  # or a shape would meet the limit of recompilations, and run uncompiled
    blocks = create_block_mask(sees, None, None, shape.total, shape.total, cu_seqlens.device, _compile=True)
    run = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = run(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
        assert isinstance(out, Tensor)
        return out[0].transpose(0, 1)

    return attend


def varlen(shape: Shape, cu_seqlens: Tensor) -> Function:
    """torch's varlen_attn, FlashAttention-2 in 2.11. Its window counts the keys to the left, which is one fewer."""
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if shape.window is None else shape.window - 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        longest = max(shape.lengths)
        grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and NEEDS_GQA_FLAG else {}
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(left, 0), **grouped)
        assert isinstance(out, Tensor)
        return out

    return attend


NEEDS_GQA_FLAG = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 12)
"""torch 2.11's varlen_attn groups heads without being told."""


def implementations(shape: Shape, device: torch.device, compiled: bool) -> dict[str, Implementation | str]:
    """The arms, ours first, or why one is not there."""
    cu_seqlens = borders(shape, device)
    longest = max(shape.lengths)
    check_borders(cu_seqlens, shape.total, longest)

    def ours(backend: str | None, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with choice.forced(backend or choice.AUTO, *(["packed_attention"] if backend else [])):
            return packed_attention(q, k, v, cu_seqlens, window, max_seqlen=longest)

    arms: dict[str, Implementation | str] = {
        "packed_attention": Implementation(functools.partial(ours, None, shape.window), ours=True)
    }
    probe = torch.empty(1, 1, shape.head_dim, dtype=torch.bfloat16, device=device)
    for backend in ("cudnn", "triton") if device.type == "cuda" else ("reference",):
        cannot = why_not(backend, probe, longest)
        run = Implementation(functools.partial(ours, backend, shape.window), ours=True)
        arms[f"ours, {backend}"] = cannot or run
    if device.type != "cuda":
        return arms

    def quantised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours(None, shape.window, eight_bit(q), eight_bit(k), eight_bit(v))

    arms["varlen_attn"] = Implementation(varlen(shape, cu_seqlens))
    if shape.window is None:
        waste = () if len(set(shape.lengths)) == 1 and shape.row == longest else ("computes on padding",)
        for name, kind in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):
            arms[f"{name} on rows"] = Implementation(functools.partial(dense, kind, None), PADDED, lacks=waste)
        arms["MXFP8 emulated"] = Implementation(quantised)
    else:
        everything = Implementation(functools.partial(ours, None, None), lacks=("no window: sees everything",))
        arms["ours without the window"] = everything
        if shape.row <= 4096:  # a longer one does not fit, or takes seconds
            trap = functools.partial(dense, None, shape.window)
            arms["SDPA on rows with a mask"] = Implementation(trap, PADDED)
    if compiled:
        try:
            arms["FlexAttention"] = Implementation(flex(shape, cu_seqlens), compiled=True)
        except Exception as error:  # a peer may fail in any way
            arms["FlexAttention"] = reason(error)
    return arms


def both(arm: Implementation, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv), fresh gradients every time; `given`: q, k, v and dy in the arm's layout."""
    q, k, v, dy = given
    out = arm.function(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), dy)


def in_layout(arm: Implementation, shape: Shape, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    laid = tuple(pad(x, shape) for x in given) if arm.layout == PADDED else given
    return *(x.detach().requires_grad_() for x in laid[:3]), laid[3]


def judged(shape: Shape, device: torch.device) -> dict[str, Judgement]:
    """Each arm against FP64, on the first documents; what has to be compiled for them is left to `beside_ours`."""
    shape = shape.judged()
    given = operands(shape, device, 0)
    q, k, v, dy = (x.double() for x in given)
    cu_seqlens = borders(shape, device)
    truth = packed_attention_reference(q, k, v, cu_seqlens, shape.window)
    gradients = packed_attention_backward_reference(dy, q, k, v, cu_seqlens, shape.window)
    exact = dict(zip(("out", "dq", "dk", "dv"), (truth, *gradients), strict=True))
    budget = {name: Budget(relative_l2=TOLERANCE) for name in exact}
    found = {}
    for name, arm in implementations(shape, device, compiled=False).items():
        if isinstance(arm, str):
            continue
        if any("no window" in what for what in arm.lacks):
            found[name] = Judgement(lacks=arm.lacks)
            continue
        try:
            got = both(arm, in_layout(arm, shape, given))
            if arm.layout == PADDED:
                got = tuple(unpad(x, shape) for x in got)
            result = judge(dict(zip(exact, (x.detach() for x in got), strict=True)), exact, budget)
            found[name] = Judgement(result.errors, result.lacks + arm.lacks)
        except Exception as error:  # a peer may fail in any way
            found[name] = Judgement(lacks=(f"failed: {reason(error)}",))
    return found


def beside_ours(arm: Implementation, ours: Implementation, given: tuple[Tensor, ...]) -> Judgement:
    """An arm against ours, on all documents; the tolerance holds both errors."""
    names = ("out", "dq", "dk", "dv")
    try:
        got, exact = ({name: x.detach() for name, x in zip(names, both(a, given), strict=True)} for a in (arm, ours))
        wide = {name: x.double() for name, x in exact.items()}
        result = judge(got, wide, {name: Budget(relative_l2=TOLERANCE) for name in names})
        return Judgement(result.errors, result.lacks + arm.lacks)
    except Exception as error:  # a peer may fail in any way
        return Judgement(lacks=(f"failed: {reason(error)}",))


def make_case(shape: Shape, device: torch.device) -> Case:
    """Both directions at one shape."""

    def rows(compiled: bool) -> list[Timed]:
        judgements = judged(shape, device)
        given = operands(shape, device, 1)
        arms = implementations(shape, device, compiled)
        laid = {name: in_layout(arm, shape, given) for name, arm in arms.items() if not isinstance(arm, str)}
        measure = next(iter(arms.values()))
        for name, arm in arms.items():
            if not isinstance(arm, str) and arm.compiled and not isinstance(measure, str):
                judgements[name] = beside_ours(arm, measure, laid[name])

        def build(name: str, arm: Implementation, backward: bool) -> Callable[[], Work]:
            def forward() -> object:
                with torch.no_grad():
                    return arm.function(*laid[name][:3])

            run = functools.partial(both, arm, laid[name]) if backward else forward
            return lambda: Work(run, laid[name])

        def timed(direction: str) -> Timed:
            backward = direction != "forward"
            made = {}
            for name, arm in arms.items():
                if isinstance(arm, str):
                    made[name] = Arm(lambda: Work(lambda: None), ours=name.startswith("ours,"), absent=arm)
                    continue
                judgement = judgements.get(name, Judgement(lacks=("not judged",)))
                judgement = judgement if backward else judgement.of("out")
                made[name] = Arm(build(name, arm, backward), judgement, ours=arm.ours, compiled=arm.compiled)
            return Timed(direction, made, shape.nbytes(backward), shape.flops(backward))

        return [timed(direction) for direction in DIRECTIONS]

    return Case("attention", shape.columns(), rows)


def uniform_lengths(count: int, low: int, high: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths drawn evenly from low to high, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(low, high + 1, (count,), generator=generator).tolist())
