"""`llmtrain tokenize-corpus`."""

import gc
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.corpus.config import TokenizeConfig

EPILOG = """Example:

    llmtrain tokenize-corpus --input 'data/*.jsonl.zst' --tokenizer tokenizer.json --output data/corpus.u16
"""


@click.command("tokenize-corpus", cls=ConfigCommand, epilog=EPILOG)
@config_options(TokenizeConfig)
def command(given: dict[str, Any]) -> None:
    """Turn text files into a token file, and a share of their documents into a held-out one.

    Prints a count for each file and in all. The output appears at the end; a command that was stopped or killed is gone
    on with by the same command.
    """
    config = build(TokenizeConfig, given)
    # Of 100,000 inputs the collector would look at every object again and again: 4% of the time.
    gc.set_threshold(50_000)
    from llmtrain.corpus.tokenize import tokenize

    tokenize(config)
