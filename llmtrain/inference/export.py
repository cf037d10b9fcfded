"""A trained model as a folder for others: transformers and vLLM take it as it is, llama.cpp's converter too, and with
`--format gguf` llama.cpp itself.

    config.json · model.safetensors · tokenizer.json · tokenizer_config.json · special_tokens_map.json
    generation_config.json · README.md (the model card) · evaluation.json · curves.svg

The folder comes into being whole (`storage.atomic.atomic_folder`).
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.inference import gguf_file, hf
from llmtrain.inference.config import SamplingConfig
from llmtrain.inference.model_card import Card
from llmtrain.model.transformer import Transformer
from llmtrain.storage import atomic, tensors
from llmtrain.storage.errors import ConfigMismatch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def export(model: Transformer, tokenizer: Tokenizer | None, output: Path, form: str, dtype: str, card: Card) -> None:
    """Writes the folder `output`, which must not exist. `form`: "hf" or "gguf"; `dtype`: one of DTYPES, that of the
    matrices. Without a tokenizer its files are left out, which GGUF does not allow.

    Raises ConfigMismatch where the form has no word for the model or its tokenizer or the type none for a weight,
    UsageError where the extra is not installed, CannotCreate, StorageFailure.
    """
    if dtype == "fp16":
        check_range(model)
    name = gguf_name(output).removesuffix(".gguf") if form == "gguf" else output.name
    title = name.encode(errors="backslashreplace").decode()  # a folder's name need not be UTF-8
    if form == "gguf":
        hf.refuse_experts(model.config, "GGUF")
        gguf_file.check(tokenizer)
    config = hf.config_json(model.config, dtype, tokenizer.eos_id if tokenizer else None)
    with atomic.atomic_folder(output) as folder:
        if form == "gguf":
            assert tokenizer is not None
            gguf_file.write(folder / gguf_name(output), model, tokenizer, dtype, title)
        else:
            atomic.write_json(folder / "config.json", config)
            write_weights(folder / "model.safetensors", model, DTYPES[dtype])
            if tokenizer is not None:
                write_tokenizer(folder, tokenizer, model.config.max_seq_len)
            atomic.write_json(folder / "generation_config.json", generation_config(config))
        card.write(folder, title, form)


def gguf_name(output: Path) -> str:
    """Of the file in the folder: X.gguf, where the folder is named X or, as the file usually is, X.gguf."""
    return f"{output.name.removesuffix('.gguf')}.gguf"


@torch.no_grad()
def check_range(model: Transformer) -> None:
    """Raises ConfigMismatch where a weight would be an infinity in fp16."""
    ours = dict(model.named_parameters())
    for name, piece in hf.pieces(model.config).items():
        if not torch.isfinite(piece.of(ours).half()).all():
            most = torch.finfo(torch.float16).max
            raise ConfigMismatch(f"--dtype fp16: {name} has a number beyond {most:,.0f}: give bf16 or fp32")


@torch.no_grad()
def write_weights(path: Path, model: Transformer, dtype: torch.dtype) -> None:
    """The model's tensors under transformers' names, as one safetensors file."""
    ours = dict(model.named_parameters())
    entries = {}
    for name, piece in hf.pieces(model.config).items():
        tensor = piece.of(ours).to("cpu", dtype)
        entries[name] = tensors.TensorEntry(SAFETENSORS_NAMES[dtype], tuple(tensor.shape), _bytes(tensor))
    tensors.write(path, entries, {"format": "pt"})


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """What `generate` does when nothing is said."""
    usual = SamplingConfig()
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["eos_token_id"],
        "do_sample": True,
        "temperature": usual.temperature,
        "top_k": usual.top_k,
        "max_new_tokens": usual.max_new_tokens,
    }


def write_tokenizer(folder: Path, tokenizer: Tokenizer, longest: int) -> None:
    """tokenizer.json without what would make ids depend on more than the text (see corpus.tokenizer), and the two files
    that say of which token is which. As everywhere, the text of a special token then becomes that token."""
    spec = json.loads(tokenizer.data)
    spec |= {"truncation": None, "padding": None, "post_processor": None}
    eos = tokenizer.token(tokenizer.eos_id)
    added = {token["content"]: token for token in spec.setdefault("added_tokens", [])}
    if eos not in added:  # its id is one of the vocabulary, and only an added token is never split
        spec["added_tokens"].append(
            {"id": tokenizer.eos_id, "content": eos, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        )  # fmt: skip
    special = {"bos_token": eos, "eos_token": eos, "pad_token": eos}
    # As it was where nothing had to change: what was tokenized with it is known by the hash of these bytes.
    same = spec == json.loads(tokenizer.data)
    data = tokenizer.data if same else json.dumps(spec, ensure_ascii=False).encode()
    atomic.write_bytes(folder / "tokenizer.json", data)
    atomic.write_json(folder / "special_tokens_map.json", special)
    atomic.write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "add_bos_token": False,
            "add_eos_token": False,
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
        },
    )
