"""How transformers says the same model: config.json and the names and parts of its tensors.

    dense                                     Llama; with QK-norm Qwen3
    experts in every layer, none shared       Mixtral
    experts and QK-norm, none shared          Qwen3-MoE
    experts, without QK-norm                  Qwen2-MoE, which has a gate on the shared expert and nothing to switch it
                                              off: with weights of 0 it gives a half, and the expert is doubled

All of them rotate the two halves of a head and make the weights of a token's experts sum to 1, as we do, so no matrix
has to be reordered. Their q, k and v, gate and up are rows of our fused matrices.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from llmtrain.model.config import OF_EXPERTS, ModelConfig
from llmtrain.storage.errors import ConfigMismatch

OF_TRAINING = frozenset({"z_loss", "init_std", "balance_loss", "router_z_loss"})
"""Fields of a model that its results do not depend on."""
SAID = frozenset(
    "vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff max_seq_len tie_embeddings qk_norm rope_theta "
    "norm_eps moe".split()
) | frozenset(OF_EXPERTS)
"""Fields that config.json has a word for."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CLASSES = {
    "llama": "Llama", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"
}  # fmt: skip


class Piece(NamedTuple):
    """A tensor of theirs as a part of one of ours."""

    ours: str
    rows: slice | tuple[slice, ...] = slice(None)
    expert: int | None = None
    scale: float = 1.0

    def of(self, tensors: Mapping[str, Any]) -> Any:
        """Theirs out of ours, which are by name; a view where it can be."""
        tensor = tensors[self.ours]
        tensor = (tensor if self.expert is None else tensor[self.expert])[self.rows]
        return tensor if self.scale == 1.0 else tensor * self.scale


def model_type(config: ModelConfig) -> str:
    """transformers' name of the kind of model. Raises ConfigMismatch for a setting that no kind of theirs has, and
    for a field that this module does not know unless it has its default: no export says less than the model does."""
    c = config
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if field.name not in SAID | OF_TRAINING and value != field.default:
            raise _refusal(f"{field.name} {value}")
    if not c.moe:
        return "qwen3" if c.qk_norm else "llama"
    if c.qk_norm and c.n_shared_experts:
        raise _refusal(f"n_shared_experts {c.n_shared_experts} and qk_norm")
    if c.qk_norm:
        return "qwen3_moe"
    return "qwen2_moe" if c.n_shared_experts or c.n_routed < c.n_layers else "mixtral"


def _refusal(what: str, form: str = "transformers") -> ConfigMismatch:
    return ConfigMismatch(
        f"the model has {what}, for which {form} has no word: use it with llmtrain, or train another without that"
    )


def refuse_experts(config: ModelConfig, form: str) -> None:
    """Raises ConfigMismatch for a model with experts."""
    if config.moe:
        raise _refusal("experts", form)


def pieces(config: ModelConfig) -> dict[str, Piece]:
    """Their name of each tensor -> where it lies in ours. A tied head is not among them."""
    c, kind = config, model_type(config)
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
        }
        if c.qk_norm:
            of_layer["self_attn.q_norm"] = Piece("attention.q_norm.weight")
            of_layer["self_attn.k_norm"] = Piece("attention.k_norm.weight")
        of_layer |= _routed(c, kind) if c.is_routed(i) else dict(_feed_forward("mlp.", "feed_forward.", c.d_ff))
        found |= {f"{theirs}{name}.weight": piece._replace(ours=ours + piece.ours) for name, piece in of_layer.items()}
    return found


def _feed_forward(
    theirs: str, ours: str, width: int, expert: int | None = None, names: tuple[str, ...] = (), double: bool = False
) -> Iterator[tuple[str, Piece]]:
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    yield theirs + gate, Piece(ours + "gate_up.weight", slice(0, width), expert)
    yield theirs + up, Piece(ours + "gate_up.weight", slice(width, 2 * width), expert)
    yield theirs + down, Piece(ours + "down.weight", expert=expert, scale=2.0 if double else 1.0)


def _routed(c: ModelConfig, kind: str) -> dict[str, Piece]:
    room, names = ("block_sparse_moe.", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp.", ())
    found = {room + "gate": Piece("feed_forward.router.weight")}
    for expert in range(c.n_experts):
        found |= dict(_feed_forward(f"{room}experts.{expert}.", "feed_forward.", c.expert_width, expert, names))
    if kind == "qwen2_moe":
        found[room + "shared_expert_gate"] = Piece("feed_forward.router.weight", slice(0, 1), scale=0.0)
        theirs, none = room + "shared_expert.", slice(0, 0)
        if c.n_shared_experts:
            found |= dict(_feed_forward(theirs, "feed_forward.shared.", c.shared_width, double=True))
        else:  # one of width 0
            found[theirs + "gate_proj"] = found[theirs + "up_proj"] = Piece("feed_forward.router.weight", none)
            found[theirs + "down_proj"] = Piece("attention.out.weight", (slice(None), none))
    return found


def config_json(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """config.json of the model with weights of `dtype`, one of DTYPES. A document begins behind the end of another, so
    the token that ends a text also begins one. Raises ConfigMismatch as `model_type`."""
    c, kind = config, model_type(config)
    said: dict[str, Any] = {
        "architectures": [f"{CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.expert_width if kind == "mixtral" else c.d_ff,
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
    if kind == "llama":
        said["mlp_bias"] = False
    if c.moe:
        said |= {"num_experts_per_tok": c.experts_per_token, "router_aux_loss_coef": c.balance_loss}
        said["num_local_experts" if kind == "mixtral" else "num_experts"] = c.n_experts
    if c.moe and kind != "mixtral":
        said |= {
            "norm_topk_prob": True,
            "moe_intermediate_size": c.expert_width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(c.n_layers) if not c.is_routed(i)],
        }
    if kind == "qwen2_moe":
        said |= {"qkv_bias": False, "shared_expert_intermediate_size": c.shared_width}
    return said


# What may stand in a config.json only with these values, because our model has nothing else; where it does not stand,
# the first of them holds there too, unless _DEFAULTS has what does.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "decoder_sparse_step": (1,),
}
_ONLY_OF_KIND: dict[str, dict[str, tuple[Any, ...]]] = {
    "mixtral": {"sliding_window": (None,)},
    "qwen2_moe": {"norm_topk_prob": (True,), "qkv_bias": (False,)},
    "qwen3_moe": {"norm_topk_prob": (True,)},
}
# What transformers takes for settings that are not said and that we would take otherwise.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"norm_topk_prob": False, "qkv_bias": True, "shared_expert_intermediate_size": 5632},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"norm_topk_prob": False},
}
# Keys under which configurations of others say how positions are scaled.
_ROPE = ("rope_parameters", "rope_scaling")
ADVICE = "such a model cannot be taken over"


def model_config(said: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a config.json says, as `config_json` writes it or as the kinds of CLASSES do.

    Raises ConfigMismatch naming the setting that our model does not have, or that is missing or no number.
    """

    def refuse(what: str, advice: str = ADVICE) -> ConfigMismatch:
        return ConfigMismatch(f"{where}: {what}: {advice}")

    kind = said.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        known = ", ".join(CLASSES)
        raise refuse(f"model_type is {kind!r}, known are {known}", "name a model of Llama's or Qwen3's shape")
    said = _DEFAULTS.get(kind, {}) | {name: value for name, value in said.items() if value is not None}
    for name, values in (_ONLY | _ONLY_OF_KIND.get(kind, {})).items():
        if said.get(name, values[0]) not in values:
            raise refuse(f"{name} is {said[name]!r}, our model has only {values[0]!r}")
    theta = said.get("rope_theta")
    for key in _ROPE:
        rope = said.get(key, {})
        if not isinstance(rope, dict):
            raise refuse(f"{key} is {rope!r}, no object")
        for name, value in rope.items():
            if name not in ("rope_theta", "rope_type", "type") or (name != "rope_theta" and value != "default"):
                raise refuse(f"{key} has {name} {value!r}, our model has only plain rotary positions")
        theta = rope.get("rope_theta", theta)
    layers = said.get("layer_types", [])
    if not isinstance(layers, list) or any(one != "full_attention" for one in layers):
        others = ", ".join(sorted(set(map(str, layers)))) if isinstance(layers, list) else repr(layers)
        raise refuse(f"layer_types has {others}, our model has full attention")

    def number(name: str, default: Any = None) -> int:
        value = said.get(name, default)
        if type(value) is not int:
            raise refuse(f"{name} is {value!r}, not a whole number", "correct it")
        if name in ("vocab_size", "max_position_embeddings") and value < 1:  # 0 would say: as the token file has it
            raise refuse(f"{name} is {value}, not above 0", "correct it")
        return value

    def real(name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise refuse(f"{name} is {value!r}, not a number", "correct it")
        return float(value)

    heads = number("num_attention_heads")
    try:
        return ModelConfig(
            vocab_size=number("vocab_size"),
            d_model=number("hidden_size"),
            n_layers=number("num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", number("hidden_size") // max(heads, 1)),
            d_ff=number("intermediate_size"),
            max_seq_len=number("max_position_embeddings"),
            tie_embeddings=said.get("tie_word_embeddings", False) is True,
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            rope_theta=real("rope_theta", 10000.0 if theta is None else theta),
            norm_eps=real("rms_norm_eps", said.get("rms_norm_eps", 1e-6)),
            init_std=real("initializer_range", said.get("initializer_range", 0.02)),
            **(_experts(kind, said, number, refuse) if kind not in ("llama", "qwen3") else {}),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise refuse(str(error), "correct it") from None


def _experts(
    kind: str, said: Mapping[str, Any], number: Callable[..., int], refuse: Callable[..., ConfigMismatch]
) -> dict[str, Any]:
    """The fields of OF_EXPERTS that shapes depend on. Raises ConfigMismatch."""
    layers, width = number("num_hidden_layers"), "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    dense = said.get("mlp_only_layers", [])
    if dense != list(range(len(dense))) or len(dense) >= layers:
        raise refuse(f"mlp_only_layers is {dense!r}, our model has dense layers only before those with experts")
    shared, rest = divmod(said.get("shared_expert_intermediate_size", 0), max(number(width), 1))
    if rest:
        raise refuse(
            f"shared_expert_intermediate_size {said['shared_expert_intermediate_size']} is no multiple of {width} "
            f"{number(width)}, as it is in our model"
        )
    return {
        "moe": True,
        # transformers 5 writes the second name for all kinds.
        "n_experts": number("num_experts" if "num_experts" in said else "num_local_experts"),
        "experts_per_token": number("num_experts_per_tok"),
        "moe_d_ff": number(width),
        "n_shared_experts": shared,
        "moe_layers": layers - len(dense),
    }
