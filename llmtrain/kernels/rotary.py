"""Rotary positions (Su et al. 2021, halves convention) on a packed qkv, with the split into heads and QK-norm."""

import torch
from torch import Tensor

from llmtrain.kernels.rmsnorm import rmsnorm


def rotary_tables(max_seq_len: int, head_dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim): two (max_seq_len, head_dim / 2) FP32 tables."""
    # FP64 until the end: positions beyond 2^15 times FP32 frequencies would lose the low bits of the angle.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angles = torch.arange(max_seq_len, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (B, T, H, D); cos, sin: (T, D/2) or (B, T, D/2) -> the rotated x, computed in FP32."""
    wide = x if x.dtype == torch.float64 else x.float()
    cos, sin = (t.to(wide.dtype).unsqueeze(-2) for t in (cos, sin))  # (.., T, 1, D/2)
    first, second = wide.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotary_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv (B, T, (n_heads + 2 n_kv_heads) * D) into heads, normalises q and k where weights (D,) are given,
    and rotates them. cos, sin: (T, D/2) or (B, T, D/2). Returns q (B, T, n_heads, D), k, v (B, T, n_kv_heads, D)."""
    b, t, width = qkv.shape
    heads = qkv.view(b, t, n_heads + 2 * n_kv_heads, -1)
    q, k, v = heads.split([n_heads, n_kv_heads, n_kv_heads], 2)
    if q_norm is not None and k_norm is not None:
        q, k = rmsnorm(q, q_norm, eps), rmsnorm(k, k_norm, eps)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin), v
