"""Files and folders that have their final name only when they are whole and on the disk.

The order is always: temporary name in the same folder, fsync the file, rename, fsync the folder. Each step was
needed: a rename without the first fsync left an empty file after a power cut, one without the second was lost.
"""

import errno
import fcntl
import io
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmtrain.storage.errors import CannotCreate, LlmtrainError, write_error

PathLike = str | os.PathLike[str]

_TAG = r"\d+(-\d+)?"
"""What `_tags` yields."""


class _Raw(io.FileIO):
    """The file under its temporary name; a failed write names the final one."""

    partial: Path
    final: Path

    def write(self, data) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            raise write_error(error, self.final) from error


class AtomicFile(io.BufferedWriter):
    """What `atomic_file` opens: a buffered binary file."""

    raw: _Raw

    def sync(self) -> None:
        """Brings what was written so far to the disk. Raises StorageFailure where that fails."""
        self.flush()
        try:
            os.fsync(self.fileno())
        except OSError as error:
            raise write_error(error, self.raw.final) from error


@contextmanager
def atomic_file(path: PathLike) -> Iterator[AtomicFile]:
    """A binary file to write, under a temporary name beside `path`, that gets the name `path` when the block ends
    well: then it is on the disk. When the block fails, `path` is as it was and the temporary is gone. The mode
    follows the umask. What a killed writer of the same `path` left is removed first.

    Raises CannotCreate where the place does not take a file, StorageFailure where the disk fails."""
    final = Path(path)
    refuse_what_is_no_file(final)
    _remove_partials_of_the_dead(final)
    raw = _open_partial(final)
    try:
        file = AtomicFile(raw, 1 << 20)
        yield file
        file.sync()
        try:
            os.replace(raw.partial, final)
        except OSError as error:
            raise write_error(error, final) from error
    except BaseException:
        with suppress(OSError):
            os.unlink(raw.partial)
        raise
    finally:
        # The raw file is closed, not the buffer: closing that writes again what has just failed to be written.
        raw.close()
    fsync_folder(final.parent)


def write_bytes(path: PathLike, data: bytes | bytearray | memoryview) -> None:
    """Puts `data` at `path`, whole or not at all; on the disk on return. Errors as of `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data)


def write_json(path: PathLike, value: object) -> None:
    """Puts `json_bytes(value)` at `path`, whole or not at all; on the disk on return. Errors as of `atomic_file`."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: object, indent: int | None = 1) -> bytes:
    """`value` as one JSON text and a newline. JSON has no NaN and no infinities: they become null, so that every
    reader of any language takes the file. With `indent=None` it is one line."""
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, allow_nan=False)
    return text.encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def fsync_folder(path: PathLike) -> None:
    """Brings the names in the folder `path` to the disk. Raises StorageFailure where that fails."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        # Some network file systems keep names in order by themselves and refuse to sync a folder.
        if error.errno != errno.EINVAL:
            raise write_error(error, path) from error


def publish_folder(work: PathLike, final: PathLike) -> None:
    """Gives the folder `work` the name `final` (same parent), everything in it on the disk first.

    Raises CannotCreate where `final` is taken or the place does not allow it, StorageFailure where the disk fails;
    `work` then keeps its name."""

    def unseen(error: OSError) -> None:  # what cannot be listed would be left out
        raise write_error(error, work) from error

    for folder, _, names in os.walk(work, onerror=unseen):
        for name in names:
            _fsync_file(os.path.join(folder, name))
        fsync_folder(folder)
    try:
        os.rename(work, final)
    except OSError as error:
        raise write_error(error, final) from error
    fsync_folder(Path(final).parent)


def make_parent(path: PathLike) -> None:
    """Makes the folder that `path` is to lie in: for an output that a person named, before the work for it begins.
    Raises CannotCreate."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(error, path, "created") from error


def make_place(path: PathLike) -> None:
    """Makes the folder that `path` is to lie in, and tries whether it takes a file: for an output that a person named,
    before long work for it begins. Raises CannotCreate, StorageFailure."""
    make_parent(path)
    refuse_what_is_no_file(Path(path))
    raw = _open_partial(Path(path))
    os.unlink(raw.partial)
    raw.close()


@contextmanager
def atomic_folder(path: PathLike) -> Iterator[Path]:
    """A folder to fill, under a temporary name beside `path`, that gets the name `path` when the block ends well: then
    all of it is on the disk. When the block fails it is gone. What killed makers of the same `path` left is removed
    first. The folder that `path` lies in is made where it is not there.

    Raises CannotCreate where `path` is taken or the place does not take a folder, StorageFailure."""
    final = Path(path)
    if not final.name or os.path.lexists(final):
        raise write_error(FileExistsError(errno.EEXIST, "exists"), final, "created")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in _matching(final.parent, rf"{re.escape(f'.{final.name}.')}{_TAG}\.partial"):
            _remove_where_nobody_works(left)
        work, descriptor = _open_work(final)
    except OSError as error:
        raise write_error(error, final, "created") from error
    try:
        try:
            yield work
            publish_folder(work, final)
        except OSError as error:
            raise write_error(error, final) from error
    except BaseException:
        with suppress(LlmtrainError):  # the first failure is the one to tell
            _delete(work)
        raise
    finally:
        os.close(descriptor)


def _open_work(final: Path) -> tuple[Path, int]:
    """A new folder beside `final`, locked for as long as its descriptor is open: the lock says that its maker lives."""
    for tag in _tags():
        work = final.with_name(f".{final.name}.{tag}.partial")
        try:
            work.mkdir()
        except FileExistsError:
            continue
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, work):
            return work, descriptor
        os.close(descriptor)  # another maker of `final` took it for a dead one's before it was locked
    raise AssertionError("the tags do not end")


def _remove_where_nobody_works(work: Path) -> None:
    with suppress(OSError, LlmtrainError):
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(work)
        finally:
            os.close(descriptor)


def remove_tree(path: PathLike) -> None:
    """Removes the folder or file `path`; none there is fine. It loses its name in one step, so that nobody ever
    sees it half-removed; what a killed remover left in the same parent goes too.

    Raises CannotCreate where the place does not allow it, StorageFailure where the disk fails."""
    path = Path(path)
    names = (path.with_name(f".{path.name}.{tag}.trash") for tag in _tags())
    try:
        os.rename(path, next(name for name in names if not os.path.lexists(name)))
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(error, path, "removed") from error
    fsync_folder(path.parent)
    remove_trash(path.parent)


def remove_trash(folder: PathLike) -> None:
    """Removes what killed calls of `remove_tree` left in the folder. Raises as it does."""
    for trash in _matching(Path(folder), rf"\..+\.{_TAG}\.trash"):
        _delete(trash)


def _tags() -> Iterator[str]:
    """Names for this process' temporaries: its pid, then the pid and a number. Threads, and containers that share
    a folder but not their pids, find a free one."""
    yield str(os.getpid())
    for number in itertools.count(1):
        yield f"{os.getpid()}-{number}"


def _open_partial(final: Path) -> _Raw:
    """A new file beside `final`, locked for as long as it is open: the lock says that its writer lives."""
    for tag in _tags():
        partial = final.with_name(f".{final.name}.{tag}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        except OSError as error:
            raise write_error(error, final, "created") from error
        # A file system without locks has no partials removed: see _remove_partials_of_the_dead.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not _is_at(descriptor, partial):
            # Another writer of `final` took it for a dead one's before it was locked.
            os.close(descriptor)
            continue
        raw = _Raw(descriptor, "wb")
        raw.partial, raw.final = partial, final
        return raw
    raise AssertionError("the tags do not end")


def _remove_partials_of_the_dead(final: Path) -> None:
    """Removes the temporaries of `final` whose writers are dead: those that nobody holds locked."""
    for partial in _matching(final.parent, rf"{re.escape(f'.{final.name}.')}{_TAG}\.partial"):
        with suppress(OSError):
            with open(partial, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The name may be a new writer's by now; while the lock on a file is ours, its name stays its own.
                if _is_at(file.fileno(), partial):
                    os.unlink(partial)


def _matching(folder: Path, pattern: str) -> list[Path]:
    """What in `folder` has a name of `pattern`; nothing where it cannot be listed."""
    try:
        return [folder / name for name in os.listdir(folder) if re.fullmatch(pattern, name)]
    except OSError:
        return []


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` is a name of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def refuse_what_is_no_file(final: Path) -> None:
    """Raises CannotCreate where what has the name is no file to be replaced: a rename would put a plain file in the
    place of a device or a pipe, /dev/null for one, or of the link to one that /dev/stdout is."""
    try:
        mode = os.lstat(final).st_mode
        if stat.S_ISLNK(mode) and os.readlink(final).startswith("/proc/"):
            mode = 0
        elif stat.S_ISLNK(mode) and os.path.exists(final):
            mode = os.stat(final).st_mode
    except OSError:
        return
    if stat.S_ISDIR(mode):
        raise write_error(OSError(errno.EISDIR, "is a folder"), final, "created")
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise CannotCreate(f"{final}: cannot be created: a device or pipe has this name: name a file")


def _fsync_file(path: str) -> None:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_error(error, path) from error


def remove_file(path: Path) -> None:
    """Removes the file `path`; none there is fine. Raises CannotCreate, StorageFailure."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, path, "removed") from error


def _delete(path: Path) -> None:
    """Deletes a folder or file that nobody needs, perhaps while another process does the same."""
    if os.path.islink(path) or not os.path.isdir(path):
        return remove_file(path)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise write_error(error, path, "removed") from error
