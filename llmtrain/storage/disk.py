"""Room on a disk."""

import os
from pathlib import Path

from llmtrain.storage.atomic import PathLike
from llmtrain.storage.errors import StorageFailure
from llmtrain.storage.units import in_bytes


def existing_folder(path: Path) -> Path:
    """The nearest folder above that exists."""
    while not path.exists():
        path = path.absolute().parent
    return path


def free_bytes(folder: PathLike) -> int | None:
    """Bytes that may still be written there; None where the file system does not say."""
    try:
        of_disk = os.statvfs(folder)
    except OSError:
        return None
    return of_disk.f_bavail * of_disk.f_frsize if of_disk.f_blocks else None


def require_room(folder: PathLike, needed: int, what: str) -> None:
    """Raises StorageFailure where less than `needed` bytes are free for `what`, before any is written. That there is
    room is no promise: others write too, and a quota does not show."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise StorageFailure(
            f"{os.fspath(folder)}: {what} takes {in_bytes(needed)}, {in_bytes(free)} are free: free space and run again"
        )
