"""`llmtrain evaluate`."""

import dataclasses
import json
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.inference.config import EvaluateConfig, ModelSource
from llmtrain.storage.errors import UsageError

EPILOG = """Example:

    llmtrain evaluate --run-dir runs/default --tokens data/corpus.val.u16
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@config_options(ModelSource, EvaluateConfig)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with the names of metrics.jsonl.")
def command(given: dict[str, Any], as_json: bool) -> None:
    """Loss (nats a token), perplexity and bits per byte of a trained model on token files."""
    source, config = build(ModelSource, given), build(EvaluateConfig, given)

    from llmtrain.cli.trained import load
    from llmtrain.inference.evaluate import evaluate_sources, open_sources

    trained = load(source)
    data = trained.state["config"]["data"]
    specs = config.tokens or tuple(data["val_tokens"])
    if not specs:
        raise UsageError("--tokens is missing, and the run has no held-out file of its own: name a token file")
    seq_len = config.seq_len or data["seq_len"]
    tokenizer = trained.tokenizer_if_known()
    sources = open_sources(specs, trained.model.config, seq_len, tokenizer, data.get("eos_id"))
    step = trained.state["step"]
    if not as_json:
        click.echo(f"{'source':<20} {'step':>9} {'targets':>13} {'loss':>8} {'perplexity':>12} {'bits/byte':>10}")
    for result in evaluate_sources(
        trained.model,
        sources,
        seq_len=seq_len,
        batch_size=config.batch_size,
        max_windows=config.max_windows,
        tokenizer=tokenizer,
        document_mask=data.get("document_mask", False),
    ):
        if as_json:
            click.echo(json.dumps({"step": step, **dataclasses.asdict(result)}))
            continue
        bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
        click.echo(
            f"{result.source:<20} {step:>9,} {result.targets:>13,} {result.val_loss:>8.4f} {result.ppl:>12,.2f} "
            f"{bits:>10}"
        )
