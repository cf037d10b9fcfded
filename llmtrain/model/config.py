"""The shape of a model. Imports no torch: the command line reads it."""

import math
from dataclasses import dataclass
from typing import Literal

CheckpointActivations = Literal["none", "selective", "full"]
"""What the backward runs again instead of keeping it."""


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 0
    """Rows of the embedding; 0: the token file's vocabulary."""
    d_model: int = 512
    """Width of the residual stream, in features."""
    n_layers: int = 8
    """Transformer blocks."""
    n_heads: int = 8
    """Query heads of a block."""
    n_kv_heads: int = 2
    """Key and value heads of a block; each serves n_heads / n_kv_heads query heads."""
    head_dim: int = 64
    """Width of one head, in features; even."""
    d_ff: int = 1408
    """Width of the SwiGLU feed-forward, in features."""
    max_seq_len: int = 0
    """Longest context the model can be run at, in tokens; 0: twice the training length."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the head's."""
    qk_norm: bool = False
    """Normalise queries and keys before the rotation, as Qwen3 does."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    z_loss: float = 0.0
    """Weight of the squared log-partition added to the loss; 0: none. PaLM uses 1e-4."""
    init_std: float = 0.02
    """Standard deviation of initial weights; the two projections into the residual stream get it / sqrt(2 n_layers)."""

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("vocab_size", "max_seq_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.vocab_size > 65536:
            raise ValueError(f"vocab_size {self.vocab_size} does not fit token files of 16-bit ids (65536 at most)")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}: change one")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must be 0 or more, not {self.z_loss}")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
