"""A file of JSON lines that grows for as long as a run lasts, through any number of crashes."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from types import TracebackType
from typing import Any, TypeGuard

from llmtrain.storage.atomic import PathLike, atomic_file, fsync_folder, json_bytes
from llmtrain.storage.errors import CannotCreate, read_error, write_error
from llmtrain.storage.reading import open_file


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a line is a number that a float holds: finite, and no whole number of 400 digits either."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class JsonLines:
    """Appends JSON objects, one a line, to the file `path`, which is made where missing. Any thread may append. A line
    that a crash left without its end is cut off when the file is opened: what is appended next starts a line.

    Raises CannotCreate where the place does not take the file, StorageFailure where the disk fails; a line that did
    not fit on a full disk leaves no half behind."""

    def __init__(self, path: PathLike) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._descriptor = self._open()

    def _open(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            os.ftruncate(descriptor, _end_of_last_line(descriptor))
        except OSError as error:
            raise write_error(error, self.path) from error
        fsync_folder(os.path.dirname(self.path) or ".")
        return descriptor

    def append(self, line: dict) -> None:
        """Adds a line; a killed process' lines are there to the last one, a power cut takes those not yet synced.
        Numbers that are not finite become null."""
        data = json_bytes(line, indent=None)
        with self._lock:
            end = os.fstat(self._descriptor).st_size
            done = 0
            try:
                while done < len(data):
                    done += os.write(self._descriptor, data[done:])
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, end)
                raise write_error(error, self.path) from error

    def sync(self) -> None:
        """Returns when every line so far is on the disk, under the file's name. Raises StorageFailure, and as
        `require_in_place`."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise write_error(error, self.path) from error
        self.require_in_place()

    def require_in_place(self) -> None:
        """Raises CannotCreate where somebody removed or replaced the file: what is written would be nobody's."""
        try:
            there = os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            there = False
        except OSError:
            return  # the disk fails, which is for the next write to say
        if not there:
            raise CannotCreate(f"{self.path}: was removed or replaced while in use: start again in another folder")

    def rewrite(self, keep: Callable[[dict], bool]) -> None:
        """Leaves only the lines that `keep` is true of, byte for byte as they are; those that are no JSON object go.
        A crash in between leaves the file as it was."""
        with self._lock:
            with atomic_file(self.path) as file:
                for raw, line in _lines(self.path):
                    if keep(line):
                        file.write(raw)
            old, self._descriptor = self._descriptor, self._open()
            os.close(old)

    @staticmethod
    def read(path: PathLike) -> Iterator[dict]:
        """The lines of a journal, which may be growing; one that is torn or otherwise no JSON object is skipped, so
        that damage to the record never keeps a run from going on. Raises InputMissing, StorageFailure."""
        return (line for _, line in _lines(path))

    def close(self) -> None:
        """Ends the use of the file; `sync` first what must be on the disk."""
        os.close(self._descriptor)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lines(path: PathLike) -> Iterator[tuple[bytes, dict]]:
    """Each line that is whole, its end included, and what it says. Ends at the first that is not: of a line that is
    being written the rest would come as the next one, and neither half says anything."""
    try:
        with BufferedReader(open_file(path)) as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                try:
                    line = json.loads(raw)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict):
                    yield raw, line
    except OSError as error:
        raise read_error(error, path) from error


def _end_of_last_line(descriptor: int) -> int:
    """The offset after the file's last newline."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - 65536)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
