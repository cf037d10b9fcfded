"""`llmtrain export`."""

from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.inference.config import ExportConfig, ModelSource

EPILOG = """Example:

    llmtrain export runs/default --output export/my-model
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@config_options(ExportConfig)
def command(given: dict[str, Any], run: Path) -> None:
    """Write a trained model for transformers, vLLM or llama.cpp.

    RUN is a run directory, whose newest whole checkpoint is taken, or a checkpoint folder. The folder that is written
    holds the weights, the tokenizer and a model card with data, recipe, curves and evaluations.
    """
    config = build(ExportConfig, given)

    import os

    from llmtrain.cli.trained import load
    from llmtrain.inference.export import export, gguf_name
    from llmtrain.inference.model_card import Card
    from llmtrain.model.flops import parameter_counts
    from llmtrain.storage.errors import CannotCreate

    if os.path.lexists(config.output):  # said before a large model is loaded
        raise CannotCreate(f"{config.output}: is there already: remove it or name another --output")
    checkpoint = run if os.path.exists(run / "MANIFEST.json") else None
    source = ModelSource(
        run_dir=run, checkpoint=checkpoint, tokenizer=config.tokenizer, device="cpu", precision="fp32"
    )
    trained = load(source)
    state = trained.state
    dtype = config.dtype
    if dtype == "auto":
        dtype = "fp32" if state["config"].get("run", {}).get("precision") == "fp32" else "bf16"
    tokenizer = trained.tokenizer_if_known()
    metrics = (run.absolute().parent.parent if checkpoint else run) / "metrics.jsonl"
    card = Card.of(state, parameter_counts(trained.model.config).total, dtype, metrics)
    export(trained.model, tokenizer, config.output, config.format, dtype, card)
    made = config.output / gguf_name(config.output) if config.format == "gguf" else config.output
    click.echo(f"{made}: step {state['step']:,}, {card.parameters:,} parameters in {dtype}, {config.format}")
    if tokenizer is None:
        click.echo(f"without a tokenizer: {trained.tokenizer_file} is not there; name it with --tokenizer", err=True)
