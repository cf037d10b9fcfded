"""`llmtrain import`."""

from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.inference.config import ImportConfig

EPILOG = """Example:

    llmtrain import downloads/Qwen3-0.6B-Base --run-dir runs/qwen3

    llmtrain tokenize-corpus --tokenizer runs/qwen3/tokenizer.json --output data/corpus.u32

    llmtrain train --init-from runs/qwen3 --tokens data/corpus.u32 --run-dir runs/mine
"""

USUAL_SEQ_LEN = 1024
"""Windows that `evaluate` cuts where nothing is said, in tokens; a run trains on those of its own --seq-len."""


@click.command("import", cls=ConfigCommand, epilog=EPILOG)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@config_options(ImportConfig)
def command(given: dict[str, Any], folder: Path) -> None:
    """Take over a model of others, to go on training from.

    DIR holds config.json, model.safetensors (or several with their index) and tokenizer.json, of the shape of Llama,
    Qwen3, Mixtral, Qwen2-MoE or Qwen3-MoE. The run directory that is made holds the weights as the checkpoint of
    step 0: `train --init-from`, `generate`, `evaluate`, `inspect` and `export` take it.
    """
    config = build(ImportConfig, given)

    import dataclasses
    import os

    import torch

    from llmtrain import __version__
    from llmtrain.inference.import_hf import TOKENIZER, open_folder
    from llmtrain.model.flops import parameter_counts
    from llmtrain.model.transformer import Transformer
    from llmtrain.storage import atomic
    from llmtrain.storage.errors import CannotCreate
    from llmtrain.training import checkpoint
    from llmtrain.training.flat import FlatParameters
    from llmtrain.training.snapshot import WeightsAlone

    if os.path.lexists(config.run_dir):  # said before a large model is read
        raise CannotCreate(f"{config.run_dir}: is there already: remove it or name another --run-dir")
    foreign = open_folder(folder, config.tokenizer)
    flat = FlatParameters(Transformer(foreign.config, device="meta"), "cpu", torch.float32, with_gradients=False)
    foreign.fill(flat.parameters)
    seq_len = min(USUAL_SEQ_LEN, foreign.config.max_seq_len)
    state = {
        "samples": 0,
        "tokens": 0,
        "config": {
            "model": dataclasses.asdict(foreign.config),
            "data": {"tokens": [], "val_tokens": [], "seq_len": seq_len},
            "run": {"precision": "bf16" if foreign.dtype == "BF16" else "fp32"},
        },
        # What it was trained on is not known; that its tokenizer goes with it is.
        "corpus": [{"weight": 1.0, "tokens": 0, "sha256": "", "tokenizer": foreign.tokenizer.sha256}],
        "environment": {"llmtrain": __version__, "torch": torch.__version__},
        "imported": {"name": folder.absolute().name, "model_type": foreign.model_type, "dtype": foreign.dtype},
    }
    with atomic.atomic_folder(config.run_dir) as work:
        atomic.write_bytes(work / TOKENIZER, foreign.tokenizer.data)
        checkpoint.save(work, 0, WeightsAlone(flat), state)
    click.echo(
        f"{config.run_dir}: {parameter_counts(foreign.config).total:,} parameters of {folder} ({foreign.model_type}, "
        f"{foreign.dtype}), vocabulary {foreign.config.vocab_size:,}, up to {foreign.config.max_seq_len:,} tokens"
    )
