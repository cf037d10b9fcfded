"""safetensors files without torch or numpy: https://huggingface.co/docs/safetensors, section "Format".

8 bytes: the header's length N, little-endian · N bytes: JSON, name -> {"dtype", "shape", "data_offsets"} · the data.
The sha256 of the whole file is made in a second thread beside the writing and reading, which it would else double.
"""

import hashlib
import json
import math
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

from llmtrain.storage.atomic import AtomicFile, PathLike, atomic_file
from llmtrain.storage.errors import BadData, read_error
from llmtrain.storage.reading import open_file

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element of each dtype of the format (those of less than a byte are not read or written)."""

_CHUNK = 4 << 20
_MAX_HEADER = 100_000_000  # the format's own limit


class TensorEntry(NamedTuple):
    """A tensor to write."""

    dtype: str
    """One of ITEM_BYTES."""
    shape: tuple[int, ...]
    data: memoryview | bytearray | bytes
    """Its elements, C-contiguous, little-endian: anything with the buffer protocol."""


class TensorIndex(NamedTuple):
    """Where a tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte from the start of the file."""
    end: int
    """Offset after its last byte from the start of the file."""


def write(
    target: PathLike | AtomicFile, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Writes `entries` as one safetensors file, on the disk on return, and gives its size in bytes and its sha256.
    A path is written by `atomic_file`, an open file is one of its. The largest element types come first, so that each
    tensor is aligned to its own.

    Raises CannotCreate, StorageFailure, and ValueError where an entry's data does not fit its dtype and shape."""
    if not isinstance(target, AtomicFile):
        with atomic_file(target) as file:
            return write(file, entries, metadata)
    names = sorted(entries, key=lambda name: -ITEM_BYTES[entries[name].dtype])
    views = {name: _bytes_of(name, entries[name].data) for name in names}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape, _ = entries[name]
        begin, end = end, end + views[name].nbytes
        if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"tensor {name}: {end - begin} bytes are not {dtype} {tuple(shape)}")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    with _hash_beside() as (digest, pending):
        for view in (memoryview(start), *views.values()):
            for at in range(0, view.nbytes, _CHUNK):
                chunk = view[at : at + _CHUNK]
                pending.put(chunk)
                target.write(chunk)
                _begin_to_write_out(target)
        target.sync()
    return len(start) + end, digest.hexdigest()


def read_index(path: PathLike) -> dict[str, TensorIndex]:
    """Where each tensor of a safetensors file lies, in the file's order; each bound is checked, and that they fill
    the file. Raises InputMissing, StorageFailure, and BadData where the header lies or the file is cut."""
    return read_header(path)[0]


def read_header(path: PathLike) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    """`read_index`, and the file's metadata."""
    with _open(path) as file:
        _, index, metadata = _header(file, path)
        return index, metadata


def read_into(
    path: PathLike, buffers: Mapping[str, memoryview | bytearray], begins: Mapping[str, int] | None = None
) -> str:
    """Reads the tensors named in `buffers` straight into these (writable, C-contiguous, of the tensor's size in
    bytes; compare dtype and shape by `read_index` before) and gives the sha256 of the whole file, whose other parts
    are read too. Of a tensor that `begins` names, its bytes from there on, as many as the buffer takes.

    Raises InputMissing, StorageFailure, and BadData where the header lies, a tensor is missing or of another size."""
    begins = begins or {}
    with _open(path) as file:
        start, index, _ = _header(file, path)
        views = {name: _bytes_of(name, buffer) for name, buffer in buffers.items()}
        for name, view in views.items():
            if name not in index:
                raise BadData(f"{path}: holds no tensor {name}: use the file that belongs here")
            _, shape, begin, end = index[name]
            if view.nbytes > end - begin - begins[name] if name in begins else view.nbytes != end - begin:
                raise BadData(
                    f"{path}: tensor {name} has {end - begin} bytes, shape {shape}, where {view.nbytes} are "
                    "needed: use the file that belongs here"
                )
        spare = memoryview(bytearray(_CHUNK))
        with _hash_beside() as (digest, pending):
            pending.put(memoryview(start))
            for name, (_, _, begin, end) in index.items():
                view = views.get(name, memoryview(b""))
                before = begins.get(name, 0)
                for wanted, length in ((None, before), (view, len(view)), (None, end - begin - before - len(view))):
                    for at in range(0, length, _CHUNK):
                        size = min(_CHUNK, length - at)
                        if wanted is not None:
                            chunk = wanted[at : at + size]
                        else:
                            pending.join()  # `spare` must be hashed before it is filled again
                            chunk = spare[:size]
                        _fill(file, chunk, path)
                        pending.put(chunk)
        return digest.hexdigest()


def read_each(path: PathLike) -> Iterator[tuple[str, TensorIndex, bytearray]]:
    """Each tensor of a safetensors file in turn, its bytes with its name and where they lie: for what is converted and
    not kept. Raises InputMissing, StorageFailure, and BadData where the header lies or the file is cut."""
    with _open(path) as file:
        _, index, _ = _header(file, path)
        for name, entry in index.items():
            data = bytearray(entry.end - entry.begin)
            _fill(file, memoryview(data), path)
            yield name, entry, data


@contextmanager
def _hash_beside() -> Iterator[tuple["hashlib._Hash", "queue.Queue[memoryview | None]"]]:
    """A sha256 and a queue: what is put there is hashed by a second thread, all of it by the end of the block.
    Hashing, reading and writing of large buffers release the interpreter's lock, so they do run side by side."""
    digest = hashlib.sha256()
    pending: queue.Queue[memoryview | None] = queue.Queue()

    def work() -> None:
        while (chunk := pending.get()) is not None:
            digest.update(chunk)
            pending.task_done()

    thread = threading.Thread(target=work, name="sha256", daemon=True)
    thread.start()
    try:
        yield digest, pending
    finally:
        pending.put(None)
        thread.join()


def _begin_to_write_out(file: AtomicFile) -> None:
    """Has the kernel begin to write the last two chunks out, so that the disk works while the next are copied and
    hashed: a file then takes 1.1 times as long as plainly written, else 1.5 times (scripts/bench/storage.py)."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with suppress(OSError):  # a hint; the sync says what the disk does not take
            recent = max(0, file.tell() - 2 * _CHUNK)
            os.posix_fadvise(file.fileno(), recent, 2 * _CHUNK, os.POSIX_FADV_DONTNEED)


@contextmanager
def _open(path: PathLike) -> Iterator[BinaryIO]:
    """The file, unbuffered, its read errors turned into ours."""
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        raise read_error(error, path) from error


def _header(file: BinaryIO, path: PathLike) -> tuple[bytes, dict[str, TensorIndex], dict[str, str]]:
    """The bytes before the data, the tensors in the order of their offsets, and the metadata."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise BadData(f"{path}: is cut: {size} bytes hold no safetensors header: use another copy")
    prefix = bytearray(8)
    _fill(file, memoryview(prefix), path)
    length = int.from_bytes(prefix, "little")
    if length > min(size - 8, _MAX_HEADER):
        raise BadData(f"{path}: is cut or no safetensors file: a header of {length} bytes in a file of {size}")
    text = bytearray(length)
    _fill(file, memoryview(text), path)
    try:
        index, metadata = _parse(bytes(text), data_begin=8 + length, size=size)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else "not JSON"
        raise BadData(f"{path}: its safetensors header is wrong ({reason}): use another copy") from None
    return bytes(prefix + text), index, metadata


def _parse(text: bytes, data_begin: int, size: int) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    """Raises ValueError, saying what is wrong, for anything but tensors that fill the data without gap or overlap."""
    header = json.loads(text.decode(), object_pairs_hook=_no_twins)
    if not isinstance(header, dict):
        raise ValueError("no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ does not map names to text")
    index = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r} has an unknown dtype")
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"tensor {name!r} has a shape or offsets that are no counts")
        begin, end = (data_begin + offset for offset in offsets)
        if not begin <= end <= size:
            raise ValueError(f"tensor {name!r} lies outside the file")
        if _n_bytes(shape, ITEM_BYTES[dtype], limit=size) != end - begin:
            raise ValueError(f"tensor {name!r} has a shape that does not fit its offsets")
        index[name] = TensorIndex(dtype, tuple(shape), begin, end)
    index = dict(sorted(index.items(), key=lambda item: item[1][2:]))
    at = data_begin
    for name, entry in index.items():
        if entry.begin != at:
            raise ValueError(f"tensor {name!r} overlaps the one before it or leaves a gap")
        at = entry.end
    if at != size:
        raise ValueError(f"the tensors end at byte {at}, the file at {size}")
    return index, metadata


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name occurs twice")
    return value


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _n_bytes(shape: list[int], item_bytes: int, limit: int) -> int:
    """Bytes of a tensor, or some number above `limit`: a made-up shape must not cost the product of its dimensions."""
    if 0 in shape:
        return 0
    n_bytes = item_bytes
    for dimension in shape:
        n_bytes *= dimension
        if n_bytes > limit:
            break
    return n_bytes


def _bytes_of(name: str, data: memoryview | bytearray | bytes) -> memoryview:
    """The buffer as flat bytes. Raises ValueError where it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"tensor {name}: its buffer is not C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _fill(file: BinaryIO, chunk: memoryview, path: PathLike) -> None:
    """Reads until `chunk` is full."""
    done = 0
    while done < chunk.nbytes:
        n = file.readinto(chunk[done:])  # type: ignore[attr-defined]
        if not n:
            raise BadData(f"{path}: was cut while it was read: use another copy")
        done += n
