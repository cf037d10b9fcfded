"""How transformers says the same model: config.json and the names and parts of its tensors.

A model with QK-norm is a Qwen3 there, one without a Llama. Both rotate the two halves of a head, as ours does, so no
matrix has to be reordered; their q, k and v, gate and up are rows of our fused matrices.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import ConfigMismatch

OF_TRAINING = frozenset({"z_loss", "init_std"})
"""Fields of a model that its results do not depend on."""
SAID = frozenset(
    "vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff max_seq_len tie_embeddings qk_norm rope_theta "
    "norm_eps".split()
)
"""Fields that config.json has a word for."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Piece(NamedTuple):
    """A tensor of theirs as rows of one of ours."""

    ours: str
    rows: slice = slice(None)


def refuse_what_cannot_be_said(config: ModelConfig, form: str) -> None:
    """Raises ConfigMismatch naming the first setting of the model that `form` has no word for. A field that this module
    does not know is refused unless it has its default, so that no export says less than the model does."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in SAID | OF_TRAINING and value != field.default:
            raise ConfigMismatch(
                f"the model has {field.name} {value}, for which {form} has no word: use it with llmtrain, or train "
                "another without that"
            )


def pieces(config: ModelConfig) -> dict[str, Piece]:
    """Their name of each tensor -> where it lies in ours. A tied head is not among them."""
    c = config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    found = {"model.embed_tokens.weight": Piece("embedding.weight"), "model.norm.weight": Piece("norm.weight")}
    if not c.tie_embeddings:
        found["lm_head.weight"] = Piece("head.weight")
    for i in range(c.n_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        of_layer = {
            "input_layernorm": Piece("attention_norm.weight"),
            "post_attention_layernorm": Piece("feed_forward_norm.weight"),
            "self_attn.q_proj": Piece("attention.qkv.weight", slice(0, q)),
            "self_attn.k_proj": Piece("attention.qkv.weight", slice(q, q + kv)),
            "self_attn.v_proj": Piece("attention.qkv.weight", slice(q + kv, q + 2 * kv)),
            "self_attn.o_proj": Piece("attention.out.weight"),
            "mlp.gate_proj": Piece("feed_forward.gate_up.weight", slice(0, c.d_ff)),
            "mlp.up_proj": Piece("feed_forward.gate_up.weight", slice(c.d_ff, 2 * c.d_ff)),
            "mlp.down_proj": Piece("feed_forward.down.weight"),
        }
        if c.qk_norm:
            of_layer["self_attn.q_norm"] = Piece("attention.q_norm.weight")
            of_layer["self_attn.k_norm"] = Piece("attention.k_norm.weight")
        found |= {f"{theirs}{name}.weight": Piece(ours + piece.ours, piece.rows) for name, piece in of_layer.items()}
    return found


def config_json(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """config.json of the model with weights of `dtype`, one of DTYPES. A document begins behind the end of another, so
    the token that ends a text also begins one. Raises ConfigMismatch as `refuse_what_cannot_be_said`."""
    c = config
    refuse_what_cannot_be_said(c, "config.json")
    kind = "Qwen3" if c.qk_norm else "Llama"
    said = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_seq_len,
        "initializer_range": c.init_std,
        "rms_norm_eps": c.norm_eps,
        # The first is read by transformers 4, vLLM and converters, the second by transformers 5.
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": DTYPES[dtype],
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
    }
    return said | ({} if c.qk_norm else {"mlp_bias": False})


# What may stand in a config.json only with these values, because our model has nothing else.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}


def model_config(said: Mapping[str, Any], where: str, tied: bool) -> ModelConfig:
    """The model that a config.json says; `tied`: what holds where it does not say whether the head is the embedding.

    Raises ConfigMismatch naming the setting that our model does not have, or that is missing or no number.
    """

    def refuse(what: str) -> ConfigMismatch:
        return ConfigMismatch(f"{where}: {what}: name a model of Llama's or Qwen3's shape")

    kind = said.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise refuse(f"model_type is {kind!r}, known are 'llama' and 'qwen3'")
    for name, values in _ONLY.items():
        if said.get(name, values[0]) not in values:
            raise refuse(f"{name} is {said[name]!r}, this model has only {values[0]!r}")
    rope = said.get("rope_parameters") or {}
    for name, value in rope.items():
        if name not in ("rope_theta", "rope_type") or (name == "rope_type" and value != "default"):
            raise refuse(f"rope_parameters has {name} {value!r}, this model has only plain rotary positions")
    if set(said.get("layer_types") or ()) - {"full_attention"}:
        raise refuse(f"layer_types has {', '.join(sorted(set(said['layer_types'])))}, this model has full attention")

    def number(name: str, default: Any = None) -> Any:
        value = said.get(name)
        value = default if value is None else value
        if type(value) not in (int, float):
            raise refuse(f"{name} is {value!r}, not a number")
        return value

    heads = number("num_attention_heads")
    try:
        return ModelConfig(
            vocab_size=number("vocab_size"),
            d_model=number("hidden_size"),
            n_layers=number("num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=number("num_key_value_heads", heads),
            # Each kind has its own default.
            head_dim=number("head_dim", 128 if kind == "qwen3" else number("hidden_size") // max(heads, 1)),
            d_ff=number("intermediate_size"),
            max_seq_len=number("max_position_embeddings"),
            tie_embeddings=bool(said.get("tie_word_embeddings", tied)),
            qk_norm=kind == "qwen3",
            rope_theta=float(rope.get("rope_theta") or number("rope_theta", 10000.0)),
            norm_eps=float(number("rms_norm_eps", 1e-6)),
            init_std=float(number("initializer_range", 0.02)),
        )
    except (TypeError, ValueError) as error:
        raise refuse(str(error)) from None
