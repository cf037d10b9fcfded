"""The shape of a model. Imports no torch: the command line reads it."""

import math
from dataclasses import dataclass, fields
from typing import Literal

CheckpointActivations = Literal["none", "selective", "full"]
"""What the backward runs again instead of keeping it."""

OF_EXPERTS = (
    "n_experts", "experts_per_token", "moe_d_ff", "n_shared_experts", "moe_layers", "balance_loss", "router_z_loss"
)  # fmt: skip
"""Fields that say nothing without moe."""


MOST = {
    "n_layers": 1 << 16, "n_heads": 1 << 16, "n_kv_heads": 1 << 16, "head_dim": 1 << 16, "d_model": 1 << 24,
    "d_ff": 1 << 24, "moe_d_ff": 1 << 24, "n_shared_experts": 1 << 8, "max_seq_len": 1 << 31, "window": 1 << 31,
    "global_every": 1 << 16,
}  # fmt: skip
"""So that what is counted layer by layer is counted at once, and no count of bytes needs more than 64 bits; no model is
near."""

MAX_VOCAB_SIZE = 1 << 20
"""Up to which the head is tested; the vocabularies in use end at a quarter of it."""


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
    moe: bool = False
    """Routed experts in place of the feed-forward of the later layers: each token meets the few that a router picks."""
    n_experts: int = 8
    """With moe: experts of a routed layer, 256 at most."""
    experts_per_token: int = 2
    """With moe: experts that each token meets."""
    moe_d_ff: int = 0
    """With moe: width of one expert, in features; 0: a quarter of d_ff."""
    n_shared_experts: int = 1
    """With moe: experts more, as one of their joint width, that every token meets; 0: none."""
    moe_layers: int = 0
    """With moe: how many layers are routed, counted from the last; 0: all but the first quarter."""
    balance_loss: float = 0.01
    """With moe: weight of the loss that keeps the experts of each sequence evenly used; 0: none."""
    router_z_loss: float = 1e-3
    """With moe: weight of the squared log-partition of the routers' logits; 0: none."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the head's."""
    window: int = 0
    """Keys that a token sees at most in layers with a sliding window, itself among them; 0: no layer has one."""
    global_every: int = 0
    """Every N-th layer sees everything even so, such as the 4th, the 8th and so on; 0: with a window all have it."""
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
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, not {getattr(self, name)}")
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "experts_per_token"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        of_experts = "moe_d_ff", "n_shared_experts", "moe_layers"
        for name in ("vocab_size", "max_seq_len", "window", "global_every", *of_experts):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be at most {MAX_VOCAB_SIZE}, not {self.vocab_size}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}: change one")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        self._check_experts()
        for name in ("z_loss", "balance_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.global_every and not self.window:
            raise ValueError(f"global_every {self.global_every} says which layers have no window: give window too")
        if self.global_every == 1:
            raise ValueError(f"global_every 1 leaves no layer the window of {self.window}: leave both out")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        if self.norm_eps < 1e-30:
            raise ValueError(f"norm_eps must be 1e-30 or more, or a card takes it for 0, not {self.norm_eps}")

    def _check_experts(self) -> None:
        if not self.moe:
            defaults = {field.name: field.default for field in fields(self)}
            for name in OF_EXPERTS:
                if (value := getattr(self, name)) != defaults[name]:
                    raise ValueError(f"{name} {value} is of routed experts: give moe too, or leave it out")
            return
        # kernels/routing.py numbers experts by one byte.
        if not self.experts_per_token <= self.n_experts <= 256:
            raise ValueError(
                f"n_experts must be from experts_per_token ({self.experts_per_token}) to 256, not {self.n_experts}"
            )
        if self.moe_layers > self.n_layers:
            raise ValueError(f"moe_layers {self.moe_layers} are more than n_layers {self.n_layers}")
        if self.expert_width < 1:
            raise ValueError(f"moe_d_ff 0 is a quarter of d_ff, which {self.d_ff} has none of: give it")

    @property
    def expert_width(self) -> int:
        """moe_d_ff, once 0 has become a number."""
        return self.moe_d_ff or self.d_ff // 4

    @property
    def shared_width(self) -> int:
        """Width of what every token meets in a routed layer; 0 where there is none."""
        return self.n_shared_experts * self.expert_width

    @property
    def n_routed(self) -> int:
        """Layers with experts."""
        return (self.moe_layers or self.n_layers - self.n_layers // 4) if self.moe else 0

    def is_routed(self, layer: int) -> bool:
        """Whether a layer, by its number from 0, has experts."""
        return layer >= self.n_layers - self.n_routed

    def feed_forward_words(self) -> str:
        """Its feed-forwards, for a person."""
        if not self.moe:
            return f"d_ff {self.d_ff}"
        dense = f"d_ff {self.d_ff}, " if self.n_routed < self.n_layers else ""
        shared = f" and {self.n_shared_experts} that all share" if self.n_shared_experts else ""
        return (
            f"{dense}{self.n_routed} {'layers' if self.n_routed > 1 else 'layer'} of {self.n_experts} experts of "
            f"{self.expert_width}, of which a token meets {self.experts_per_token}{shared}"
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, in keys; None: it sees everything."""
        every = self.global_every
        return tuple(
            self.window if self.window and not (every and (layer + 1) % every == 0) else None
            for layer in range(self.n_layers)
        )

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
