"""What a model costs, against counts made independently: of real tensors, and of pairs one by one."""

import pytest
import torch

from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import (
    attention_flops,
    causal_pairs,
    classic_flops_per_token,
    flops_per_token,
    parameter_counts,
    peak_flops,
)
from llmtrain.model.transformer import Transformer

SHAPES = {
    "31m": ModelConfig(vocab_size=16384, max_seq_len=2048),
    "102m": ModelConfig(
        vocab_size=32000, d_model=768, n_layers=16, n_heads=12, n_kv_heads=4, d_ff=1408, max_seq_len=2048
    ),
    "untied": ModelConfig(vocab_size=300, d_model=48, n_layers=3, n_heads=6, n_kv_heads=3, head_dim=16, d_ff=80,
                          max_seq_len=64, tie_embeddings=False, qk_norm=True),
    "moe-55m": ModelConfig(vocab_size=32000, max_seq_len=2048, moe=True),
    "routed": ModelConfig(vocab_size=300, d_model=48, n_layers=3, n_heads=6, n_kv_heads=3, head_dim=16, d_ff=80,
                          max_seq_len=64, moe=True, n_experts=7, experts_per_token=3, moe_d_ff=24, n_shared_experts=0,
                          moe_layers=2),
}  # fmt: skip


@pytest.mark.parametrize("shape, total", [("31m", 30_941_696), ("102m", 101_671_680)])
def test_parameters_of_the_presets_are_pinned(shape, total):
    assert parameter_counts(SHAPES[shape]).total == total


def test_the_routed_model_has_its_total_and_active_parameters_pinned():
    counts = parameter_counts(SHAPES["moe-55m"])
    assert (counts.total, counts.active) == (55_181_824, 35_717_632)  # 55.18M and 35.7M
    assert parameter_counts(ModelConfig(vocab_size=16384, max_seq_len=8, moe=True)).active == 27_722_240


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_model_itself(shape):
    config = SHAPES[shape]
    with torch.device("meta"):
        model = Transformer(config, device="meta")
    counts = parameter_counts(config)
    experts = [m.weight for m in model.modules() if type(m).__name__ == "Experts"]
    idle = sum(w[config.experts_per_token :].numel() for w in experts)
    assert len(experts) == 2 * config.n_routed
    assert counts.total == counts.active + idle == sum(p.numel() for p in model.parameters())
    multiplied = sum(m.weight.numel() for name, m in model.named_modules() if type(m).__name__ == "Linear")
    multiplied += sum(w.numel() for w in experts) - idle
    if config.tie_embeddings:
        multiplied += model.embedding.weight.numel()
    assert counts.in_matmuls == multiplied


def flops_by_hand(c: ModelConfig, lengths: list[int], windows: list[int | None]) -> int:
    """Forward and backward FLOPs of documents of these lengths: each product of the network written out, a query at a
    time where it attends."""
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    forward = 0
    for length in lengths:
        per_token = c.d_model * c.vocab_size  # head
        for layer in range(c.n_layers):
            per_token += c.d_model * q + 2 * c.d_model * kv + q * c.d_model  # q, k and v, out
            width = c.d_ff
            if c.moe and layer >= c.n_layers - c.n_routed:
                width = (c.experts_per_token + c.n_shared_experts) * c.expert_width
                per_token += c.d_model * c.n_experts  # router
            per_token += c.d_model * width * 2 + width * c.d_model  # gate and up, down
        forward += 2 * per_token * length
        for window in windows:
            keys = sum(min(i + 1, window or length) for i in range(length))
            forward += keys * c.n_heads * (2 * c.head_dim + 2 * c.head_dim)  # q . k, and the weighted sum of v
    return 3 * forward  # the backward pass forms two products for each of the forward's


@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
@pytest.mark.parametrize("shape", SHAPES)
def test_flops_per_token_by_hand(shape, seq_len):
    config = SHAPES[shape]
    by_hand = flops_by_hand(config, [seq_len], [None] * config.n_layers)
    assert flops_per_token(config, seq_len) * seq_len == pytest.approx(by_hand, rel=1e-12)


def test_flops_per_token_at_the_contexts_that_tables_quote():
    # The attention term on paper: 12 * 16 layers * 12 heads * 64 * (T + 1) / 2 keys a query.
    blocks = 16 * (768 * (12 + 8) * 64 + 768 * 768 + 3 * 768 * 1408)
    for seq_len, attention in ((512, 37_822_464), (2048, 151_068_672), (8192, 604_053_504)):
        assert flops_per_token(SHAPES["102m"], seq_len) == 6 * (blocks + 32000 * 768) + attention


@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_flops_by_documents_and_windows(shape, seq_len):
    config = SHAPES[shape]
    lengths = [1, 255, seq_len // 4, seq_len - 256 - seq_len // 4]
    windows = [128 if i % 2 else None for i in range(config.n_layers)]
    in_matmuls = 6 * parameter_counts(config).in_matmuls * seq_len
    assert sum(lengths) == seq_len
    assert in_matmuls + attention_flops(config, lengths, windows) == flops_by_hand(config, lengths, windows)
    plain = [None] * config.n_layers
    assert in_matmuls + attention_flops(config, lengths) == flops_by_hand(config, lengths, plain)


@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
def test_causal_pairs_one_by_one(length, window):
    seen = [(q, k) for q in range(length) for k in range(length) if k <= q and (window is None or k > q - window)]
    assert causal_pairs(length, window) == len(seen)


def test_the_classic_count_charges_full_attention_and_all_parameters():
    c = SHAPES["102m"]
    assert classic_flops_per_token(c, 1024) == 6 * 101_671_680 + 12 * 16 * 1024 * 768


def test_peaks_go_by_the_device_name_and_an_unknown_card_has_none():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA GeForce RTX 3060") == 25e12
    assert peak_flops("Imaginary 9000") is None
