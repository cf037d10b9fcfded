"""A model as one GGUF file, which llama.cpp and what is built on it run. Needs the package gguf (extra `gguf`).

llama.cpp rotates neighbouring numbers of a head in its architecture "llama", and the two halves of a head, as ours
does, in "qwen3". So for the first the rows of q and k are reordered, as its own converter does.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.inference import hf
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import ConfigMismatch, UsageError, write_error

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""transformers' names of tensors, without the layer's number -> GGUF's."""


def name_of(theirs: str) -> str:
    """GGUF's name of a tensor that transformers calls `theirs`."""
    stem = theirs.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[stem]}.weight"


def _import() -> Any:
    try:
        import gguf
    except ImportError:
        raise UsageError("--format gguf: needs a package: pip install 'llmtrain[gguf]'") from None
    return gguf


def check(tokenizer: Tokenizer | None) -> None:
    """Raises UsageError where gguf is not installed or no tokenizer is known, ConfigMismatch for a tokenizer that
    llama.cpp has no splitting for."""
    _import()
    if tokenizer is None:
        raise UsageError("--format gguf: a GGUF file holds its tokenizer, and none is known: name it with --tokenizer")
    splitting(tokenizer)


def splitting(tokenizer: Tokenizer) -> str:
    """llama.cpp's name of how the tokenizer splits text. Raises ConfigMismatch where it has none."""
    name = tokenizer.splitting
    spec = json.loads(tokenizer.data)
    if name is None or spec["model"].get("type") != "BPE" or spec["model"].get("byte_fallback"):
        raise ConfigMismatch(
            f"{tokenizer.file}: splits text in a way that GGUF has no name for; known are those of GPT-2, Llama 3 and "
            "Qwen 2: use --format hf and llama.cpp's own converter"
        )
    return {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2"}[name]


@torch.no_grad()
def write(path: Path, model: Transformer, tokenizer: Tokenizer, dtype: str, title: str) -> None:
    """Writes the file; `dtype` is that of the matrices, vectors stay FP32. Raises StorageFailure."""
    gguf = _import()
    c = model.config
    architecture = "qwen3" if c.qk_norm else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(title)
    writer.add_file_type(
        {"fp32": gguf.LlamaFileType.ALL_F32, "fp16": gguf.LlamaFileType.MOSTLY_F16}.get(
            dtype, gguf.LlamaFileType.MOSTLY_BF16
        )
    )
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    _add_tokenizer(gguf, writer, tokenizer, c.vocab_size)
    ours = dict(model.named_parameters())
    for name, piece in hf.pieces(c).items():
        tensor = piece.of(ours).cpu()
        if not c.qk_norm and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = neighbours(tensor, c)
        data, kind = _numbers(gguf, tensor, dtype)
        writer.add_tensor(name_of(name), data, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise write_error(error, path) from error
    finally:
        writer.close()


def neighbours(rows: Tensor, c: ModelConfig) -> Tensor:
    """Rows (heads * head_dim, d_model) whose halves of a head are rotated -> the same with neighbours rotated."""
    return rows.view(-1, 2, c.head_dim // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _numbers(gguf: Any, tensor: Tensor, dtype: str) -> tuple[np.ndarray, Any]:
    kinds = gguf.GGMLQuantizationType
    if tensor.dim() == 1 or dtype == "fp32":
        return tensor.float().contiguous().numpy(), kinds.F32
    if dtype == "fp16":
        return tensor.half().contiguous().numpy(), kinds.F16
    return tensor.bfloat16().contiguous().view(torch.uint8).numpy(), kinds.BF16  # numpy has no bf16


def _add_tokenizer(gguf: Any, writer: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    spec = json.loads(tokenizer.data)
    added = {int(token["id"]): token for token in spec["added_tokens"]}
    texts = {number: text for text, number in tokenizer.vocab.items()}
    texts |= {number: token["content"] for number, token in added.items()}
    tokens, kinds = [], []
    for number in range(vocab_size):
        if number not in texts:
            tokens.append(f"[PAD{number}]")
            kinds.append(gguf.TokenType.UNUSED)
            continue
        tokens.append(texts[number])
        control = number == tokenizer.eos_id or added.get(number, {}).get("special")
        user = gguf.TokenType.USER_DEFINED if number in added else gguf.TokenType.NORMAL
        kinds.append(gguf.TokenType.CONTROL if control else user)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.eos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_add_bos_token(False)
