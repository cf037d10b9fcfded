"""Causal grouped-query attention, softmax(q k^T / sqrt(D)) v, within documents and windows.

The backends are torch's own, and our kernel for documents and windows; they are chosen by name here rather than by
torch, so that a run can record which one it used. All take q, k, v as (B, T, H, D) memory seen through transposed
views: nothing is transposed in memory, gradients come back in that layout, and v may be a view into a packed qkv whose
rows lie further apart.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.kernels import choice
from llmtrain.kernels.choice import REFERENCE, TRITON, choose
from llmtrain.kernels.document_attention import document_attention, first_seen, supports

CUDNN = "cudnn"
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


def choose_backend(
    dtype: torch.dtype, head_dim: int, t: int, s: int, masked: bool, capability: tuple[int, int], deterministic: bool
) -> str:
    """The backend on CUDA for T queries on S keys; `masked` where causality alone does not say what is seen."""
    half = dtype in (torch.bfloat16, torch.float16)
    if masked and half and t == s and supports(head_dim):
        return TRITON  # skips what the mask excludes, and adds in a fixed order
    if masked or not half or head_dim > 256:
        return EFFICIENT  # the one of torch's that takes a mask, or FP32
    # Measured on an H200: 1.4 to 1.7 times as fast as FlashAttention-2, but its backward adds with atomics. Before
    # 9.15 cuDNN was wrong for some T that 128 does not divide. A new T costs it a plan of 50 to 100 ms, which rules it
    # out for decoding, where S grows token by token.
    if capability[0] in (9, 10) and t == s and t % 128 == 0 and head_dim % 8 == 0 and head_dim <= 128:
        if not deterministic:
            return CUDNN
    # FlashAttention-2's backward keeps its order of additions under torch's deterministic algorithms.
    return FLASH


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
    backend for the op "attention"; one that cannot do what is asked raises RuntimeError.
    """
    t, s = q.shape[1], k.shape[1]
    assert s == offset + t, (s, offset, t)
    masked = doc_start is not None or window is not None or 0 < offset and t > 1
    backend = choose("attention", q)
    if backend == TRITON and q.is_cuda:
        capability = torch.cuda.get_device_capability(q.device)
        deterministic = torch.are_deterministic_algorithms_enabled()
        backend = choose_backend(q.dtype, q.shape[3], t, s, masked, capability, deterministic)
    elif backend == TRITON and not (masked and t == s):
        backend = REFERENCE  # forced on a CPU, where torch's backends do not exist
    choice.ran["attention"] = backend
    if backend == TRITON:
        return document_attention(q, k, v, first_seen(t, q.shape[0], doc_start, window, q.device))

    mask = attention_mask(t, s, offset, doc_start, window, q.device) if masked else None
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
