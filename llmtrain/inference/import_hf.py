"""A model of others as ours: the folder that transformers writes, and `export` too.

    config.json · model.safetensors, or parts of it that model.safetensors.index.json names · tokenizer.json

What the folder holds is checked by its headers before memory is taken; weights become FP32 masters, whatever type they
are stored in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.inference import hf
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage import tensors
from llmtrain.storage.errors import BadData, ConfigMismatch, InputMissing
from llmtrain.storage.manifest import read_json

CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DERIVED = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that older files hold and that follow from the configuration."""


@dataclass(frozen=True)
class Foreign:
    """A folder whose names, shapes and types are those of the model that its config.json says."""

    folder: Path
    config: ModelConfig
    model_type: str
    tokenizer: Tokenizer
    files: tuple[Path, ...]
    dtype: str
    """Of the embedding: F32, F16 or BF16."""

    @torch.no_grad()
    def fill(self, ours: Mapping[str, Tensor]) -> None:
        """Writes the weights into `ours`, by our names, on the CPU and FP32. Raises BadData for one that is not finite
        or cut off, ConfigMismatch for one that our model has no place for."""
        pieces, head = hf.pieces(self.config), None
        for path in self.files:
            for name, entry, data in tensors.read_each(path):
                if name.endswith(DERIVED):
                    continue
                theirs = torch.frombuffer(data, dtype=DTYPES[entry.dtype]) if data else torch.empty(0)
                theirs = theirs.view(entry.shape).float()
                if not torch.isfinite(theirs).all():
                    raise BadData(f"{path}: tensor {name} holds a number that is not finite: use another copy")
                if name not in pieces:  # a tied head, which the folder may hold too
                    head = theirs
                    continue
                piece = pieces[name]
                if piece.scale:
                    piece._replace(scale=1.0).of(ours).copy_(theirs / piece.scale)
                elif theirs.any():
                    raise ConfigMismatch(
                        f"{path}: {name} is not 0: our shared expert has no gate, so {hf.ADVICE}"
                    )
        if head is not None and not torch.equal(head, pieces[EMBEDDING].of(ours)):
            raise ConfigMismatch(
                f"{self.folder}: {HEAD} is not the embedding, though tie_word_embeddings is true: correct {CONFIG}"
            )


def open_folder(folder: Path, tokenizer_file: Path | None = None) -> Foreign:
    """Reads what says of what the folder holds, and checks it. `tokenizer_file`: in place of the folder's.

    Raises InputMissing for what is not there, BadData for what is damaged or pickled, ConfigMismatch for a model that
    ours cannot be.
    """
    if not folder.is_dir():
        raise InputMissing(f"{folder}: no such folder: download the model first, as with `hf download`")
    said = read_json(folder / CONFIG)
    config = hf.model_config(said, str(folder / CONFIG))
    files = weight_files(folder)
    without_memory = dict(Transformer(config, device="meta").named_parameters())
    shapes = {name: tuple(piece.of(without_memory).shape) for name, piece in hf.pieces(config).items()}
    if config.tie_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    found: dict[str, str] = {}
    for path in files:
        for name, entry in tensors.read_index(path).items():
            if name.endswith(DERIVED):
                continue
            _check(path, name, entry, shapes.get(name))
            if name in found:
                raise BadData(f"{path}: holds tensor {name}, as another file does: use another copy")
            found[name] = entry.dtype
    missing = sorted(shapes.keys() - found.keys() - ({HEAD} if config.tie_embeddings else set()))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadData(f"{folder}: its weights lack {missing[0]}{more}, which its {CONFIG} asks for: use another copy")
    tokenizer = tokenizers.load(tokenizer_file or folder / TOKENIZER)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigMismatch(
            f"{tokenizer.file}: has {tokenizer.vocab_size} tokens, the model's vocab_size is {config.vocab_size}: name "
            "the model's own with --tokenizer"
        )
    return Foreign(folder, config, said["model_type"], tokenizer, files, found[EMBEDDING])


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that the model lies in. Raises InputMissing, BadData."""
    if (folder / WEIGHTS).exists():
        return (folder / WEIGHTS,)
    if (folder / INDEX).exists():
        named = read_json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named or not all(map(_is_plain_name, named.values())):
            raise BadData(f"{folder / INDEX}: has no weight_map of names to files beside it: use another copy")
        return tuple(folder / name for name in sorted(set(named.values())))
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise BadData(
            f"{folder / pickled[0]}: is a pickle, which can run code when it is read: convert the model with "
            "transformers' from_pretrained and save_pretrained"
        )
    raise InputMissing(f"{folder}: holds no {WEIGHTS}: name a folder with a model's weights")


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")


def _check(path: Path, name: str, entry: tensors.TensorIndex, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        what = "a bias" if name.endswith("bias") else "a tensor that our model does not have"
        raise ConfigMismatch(f"{path}: holds {name}, {what}: {hf.ADVICE}")
    if entry.shape != shape:
        raise BadData(
            f"{path}: {name} has shape {entry.shape}, {shape} is what {CONFIG} asks for: use another copy, or correct "
            "the configuration"
        )
    if entry.dtype not in DTYPES:
        raise ConfigMismatch(f"{path}: {name} is {entry.dtype}, known are {', '.join(DTYPES)}: convert the model")
