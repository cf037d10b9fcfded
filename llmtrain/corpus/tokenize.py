"""Text files into a token file and, where a share is held out, a second one: the work of `tokenize-corpus`."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from llmtrain.corpus import tokenizer as tokenizer_room
from llmtrain.corpus.config import TokenizeConfig
from llmtrain.corpus.documents import bad_data, blocks, plural
from llmtrain.corpus.inputs import Input, find_inputs, refuse_to_overwrite, shown, total_size
from llmtrain.corpus.reading import read_documents
from llmtrain.corpus.streams import Damage, Progress
from llmtrain.corpus.token_file import BlockHashes, docs_path, manifest_path, write_manifest
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.corpus.workers import Task, encode_blocks
from llmtrain.storage.atomic import atomic_file
from llmtrain.storage.errors import BadData, StopRequested, write_error

# Text that a worker gets at once: half a second's work, so the hand-over does not count, and little memory.
BLOCK_BYTES = 1 << 20

# Of each reason to leave documents of a file out, the manifest names so many places.
FIRST_PLACES = 5

# A terminal's worth: the counts of more files would push everything else out of sight, and the manifest has them.
MOST_PRINTED = 100


def held_out_path(output: Path) -> Path:
    """Where the held-out documents of the token file `output` go: X.u16 -> X.val.u16."""
    return output.with_suffix(f".val{output.suffix}")


def tokenize(config: TokenizeConfig, *, block_bytes: int = BLOCK_BYTES) -> None:
    """Writes the token file(s) that `config` asks for and prints a count a file and in all.

    Neither the number of workers nor `block_bytes`, the text that a worker gets at once, shows in the output. All of it
    appears at the end or none. Raises InputMissing, BadData, CannotCreate, StorageFailure; StopRequested on SIGINT,
    SIGTERM and SIGHUP.
    """
    begin = time.perf_counter()
    tokenizer = tokenizer_room.load(config.tokenizer)
    tokenizer.require_u16()
    outputs = [config.output] + ([held_out_path(config.output)] if config.holdout else [])
    # A folder may well hold what this command itself reads and writes.
    written = [name for path in outputs for name in _names(path)]
    refuse_to_overwrite([config.tokenizer, *config.inputs], written)
    files = find_inputs(config.inputs, [config.tokenizer, *written], config.format, config.text_field)
    counts = _Counts(files, config.on_bad)
    workers = config.workers or _cores()
    if counts.total is not None and not any(file.compression for file in files):
        workers = min(workers, counts.total // block_bytes + 1)
    with _stop_signals() as check:
        parts = _write_parts(config, tokenizer, outputs, counts, workers, block_bytes, check)
    _summary(parts, counts, time.perf_counter() - begin)


def _write_parts(
    config: TokenizeConfig,
    tokenizer: Tokenizer,
    outputs: list[Path],
    counts: "_Counts",
    workers: int,
    block_bytes: int,
    check: Callable[[], None],
) -> list["_Part"]:
    """The token files at `outputs`, whole, or nothing there."""
    files = counts.files
    publishing = False
    try:
        with ExitStack() as stack:
            parts = [stack.enter_context(_part(path, len(files))) for path in outputs]
            progress = Progress()
            documents = blocks(read_documents(files, config.reading, progress), block_bytes)
            tasks = encode_blocks(documents, tokenizer, workers, config.holdout, block_bytes, check)
            # A bar where stderr is a terminal.
            bar = tqdm(total=counts.total, unit="B", unit_scale=True, disable=None, desc="tokenizing")
            with bar, closing(tasks):
                for task in tasks:
                    counts.add(task)
                    _write(parts, task)
                    counts.report(task.files[-1], parts)
                    bar.update(progress.bytes - bar.n)
                counts.report(len(files), parts)
            if not parts[0].documents:
                raise BadData(_nothing(config, files, sum(part.documents for part in parts)))
            check()
            publishing = True
            # From here on nothing vouches for the old ids; the new manifests come last.
            for path in outputs:
                _remove(manifest_path(path))
        for part in reversed(parts):
            if part.documents:
                part.write_manifest(tokenizer, counts.inputs(part, with_left_out=part is parts[0]))
            else:
                # A held-out part of an earlier run may hold documents that are trained on now.
                for path in _names(part.path):
                    _remove(path)
    except BaseException:
        if publishing:
            for path in (name for output in outputs for name in _names(output)):
                with suppress(OSError):
                    path.unlink()
        raise
    return parts


def _cores() -> int:
    """Cores that this process may use; where that cannot be asked, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _names(path: Path) -> list[Path]:
    return [manifest_path(path), docs_path(path), path]


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, path, "removed") from error


class _Part:
    """One token file while it is written: its ids and its document index, and what its manifest will say."""

    def __init__(self, path: Path, ids: BinaryIO, docs: BinaryIO, files: int) -> None:
        self.path = path
        self.tokens = self.documents = self.max_id = 0
        self.file_documents = np.zeros(files, np.int64)
        self.file_tokens = np.zeros(files, np.int64)
        self._ids, self._docs, self._hashes = ids, docs, BlockHashes()

    def add(self, ids: np.ndarray, lengths: np.ndarray, files: np.ndarray) -> None:
        """Documents: all their ids (uint16), and of each its length in ids and the number of its file."""
        if not len(lengths):
            return
        data = ids.astype("<u2", copy=False)
        self._ids.write(data.data)
        self._hashes.update(data)
        self._docs.write((self.tokens + np.cumsum(lengths)).astype("<u8").data)
        self.tokens += len(ids)
        self.documents += len(lengths)
        self.max_id = max(self.max_id, int(ids.max()))
        np.add.at(self.file_documents, files, 1)
        np.add.at(self.file_tokens, files, lengths)

    def write_manifest(self, tokenizer: Tokenizer, inputs: list[dict[str, Any]]) -> None:
        write_manifest(
            self.path,
            tokens=self.tokens,
            documents=self.documents,
            max_id=self.max_id,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer={"file": tokenizer.file, "sha256": tokenizer.sha256},
            engine=tokenizer_room.ENGINE,
            sha256=self._hashes.hexdigests(),
            inputs=inputs,
        )


class _NothingToKeep(Exception):
    pass


@contextmanager
def _part(path: Path, files: int) -> Iterator[_Part]:
    """A part under temporary names, which has its final ones at the end unless no document came."""
    if os.path.isdir(manifest_path(path)):
        raise write_error(IsADirectoryError(errno.EISDIR, ""), manifest_path(path), "created")
    with suppress(_NothingToKeep), atomic_file(docs_path(path)) as docs, atomic_file(path) as ids:
        part = _Part(path, ids, docs, files)
        yield part
        if not part.documents:
            raise _NothingToKeep


def _write(parts: list[_Part], task: Task) -> None:
    """Each document of an encoded block into the part that it belongs to."""
    encoded = task.encoded
    assert encoded is not None
    kept = encoded.lengths > 0
    files = np.array(task.files)
    for part, mine in zip(parts, (kept & ~encoded.held_out, kept & encoded.held_out), strict=False):
        of_ids = np.repeat(mine, encoded.lengths)
        ids = encoded.ids if of_ids.all() else encoded.ids[of_ids]
        part.add(ids, encoded.lengths[mine], files[mine])


class _Counts:
    """What came of each input file."""

    def __init__(self, files: list[Input], on_bad: str) -> None:
        self.files, self.on_bad = files, on_bad
        self.total = total_size(files)
        self.bytes = [0] * len(files)
        self.left_out: list[dict[str, int]] = [{} for _ in files]
        self.first: list[dict[str, list[str]]] = [{} for _ in files]
        self._reported = 0

    def add(self, task: Task) -> None:
        """Raises BadData for a damaged document that may not be left out."""
        assert task.encoded is not None
        for file, size in zip(task.files, task.sizes, strict=True):
            self.bytes[file] += size
        for number, reason, offset in task.encoded.left_out:
            file, damage = task.files[number], task.damages[number] or Damage(reason, "")
            place = self.files[file].place(task.places[number], offset)
            if damage.reason != "empty" and self.on_bad == "error":
                raise bad_data(self.files[file], place, damage)
            self.left_out[file][damage.reason] = self.left_out[file].get(damage.reason, 0) + 1
            first = self.first[file].setdefault(damage.reason, [])
            if len(first) < FIRST_PLACES:
                first.append(place)

    def report(self, end: int, parts: list[_Part]) -> None:
        """Prints the counts of the files before number `end` that were not printed yet; of very many, only those of
        files with a damaged document."""
        lines = []
        for file in range(self._reported, end):
            tokens = sum(int(part.file_tokens[file]) for part in parts)
            documents = sum(int(part.file_documents[file]) for part in parts)
            line = f"{shown(self.files[file].name)}: {tokens:,} tokens, {plural(documents, 'document')}"
            for reason, count in sorted(self.left_out[file].items()):
                line += f", {count:,} {reason} left out (the first at {self.first[file][reason][0]})"
            if len(self.files) <= MOST_PRINTED or set(self.left_out[file]) - {"empty"}:
                lines.append(line)
        if lines:
            tqdm.write("\n".join(lines))
        self._reported = max(self._reported, end)

    def inputs(self, part: _Part, with_left_out: bool) -> list[dict[str, Any]]:
        """The manifest's `inputs` of a part. What was left out is said once, with the part that is trained on."""
        return [
            {
                "path": one.name,
                "bytes": self.bytes[file],
                "documents": int(part.file_documents[file]),
                "tokens": int(part.file_tokens[file]),
                "skipped": dict(sorted(self.left_out[file].items())) if with_left_out else {},
            }
            | ({"skipped_at": dict(sorted(self.first[file].items()))} if with_left_out and self.first[file] else {})
            for file, one in enumerate(self.files)
        ]


def _nothing(config: TokenizeConfig, files: list[Input], held_out: int) -> str:
    where = ", ".join(config.inputs)
    if held_out:
        return f"{where}: all documents ({held_out}) fell into the held-out share of {config.holdout}: lower --holdout"
    if not files:
        return f"{where}: no files in it: check what --input names"
    return f"{where}: no document that holds text in {plural(len(files), 'file')}: check what --input names"


def _summary(parts: list[_Part], counts: _Counts, seconds: float) -> None:
    for part, note in zip(parts, ("", " (held out)"), strict=False):
        if part.documents:
            print(f"{shown(part.path)}: {part.tokens:,} tokens, {plural(part.documents, 'document')}{note}")
        else:
            few = f"not written, none of {plural(parts[0].documents, 'document')} fell into the share held out"
            print(f"{shown(part.path)}: {few}: raise --holdout, or see --document for what a document is")
    nbytes, tokens = sum(counts.bytes), sum(part.tokens for part in parts)
    left_out: dict[str, int] = {}
    for one in counts.left_out:
        for reason, count in one.items():
            left_out[reason] = left_out.get(reason, 0) + count
    mb = nbytes / 1e6
    line = f"in all: {plural(len(counts.files), 'file')}, {mb:,.1f} MB, {nbytes / tokens:.2f} bytes a token, "
    line += f"{seconds:,.1f} s, {mb / seconds:,.1f} MB/s"
    print(line + "".join(f", {count:,} {reason} left out" for reason, count in sorted(left_out.items())))
    if len(counts.files) > MOST_PRINTED:
        print(f"the count of each file is in {shown(manifest_path(parts[0].path))}")


@contextmanager
def _stop_signals() -> Iterator[Callable[[], None]]:
    """Gives a function that raises StopRequested after SIGINT, SIGTERM or SIGHUP.

    The signals only leave a note, so that they cannot break into the middle of a rename. One that was ignored before
    (nohup) stays ignored.
    """
    got: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda received, _: got.append(received))

    def check() -> None:
        if got:
            name = signal.Signals(got[0]).name
            raise StopRequested(f"stopped by {name}: nothing was written, run the command again to start over")

    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
