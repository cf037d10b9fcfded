"""`llmtrain evaluate`."""

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.inference.config import EvaluateConfig, ModelSource
from llmtrain.storage.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.corpus.choices import Choices
    from llmtrain.inference.evaluate import Evaluation

EPILOG = """Example:

    llmtrain evaluate --run-dir runs/default --tokens data/corpus.val.u16

    llmtrain evaluate --run-dir runs/default --choices arc.jsonl --text held.jsonl --kind-field domain
"""

ACCURACIES = ("accuracy", "accuracy_stderr", "accuracy_norm", "accuracy_norm_stderr")


@click.command(cls=ConfigCommand, epilog=EPILOG)
@config_options(ModelSource, EvaluateConfig)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with the names of metrics.jsonl.")
def command(given: dict[str, Any], as_json: bool) -> None:
    """What a trained model makes of token files, text and questions.

    Loss (nats a token), perplexity and bits per byte on token files and on text, of each kind of document; and the
    share of multiple-choice questions whose right answer is the likeliest, as a whole and by character. Where nothing
    is named, it evaluates on what the run itself does.
    """
    source, config = build(ModelSource, given), build(EvaluateConfig, given)

    from llmtrain.cli.trained import load
    from llmtrain.corpus.choices import read_choices
    from llmtrain.corpus.kinds import read_text
    from llmtrain.inference.evaluate import answer, evaluate_sources, evaluate_text, open_sources

    trained = load(source)
    model, data = trained.model, trained.state["config"]["data"]
    if not (config.tokens or config.choices or config.text):
        names = ("choices", "text", "text_field", "kind_field")
        of_run = {name: data.get(f"val_{name}", getattr(config, name)) for name in names}
        of_run = {name: tuple(value) if isinstance(value, list) else value for name, value in of_run.items()}
        config = dataclasses.replace(config, tokens=tuple(data["val_tokens"]), **of_run)
    if not (config.tokens or config.choices or config.text):
        raise UsageError("--tokens is missing, and the run has no held-out file of its own: name a token file")
    seq_len = config.seq_len or data["seq_len"]
    tokenizer = trained.tokenizer() if config.choices or config.text else trained.tokenizer_if_known()
    # All of it is opened and checked before any of it is evaluated.
    eos_id, within = data.get("eos_id"), data.get("document_mask", False)
    sources = []
    if config.tokens:
        sources = open_sources(config.tokens, model.config, seq_len, tokenizer, eos_id, within)
    choices = [read_choices(spec, trained.tokenizer(), model.config.max_seq_len) for spec in config.choices]
    texts = [
        read_text(spec, trained.tokenizer(), seq_len, config.text_field, config.kind_field) for spec in config.text
    ]

    def losses() -> "Iterator[Evaluation]":
        windows = {"seq_len": seq_len, "batch_size": config.batch_size, "max_windows": config.max_windows}
        yield from evaluate_sources(model, sources, **windows, tokenizer=tokenizer, document_mask=within)
        yield from evaluate_text(model, texts, **windows)

    step = trained.state["step"]
    answers = ((one, answer(model, one, tokens_at_once=config.batch_size * seq_len)) for one in choices)
    if as_json:
        for result in losses():
            click.echo(json.dumps({"step": step, **dataclasses.asdict(result)}))
        for one, figures in answers:
            click.echo(json.dumps({"step": step, "source": one.name, **figures}))
        return
    if sources or texts:
        click.echo(f"{'source':<20} {'step':>9} {'targets':>13} {'loss':>8} {'perplexity':>12} {'bits/byte':>10}")
    for result in losses():
        bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
        click.echo(
            f"{result.source:<20} {step:>9,} {result.targets:>13,} {result.val_loss:>8.4f} {result.ppl:>12,.2f} "
            f"{bits:>10}"
        )
    if choices:
        click.echo(f"{'source':<20} {'step':>9} {'questions':>13} {'accuracy':>17} {'by character':>17}")
    for one, figures in answers:
        say_answers(one, step, figures, model.config.max_seq_len)


def say_answers(choices: "Choices", step: int, figures: dict[str, float], longest: int) -> None:
    plain, error, by_length, its_error = (figures[name] for name in ACCURACIES)
    shares = [f"{share:.4f} +- {of_share:.4f}" for share, of_share in ((plain, error), (by_length, its_error))]
    click.echo(f"{choices.name:<20} {step:>9,} {int(figures['questions']):>13,} {shares[0]:>17} {shares[1]:>17}")
    if choices.shortened:
        click.echo(f"({choices.shortened} prompts lost their beginning: the model reads {longest} tokens)", err=True)
