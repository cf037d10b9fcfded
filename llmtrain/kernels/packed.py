"""Causal attention within documents that are laid end to end, without padding between them.

cuDNN's graph API computes it where it is there and documents are long, our own kernel where they are short, where the
number of slots is far above that of documents, or where there is no such library. Shapes are constant whatever the mix
of documents: `cu_seqlens` is padded by repeating its last border. Nothing waits for the device, nothing is compiled
again, and both can be captured in a CUDA graph after one call. Under torch.compile it is one opaque operator.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels import choice, cudnn_attention
from llmtrain.kernels.attention_blocks import supports
from llmtrain.kernels.choice import REFERENCE, TRITON
from llmtrain.kernels.document_attention import dkv_triton, dq_triton, forward_triton, triton
from llmtrain.kernels.document_ranges import clear_behind, document_ranges

CUDNN = "cudnn"

CUDNN_FROM = 768
"""Tokens a slot from which cuDNN is the faster one on an H200; below, documents are short or slots many."""


def _documents(cu_seqlens: Tensor) -> Iterator[slice]:
    """Where there are tokens. Waits for the device."""
    borders = cu_seqlens.tolist()
    return (slice(a, b) for a, b in zip(borders, borders[1:], strict=False) if a < b)


def _weights(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """q: (T, Hkv, GROUP, D), k: (T, Hkv, D) of one document -> softmax, (Hkv, GROUP, T, T)."""
    token = torch.arange(len(q), device=q.device)
    seen = token <= token[:, None]
    if window is not None:
        seen = seen & (token > token[:, None] - window)
    scores = torch.einsum("ihgd,jhd->hgij", q, k) / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def _wide(x: Tensor, kv_heads: int) -> Tensor:
    """(T, H, D) -> (T, Hkv, GROUP, D), or as it is where H is Hkv, in FP32 or FP64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.reshape(len(x), kv_heads, -1, x.shape[2])


def packed_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None = None
) -> Tensor:
    """As `packed_attention`, from whole score matrices, document by document."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    h_kv = k.shape[1]
    for document in _documents(cu_seqlens):
        of_k, of_v = (_wide(x[document], h_kv)[:, :, 0] for x in (k, v))
        y = torch.einsum("hgij,jhd->ihgd", _weights(_wide(q[document], h_kv), of_k, window), of_v)
        out[document] = y.reshape(out[document].shape).to(out.dtype)
    return out


def packed_attention_backward_reference(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    h_kv = k.shape[1]
    for document in _documents(cu_seqlens):
        of_k, of_v = (_wide(x[document], h_kv)[:, :, 0] for x in (k, v))
        of_q, of_dy = (_wide(x[document], h_kv) for x in (q, dy))
        weights = _weights(of_q, of_k, window)
        of_weights = torch.einsum("ihgd,jhd->hgij", of_dy, of_v)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / q.shape[2] ** 0.5
        dq[document] = torch.einsum("hgij,jhd->ihgd", of_scores, of_k).reshape(dq[document].shape).to(q.dtype)
        dk[document] = torch.einsum("hgij,ihgd->jhd", of_scores, of_q).to(q.dtype)
        dv[document] = torch.einsum("hgij,ihgd->jhd", weights, of_dy).to(q.dtype)
    return dq, dk, dv


def check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None, max_seqlen: int | None) -> None:
    """Raises ValueError for what `packed_attention` cannot take, naming the argument. What the borders are is looked at
    on a CPU only: on a card that would wait for it."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or 0 in x.shape:
            raise ValueError(f"{name}: (tokens, heads, head_dim) wanted, none of them 0, not {tuple(x.shape)}")
        if x.dtype != q.dtype or x.dtype not in choice.FLOATS:
            raise ValueError(f"{name}: one floating-point dtype wanted for q, k and v, not {x.dtype} beside {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, q on {q.device}")
        if x.stride(2) != 1:
            raise ValueError(f"{name}: its last dimension must be contiguous, its strides are {x.stride()}")
    if k.shape != v.shape:
        raise ValueError(f"v: {tuple(k.shape)} wanted, as k has, not {tuple(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k: q's tokens and head_dim and a divisor of its heads wanted, not {tuple(k.shape)} beside "
            f"{tuple(q.shape)}"
        )
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens: (documents + 1,) of int32 or int64 wanted, at least 2, not {tuple(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens: is on {cu_seqlens.device}, q on {q.device}")
    for name, number in (("window", window), ("max_seqlen", max_seqlen)):
        if number is not None and not isinstance(number, int):
            raise ValueError(f"{name}: an int wanted, not {number!r}")
    if window is not None and window < 1:
        raise ValueError(f"window: 1 key or more wanted, not {window}")
    if max_seqlen is not None and not 1 <= max_seqlen <= q.shape[0]:
        raise ValueError(f"max_seqlen: from 1 to the {q.shape[0]} tokens wanted, not {max_seqlen}")


def check_borders(cu_seqlens: Tensor, total: int, longest: int) -> None:
    """Raises ValueError where they are not those of documents of `longest` tokens at most among `total`."""
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()) or int(cu_seqlens[-1]) > total:
        raise ValueError(f"cu_seqlens: borders wanted that begin with 0, never fall and end by {total}")
    if int(lengths.max()) > longest:
        raise ValueError(f"cu_seqlens: a document has {int(lengths.max())} tokens, max_seqlen is {longest}")


def why_not(backend: str, q: Tensor, max_seqlen: int | None) -> str | None:
    """Why `backend` cannot do it, as half a sentence about it; None where it can."""
    if backend == REFERENCE:
        return None
    if backend == TRITON:
        if triton is None:
            return "needs triton, which is not installed"
        return None if q.dtype != torch.float64 and supports(q.shape[2]) else f"has no kernel for {_heads(q)}"
    if backend != CUDNN:
        return "is no backend of packed_attention"
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] < 9:
        return "needs a CUDA card of compute capability 9.0 or more"
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] % 8 or q.shape[2] > cudnn_attention.MOST_HEAD_DIM:
        return f"takes 16 bits and heads of up to {cudnn_attention.MOST_HEAD_DIM} in whole eights, not {_heads(q)}"
    if max_seqlen is None:
        return "needs max_seqlen"
    return cudnn_attention.unavailable()


def _heads(q: Tensor) -> str:
    return f"heads of {q.shape[2]} in {str(q.dtype).removeprefix('torch.')}"


def choose_backend(q: Tensor, slots: int, window: int | None, max_seqlen: int | None) -> str:
    """What is forced for the op "packed_attention", or else the fastest. RuntimeError where that cannot do it."""
    asked = choice.choose("packed_attention", q)
    if choice.named("packed_attention"):
        cannot = why_not(asked, q, max_seqlen)
        if cannot:
            raise RuntimeError(f"packed_attention: {asked} {cannot}")
    elif q.is_cuda and asked == TRITON and q.shape[0] >= CUDNN_FROM * slots and not why_not(CUDNN, q, max_seqlen):
        asked = CUDNN
    if asked == TRITON and why_not(TRITON, q, max_seqlen):
        asked = REFERENCE
    choice.ran["packed_attention"] = asked
    return asked


def _keys_seen(total: int, slots: int, window: int | None) -> int:
    return min(total // slots, window or total)


def _cudnn_shape(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None, longest: int) -> Any:
    deterministic = torch.are_deterministic_algorithms_enabled()
    return cudnn_attention.shape_of(q, k, v, len(cu_seqlens) - 1, longest, window, deterministic)


@torch.library.custom_op("llmtrain::packed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None, longest: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, statistics, what the backend made of cu_seqlens)."""
    if not q.is_cuda:
        check_borders(cu_seqlens, len(q), longest)
    if backend == CUDNN:
        shape = _cudnn_shape(q, k, v, cu_seqlens, window, longest)
        index = cudnn_attention.offsets(cu_seqlens, shape)
        documents = cudnn_attention.Documents(index, cu_seqlens.diff().int())
        out, stats = cudnn_attention.forward_cudnn(q, k, v, shape, documents)
        clear_behind(out, cu_seqlens[-1])
        return out, stats, index
    if backend == TRITON:
        ranges = document_ranges(cu_seqlens, len(q), window)
        keys_seen = _keys_seen(len(q), len(cu_seqlens) - 1, window)
        out, stats = forward_triton(q[None], k[None], v[None], ranges[0], keys_seen)
        return out[0], stats, ranges
    out = packed_attention_reference(q, k, v, cu_seqlens, window)
    return out, q.new_empty(0), cu_seqlens.new_empty(0)


@_forward.register_fake
def _(q, k, v, cu_seqlens, window, longest, backend):
    total, heads, _ = q.shape
    out = q.new_empty(q.shape)
    if backend == CUDNN:
        shape = _cudnn_shape(q, k, v, cu_seqlens, window, longest)
        stats = q.new_empty(total, heads, dtype=torch.float32)
        return out, stats, cudnn_attention.offsets(cu_seqlens, shape)
    if backend == TRITON:
        stats = q.new_empty(1, k.shape[1], total * (heads // k.shape[1]), dtype=torch.float32)
        return out, stats, cu_seqlens.new_empty(2, total, dtype=torch.int32)
    return out, q.new_empty(0), cu_seqlens.new_empty(0)


@torch.library.custom_op("llmtrain::packed_attention_backward", mutates_args=())
def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor, stats: Tensor, index: Tensor,
    window: int | None, longest: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dy = dy.contiguous()
    if backend == CUDNN:
        shape = _cudnn_shape(q, k, v, cu_seqlens, window, longest)
        documents = cudnn_attention.Documents(index, cu_seqlens.diff().int())
        gradients = cudnn_attention.backward_cudnn(q, k, v, out, stats, dy, shape, documents)
        for gradient in gradients:
            clear_behind(gradient, cu_seqlens[-1])
        return gradients
    if backend == TRITON:
        keys_seen = _keys_seen(len(q), len(cu_seqlens) - 1, window)
        rows = q[None], k[None], v[None]
        dq, delta = dq_triton(*rows, index[0], out[None], stats, dy[None], keys_seen)
        dk, dv = dkv_triton(*rows, index[1], stats, dy[None], delta, keys_seen)
        return dq[0], dk[0], dv[0]
    return packed_attention_backward_reference(dy, q, k, v, cu_seqlens, window)


@_backward.register_fake
def _(dy, q, k, v, cu_seqlens, out, stats, index, window, longest, backend):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, cu_seqlens, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)


def _backward_of_op(ctx: Any, dy: Tensor, *_: Any) -> Any:
    return *_backward(dy, *ctx.saved_tensors, *ctx.constants), None, None, None, None


_forward.register_autograd(_backward_of_op, setup_context=_setup_context)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None = None, *, max_seqlen: int | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, causal within documents, of which a query sees the last `window` keys where given.

    q: (total, H, D), k, v: (total, Hkv, D), H a multiple of Hkv, of one dtype; their last dimension must be contiguous,
    and v may be a view of a packed qkv. cu_seqlens: (slots + 1,) int32 or int64 on the same device: 0, then where each
    document ends; unused slots repeat the last border, so that its length stays the same whatever the mix. Tokens
    behind the last document must be finite; their results and gradients are 0.

    max_seqlen: no document is longer. cuDNN needs it; one longer gives wrong results there. In bf16 and fp16 results
    are within 5.6e-3 of FP64, relative to the norm. Two calls give the same bits, but for cuDNN's backward, which does
    under torch's deterministic algorithms only. -> (total, H, D). Raises ValueError, which names the argument.
    """
    check(q, k, v, cu_seqlens, window, max_seqlen)
    backend = choose_backend(q, len(cu_seqlens) - 1, window, max_seqlen)
    return _forward(q, k, v, cu_seqlens.contiguous(), window, max_seqlen or len(q), backend)[0]
