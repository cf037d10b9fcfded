"""Opening what has to be a plain file."""

import errno
import os
import stat
from io import FileIO

from llmtrain.storage.errors import BadData, read_error


def open_file(path: str | os.PathLike[str], if_missing: str = "check the path") -> FileIO:
    """The file, unbuffered, for reading. A pipe would keep the process waiting for a writer that may never come, and
    a device has no end. Raises InputMissing, StorageFailure, and BadData where it is no plain file."""
    try:
        # Of a plain file O_NONBLOCK changes nothing.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise read_error(error, path, if_missing) from error
    try:
        if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
            raise read_error(IsADirectoryError(errno.EISDIR, ""), path)
        if not stat.S_ISREG(mode):
            raise BadData(f"{os.fspath(path)}: is a pipe or device, a plain file is needed: copy it into one")
    except BaseException:
        os.close(descriptor)
        raise
    return FileIO(descriptor)
