"""`llmtrain inspect`."""

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import click

from llmtrain.cli.inspect_tokens import Line, token_file_lines
from llmtrain.cli.options import ConfigCommand
from llmtrain.corpus.shards import find_parts
from llmtrain.storage.errors import BadData, InputMissing, LlmtrainError, UsageError
from llmtrain.storage.units import in_bytes

LIMIT = 1_000_000_000

EVAL_FIGURES = ("val_loss", "bits_per_byte", "accuracy", "accuracy_norm")

EXCERPT = 160
"""Characters of a sample's text that are shown."""


EPILOG = """Example:

    llmtrain inspect runs/default --step 1000
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(1), help="Of a run: the samples that this step trains on, and their text.")
@click.option(
    "--limit", type=click.IntRange(0), default=LIMIT, show_default=True,
    help="Of a token file: how many tokens to read for what the manifest does not say; 0: all.",
)  # fmt: skip
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="FILE",
    help="Of a token file: another one whose documents to look for in it; X.val.u16 of X.u16 when not given.",
)  # fmt: skip
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), metavar="FILE",
    help="Of a token file: what decodes it, where the tokenizer that its manifest names is not there.",
)  # fmt: skip
@click.option("--eos-id", type=click.IntRange(0), help="Of a token file of others: the id that ends each document.")
def command(
    path: Path, step: int | None, limit: int, against: Path | None, tokenizer: Path | None, eos_id: int | None
) -> None:
    """Say what a token file, a checkpoint or a run directory holds.

    Of a token file it counts ids, lengths and documents that are the same. It believes manifests and does not hash
    files: `llmtrain verify` does.
    """
    kind = kind_of(path)
    if step is not None and kind != "run":
        raise UsageError(f"{path}: is a {kind}, and --step is of a run: name its directory")
    if kind == "token file":
        lines = token_file_lines(path, limit, against, tokenizer, eos_id)
    elif kind == "checkpoint":
        lines = checkpoint_lines(path)
    else:
        lines = run_lines(path) if step is None else step_lines(path, step)
    for label, text in lines:
        click.echo(f"{label:<12}{text}")


def kind_of(path: Path) -> Literal["token file", "checkpoint", "run"]:
    """What there is at `path`. Raises InputMissing where nothing is, BadData for a folder that is neither, UsageError
    for a part of a token file."""
    if not os.path.exists(path):
        if find_parts(path):
            return "token file"
        raise InputMissing(f"{path}: no such file or folder: check the path")
    if not path.is_dir():
        whole = path.with_suffix("")
        if (path.suffix in (".json", ".docs", ".mask") or path.suffix.startswith(".pack-")) and whole.is_file():
            raise UsageError(f"{path}: belongs to the token file {whole}: name that one")
        return "token file"
    if (path / "MANIFEST.json").exists() or (path / "model.safetensors").exists():
        return "checkpoint"
    if (path / "checkpoints").is_dir() or (path / "config.toml").exists():
        return "run"
    raise BadData(f"{path}: is neither a checkpoint nor a run directory (no MANIFEST.json, no checkpoints)")


def model_line(model: dict[str, Any], parameters: int) -> str:
    from llmtrain.model.config import ModelConfig
    from llmtrain.model.flops import parameter_counts

    c = ModelConfig(**{field.name: model[field.name] for field in fields(ModelConfig) if field.name in model})
    active = f", {parameter_counts(c).active:,} active" if c.moe else ""
    return (
        f"{parameters:,} parameters{active}: d_model {c.d_model}, {c.n_layers} layers, "
        f"{c.n_heads}/{c.n_kv_heads} heads of {c.head_dim}, {c.feed_forward_words()}, vocabulary {c.vocab_size:,}, "
        f"up to {c.max_seq_len:,} tokens"
    )


def checkpoint_lines(folder: Path) -> Iterator[Line]:
    import math

    from llmtrain.storage.manifest import read_json, sha256_file
    from llmtrain.training.checkpoint import STATE, read_manifest

    manifest = read_manifest(folder)
    if sha256_file(folder / STATE) != manifest["files"][STATE]["sha256"]:
        raise BadData(f"{folder / STATE}: is damaged (its sha256 differs): use another checkpoint")
    state = read_json(folder / STATE)
    config, environment = state["config"], state["environment"]
    yield "checkpoint", f"{folder}: step {state['step']:,}"
    yield "position", f"{state['samples']:,} samples, {state['tokens']:,} tokens"
    shapes = [[piece["shape"] for piece in pieces] for pieces in manifest["tensors"]["model"].values()]
    parameters = sum(math.prod(shape) for pieces in shapes for shape in pieces)
    yield "model", model_line(config["model"], parameters)
    yield "corpus", ", ".join(f"{spec} ({one['tokens']:,} tokens)" for spec, one in corpus(state))
    yield "made with", ", ".join(f"{name} {value}" for name, value in environment.items())
    for name, entry in manifest["files"].items():
        yield "file", f"{name} {in_bytes(entry['bytes'])}, sha256 {entry['sha256'][:16]}"


def corpus(state: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each source as it was named, with what identifies its content."""
    return list(zip(state["config"]["data"]["tokens"], state["corpus"], strict=False))


def run_lines(run_dir: Path) -> Iterator[Line]:
    from llmtrain.storage.journal import JsonLines, is_number
    from llmtrain.storage.lock import dead_holder
    from llmtrain.storage.manifest import read_json
    from llmtrain.training.checkpoint import folder_of, list_steps, read_manifest

    yield "run", str(run_dir)
    if (run_dir / "status.json").exists():
        status = read_json(run_dir / "status.json")
        running = status.get("state") == "running"
        # Of a run that goes on, status.json says where it began; the newest train line says how far it is.
        where = "" if running else f"at step {status.get('step')}: "
        yield "state", f"{status.get('state')} {where}{status.get('reason')}"
        if running and (pid := dead_holder(run_dir / "lock")):
            yield "", f"but process {pid} is gone, so it was killed or the machine went down: --resume goes on"
    newest: dict[str, dict[str, Any]] = {}
    if (run_dir / "metrics.jsonl").exists():
        for line in JsonLines.read(run_dir / "metrics.jsonl"):
            if line.get("kind") == "train":
                newest["train"] = line
            elif line.get("kind") == "eval":
                newest[f"eval {line.get('source')}"] = line
    for label, names in (("train", ("lm_loss", "ppl", "lr", "tok_per_s")), ("eval", EVAL_FIGURES)):
        for kind, line in newest.items():
            if kind.partition(" ")[0] == label:
                known = [name for name in names if is_number(line.get(name))]
                figures = ", ".join(f"{name} {line[name]:.5g}" for name in known)
                source = kind.partition(" ")[2]
                yield label, f"step {line.get('step')}: {source + ': ' if source else ''}{figures}"
    steps = list_steps(run_dir)
    for step in steps:
        folder = folder_of(run_dir, step)
        try:
            size = in_bytes(sum(entry["bytes"] for entry in read_manifest(folder)["files"].values()))
        except LlmtrainError as error:
            if not os.path.lexists(folder):  # the run has removed it just now
                continue
            size = f"damaged: {error}"
        yield "checkpoint", f"{folder.name} {size}"
    if not steps:
        yield "checkpoint", "none yet"


def step_lines(run_dir: Path, step: int) -> Iterator[Line]:
    """The samples of a step: where each lies in its token file, and how it begins."""
    import json

    import numpy as np

    from llmtrain.cli.train import configuration
    from llmtrain.corpus import tokenizer as tokenizers
    from llmtrain.training.plan import samples_of_run
    from llmtrain.training.run_corpus import open_sources, order_of_run

    config = configuration({"run_dir": run_dir}, None, resume=True)
    per_step = config.run.sequences_per_step
    sources = open_sources(config.data.tokens, config.model.vocab_size, config.data.eos_id)
    order = order_of_run(config, sources)
    begin, end = (step - 1) * per_step, min(step * per_step, samples_of_run(config, order))
    if begin >= end:
        raise UsageError(f"--step {step}: the run ends at step {-(-samples_of_run(config, order) // per_step)}")
    file = run_dir / "tokenizer.json"
    tokenizer = tokenizers.load(file) if file.exists() else None
    yield "step", f"{step} trains on samples {begin:,} to {end - 1:,}"
    for sample, s, window in zip(range(begin, end), *order.locate(np.arange(begin, end)), strict=True):
        cut, one = order.cuts[s], np.array([window])
        ids = cut.gather(one).ids[0]
        content = tokenizer.decode(ids[:EXCERPT])[:EXCERPT] if tokenizer else ids[:16].tolist()
        where = f"{order.sources[s].name} window {window}, tokens from {int(cut.pieces(one).starts[0]):,} on"
        yield f"{sample:,}", f"{where}: {json.dumps(content, ensure_ascii=False)}"
