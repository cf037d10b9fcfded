"""`llmtrain tokenize-corpus`."""

from typing import Any

import click

from llmtrain.cli.options import build, config_options
from llmtrain.corpus.config import TokenizeConfig


@click.command("tokenize-corpus")
@config_options(TokenizeConfig)
def command(given: dict[str, Any]) -> None:
    """Turn text files into a token file, and a share of their documents into a held-out one.

    Prints a count for each file and in all. The output appears whole at the end, or not at all.
    """
    config = build(TokenizeConfig, given)
    from llmtrain.corpus.tokenize import tokenize

    tokenize(config)
