"""The peer anyone would write: a Llama in a page of plain torch, made well for torch.compile.

One matrix for q, k and v and one for gate and up, the residual stream in bf16, norms and rotations in FP32 between
casts (the compiler fuses them), SDPA with grouped keys on (B, T, H, D) memory, and torch's own cross-entropy.
Parameters have the names of llmtrain's, so that both start from the same bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.model.config import ModelConfig


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (B, T, H, D); cos, sin: (T, 1, D/2)."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads = [c.n_heads, c.n_kv_heads, c.n_kv_heads]
        self.qkv = nn.Linear(c.d_model, c.qkv_width, bias=False)
        if c.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.norm_eps) for _ in range(2))
        self.qk_norm = c.qk_norm
        self.out = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, sum(self.heads), -1).split(self.heads, 2)  # (B, T, H, D) each
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attention = Attention(c)
        self.feed_forward_norm = RMSNorm(c.d_model, c.norm_eps)
        self.feed_forward = FeedForward(c)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = h + self.attention(self.attention_norm(h), cos, sin)
        return h + self.feed_forward(self.feed_forward_norm(h))


class PlainLlama(nn.Module):
    """FP32 weights; `dtype` is that of the residual stream, and autocast's where that is bf16."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert c.tie_embeddings and not c.moe and not c.window, "the plain model is a Llama with a tied head"
        self.dtype, self.z_loss = dtype, c.z_loss
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        angles = torch.arange(c.max_seq_len, dtype=torch.float64)[:, None, None] * frequencies  # (T, 1, D/2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets: (B, T) int64 -> the mean cross-entropy, and with a z-loss that too."""
        t = ids.shape[1]
        h = self.embedding(ids).to(self.dtype)
        for block in self.layers:
            h = block(h, self.cos[:t], self.sin[:t])
        logits = F.linear(self.norm(h), self.embedding.weight)  # (B, T, V)
        rows = logits.float().view(-1, logits.shape[-1])
        loss = F.cross_entropy(rows, targets.view(-1))
        return loss + self.z_loss * rows.logsumexp(-1).square().mean() if self.z_loss else loss
