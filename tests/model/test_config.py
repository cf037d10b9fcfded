"""A shape that cannot be is refused by the name of its field and the value it had."""

import pytest

from llmtrain.model.config import ModelConfig


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"d_model": 0}, ["d_model", "0"]),
        ({"n_layers": -1}, ["n_layers", "-1"]),
        ({"n_heads": 6, "n_kv_heads": 4}, ["n_heads 6", "n_kv_heads 4"]),
        ({"head_dim": 63}, ["head_dim", "63"]),
        ({"d_model": 10**400}, ["d_model must be at most 16777216"]),
        ({"n_heads": 10**12}, ["n_heads must be at most 65536"]),
        ({"max_seq_len": 1 << 40}, ["max_seq_len must be at most"]),
        ({"vocab_size": (1 << 20) + 1}, ["vocab_size", "1048576", "1048577"]),
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"max_seq_len": -5}, ["max_seq_len", "-5"]),
        ({"z_loss": -1e-4}, ["z_loss", "-0.0001"]),
        ({"rope_theta": 0.0}, ["rope_theta", "0.0"]),
        ({"norm_eps": 0.0}, ["norm_eps", "0.0"]),
        ({"norm_eps": 1e-38}, ["norm_eps", "1e-38"]),
        ({"init_std": float("nan")}, ["init_std", "nan"]),
        ({"init_std": float("inf")}, ["init_std", "inf"]),
        ({"z_loss": float("nan")}, ["z_loss", "nan"]),
        ({"n_experts": 16}, ["n_experts 16", "moe"]),
        ({"moe": True, "n_experts": 257}, ["n_experts", "256", "257"]),
        ({"moe": True, "n_experts": 4, "experts_per_token": 5}, ["n_experts", "experts_per_token (5)", "4"]),
        ({"moe": True, "experts_per_token": 0}, ["experts_per_token", "0"]),
        ({"moe": True, "moe_layers": 9}, ["moe_layers 9", "n_layers 8"]),
        ({"moe": True, "d_ff": 3}, ["moe_d_ff 0", "3"]),
        ({"moe": True, "balance_loss": -1.0}, ["balance_loss", "-1.0"]),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name_and_value(fields, words):
    with pytest.raises(ValueError) as refused:
        ModelConfig(**fields)
    assert all(word in str(refused.value) for word in words)


def test_the_defaults_and_the_largest_vocabulary_are_valid():
    assert [layer for layer in range(8) if ModelConfig(moe=True).is_routed(layer)] == [2, 3, 4, 5, 6, 7]
    assert ModelConfig(moe=True, moe_layers=1).n_routed == 1 and ModelConfig(vocab_size=9).n_routed == 0
    assert ModelConfig(vocab_size=65_536).qkv_width == (8 + 2 * 2) * 64
