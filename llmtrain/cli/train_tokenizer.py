"""`llmtrain train-tokenizer`."""

from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.corpus.config import TokenizerConfig

EPILOG = """Example:

    llmtrain train-tokenizer --input data/text --vocab-size 16384 --output tokenizer.json
"""


@click.command("train-tokenizer", cls=ConfigCommand, epilog=EPILOG)
@config_options(TokenizerConfig)
def command(given: dict[str, Any]) -> None:
    """Train a byte-level BPE tokenizer on text files."""
    config = build(TokenizerConfig, given)
    from llmtrain.corpus.tokenizer_training import train_tokenizer

    train_tokenizer(config)
