"""Which inputs a corpus is made of: files, folders, globs, remote files, standard input; and the form of each."""

import errno
import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
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


class Input(NamedTuple):
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
    names: Sequence[str],
    exclude: Iterable[Path] = (),
    format: str = "auto",
    text_field: str | None = None,
    option: str = "--input",
) -> list[Input]:
    """The inputs that `names` (files, folders, globs, URLs, `-` for standard input) mean, each once: in the order of
    the names and, within one, of the bytes of their paths. Below a folder, names that begin with a dot are left
    out, and so are devices, pipes and links to folders or to nothing. `exclude` are files that are never input, such as
    a command's own output.

    `format` is what all of them hold; with "auto" the end of each name says it (SUFFIXES). Raises InputMissing for a
    name that means nothing, UsageError for what cannot be read as a stream and where a `text_field` is asked for and no
    input has fields. `option`: what has the names, for messages.
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
            for url, size, version in find_remote(name, option):
                if url not in seen:
                    seen.add(url)
                    found.append(_input(shown_url(url), format, size, version, url))
            continue
        for path, real, size, version in _expand(name, option):
            if real not in seen:
                seen.add(real)
                found.append(_input(path, format, size, version))
    if text_field is not None and found and all(one.format == TEXT for one in found):
        say = "say what the inputs hold with --format jsonl" if option == "--input" else "name it X.jsonl or X.parquet"
        raise UsageError(
            f"{', '.join(map(shown, names))}: field {text_field}: plain text has no fields: leave it out, or {say}"
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


def _input(name: str, format: str, size: int | None, version: str, url: str = "") -> Input:
    path = urlsplit(name).path if url else name
    # Dots at the beginning of a file's name do not begin an ending.
    format, compression = _form(path.rpartition("/")[2].lstrip(".").partition(".")[2].lower(), format)
    if format == PARQUET and (compression or size is None):
        what = f"Parquet inside {compression}" if compression else "Parquet of unknown size"
        raise UsageError(f"{shown(name)}: {what} cannot be read, its index comes last: make a plain file of it")
    return Input(name, format, compression, size, version, url)


@lru_cache(1 << 10)
def _form(ending: str, format: str) -> tuple[str, str]:
    """(format, compression) of a file whose name ends so behind its first dot: in large trees there are few endings."""
    rest, _, last = ending.rpartition(".")
    compression = COMPRESSIONS.get(f".{last}", "")
    if format == "auto":
        format = SUFFIXES.get("." + (rest.rpartition(".")[2] if compression else last), TEXT)
    return format, compression


# A path, the real one, and what `Input` says as size and version.
_Found = tuple[str, str, int | None, str]


def _expand(name: str, option: str) -> Iterator[_Found]:
    """The files that a name means."""
    # A file whose name looks like a glob is that file.
    if os.path.isdir(name):
        yield from _below(name)
    elif os.path.exists(name):
        yield _one(name)
    elif not glob.has_magic(name):
        raise InputMissing(f"{name}: no such file or folder: put text there, or name it with {option}")
    else:
        matches = sorted(glob.glob(name, recursive=True), key=os.fsencode)
        if not matches:
            raise InputMissing(f"{name}: no file matches: check the pattern given as {option}")
        for match in matches:
            # `**` matches folders and what is in them; a folder that matched by itself means what is below it.
            yield from _below(match) if os.path.isdir(match) else [_one(match)]


def _one(path: str) -> _Found:
    try:
        status = os.stat(path)
    except OSError as error:
        raise read_error(error, path) from error
    regular = stat.S_ISREG(status.st_mode)
    size, version = (status.st_size, str(status.st_mtime_ns)) if regular else (None, "")
    return str(Path(path)), os.path.realpath(path), size, version


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a plain file or a link to one. Raises OSError where that cannot be seen."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that leads to itself is one that leads nowhere
            return False
        raise


def _below(folder: str) -> list[_Found]:
    """As `_expand`, in order. Of a tree of 80,000 files everything shows that is done for each: so the paths are put
    together here, and the system is asked once."""
    found: list[_Found] = []
    folders = [(str(Path(folder)), os.path.realpath(folder))]
    while folders:
        folder, real = folders.pop()
        prefix = "" if folder == "." else os.path.join(folder, "")
        real_prefix = os.path.join(real, "")
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name
                    if name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((prefix + name, real_prefix + name))
                    elif _is_file(entry):
                        path = prefix + name
                        real_path = os.path.realpath(path) if entry.is_symlink() else real_prefix + name
                        status = entry.stat()
                        found.append((path, real_path, status.st_size, str(status.st_mtime_ns)))
        except OSError as error:
            raise read_error(error, error.filename or folder) from error
    return sorted(found, key=lambda one: os.fsencode(one[0]))
