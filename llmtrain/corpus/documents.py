"""The documents of a corpus as a stream of bytes, damaged ones among them."""

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from llmtrain.corpus.inputs import Input, shown
from llmtrain.corpus.streams import Broken, Damage, Progress, Text
from llmtrain.storage.errors import BadData, read_error

FILE = "file"
LINE = "line"

INVALID_UTF8 = "invalid_utf8"


@dataclass(frozen=True)
class Reading:
    """How documents are taken out of inputs."""

    document: str = FILE
    """Of plain text: FILE; LINE, without its line end ("\\n" or "\\r\\n"); or else the text of a line that separates
    documents, whose own lines stay whole, the last line end included."""


class Document(NamedTuple):
    """One document, not known to be UTF-8 yet, and where it comes from."""

    file: int
    """Number of its input in the list of inputs."""
    ordinal: int
    """Number of the document in its input, from 0; empty and damaged ones count."""
    place: int
    """Where it begins: the byte of the (decompressed) text where `data` begins; see inputs.PLACES for other forms."""
    size: int
    """Bytes of text that it stands for. In plain text its line end, its separator and a byte order mark count, so that
    the sizes of an undamaged file's documents, where it has any, add up to the file's."""
    data: bytes
    """Empty where it is damaged."""
    damage: Damage | None = None


def read_documents(
    inputs: Sequence[Input], reading: Reading, progress: Progress | None = None, start: tuple[int, int] = (0, 0)
) -> Iterator[Document]:
    """The documents of `inputs` in order; empty and damaged ones too, so that they can be counted.

    Reading again gives the same documents; `start` (input, ordinal) leaves out those before it. A byte order mark at
    the beginning of an input is dropped. An input that is damaged from some place on ends there with a document whose
    damage is "truncated"; the whole documents before it were given. `progress` is told how much was read. Raises
    InputMissing, StorageFailure.
    """
    progress = progress or Progress()
    for file in range(start[0], len(inputs)):
        documents = _read(file, inputs[file], reading, progress)
        with closing(documents):
            yield from islice(documents, start[1] if file == start[0] else 0, None)


def _read(file: int, input: Input, reading: Reading, progress: Progress) -> Generator[Document, None, None]:
    try:
        with Text(input, progress, whole=reading.document == FILE) as text:
            if reading.document == FILE:
                yield _whole(file, text)
            elif reading.document == LINE:
                yield from _lines(file, text)
            else:
                yield from _separated(file, text, os.fsencode(reading.document))
    except OSError as error:
        raise read_error(error, input.name) from error


def _whole(file: int, text: Text) -> Document:
    """An input that is one document."""
    try:
        data = text.readall()
    except Broken as broken:
        return Document(file, 0, text.mark, 0, b"", broken.damage)
    return Document(file, 0, text.mark, text.mark + len(data), data)


def _lines(file: int, text: Text) -> Iterator[Document]:
    ordinal = begin = 0
    try:
        for line in text.buffered():
            begin = begin or text.mark
            data = line
            if line.endswith(b"\n"):
                data = line[: -2 if line.endswith(b"\r\n") else -1]
            yield Document(file, ordinal, begin, len(line) + (0 if ordinal else text.mark), data)
            begin += len(line)
            ordinal += 1
    except Broken as broken:
        yield Document(file, ordinal, begin, 0, b"", broken.damage)


def _separated(file: int, text: Text, separator: bytes) -> Iterator[Document]:
    lines: list[bytes] = []
    ordinal = begin = size = 0
    try:
        for line in text.buffered():
            begin = begin or text.mark
            size += len(line)
            if line.rstrip(b"\r\n") != separator:
                lines.append(line)
                continue
            yield Document(file, ordinal, begin, size + (0 if ordinal else text.mark), b"".join(lines))
            lines, begin, size = [], begin + size, 0
            ordinal += 1
    except Broken as broken:
        yield Document(file, ordinal, begin, 0, b"", broken.damage)
        return
    if lines:
        yield Document(file, ordinal, begin, size + (0 if ordinal else text.mark), b"".join(lines))


def blocks(documents: Iterable[Document], block_bytes: int) -> Iterator[list[Document]]:
    """Whole documents in runs of at most `block_bytes`; a document that is longer is a block of its own."""
    block: list[Document] = []
    size = 0
    for document in documents:
        # Every document counts for something, or a run of empty ones would be a block without end.
        weight = document.size + 16
        if block and size + weight > block_bytes:
            yield block
            block, size = [], 0
        block.append(document)
        size += weight
    if block:
        yield block


def falls_within(data: bytes | memoryview, share: float) -> bool:
    """Whether a document belongs to the `share` (0 to 1) of all documents that its content chooses.

    Equal documents fall on the same side wherever they stand, and those in a share are in every larger one.
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < share * 2**64


def bad_data(input: Input, place: str, damage: Damage) -> BadData:
    """The error for what stands at `place` (see Input.place) and is no document."""
    where = shown(input.name)
    if damage.reason == INVALID_UTF8:
        what = f"{where}: not UTF-8 at {place}: convert the file"
    else:
        what = f"{where}: {damage.detail}, at {place}: get the file again"
        if damage.reason == "truncated":
            return BadData(f"{what}, or keep the whole documents before the damage with --on-bad skip")
    return BadData(f"{what}, or leave such documents out with --on-bad skip")


def plural(count: int, noun: str) -> str:
    """`count` of `noun`, for a line that a person reads."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
