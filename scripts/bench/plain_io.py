"""Plain writing and reading, which checkpoint.py and storage.py measure ours against."""

import os
import time
from collections.abc import Callable
from pathlib import Path

CHUNK = 4 << 20


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_write(path: Path, views: list[memoryview]) -> None:
    """The bytes, and fsync."""
    with open(path, "wb", buffering=0) as file:
        for view in views:
            for at in range(0, view.nbytes, CHUNK):
                file.write(view[at : at + CHUNK])
        os.fsync(file.fileno())


def plain_read(path: Path, views: list[memoryview]) -> None:
    """The bytes straight into the buffers."""
    with open(path, "rb", buffering=0) as file:
        for view in views:
            for at in range(0, view.nbytes, CHUNK):
                file.readinto(view[at : at + CHUNK])


def drop_cache(path: Path) -> None:
    """Takes the file's pages out of memory."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
