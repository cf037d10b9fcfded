"""Causal grouped-query attention, softmax(q k^T / sqrt(D)) v, within documents and windows.

The backends are torch's own, and our kernel for documents and windows; they are chosen by name here rather than by
torch, so that a run can record which one it used. All take q, k, v as (B, T, H, D) memory seen through transposed
views: nothing is transposed in memory, gradients come back in that layout, and v may be a view into a packed qkv whose
rows lie further apart.
"""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.kernels import choice, cudnn_attention
from llmtrain.kernels.attention_blocks import supports
from llmtrain.kernels.choice import AUTO, REFERENCE, TRITON, choose
from llmtrain.kernels.document_attention import document_attention, first_seen, triton

CUDNN = "cudnn"
GRAPH = "cudnn-graph"
FLASH = "flash"
EFFICIENT = "efficient"

_TORCH_NAMES = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION, REFERENCE: SDPBackend.MATH}


def attention_mask(t: int, s: int, offset: int, doc_start: Tensor | None, window: int | None, device) -> Tensor:
    """What query column offset + i may see of the keys: (T, S) or, with documents, (B, 1, T, S) bool."""
    query = torch.arange(offset, offset + t, device=device)[:, None]
    key = torch.arange(s, device=device)[None, :]
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if doc_start is not None:
        seen = seen & (key >= doc_start[:, :, None])  # (B, T, S)
        seen = seen[:, None]
    return seen


class Backend(NamedTuple):
    """A choice and its reason."""

    name: str
    why: str
    windowed: str | None = None
    """The backend of layers with a sliding window; None: no layer has one."""

    def label(self, ran: Mapping[str, str] | None = None) -> str:
        """What computes attention; with `choice.ran`, what did."""
        name = (ran or {}).get("attention", self.name)
        if self.windowed is None:
            return name
        return f"{name}, {(ran or {}).get('windowed attention', self.windowed)} within windows"


def why_not(
    backend: str, dtype: torch.dtype, head_dim: int, t: int, s: int, masked: bool,
    capability: tuple[int, int] | None, deterministic: bool, windowed: bool = False,
) -> str | None:  # fmt: skip
    """Why `backend` cannot attend from T queries to S keys, as half a sentence about it; None where it can.

    `masked`: documents or the like say what is seen beside causality; `windowed`: a sliding window does. `capability`:
    the card's, None on a CPU.
    """
    if backend == REFERENCE:
        return None
    if capability is None and not (backend == TRITON and os.environ.get("TRITON_INTERPRET") == "1"):
        return "runs on a CUDA card only"
    if backend == TRITON:
        if triton is None:
            return "needs triton, which is not installed"
        if dtype == torch.float64 or not supports(head_dim):
            return f"has no kernel for heads of {head_dim} in {_name(dtype)}"
        return None if t == s else "takes no keys from a cache"
    if backend == EFFICIENT:
        if dtype == torch.float64 or head_dim * dtype.itemsize % 16:
            return f"does not take heads of {head_dim} in {_name(dtype)}"
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits only, not in {_name(dtype)}"
    if masked or windowed and backend != GRAPH:
        return "takes no documents and no windows" if backend != GRAPH else "takes no documents in rows"
    if capability is not None and capability[0] < 8:
        return f"needs compute capability 8.0, this card has {capability[0]}.{capability[1]}"
    if backend == FLASH:
        return None if head_dim <= 256 else f"takes heads up to 256, not {head_dim}"
    if head_dim % 8 or head_dim > 128:
        return f"takes heads of up to 128 in whole eights, not {head_dim}"
    # Before 9.15 cuDNN was wrong for some T that 128 does not divide. A new T costs it a plan of 50 to 100 ms, which
    # rules it out for decoding, where S grows token by token.
    if t != s or t % 128:
        return f"is right for lengths in whole 128s only, not {t}"
    if backend == GRAPH:
        if capability is not None and capability[0] < 9:
            return f"needs compute capability 9.0, this card has {capability[0]}.{capability[1]}"
        return cudnn_attention.unavailable()
    return "adds with atomics in its backward, in no fixed order" if deterministic else None


def choose_backend(
    dtype: torch.dtype, head_dim: int, t: int, s: int, masked: bool, capability: tuple[int, int] | None,
    deterministic: bool, windowed: bool = False,
) -> Backend:  # fmt: skip
    """What `auto` is; arguments as in `why_not`."""
    if capability is None:
        return Backend(REFERENCE, "the one that runs on a CPU")
    half = dtype in (torch.bfloat16, torch.float16)
    case = dtype, head_dim, t, s, masked, capability, deterministic, windowed
    graph_cannot = why_not(GRAPH, *case)
    if windowed and graph_cannot is None:
        return Backend(GRAPH, "it skips what windows hide")
    if (masked or windowed) and half and t == s and supports(head_dim):
        return Backend(TRITON, "it skips what documents and windows hide")
    cannot = why_not(FLASH, *case)
    if cannot:
        return Backend(EFFICIENT, f"FlashAttention-2 {cannot}")
    cannot = why_not(CUDNN, *case)
    if cannot is None and capability[0] in (9, 10):
        return Backend(CUDNN, "measured on an H200, 1.4 to 1.7 times as fast as FlashAttention-2")
    if graph_cannot is None and deterministic:
        return Backend(GRAPH, f"it adds in a fixed order; cuDNN as torch calls it {cannot}")
    # FlashAttention-2's backward keeps its order of additions under torch's deterministic algorithms.
    return Backend(FLASH, f"cuDNN {cannot or 'was measured to be faster on compute capability 9 and 10 only'}")


def training_backend(
    asked: str, dtype: torch.dtype, head_dim: int, seq_len: int, device: torch.device, masked: bool = False,
    windowed: bool = False, capability: tuple[int, int] | None = None,
) -> Backend:  # fmt: skip
    """The backend of training on whole rows: what `asked` names, or what `auto` takes.

    `masked`: attention stays within the documents of a row; `windowed`: within a sliding window. `capability`: of a
    card that is not here. Raises ValueError, half a sentence, where the one named cannot do it.
    """
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    case = dtype, head_dim, seq_len, seq_len, masked, capability, deterministic, windowed
    if asked == AUTO:
        return choose_backend(*case)
    cannot = why_not(asked, *case)
    if cannot:
        raise ValueError(cannot)
    return Backend(asked, "asked for")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offset: int = 0,
    doc_start: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """q: (B, T, H, D), k, v: (B, S, Hkv, D), S = offset + T -> (B, T, H, D).

    Query column i stands at offset + i (the keys before it come from a cache) and sees keys from doc_start (B, T)
    up to itself, at most `window` of them. The last dimension must be contiguous. `choice.forced` takes the name of a
    backend for the op "attention"; one that cannot do what is asked raises RuntimeError, with the reason.
    """
    t, s = q.shape[1], k.shape[1]
    assert s == offset + t, (s, offset, t)
    if window is not None and window >= s:
        window = None  # it hides nothing
    masked = doc_start is not None or 0 < offset and t > 1
    windowed = window is not None
    backend = choose("attention", q)
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    case = q.dtype, q.shape[3], t, s, masked, capability, torch.are_deterministic_algorithms_enabled(), windowed
    if choice.named("attention"):
        cannot = why_not(backend, *case)
        if cannot:
            raise RuntimeError(f"attention: {backend} {cannot}")
    elif backend == TRITON and q.is_cuda:
        backend = choose_backend(*case).name
    elif backend == TRITON and not ((masked or windowed) and t == s):
        backend = REFERENCE  # all ops are forced to their kernels on a CPU, where torch's backends do not exist
    choice.ran["windowed attention" if windowed else "attention"] = backend
    if backend == TRITON:
        start = first_seen(t, q.shape[0], doc_start, window, q.device)
        return document_attention(q, k, v, start, min(window or t, t))
    if backend == GRAPH:
        return cudnn_attention.cudnn_attention(q, k, v, window)

    mask = attention_mask(t, s, offset, doc_start, window, q.device) if masked or windowed else None
    if backend == EFFICIENT and q.shape[2] != k.shape[2]:
        # Not every torch version's efficient attention groups heads, and its way out is the whole (B, H, T, S) matrix.
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    backends = [_TORCH_NAMES[backend]] if backend != EFFICIENT else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and t > 1,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2)
