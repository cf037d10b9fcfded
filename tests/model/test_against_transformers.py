"""Logits against the implementations that everybody else's checkpoints were trained with, given the same weights."""

from dataclasses import replace

import pytest
import torch

from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

CONFIG = ModelConfig(
    vocab_size=97, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=24, d_ff=112, max_seq_len=64,
    norm_eps=1e-5, rope_theta=500.0, init_std=0.1,
)  # fmt: skip


def peer(config: ModelConfig) -> torch.nn.Module:
    """The same architecture there; a head_dim of its own, so that nothing rests on d_model / n_heads."""
    kind = "Qwen3" if config.qk_norm else "Llama"
    shape = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.d_ff,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        attention_bias=False,
        attn_implementation="eager",
    )
    return getattr(transformers, f"{kind}ForCausalLM")(shape).float().eval()


@torch.no_grad()
def give_weights(model: Transformer, other: torch.nn.Module) -> None:
    c, state = model.config, {}
    widths = [c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.n_kv_heads * c.head_dim]
    state["model.embed_tokens.weight"] = model.embedding.weight
    state["model.norm.weight"] = model.norm.weight
    state["lm_head.weight"] = model.head_weight
    for i, block in model.layers.items():
        at = f"model.layers.{i}."
        state[at + "input_layernorm.weight"] = block.attention_norm.weight
        state[at + "post_attention_layernorm.weight"] = block.feed_forward_norm.weight
        for name, part in zip("qkv", block.attention.qkv.weight.split(widths), strict=True):
            state[at + f"self_attn.{name}_proj.weight"] = part
        state[at + "self_attn.o_proj.weight"] = block.attention.out.weight
        if c.qk_norm:
            state[at + "self_attn.q_norm.weight"] = block.attention.q_norm.weight
            state[at + "self_attn.k_norm.weight"] = block.attention.k_norm.weight
        gate, up = block.feed_forward.gate_up.weight.chunk(2)
        state[at + "mlp.gate_proj.weight"], state[at + "mlp.up_proj.weight"] = gate, up
        state[at + "mlp.down_proj.weight"] = block.feed_forward.down.weight
    assert set(other.state_dict()) == set(state)
    other.load_state_dict(state)


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, tie_embeddings=False), replace(CONFIG, qk_norm=True)],
    ids=["llama", "llama untied", "qwen3"],
)
def test_logits_and_loss_equal_those_of_transformers(config):
    model = Transformer(config)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
    other = peer(config)
    give_weights(model, other)
    ids = torch.randint(0, config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = other(ids, labels=ids)
        got = model.logits(model(ids))
        loss = model.loss(ids[:, :-1], ids[:, 1:])
    assert want.logits.std() > 0.5, "logits too flat to tell anything"
    assert (got - want.logits).abs().max().item() <= 1e-5
    assert (loss.lm / loss.n_targets).item() == pytest.approx(want.loss.item(), abs=1e-5)
