"""Text into a token file and, where a share is held out, a second one: the work of `tokenize-corpus`."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llmtrain.corpus import shards
from llmtrain.corpus import tokenizer as tokenizer_room
from llmtrain.corpus.config import TokenizeConfig
from llmtrain.corpus.counts import MOST_PRINTED, Counts
from llmtrain.corpus.documents import Document, blocks
from llmtrain.corpus.engine import GIGATOKEN, TOKENIZERS, Engine, choose_engine, pinned_engine
from llmtrain.corpus.inputs import Input, find_inputs, refuse_to_overwrite, shown
from llmtrain.corpus.probe import BYTES_EACH, INPUTS, Probe, draw, expected_bytes, free_bytes, say_what_would_be_written
from llmtrain.corpus.reading import FILE, read_documents
from llmtrain.corpus.resuming import Resumed
from llmtrain.corpus.streams import Progress
from llmtrain.corpus.token_manifest import held_out_path, manifest_bytes, manifest_path, work_folder
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.corpus.workers import Encoded, Task, Workers, encode_blocks
from llmtrain.corpus.writing import Work, journal_engine
from llmtrain.corpus.writing_part import Part, names
from llmtrain.storage.atomic import make_parent
from llmtrain.storage.errors import (
    STOP_SIGNALS,
    BadData,
    ConfigMismatch,
    InputMissing,
    LlmtrainError,
    StopRequested,
    StorageFailure,
    UsageError,
)
from llmtrain.storage.interrupts import interrupts
from llmtrain.storage.manifest import read_json
from llmtrain.storage.units import in_bytes, plural

# Text that a worker gets at once: half a second's work, or 6 ms' of gigatoken's, so the hand-over does not count.
BLOCK_BYTES = {"tokenizers": 1 << 20, "gigatoken": 2 << 20}

# What a kill may cost.
COMMIT_SECONDS = 5.0


def tokenize(config: TokenizeConfig, *, block_bytes: int | None = None, commit_seconds: float = COMMIT_SECONDS) -> None:
    """Writes the token file(s) that `config` asks for and prints a count a file and in all.

    Neither the number of workers nor `block_bytes`, the text that a worker gets at once, shows in the output. It
    appears at the end. What an unfinished run of the same `config` left is gone on from. Raises InputMissing, BadData,
    CannotCreate, StorageFailure, ConfigMismatch; StopRequested on a signal of STOP_SIGNALS.
    """
    with Workers(config.holdout) as workers:
        if not config.dry_run:
            # It gets ready while the inputs are looked for.
            workers.start(1)
        _tokenize(config, workers, block_bytes, commit_seconds)


def _tokenize(config: TokenizeConfig, workers: Workers, block_bytes: int | None, commit_seconds: float) -> None:
    begin = time.perf_counter()
    tokenizer = tokenizer_room.load(config.tokenizer)
    id_type = tokenizer.id_type
    if id_type != "uint16" and config.output.suffix == ".u16":
        raise UsageError(
            f"{config.output}: ids of a vocabulary of {tokenizer.vocab_size:,} take four bytes: name it with --output "
            f"{config.output.with_suffix('.u32')}"
        )
    workers.open(tokenizer, _probably(config))
    outputs = _outputs(config)
    # A folder may well hold what this command itself reads and writes.
    written = [name for path in outputs for name in names(path)]
    refuse_to_overwrite([config.tokenizer, *config.inputs], written)
    field = config.completion_field or config.text_field
    everything = find_inputs(config.inputs, [config.tokenizer, *written], config.format, field)
    files = everything
    asked: dict[str, Any] = {
        "tokenizer": tokenizer.sha256, "holdout": config.holdout, "shard": config.shard, "append": config.append,
        "format": config.format, **asdict(config.reading),
    }  # fmt: skip
    if config.shard:
        number, of = map(int, config.shard.split("/"))
        files = shards.share(everything, number, of)
        asked["split"] = shards.split_hash(everything)
    if config.dry_run:
        _dry_run(config, tokenizer, outputs, everything, files)
        return
    make_parent(outputs[0])
    with _stop_signals(work_folder(outputs[0])) as check, Work(
        outputs, asked, config.append, commit_seconds, id_type
    ) as work:
        files = _not_there_yet(work, files, config, tokenizer)
        counts = Counts(files, config.on_bad, len(outputs))
        _restore(work, counts)
        if not (config.append and not files):
            if work.publishing is None:
                _write_parts(config, tokenizer, work, everything, counts, workers, block_bytes, check)
                workers.end()
            _publish(tokenizer, work, counts)
        else:
            work.discard()
        parts = work.parts
    _summary(config, parts, counts, time.perf_counter() - begin)


def _probably(config: TokenizeConfig) -> str:
    """The engine that will most likely be used."""
    return TOKENIZERS if config.engine == TOKENIZERS else GIGATOKEN


def _outputs(config: TokenizeConfig) -> list[Path]:
    outputs = [config.output] + ([held_out_path(config.output)] if config.holdout else [])
    if config.shard:
        number, of = map(int, config.shard.split("/"))
        outputs = [shards.part_path(path, number, of) for path in outputs]
    return outputs


def _not_there_yet(work: Work, files: list[Input], config: TokenizeConfig, tokenizer: Tokenizer) -> list[Input]:
    """With --append those of `files` that the token file was not made of. Raises InputMissing, ConfigMismatch."""
    if not config.append:
        return files
    base = work.parts[0].base
    if base is None:
        raise InputMissing(f"{config.output}: is no token file with a manifest to append to: leave --append out")
    for part in work.parts:
        if part.base and (part.base.get("mask") is not None) != part.masked:
            has, give = ("no", "leave --prompt-field out") if part.masked else ("a", "give --prompt-field as then")
            raise ConfigMismatch(f"{part.path}: has {has} loss mask: {give}, or name another --output")
        sha256 = part.base["tokenizer"]["sha256"] if part.base else tokenizer.sha256
        if sha256 != tokenizer.sha256:
            raise ConfigMismatch(f"{part.path}: was made with another tokenizer than {tokenizer.file}: name that one")
    known = {one["path"] for one in base["inputs"]}
    new = [one for one in files if one.size is None or one.name not in known]
    if len(new) < len(files):
        print(f"{plural(len(files) - len(new), 'input')} left out, in {shown(config.output)} already")
    return new


def _restore(work: Work, counts: Counts) -> None:
    """Puts the journal's counts into `counts`. Raises ConfigMismatch where an input that was read is another now."""
    for file, record in work.inputs.items():
        one = counts.files[file] if file < len(counts.files) else None
        same = one and (one.name, one.size, one.version) == (record.name, record.size, record.version)
        if not same:
            raise ConfigMismatch(
                f"{shown(record.name)}: was changed, moved or left out since {work.folder} was begun with it: "
                "put it back, or remove that folder to start over"
            )
        counts.restore(record)
    if counts.on_bad == "error" and counts.damaged():
        raise ConfigMismatch(f"{work.folder}: was begun with --on-bad skip: say that again, or remove the folder")


def _engine(
    config: TokenizeConfig, tokenizer: Tokenizer, outputs: list[Path], pinned: dict[str, str] | None, probe: Probe
) -> Engine:
    """The one that is `pinned`; else that of another share of the same corpus; else the one to be had. Prints why."""
    where = work_folder(outputs[0])
    if pinned is None and config.append:
        pinned, where = read_json(manifest_path(outputs[0]))["engine"], outputs[0]
    if pinned is None and config.shard:
        for path in shards.find_parts(config.output) or outputs:
            if path not in outputs and manifest_path(path).exists():
                manifest = read_json(manifest_path(path))
                if manifest["tokenizer"]["sha256"] == tokenizer.sha256:
                    pinned, where = manifest["engine"], path
            elif path not in outputs and (begun := journal_engine(path)):
                pinned, where = begun, work_folder(path)
    if pinned is not None:
        return pinned_engine(tokenizer, pinned, str(where), config.engine)
    engine, why_slow = choose_engine(tokenizer, config.engine, probe.texts)
    if why_slow:
        tqdm.write(why_slow)
    return engine


def _dry_run(
    config: TokenizeConfig, tokenizer: Tokenizer, outputs: list[Path], everything: list[Input], files: list[Input]
) -> None:
    probe = draw(everything, config.reading)
    engine = _engine(config, tokenizer, outputs, None, probe)
    expected = expected_bytes(probe, engine, files, config.reading)
    say_what_would_be_written(outputs[0], expected, files, engine)


def _write_parts(
    config: TokenizeConfig,
    tokenizer: Tokenizer,
    work: Work,
    everything: list[Input],
    counts: Counts,
    workers: Workers,
    block_bytes: int | None,
    check: Callable[[], None],
) -> None:
    """Encodes and writes what is not written yet."""
    files = counts.files
    workers.start(_how_many(config, counts, block_bytes or BLOCK_BYTES[_probably(config)]))
    known = work.engine or config.append
    probe = Probe() if known else draw(everything, config.reading)
    progress = Progress()
    stream = Resumed(files, work)
    documents: Iterator[Document] = stream.skip_what_was_read(
        read_documents(files, config.reading, progress, stream.start, unread=bool(known or probe.texts))
    )
    if not known and not probe.texts:
        head = []
        for document in documents:
            head.append(document)
            probe.add([document], BYTES_EACH)
            if probe.text >= INPUTS * BYTES_EACH:
                break
        documents = chain(head, documents)
    engine = _engine(config, tokenizer, work.outputs, work.engine, probe)
    _warn_of_a_small_disk(config, engine, probe, files)
    work.start({"name": engine.name, "version": engine.version})
    if work.committed:
        tqdm.write(f"{shown(work.folder)}: goes on after {sum(counts.bytes) / 1e6:,.1f} MB of text")
    block_bytes = block_bytes or BLOCK_BYTES[engine.name]
    workers.start(_how_many(config, counts, block_bytes))
    tasks = encode_blocks(stream.watch(blocks(documents, block_bytes)), workers, engine, block_bytes, check)
    done = sum(file.size or 0 for file in files[: work.at[0]])
    # A bar where stderr is a terminal.
    bar = tqdm(total=counts.total, initial=done, unit="B", unit_scale=True, disable=None, desc="tokenizing")
    try:
        with bar, closing(tasks):
            for task in tasks:
                counts.check(task)
                _write(work.parts, counts, task)
                counts.report(task.files[-1])
                work.commit_when_due((task.files[-1], task.ordinals[-1] + 1), stream.digests.popleft(), counts)
                bar.update(done + progress.bytes - bar.n)
            counts.report(len(files))
    except (StopRequested, StorageFailure):
        # What failed to be written was cut off again, which made room for this.
        if work.at > (0, 0):
            with suppress(LlmtrainError):
                work.commit(counts)
        raise
    added = [part.documents - (part.base["documents"] if part.base else 0) for part in work.parts]
    if not added[0] and not config.append and not config.shard:
        work.discard()
        raise BadData(_nothing(config, files, sum(added)))


def _how_many(config: TokenizeConfig, counts: Counts, block_bytes: int) -> int:
    """Workers: no more than there are blocks, where one can tell."""
    workers = config.workers or _cores()
    if counts.total is None or any(file.compression for file in counts.files):
        return workers
    return min(workers, counts.total // block_bytes + 1)


def _warn_of_a_small_disk(config: TokenizeConfig, engine: Engine, probe: Probe, files: list[Input]) -> None:
    expected = expected_bytes(probe, engine, files, config.reading) if probe.stored else None
    if expected and expected > (free := free_bytes(config.output.parent)):
        tqdm.write(
            f"{shown(config.output)}: about {in_bytes(expected)} will be written, its disk has {in_bytes(free)} free: "
            "make room in time; should it become full, the same command goes on afterwards"
        )


def _publish(tokenizer: Tokenizer, work: Work, counts: Counts) -> None:
    shard = None
    if work.asked["shard"]:
        number, of = map(int, work.asked["shard"].split("/"))
        shard = {"number": number, "of": of, "split": work.asked["split"]}
    engine = work.engine
    assert engine

    def manifest(part: Part, number: int, hashes: list[str], of_mask: list[str] | None) -> bytes:
        return manifest_bytes(
            tokens=part.tokens,
            documents=part.documents,
            max_id=part.max_id,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer=part.base["tokenizer"] if part.base else {"file": tokenizer.file, "sha256": tokenizer.sha256},
            engine=engine,
            dtype=tokenizer.id_type,
            sha256=hashes,
            mask=None if of_mask is None else {"loss_tokens": part.loss_tokens, "sha256": of_mask},
            inputs=(part.base["inputs"] if part.base else []) + counts.inputs(number),
            shard=shard,
        )

    work.publish(counts, manifest, keep_empty=shard is not None)


def _cores() -> int:
    """Cores that this process may use; where that cannot be asked, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(parts: list[Part], counts: Counts, task: Task) -> None:
    """Each document of an encoded block into the part that it belongs to: all of them, or none."""
    encoded = task.encoded
    assert encoded is not None
    kept = encoded.lengths > 0
    files = np.array(task.files)
    before = [part.state() for part in parts]
    sides = list(zip(parts, (kept & ~encoded.held_out, kept & encoded.held_out), strict=False))
    try:
        for part, mine in sides:
            ids = encoded.ids if (mine == kept).all() else _ids_of(encoded, mine)
            part.add(ids, encoded.lengths[mine], encoded.of_prompt[mine])
    except LlmtrainError:
        for part, state in zip(parts, before, strict=True):
            part.cut(state)
        raise
    counts.add(task)
    for number, (_, mine) in enumerate(sides):
        counts.add_written(number, encoded.lengths[mine], files[mine])


def _ids_of(encoded: Encoded, mine: np.ndarray) -> list[np.ndarray]:
    """The ids of those documents."""
    if not mine.any():
        return []
    ids = encoded.ids[0] if len(encoded.ids) == 1 else np.concatenate(encoded.ids)
    borders = np.flatnonzero(np.diff(mine, prepend=False, append=False))
    if len(borders) > 64:
        return [ids[np.repeat(mine, encoded.lengths)]]
    ends = np.concatenate([[0], np.cumsum(encoded.lengths)])[borders].tolist()
    return [ids[begin:end] for begin, end in zip(ends[::2], ends[1::2], strict=True)]


def _nothing(config: TokenizeConfig, files: list[Input], held_out: int) -> str:
    where = ", ".join(config.inputs)
    if held_out == 1:
        return f"{where}: its only document fell into the held-out share of {config.holdout}: {_more_documents(config)}"
    if held_out:
        return f"{where}: all documents ({held_out}) fell into the held-out share of {config.holdout}: lower --holdout"
    if not files:
        return f"{where}: no files in it: check what --input names"
    return f"{where}: no document that holds text in {plural(len(files), 'file')}: check what --input names"


def _more_documents(config: TokenizeConfig) -> str:
    """What makes documents enough to hold some out and keep some."""
    if config.document == FILE and config.completion_field is None:
        return "a text file is one document by default, --document line or the text of a line between two makes many"
    return "add documents, or give --holdout 0"


def _summary(config: TokenizeConfig, parts: list[Part], counts: Counts, seconds: float) -> None:
    for part, note in zip(parts, ("", " (held out)"), strict=False):
        if part.documents:
            of_loss = f", {part.loss_tokens:,} tokens ({part.loss_tokens / part.tokens:.1%}) in the loss" * part.masked
            print(f"{shown(part.path)}: {part.tokens:,} tokens, {plural(part.documents, 'document')}{of_loss}{note}")
        else:
            documents = parts[0].documents
            few = f"not written, none of {plural(documents, 'document')} fell into the share held out"
            # Of a single document a larger share would leave none to train on.
            larger = "raise --holdout; " * (documents > 1)
            print(f"{shown(part.path)}: {few}: {larger}{_more_documents(config)}")
    nbytes, tokens = sum(counts.bytes), int(counts.tokens.sum())
    left_out: dict[str, int] = {}
    for one in counts.left_out:
        for reason, count in one.items():
            left_out[reason] = left_out.get(reason, 0) + count
    mb = nbytes / 1e6
    if not counts.files:
        return
    line = f"in all: {plural(len(counts.files), 'file')}, {mb:,.1f} MB, {nbytes / max(tokens, 1):.2f} bytes a token, "
    line += f"{seconds:,.1f} s, {mb / seconds:,.1f} MB/s"
    print(line + "".join(f", {count:,} {reason} left out" for reason, count in sorted(left_out.items())))
    if len(counts.files) > MOST_PRINTED:
        print(f"the count of each file is in {shown(manifest_path(parts[0].path))}")


@contextmanager
def _stop_signals(folder: Path) -> Iterator[Callable[[], None]]:
    """Gives a function that raises StopRequested after a signal of STOP_SIGNALS.

    The signals only leave a note, so that they cannot break into the middle of a rename. One that was ignored before
    (nohup) stays ignored.
    """
    got: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        interrupts.hold()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda received, _: got.append(received))
        if (waiting := interrupts.take()) is not None:
            got.append(waiting)

    def check() -> None:
        if got:
            name = signal.Signals(got[0]).name
            raise StopRequested(f"stopped by {name}, saved in {folder}: the same command goes on")

    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupts.release()
