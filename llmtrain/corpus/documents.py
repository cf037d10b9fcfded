"""Which files a corpus is made of, and the documents in them as a stream of bytes."""

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NamedTuple

from llmtrain.storage.errors import BadData, InputMissing, UsageError, read_error

FILE = "file"
LINE = "line"

BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """One document, not known to be UTF-8 yet, and where it comes from."""

    file: int
    """Number of its file in the list of files."""
    begin: int
    """Byte of the file where `data` begins."""
    size: int
    """Bytes of the file that it stands for: its line end, its separator and a byte order mark count, so that the sizes
    of a file's documents, where it has any, add up to the file's."""
    data: bytes


def find_files(inputs: Sequence[str], exclude: Iterable[Path] = ()) -> list[Path]:
    """The files that `inputs` (files, folders, globs) name, each once: in the order of the inputs and, within one,
    of the bytes of their paths. Below a folder, names that begin with a dot are left out, and so are devices, pipes
    and links to folders. `exclude` are files that are never input, such as this command's own output.

    Raises InputMissing for an input that names nothing.
    """
    seen = {os.path.realpath(path) for path in exclude}
    found = []
    for name in inputs:
        for path in _expand(name):
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                found.append(path)
    return found


def refuse_to_overwrite(inputs: Iterable[str | os.PathLike[str]], outputs: Iterable[Path]) -> None:
    """Raises UsageError where a file that was named to be read is one that would be written."""
    read = {os.path.realpath(path) for path in inputs}
    for path in outputs:
        if os.path.realpath(path) in read:
            raise UsageError(f"{shown(path)}: is read and would be written too: give --output another name")


def _expand(name: str) -> list[Path]:
    # A file whose name looks like a glob is that file.
    if os.path.isdir(name):
        return _below(name)
    if os.path.exists(name):
        return [Path(name)]
    if not glob.has_magic(name):
        raise InputMissing(f"{name}: no such file or folder: put text there, or name it with --input")
    matches = sorted(glob.glob(name, recursive=True), key=os.fsencode)
    if not matches:
        raise InputMissing(f"{name}: no file matches: check the pattern given as --input")
    # `**` matches folders and what is in them; a folder that matched by itself means what is below it.
    return [path for match in matches for path in (_below(match) if os.path.isdir(match) else [Path(match)])]


def _below(folder: str) -> list[Path]:
    def cannot_list(error: OSError) -> None:
        raise read_error(error, error.filename or folder)

    found = []
    for parent, folders, names in os.walk(folder, onerror=cannot_list):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return [Path(path) for path in sorted(found, key=os.fsencode) if os.path.isfile(path)]


def read_documents(files: Sequence[Path], document: str = FILE) -> Iterator[Document]:
    """The documents of `files` in order; empty ones too, so that they can be counted.

    `document` says what one is: FILE; LINE, without its line end ("\\n" or "\\r\\n"); or else the text of a line that
    separates documents, whose own lines stay whole, the last line end included. A byte order mark at the beginning of a
    file is dropped. Raises InputMissing, StorageFailure.
    """
    for number, path in enumerate(files):
        try:
            with BufferedReader(FileIO(path), 1 << 20) as stream:
                mark = len(BOM) if stream.peek(len(BOM)).startswith(BOM) else 0
                stream.read(mark)
                if document == FILE:
                    data = stream.read()
                    yield Document(number, mark, mark + len(data), data)
                elif document == LINE:
                    yield from _lines(number, stream, mark)
                else:
                    yield from _separated(number, stream, mark, os.fsencode(document))
        except OSError as error:
            raise read_error(error, path) from error


def _lines(number: int, stream: Iterable[bytes], mark: int) -> Iterator[Document]:
    begin, before = mark, mark
    for line in stream:
        data = line
        if line.endswith(b"\n"):
            data = line[: -2 if line.endswith(b"\r\n") else -1]
        yield Document(number, begin, before + len(line), data)
        begin, before = begin + len(line), 0


def _separated(number: int, stream: Iterable[bytes], mark: int, separator: bytes) -> Iterator[Document]:
    lines: list[bytes] = []
    begin, before, size = mark, mark, 0
    for line in stream:
        size += len(line)
        if line.rstrip(b"\r\n") != separator:
            lines.append(line)
            continue
        yield Document(number, begin, before + size, b"".join(lines))
        lines, begin, before, size = [], begin + size, 0, 0
    if lines:
        yield Document(number, begin, before + size, b"".join(lines))


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


def not_utf8(path: Path, place: int) -> BadData:
    """The error for a document of `path` that is not UTF-8 at the byte `place` of the file."""
    return BadData(
        f"{shown(path)}: not UTF-8 at byte {place}: convert the file, or leave such documents out with --on-bad skip"
    )


def shown(path: Path) -> str:
    """`path` as it can be printed: a name need not be UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def plural(count: int, noun: str) -> str:
    """`count` of `noun`, for a line that a person reads."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def file_size(path: Path) -> int:
    """In bytes. Raises InputMissing, StorageFailure."""
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise read_error(error, path) from error
