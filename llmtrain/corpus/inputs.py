"""Which inputs a corpus is made of: files, folders, globs, remote files, standard input; and the form of each."""

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from llmtrain.corpus.remote import find_remote, is_remote, shown_url
from llmtrain.storage.errors import InputMissing, UsageError, read_error

STDIN = "-"

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"

# Names that say what is in a file. Any other is plain text: source code has endings without number, or none.
SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
GZIP, ZSTD = "gzip", "zstd"
COMPRESSIONS = {".gz": GZIP, ".zst": ZSTD, ".zstd": ZSTD}

# What the place of a document in its input counts, from 0 for bytes and from 1 for the others.
PLACES = {TEXT: "byte", JSONL: "line", PARQUET: "row"}


@dataclass(frozen=True)
class Input:
    """One file to read, or standard input."""

    name: str
    """A path, `-`, or a URL without the secrets in it."""
    format: str
    """TEXT, JSONL or PARQUET: what it holds once it is decompressed."""
    compression: str
    """GZIP or ZSTD where its name says that it must be that; else "", and it is looked at."""
    size: int | None
    """Bytes as they are stored; None where nothing says it before the end (standard input, a pipe)."""
    version: str
    """Differs when its content was changed: the time of a file's last change in ns; "" where nothing tells."""
    url: str = ""
    """What opens a remote file; "" for others."""

    def place(self, place: int, offset: int = 0) -> str:
        """A document's place in it (see Document) as a person reads it; `offset` is a byte of the document."""
        return f"{PLACES[self.format]} {place + (offset if self.format == TEXT else 0)}"


def find_inputs(
    names: Sequence[str], exclude: Iterable[Path] = (), format: str = "auto", text_field: str | None = None
) -> list[Input]:
    """The inputs that `names` (files, folders, globs, URLs, `-` for standard input) mean, each once: in the order of
    the names and, within one, of the bytes of their paths. Below a folder, names that begin with a dot are left
    out, and so are devices, pipes and links to folders. `exclude` are files that are never input, such as a command's
    own output.

    `format` is what all of them hold; with "auto" the end of each name says it (SUFFIXES). Raises InputMissing for a
    name that means nothing, UsageError for what cannot be read as a stream and where a `text_field` is asked for and no
    input has fields.
    """
    seen = {os.path.realpath(path) for path in exclude}
    found = []
    for name in names:
        if name == STDIN:
            if STDIN not in seen:
                seen.add(STDIN)
                found.append(_input(STDIN, format, None, ""))
            continue
        if is_remote(name):
            for url, size, version in find_remote(name):
                if url not in seen:
                    seen.add(url)
                    found.append(replace(_input(shown_url(url), format, size, version), url=url))
            continue
        for path, real in _expand(name):
            if real not in seen:
                seen.add(real)
                found.append(_local(path, format))
    if text_field is not None and found and all(one.format == TEXT for one in found):
        raise UsageError(
            f"{', '.join(map(shown, names))}: field {text_field}: plain text has no fields: "
            "leave it out, or say what the inputs hold with --format jsonl"
        )
    return found


def split_weight(name: str) -> tuple[str, float | None]:
    """`PATH:WEIGHT` as its two parts; no weight where the end is no number or a file has the whole name. Raises
    UsageError for a weight that is none."""
    path, colon, after = name.rpartition(":")
    try:
        weight = float(after) if colon and path and not os.path.lexists(name) else None
    except ValueError:
        weight = None
    if weight is None:
        return name, None
    if not 1e-100 < weight < 1e100:
        raise UsageError(f"--input {shown(name)}: the weight {after} is no share, as 0.7 or 3: leave it out")
    return path, weight


def total_size(inputs: Iterable[Input]) -> int | None:
    """Bytes of all as they are stored; None where one cannot say."""
    sizes = [one.size for one in inputs]
    return None if None in sizes else sum(size or 0 for size in sizes)


def refuse_to_overwrite(inputs: Iterable[str | os.PathLike[str]], outputs: Iterable[Path]) -> None:
    """Raises UsageError where a file that was named to be read is one that would be written."""
    read = {os.path.realpath(path) for path in inputs}
    for path in outputs:
        if os.path.realpath(path) in read:
            raise UsageError(f"{shown(path)}: is read and would be written too: give --output another name")


def shown(path: str | os.PathLike[str]) -> str:
    """`path` as it can be printed: a name need not be UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def _local(path: str, format: str) -> Input:
    try:
        status = os.stat(path)
    except OSError as error:
        raise read_error(error, path) from error
    if stat.S_ISREG(status.st_mode):
        return _input(path, format, status.st_size, str(status.st_mtime_ns))
    return _input(path, format, None, "")


def _input(name: str, format: str, size: int | None, version: str) -> Input:
    stem, suffix = os.path.splitext(urlsplit(name.lower()).path if is_remote(name) else name.lower())
    compression = COMPRESSIONS.get(suffix, "")
    if format == "auto":
        format = SUFFIXES.get(os.path.splitext(stem)[1] if compression else suffix, TEXT)
    if format == PARQUET and (compression or size is None):
        what = f"Parquet inside {compression}" if compression else "Parquet of unknown size"
        raise UsageError(f"{shown(name)}: {what} cannot be read, its index comes last: make a plain file of it")
    return Input(name, format, compression, size, version)


def _expand(name: str) -> Iterator[tuple[str, str]]:
    """The paths that a name means, each with its real one."""
    # A file whose name looks like a glob is that file.
    if os.path.isdir(name):
        yield from _below(name)
    elif os.path.exists(name):
        yield str(Path(name)), os.path.realpath(name)
    elif not glob.has_magic(name):
        raise InputMissing(f"{name}: no such file or folder: put text there, or name it with --input")
    else:
        matches = sorted(glob.glob(name, recursive=True), key=os.fsencode)
        if not matches:
            raise InputMissing(f"{name}: no file matches: check the pattern given as --input")
        for match in matches:
            # `**` matches folders and what is in them; a folder that matched by itself means what is below it.
            yield from _below(match) if os.path.isdir(match) else [(str(Path(match)), os.path.realpath(match))]


def _below(folder: str) -> list[tuple[str, str]]:
    """Of a tree of 80,000 files every needless look at one shows: their real paths are put together."""
    found = []
    folders = [(str(Path(folder)), os.path.realpath(folder))]
    while folders:
        folder, real = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    path = entry.name if folder == "." else os.path.join(folder, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((path, os.path.join(real, entry.name)))
                    elif entry.is_file():
                        found.append(
                            (path, os.path.realpath(path) if entry.is_symlink() else os.path.join(real, entry.name))
                        )
        except OSError as error:
            raise read_error(error, error.filename or folder) from error
    return sorted(found, key=lambda one: os.fsencode(one[0]))
