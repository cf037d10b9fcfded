"""What a model costs: parameters, FLOPs a token, and what the card could do.

Exact: 6 FLOPs for each parameter that a token is multiplied with (forward 2, backward 4; the head counts, the lookup
does not), plus, a layer, 12 * n_heads * head_dim for each (query, key) pair that attends (scores and values, 2 each,
forward once and backward twice). Classic: 6 * active + 12 * n_layers * seq_len * d_model, to compare with older tables.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain.model.cards import card_of
from llmtrain.model.config import CheckpointActivations, ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters."""

    total: int
    """All that are stored; a tied matrix once."""
    active: int
    """Those that one token meets."""
    in_matmuls: int
    """Those that one token is multiplied with: the head included, the lookup and the norms not."""


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Counts from the shape alone."""
    c = config
    attention = c.d_model * c.qkv_width + c.n_heads * c.head_dim * c.d_model
    expert = 3 * c.d_model * c.expert_width
    idle = c.n_routed * (c.n_experts - c.experts_per_token) * expert
    routed = c.n_experts * (expert + c.d_model) + 3 * c.d_model * c.shared_width
    norms = 2 * c.d_model + (2 * c.head_dim if c.qk_norm else 0)
    matrix = c.vocab_size * c.d_model
    blocks = c.n_layers * attention + (c.n_layers - c.n_routed) * 3 * c.d_model * c.d_ff + c.n_routed * routed
    total = blocks + c.n_layers * norms + c.d_model + (1 if c.tie_embeddings else 2) * matrix
    return ParameterCounts(total=total, active=total - idle, in_matmuls=blocks - idle + matrix)


def causal_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of a causal document: L(L+1)/2, or Lw - w(w-1)/2 within a window of w < L keys."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return length * window - window * (window - 1) // 2


def attention_flops(config: ModelConfig, lengths: Iterable[int], windows: Iterable[int | None] | None = None) -> int:
    """Forward and backward attention FLOPs of documents of these lengths, over all layers; `windows`: one a layer, by
    default the configuration's."""
    lengths = list(lengths)
    by_window = Counter(config.windows if windows is None else windows)
    pairs = sum(n * sum(causal_pairs(length, window) for length in lengths) for window, n in by_window.items())
    return 12 * config.n_heads * config.head_dim * pairs


def layer_pairs(config: ModelConfig, length: int) -> float:
    """(query, key) pairs of one document: the mean over layers, whose windows differ."""
    return sum(causal_pairs(length, window) for window in config.windows) / config.n_layers


def flops_per_token(config: ModelConfig, seq_len: int, pairs: float | None = None) -> float:
    """Exact FLOPs a token of one training step on windows of seq_len tokens, forward and backward.

    pairs: (query, key) pairs that attend, a token, the mean over layers; those of whole rows where not given.
    """
    if pairs is None:
        pairs = layer_pairs(config, seq_len) / seq_len
    return 6 * parameter_counts(config).in_matmuls + 12 * config.n_layers * config.n_heads * config.head_dim * pairs


def rerun_flops_per_token(
    config: ModelConfig, seq_len: int, checkpoint_activations: CheckpointActivations, pairs: float | None = None
) -> float:
    """FLOPs a token that the backward runs again, which HFU counts and MFU does not.

    "full": each block's forward but for its last matmul, down. "selective" runs no matmul again. `pairs`: as above.
    """
    if checkpoint_activations != "full":
        return 0.0
    c = config
    routed = c.n_experts + 2 * c.experts_per_token * c.expert_width + 2 * c.shared_width
    widths = c.n_layers * (c.qkv_width + c.n_heads * c.head_dim) + (c.n_layers - c.n_routed) * 2 * c.d_ff
    if pairs is None:
        pairs = layer_pairs(config, seq_len) / seq_len
    return 2 * c.d_model * (widths + c.n_routed * routed) + 4 * c.n_layers * c.n_heads * c.head_dim * pairs


def classic_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """The older estimate, which counts attention as if it were not causal."""
    return 6 * parameter_counts(config).active + 12 * config.n_layers * seq_len * config.d_model


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name; None for one that is not in the table."""
    card = card_of(device_name)
    return card.bf16 if card else None
