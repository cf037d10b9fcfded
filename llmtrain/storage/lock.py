"""One process at a time in a run directory."""

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from llmtrain.storage.atomic import PathLike
from llmtrain.storage.errors import CannotCreate, ConfigMismatch, write_error

BOOT_LEEWAY = 60.0
"""Seconds that the clock may have been put right by since a boot."""

_held: set[int] = set()
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def _close_in_child() -> None:
    # A forked child shares the lock and would keep it beyond its parent's death. Closing its copy leaves the
    # parent's in force.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """Holds the lock file `path` for the length of a `with` block. The system drops the lock when its process dies,
    however it dies, so no lock outlives its holder. The file stays, unless its holder removes it. It says
    {"pid", "host", "time"} of the holder, and nothing when nobody holds it.

    Raises ConfigMismatch where another process holds it, naming that one's pid and host."""

    def __init__(self, path: PathLike) -> None:
        self.path = path
        self._descriptor = -1

    def __enter__(self) -> "RunLock":
        while True:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise write_error(error, self.path, "created") from error
            self._lock(descriptor)
            # A holder that was the last to need the file may have removed it in between.
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    break
            os.close(descriptor)
        self._descriptor = descriptor
        _held.add(descriptor)
        return self

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_holder(descriptor)
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise ConfigMismatch(f"{self.path}: in use by {holder}: stop that one or name another directory") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                raise CannotCreate(f"{self.path}: its file system has no locks: use another one") from error
            raise write_error(error, self.path) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor in _held:  # not so in a forked child
            _held.remove(descriptor)
            with suppress(OSError):  # who held it is only for people to read
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def holder(path: PathLike) -> dict[str, Any] | None:
    """{"pid", "host", "time"} of the process that a lock file names; None where it names none. A process that was
    killed is still named: see `is_dead`. The lock itself is left alone."""
    try:
        with open(path, "rb") as file:
            named = json.loads(file.read(4096))
        return {"pid": int(named["pid"]), "host": str(named["host"]), "time": str(named["time"])}
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def is_dead(named: dict[str, Any]) -> bool:
    """Whether the `holder` of a lock file was a process of this machine and is no more: it was killed, or it would have
    taken its name away. What runs on another machine is not known to be dead."""
    if named["host"] != socket.gethostname():
        return False
    with suppress(ValueError, AttributeError):
        # Since a boot the number may be another process'.
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if datetime.fromisoformat(named["time"]).timestamp() < booted - BOOT_LEEWAY:
            return True
    try:
        os.kill(named["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def dead_holder(path: PathLike) -> int | None:
    """The process that a lock file names, where it `is_dead`."""
    named = holder(path)
    return named["pid"] if named is not None and is_dead(named) else None


def _write_holder(descriptor: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "time": now})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, line.encode() + b"\n", 0)


def _read_holder(descriptor: int) -> str:
    """Who holds the lock, in words. The holder writes its name right after it has the lock, so it may take a moment."""
    for _ in range(50):
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0))
            return f"process {holder['pid']} on {holder['host']} since {holder['time']}"
        except (ValueError, TypeError, KeyError):
            time.sleep(0.01)
    return "another process"
