"""The documents of a list of inputs as one stream, whatever form each input has; plain text is cut here."""

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from llmtrain.corpus.documents import Document
from llmtrain.corpus.inputs import JSONL, PARQUET, TEXT, Input
from llmtrain.corpus.json_lines import json_documents
from llmtrain.corpus.parquet import parquet_documents
from llmtrain.corpus.streams import Broken, Progress, Text, is_small, read_small
from llmtrain.storage.errors import read_error

FILE = "file"
LINE = "line"


@dataclass(frozen=True)
class Reading:
    """How documents are taken out of inputs."""

    document: str = FILE
    """Of plain text: FILE; LINE, without its line end ("\\n" or "\\r\\n"); or else the text of a line that separates
    documents, whose own lines stay whole, the last line end included."""
    text_field: str = "text"
    """Of JSON Lines and Parquet: the field that is the text; of a nested one the names joined by dots."""
    prompt_field: str | None = None
    completion_field: str | None = None
    """In place of the text: a field that is read and one that is to be learned. Both or neither."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Those that make a document, the last of them to be learned."""
        return (self.text_field,) if self.completion_field is None else (self.prompt_field or "", self.completion_field)


def read_documents(
    inputs: Sequence[Input],
    reading: Reading,
    progress: Progress | None = None,
    start: tuple[int, int] = (0, 0),
    unread: bool = False,
) -> Generator[Document, None, None]:
    """The documents of `inputs` in order; empty and damaged ones too, so that they can be counted.

    Reading again gives the same documents; `start` (input, ordinal) leaves out those before it. A byte order mark at
    the beginning of an input is dropped. An input that is damaged from some place on ends there with a document whose
    damage is "truncated"; the whole documents before it were given. `progress` is told how much was read. With `unread`
    the small plain files that are one document are left for others to read, with `read_whole`. Raises InputMissing,
    StorageFailure.
    """
    progress = progress or Progress()
    for file in range(start[0], len(inputs)):
        input, first = inputs[file], start[1] if file == start[0] else 0
        if input.format == TEXT and reading.document == FILE:
            if first:
                progress.bytes += input.size or 0
            elif unread and is_small(input):
                assert input.size is not None
                progress.bytes += input.size
                yield Document(file, 0, 0, input.size, b"", unread=input.name)
            else:
                yield read_whole(file, input, progress)
            continue
        with closing(_read(file, input, reading, progress, first)) as documents:
            yield from documents


def read_whole(file: int, input: Input, progress: Progress) -> Document:
    """Input number `file`, plain text, as one document. Raises as `read_documents`."""
    try:
        if small := read_small(input, progress):
            data, mark = small
            return Document(file, 0, mark, mark + len(data), data)
        with Text(input, progress, whole=True) as text:
            try:
                data = text.readall()
            except Broken as broken:
                return Document(file, 0, text.mark, 0, b"", broken.damage)
            return Document(file, 0, text.mark, text.mark + len(data), data)
    except OSError as error:
        raise read_error(error, input.name) from error


def _read(file: int, input: Input, reading: Reading, progress: Progress, start: int) -> Generator[Document, None, None]:
    try:
        if input.format == PARQUET:
            yield from parquet_documents(file, input, reading.fields, progress, start)
            return
        with Text(input, progress) as text:
            if input.format == JSONL:
                documents = json_documents(file, text, reading.fields)
            elif reading.document == LINE:
                documents = _lines(file, text)
            else:
                documents = _separated(file, text, os.fsencode(reading.document))
            yield from islice(documents, start, None)
    except OSError as error:
        raise read_error(error, input.name) from error


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
