"""Causal grouped-query attention, softmax(q k^T / sqrt(D)) v, within documents and windows."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
    up to itself, at most `window` of them.
    """
    t, s = q.shape[1], k.shape[1]
    assert s == offset + t, (s, offset, t)
    mask = None
    if doc_start is not None or window is not None or 0 < offset and t > 1:
        mask = attention_mask(t, s, offset, doc_start, window, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and t > 1,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
