"""`llmtrain inspect`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from llmtrain.corpus.documents import plural
from llmtrain.storage.errors import BadData, InputMissing, UsageError
from llmtrain.storage.units import in_bytes

if TYPE_CHECKING:
    from llmtrain.corpus.token_file import TokenFile

SCANNED_TOKENS = 1 << 27
"""Ids that are looked at in a file without a manifest; a quarter of a GB, so that the command answers soon."""

EXCERPT = 160
"""Characters of a sample's text that are shown."""

Line = tuple[str, str]


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(1), help="Of a run: the samples that this step trains on, and their text.")
def command(path: Path, step: int | None) -> None:
    """Say what a token file, a checkpoint or a run directory holds.

    It believes manifests and does not hash: `llmtrain verify` does.
    """
    kind = kind_of(path)
    if step is not None and kind != "run":
        raise UsageError(f"{path}: is a {kind}, and --step is of a run: name its directory")
    lines = {"token file": token_file_lines, "checkpoint": checkpoint_lines, "run": run_lines}[kind]
    for label, text in lines(path) if step is None else step_lines(path, step):
        click.echo(f"{label:<12}{text}")


def kind_of(path: Path) -> Literal["token file", "checkpoint", "run"]:
    """What there is at `path`. Raises InputMissing where nothing is, BadData for a folder that is neither, UsageError
    for a part of a token file."""
    if not os.path.exists(path):
        raise InputMissing(f"{path}: no such file or folder: check the path")
    if not path.is_dir():
        whole = path.with_suffix("")
        if path.suffix in (".json", ".docs") and whole.is_file():
            raise UsageError(f"{path}: belongs to the token file {whole}: name that one")
        return "token file"
    if (path / "MANIFEST.json").exists() or (path / "model.safetensors").exists():
        return "checkpoint"
    if (path / "checkpoints").is_dir() or (path / "config.toml").exists():
        return "run"
    raise BadData(f"{path}: is neither a checkpoint nor a run directory (no MANIFEST.json, no checkpoints)")


def open_token_file(path: Path) -> "TokenFile":
    """The token file, with any vocabulary where it has no manifest."""
    from llmtrain.corpus.token_file import MAX_VOCAB, TokenFile, manifest_path

    return TokenFile.open(path, None if manifest_path(path).exists() else MAX_VOCAB)


def token_file_lines(path: Path) -> Iterator[Line]:
    file = open_token_file(path)
    manifest = file.manifest
    form = file.form
    if manifest:
        form += " and a document index" if file.doc_ends is not None else ", no document index"
    else:
        form += ", no manifest"
    yield "token file", f"{path}: {form}"
    yield "size", in_bytes(file.ids.nbytes)
    yield "tokens", f"{file.tokens:,}"
    if manifest is None:
        scanned = file.ids[:SCANNED_TOKENS]
        part = "" if scanned.size == file.tokens else f" among the first {scanned.size:,}"
        yield "ids", f"from {int(scanned.min())} to {int(scanned.max())}{part}; begins with {scanned[:16].tolist()}"
        if file.documents:
            yield "documents", f"{file.documents:,}, {file.tokens / file.documents:,.1f} tokens each on average"
        return
    mean = f", {file.tokens / file.documents:,.1f} tokens each on average" if file.documents else ""
    yield "documents", f"{file.documents:,}{mean}"
    yield "vocabulary", f"{manifest['vocab_size']:,}; largest id {manifest['max_id']}, EOS {manifest['eos_id']}"
    yield "tokenizer", f"{manifest['tokenizer']['file']} (sha256 {manifest['tokenizer']['sha256'][:16]})"
    yield "engine", " ".join(str(manifest["engine"].get(name, "")) for name in ("name", "version"))
    inputs = manifest["inputs"]
    # No bytes a token: of these files a part of the documents may have been held out, or be all that this one holds.
    yield "inputs", f"{plural(len(inputs), 'file')}, {in_bytes(sum(one['bytes'] for one in inputs))}"
    skipped: dict[str, int] = {}
    for one in inputs:
        for reason, count in one["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + count
    if skipped:
        yield "skipped", ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    yield "made by", str(manifest.get("created_by", "unknown"))


def model_line(model: dict[str, Any], parameters: int) -> str:
    heads = f"{model['n_heads']}/{model['n_kv_heads']} heads of {model['head_dim']}"
    return (
        f"{parameters:,} parameters: d_model {model['d_model']}, {model['n_layers']} layers, {heads}, "
        f"d_ff {model['d_ff']}, vocabulary {model['vocab_size']:,}, up to {model['max_seq_len']:,} tokens"
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
    from llmtrain.storage.journal import JsonLines
    from llmtrain.storage.manifest import read_json
    from llmtrain.training.checkpoint import folder_of, list_steps, read_manifest

    yield "run", str(run_dir)
    if (run_dir / "status.json").exists():
        status = read_json(run_dir / "status.json")
        yield "state", f"{status.get('state')} at step {status.get('step')}: {status.get('reason')}"
    newest: dict[str, dict[str, Any]] = {}
    if (run_dir / "metrics.jsonl").exists():
        for line in JsonLines.read(run_dir / "metrics.jsonl"):
            if line.get("kind") == "train":
                newest["train"] = line
            elif line.get("kind") == "eval":
                newest[f"eval {line.get('source')}"] = line
    for label, names in (("train", ("lm_loss", "ppl", "lr", "tok_per_s")), ("eval", ("val_loss", "bits_per_byte"))):
        for kind, line in newest.items():
            if kind.partition(" ")[0] == label:
                known = [name for name in names if isinstance(line.get(name), int | float)]
                figures = ", ".join(f"{name} {line[name]:.5g}" for name in known)
                source = kind.partition(" ")[2]
                yield label, f"step {line.get('step')}: {source + ': ' if source else ''}{figures}"
    steps = list_steps(run_dir)
    for step in steps:
        folder = folder_of(run_dir, step)
        try:
            size = in_bytes(sum(entry["bytes"] for entry in read_manifest(folder)["files"].values()))
        except BadData as error:
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
    from llmtrain.training.start import open_sources, order_of_run

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
