"""What can go wrong in a way that a person, or a supervisor, has to act on: one class an exit code.

`str(error)` is the one line for stderr: what is wrong, where, what to do.
"""

import errno
import os
import signal


class LlmtrainError(Exception):
    """Base of all errors that end a command with a line and not with a traceback."""

    exit_code = 70


class UsageError(LlmtrainError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class BadData(LlmtrainError):
    """A file is there and is not what it has to be: torn, altered, of another format."""

    exit_code = 65


class InputMissing(LlmtrainError):
    """A file that was named is not there or may not be read."""

    exit_code = 66


class RankLost(LlmtrainError):
    """Another process of the run is gone, or hangs; what it was is in its own log."""

    exit_code = 69


class InternalError(LlmtrainError):
    """Our own mistake."""

    exit_code = 70


class HardwareFault(LlmtrainError):
    """The machine gave different results for the same computation; what it computes is not to be trusted."""

    exit_code = 71


class CannotCreate(LlmtrainError):
    """The place for an output does not take it: no such folder, no permission, read-only."""

    exit_code = 73


class StorageFailure(LlmtrainError):
    """The disk is full or failing."""

    exit_code = 74


class MemoryTaken(LlmtrainError):
    """Other processes hold the device's memory. As with a full disk, a later try may find it free."""

    exit_code = 74


class StopRequested(LlmtrainError):
    """A signal asked for a stop and the state is saved; `--resume` goes on."""

    exit_code = 75


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Those that ask for it: a supervisor's, Ctrl-C, a closed terminal, and what Slurm sends before the time is up."""


class ConfigMismatch(LlmtrainError):
    """What was asked does not fit what is on disk, or somebody else is at work there."""

    exit_code = 78


class Diverged(LlmtrainError):
    """Training left the finite numbers; a restart would meet the same."""

    exit_code = 79


# A place that has to be changed by hand; waiting or freeing space does not help.
_NO_PLACE = {
    errno.ENOENT: "its folder does not exist: create it or name another",
    errno.ENOTDIR: "a part of the path is a file, not a folder: name another path",
    errno.EISDIR: "a folder has this name: remove it or name another path",
    errno.EEXIST: "something has this name already: remove it or name another path",
    errno.ENOTEMPTY: "a folder that is not empty has this name: remove it or name another path",
    errno.EACCES: "permission denied: make its folder writable or name another",
    errno.EPERM: "not permitted: make its folder writable or name another",
    errno.EROFS: "the file system is read-only: remount it or name another path",
    errno.ENAMETOOLONG: "the name is too long: name a shorter one",
    errno.ELOOP: "its symbolic links lead in a circle: name another path",
}

_DISK = {
    errno.ENOSPC: "the disk is full: free space and run again",
    errno.EDQUOT: "the disk quota is used up: free space and run again",
    errno.EFBIG: "the file is larger than the limit allows (ulimit -f): raise it and run again",
    errno.EIO: "the disk reports an I/O error: see `dmesg`, then run again",
    errno.EMFILE: "too many open files: raise `ulimit -n` and run again",
}


def write_error(error: OSError, path: str | os.PathLike[str], verb: str = "written") -> LlmtrainError:
    """The error to raise in place of `error`, met while `path` was created, written or removed (the `verb`):
    CannotCreate (73) where the place has to be changed, StorageFailure (74) where the disk fails."""
    if error.errno in _NO_PLACE:
        return CannotCreate(f"{os.fspath(path)}: cannot be {verb}: {_NO_PLACE[error.errno]}")
    reason = _DISK.get(error.errno or 0, f"{error.strerror or error}: check the disk and run again")
    return StorageFailure(f"{os.fspath(path)}: cannot be {verb}: {reason}")


def read_error(
    error: OSError, path: str | os.PathLike[str], if_missing: str = "check the path"
) -> LlmtrainError:
    """The error to raise in place of `error`, met while reading `path`: InputMissing (66) where there is
    no readable file (`if_missing` says what to do where there is none), StorageFailure (74) where the disk fails."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return InputMissing(f"{os.fspath(path)}: no such file: {if_missing}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return InputMissing(f"{os.fspath(path)}: permission denied: make it readable")
    if error.errno == errno.EISDIR:
        return InputMissing(f"{os.fspath(path)}: is a folder, a file is needed: check the path")
    reason = _DISK.get(error.errno or 0, f"{error.strerror or error}: check the disk and run again")
    return StorageFailure(f"{os.fspath(path)}: cannot be read: {reason}")
