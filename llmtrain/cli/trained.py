"""What the commands on a trained model share: finding and loading it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.inference.config import ModelSource
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import BadData, ConfigMismatch, InputMissing, LlmtrainError
from llmtrain.training.checkpoint import folder_of, load_model, newest_first
from llmtrain.training.devices import pick_device


@dataclass(frozen=True)
class Trained:
    model: Transformer
    state: dict[str, Any]
    """state.json of its checkpoint: the step, the run's configuration."""
    run_dir: Path
    """That the checkpoint is of."""
    tokenizer_file: Path
    given: bool
    """Whether the tokenizer was named by a person."""

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Raises InputMissing, BadData, and ConfigMismatch where it has ids that the model lacks."""
        if not self.given and not self.tokenizer_file.exists():
            raise InputMissing(f"{self.tokenizer_file}: no such file: name the corpus' tokenizer with --tokenizer")
        loaded = tokenizers.load(self.tokenizer_file)
        of_corpus = {source.get("tokenizer") for source in self.state["corpus"]} - {None}
        if not self.given and of_corpus and loaded.sha256 not in of_corpus:
            raise ConfigMismatch(
                f"{self.tokenizer_file}: is not the tokenizer of the corpus that the model was trained on: put that "
                "one there or name it with --tokenizer"
            )
        if loaded.vocab_size > self.model.config.vocab_size:
            raise ConfigMismatch(
                f"{self.tokenizer_file}: has {loaded.vocab_size} tokens, the model knows "
                f"{self.model.config.vocab_size}: name the corpus' tokenizer with --tokenizer"
            )
        return loaded

    def tokenizer_if_known(self) -> tokenizers.Tokenizer | None:
        return self.tokenizer() if self.given or self.tokenizer_file.exists() else None


def load(source: ModelSource) -> Trained:
    """Loads the model. Raises InputMissing, BadData; UsageError for a device that is not there."""
    device = pick_device(source.device)
    precision = source.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    if source.checkpoint:
        model, _, state = load_model(source.checkpoint, device, precision, source.weights)
        run_dir = source.checkpoint.absolute().parent.parent
    else:
        model, state = _load_newest(source, device, precision)
        run_dir = source.run_dir
    return Trained(model, state, run_dir, source.tokenizer or run_dir / "tokenizer.json", source.tokenizer is not None)


def _load_newest(source: ModelSource, device: torch.device, precision: str) -> tuple[Transformer, dict[str, Any]]:
    """The newest checkpoint that verifies, and a line on stderr for each that does not. Nothing is set aside: that is
    for the run itself. Raises InputMissing where there is none, BadData where none verifies."""
    run_dir = source.run_dir
    damaged: list[LlmtrainError] = []
    for step in newest_first(run_dir):
        folder = folder_of(run_dir, step)
        try:
            model, _, state = load_model(folder, device, precision, source.weights)
        except (BadData, InputMissing) as error:
            if os.path.lexists(folder):  # else the run that goes on has removed it just now
                damaged.append(error)
            continue
        for reason in map(str, damaged):
            click.echo(f"{reason.removesuffix(': use another checkpoint')}: {folder.name} is used instead", err=True)
        return model, state
    if damaged:
        raise damaged[0]
    raise InputMissing(f"{run_dir}: holds no checkpoint: train it first, or name another run directory")
