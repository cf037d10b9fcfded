"""Inputs that lie elsewhere, through fsspec (extra `remote`): found by URL and read as a stream, never stored here."""

import glob
import io
import re
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from llmtrain.storage.errors import InputMissing, LlmtrainError, StorageFailure, UsageError

# A connection may break once in some hours of reading: so often it is made anew, after 1, 2, 4 ... seconds.
ATTEMPTS = 6

# What one request asks for where an input cannot be had in one.
BLOCK_BYTES = 8 << 20

# Here one request can bring a whole file: no waiting between blocks.
STREAMED = ("http", "https", "hf")

# What tells a new version of a file, by file system; the first that is there is taken.
VERSIONS = ("ETag", "etag", "blob_id", "lfs", "LastModified", "Last-Modified", "mtime", "updated", "created")

SECRETS = re.compile("sig|token|key|credential|password", re.IGNORECASE)


def is_remote(name: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", name) is not None


def shown_url(url: str) -> str:
    """`url` without what opens the door: a name and password before the host, and a query that holds a secret."""
    parts = urlsplit(url)
    query = "" if SECRETS.search(parts.query) else parts.query
    return urlunsplit(
        parts._replace(netloc=parts.netloc.rpartition("@")[2] if parts.password else parts.netloc, query=query)
    )


def find_remote(url: str, option: str) -> list[tuple[str, int | None, str]]:
    """(URL, size, version) of the files that a URL means: one file, all below a folder, or all that match a pattern;
    sorted, without what has a name that begins with a dot below a folder. At http(s) there are only files. `option`:
    what names it, for messages.

    Raises InputMissing, StorageFailure, UsageError.
    """
    system, path = _system(url)
    try:
        if url.startswith("http"):
            found = {path: system.info(path)}
        elif glob.has_magic(path) and not system.exists(path):
            found = system.glob(path, detail=True)
        else:
            found = {path: system.info(path)}
        files: dict[str, dict[str, Any]] = {}
        for name, info in found.items():
            files |= {name: info} if info["type"] == "file" else _below(system, name)
    except Exception as error:
        raise _told(error, url) from error
    if not files:
        raise InputMissing(f"{shown_url(url)}: no file is there: check what {option} names")
    return [(_url(url, system, name), files[name].get("size"), _version(files[name])) for name in sorted(files)]


def _below(system: Any, folder: str) -> dict[str, dict[str, Any]]:
    found = system.find(folder, detail=True)
    below = len(folder.rstrip("/"))
    return {name: info for name, info in found.items() if "/." not in name[below:] and info["type"] == "file"}


def _url(url: str, system: Any, name: str) -> str:
    return url if url.startswith("http") else str(system.unstrip_protocol(name))


def _version(info: dict[str, Any]) -> str:
    return next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it."""
    if "::" in url:
        raise UsageError(f"{shown_url(url)}: a chain of file systems is not read: name the file itself")
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except ImportError as error:
        raise UsageError(f"{shown_url(url)}: remote files need packages: pip install 'llmtrain[remote]'") from error
    except Exception as error:
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            raise UsageError(f"{shown_url(url)}: no such protocol: https, s3 and hf are some that there are") from error
        raise _told(error, url) from error


def _told(error: Exception, url: str) -> LlmtrainError:
    """The error to raise in place of one of fsspec's many."""
    if isinstance(error, LlmtrainError):
        return error
    # Of http fsspec says that there is no file whatever the cause was: a refusal, a server that is down.
    cause = error.__cause__ or error
    status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, PermissionError) or status in (401, 403):
        return InputMissing(f"{shown_url(url)}: permission denied: check the account or token for it")
    down = type(cause).__module__.startswith("aiohttp") if status is None else status not in (404, 410)
    if isinstance(error, FileNotFoundError) and not down or status in (404, 410):
        return InputMissing(f"{shown_url(url)}: no such file: check the URL")
    reason = " ".join(str(cause).split())[:200] or type(cause).__name__
    return StorageFailure(f"{shown_url(url)}: cannot be read ({reason}): check the network and the account, run again")


class RemoteFile(io.RawIOBase):
    """A remote file for reading. A connection that breaks is made anew at the same byte, ATTEMPTS times; then it is an
    error: InputMissing, StorageFailure."""

    def __init__(self, url: str, size: int | None, streamed: bool) -> None:
        """`streamed` is for reading from begin to end; else it can seek, which needs a `size`."""
        self._url, self._size = url, size
        self._system, self._path = _system(url)
        self._streamed = streamed and url.split("://")[0].lower() in STREAMED
        self._ranges = True
        self._place = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._streamed

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert self._size is not None and not self._streamed
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the end of the file."""
        parts = []
        wanted = size if size >= 0 else 1 << 62
        while wanted and (piece := self._piece(min(wanted, BLOCK_BYTES))):
            parts.append(piece)
            wanted -= len(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._hang_up()
        super().close()

    def _piece(self, size: int) -> bytes:
        """At least one byte, none at the end of the file."""
        for attempt in range(ATTEMPTS):
            try:
                if self._file is None:
                    self._file = self._connected()
                if not self._streamed:
                    self._file.seek(self._place)
                piece = self._file.read(size)
                if piece or self._size is None or self._place >= self._size:
                    self._place += len(piece)
                    return piece
                raise OSError(f"it ended after {self._place} of {self._size} bytes")
            except Exception as error:
                self._hang_up()
                told = _told(error, self._url)
                if isinstance(told, InputMissing) or attempt == ATTEMPTS - 1:
                    raise told from error
                if self._streamed and isinstance(error, ValueError):
                    self._ranges = False  # this server begins at the first byte and nowhere else
                time.sleep(2**attempt)
        raise AssertionError

    def _connected(self) -> Any:
        """The file at the place where reading stopped."""
        if self._streamed and (self._place == 0 or not self._ranges):
            file = self._system.open(self._path, "rb", block_size=0)
            passed = 0
            while passed < self._place and (piece := file.read(min(self._place - passed, BLOCK_BYTES))):
                passed += len(piece)
            return file
        blocks = {"block_size": BLOCK_BYTES, "cache_type": "background", "cache_options": {"maxblocks": 4}}
        file = self._system.open(self._path, "rb", **blocks)
        file.seek(self._place)
        return file

    def _hang_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # what is left of a connection that broke
                file.close()
