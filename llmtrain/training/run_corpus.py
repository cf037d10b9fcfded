"""The corpus of a run: its token files opened, checked and put in order, and what is held out."""

import dataclasses
from pathlib import Path
from typing import Any

from llmtrain.corpus.batches import check_document_mask
from llmtrain.corpus.choices import Choices, read_choices
from llmtrain.corpus.kinds import HeldOutText, read_text
from llmtrain.corpus.order import SampleOrder, Source, absolute_spec, parse_sources
from llmtrain.corpus.packing import Packed, open_or_build
from llmtrain.corpus.token_file import TokenFile
from llmtrain.storage.errors import ConfigMismatch, InputMissing, UsageError
from llmtrain.storage.manifest import sha256_file
from llmtrain.training.config import DataConfig, TrainConfig
from llmtrain.training.validate import HeldOut

MAX_SEQ_LEN = (1 << 31) - 1
"""Positions are 32-bit numbers."""


def open_corpus(config: TrainConfig) -> tuple[TrainConfig, SampleOrder, list[HeldOut]]:
    """Opens and checks every file of the run, before anything is written: (resolved configuration, order, held-out)."""
    data = with_absolute_paths(config.data)
    vocab_size, eos_id = config.model.vocab_size, config.data.eos_id
    sources = open_sources(config.data.tokens, vocab_size, eos_id)
    config = resolve(config, sources)
    order = order_of_run(config, sources)
    if config.data.document_mask:
        check_document_mask(order)
    validation = []
    if config.data.val_tokens:
        validation = open_sources(config.data.val_tokens, vocab_size, eos_id, "--val-tokens")
        for source in validation:
            held_out = SampleOrder([source], config.data.seq_len, 0)  # for its checks; they are no mixture
            if config.data.document_mask:
                check_document_mask(held_out)
        resolve(config, sources + validation)
    of_text = open_text(config, order)
    init_from, branch_from = config.run.init_from, config.run.branch_from
    run = dataclasses.replace(
        config.run,
        init_from=None if init_from is None else init_from.absolute(),
        branch_from=None if branch_from is None else str(Path(branch_from).absolute()),
    )
    return dataclasses.replace(config, data=data, run=run), order, [*validation, *of_text]


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """As config.toml has it, which is read again by a process that may have been started elsewhere. Raises UsageError
    where an option's value names no file."""

    def absolute(specs: tuple[str, ...], option: str) -> tuple[str, ...]:
        return tuple(absolute_spec(spec, option) for spec in specs)

    return dataclasses.replace(
        data,
        tokens=absolute(data.tokens, "--tokens"),
        val_tokens=absolute(data.val_tokens, "--val-tokens"),
        val_choices=absolute(data.val_choices, "--val-choices"),
        val_text=absolute(data.val_text, "--val-text"),
    )


def open_sources(specs: tuple[str, ...], vocab_size: int, eos_id: int | None, option: str = "--tokens") -> list[Source]:
    """Opens the token files that `option` names; vocab_size 0: as their manifests say."""
    return [
        Source(name, TokenFile.open(path, vocab_size or None, eos_id), weight, budget)
        for name, path, weight, budget in parse_sources(specs, option)
    ]


def order_of_run(config: TrainConfig, sources: list[Source]) -> SampleOrder:
    """The samples of a run. Packs its token files into windows where it asks for that and none are there."""
    if config.data.packing == "documents":
        sources = [dataclasses.replace(s, cut=open_or_build(s.file, config.data.seq_len)) for s in sources]
    return SampleOrder(sources, config.data.seq_len, config.run.seed)


def resolve(config: TrainConfig, sources: list[Source]) -> TrainConfig:
    """Fills in what the corpus decides: the vocabulary and the longest context."""
    made_by = {s.file.manifest["tokenizer"]["sha256"]: s for s in sources if s.file.manifest}
    if len(made_by) > 1:
        one, other = list(made_by.values())[:2]
        raise ConfigMismatch(
            f"{one.file.path} and {other.file.path} come from different tokenizers: tokenize both with one"
        )
    model = config.model
    vocab_size = model.vocab_size or max(source.file.vocab_size for source in sources)
    max_seq_len = model.max_seq_len or 2 * config.data.seq_len
    if max_seq_len > MAX_SEQ_LEN:
        raise UsageError(f"--max-seq-len {max_seq_len} is beyond {MAX_SEQ_LEN}, where positions end: lower it")
    if max_seq_len < config.data.seq_len:
        raise UsageError(f"--max-seq-len {max_seq_len} is below --seq-len {config.data.seq_len}: raise it")
    return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=vocab_size, max_seq_len=max_seq_len))


def corpus_identity(sources: list[Source]) -> list[dict[str, Any]]:
    """What makes a corpus the same one, wherever its files lie."""
    return [
        {
            "weight": s.weight,
            **({} if s.budget is None else {"budget": s.budget}),
            "tokens": s.file.tokens,
            "sha256": s.file.content_sha256(),
            **({"packed_sha256": s.cut.header["sha256"]} if isinstance(s.cut, Packed) else {}),
            "tokenizer": s.file.manifest["tokenizer"]["sha256"] if s.file.manifest else None,
        }
        for s in sources
    ]


def open_text(config: TrainConfig, order: SampleOrder) -> list[Choices | HeldOutText]:
    """What there is to evaluate on that is not tokenized yet. Raises InputMissing where the corpus' tokenizer is not
    found, UsageError for two of one name, and as `read_choices` and `read_text`."""
    data = config.data
    if not (data.val_choices or data.val_text):
        return []
    path = tokenizer_of(config.run.run_dir, order)
    if path is None:
        raise InputMissing(
            f"{config.run.run_dir / 'tokenizer.json'}: the corpus' tokenizer is neither there nor where the corpus was "
            "made, and --val-choices and --val-text need it: copy it there"
        )
    from llmtrain.corpus import tokenizer as tokenizers  # here, because most runs never need the library

    tokenizer = tokenizers.load(path)
    found: list[Choices | HeldOutText] = []
    for spec in data.val_choices:
        found.append(read_choices(spec, tokenizer, data.seq_len, "--val-choices"))
    for spec in data.val_text:
        fields = (data.val_text_field, data.val_kind_field)
        found.append(read_text(spec, tokenizer, data.seq_len, *fields, option="--val-text"))
    tokenized = parse_sources(data.val_tokens, "--val-tokens") if data.val_tokens else []
    names = [one.name for one in (*tokenized, *found)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two held-out files are called {name}: tell them apart with NAME=PATH")
    return found


def tokenizer_of(run_dir: Path, order: SampleOrder) -> Path | None:
    """Where the corpus' tokenizer is: in the run directory, where the corpus was made, or beside the corpus; None where
    it is in none of them, or not known."""
    manifest = order.sources[0].file.manifest
    if manifest is None:
        return run_dir / "tokenizer.json" if (run_dir / "tokenizer.json").is_file() else None
    named = Path(manifest["tokenizer"]["file"])
    places = (run_dir / "tokenizer.json", named, order.sources[0].file.path.parent / named.name)
    matches = (path for path in places if path.is_file() and sha256_file(path) == manifest["tokenizer"]["sha256"])
    return next(matches, None)
