"""The bytes of one input, decompressed, a piece at a time: never on disk, never whole in memory unless asked for."""

import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from io import BufferedReader, FileIO, RawIOBase
from typing import Any, NamedTuple

from llmtrain.corpus.inputs import GZIP, STDIN, ZSTD, Input, shown
from llmtrain.corpus.remote import RemoteFile
from llmtrain.storage.errors import UsageError

PIECE_BYTES = 1 << 20

# Compressed bytes for the decoder at once. A piece of zeros grows to 32,000 times its size under zstd, whose decoder
# cannot be told to stop half-way: so at most 32 MiB come of one.
ZSTD_BYTES = 1 << 10

# Text that one call of the gzip decoder may give.
GZIP_BYTES = 1 << 20

# No UTF-8 text begins so: that of gzip and zstd is looked for in inputs whose names say nothing. A zstd file may also
# begin with a frame to be skipped (pzstd writes one), which is only looked for where the name says zstd.
MAGIC = {GZIP: b"\x1f\x8b", ZSTD: b"\x28\xb5\x2f\xfd"}
_MAGICS = tuple(MAGIC.values())
ZSTD_SKIPPED = b"\x2a\x4d\x18"

TRUNCATED = "truncated"

BOM = b"\xef\xbb\xbf"


class Damage(NamedTuple):
    """Why what stands in a document's place is none."""

    reason: str
    """A word that counts are kept by: "invalid_utf8", "truncated", ..."""
    detail: str
    """What is wrong, for a person."""


class Broken(Exception):
    """An input is damaged from here on; `damage` says how."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.damage = Damage(reason, detail)


class Progress:
    """How far the reading of inputs has come."""

    bytes = 0
    """As they are stored, of all inputs, from 0."""


def is_small(input: Input) -> bool:
    """Whether it is a small plain file as far as its name and size tell."""
    return not input.url and not input.compression and input.size is not None and input.size <= PIECE_BYTES


def read_small(input: Input, progress: Progress) -> tuple[bytes, int] | None:
    """All of a small plain file and the bytes of its byte order mark; None of what is none or is compressed, which
    `Text` reads. Of a tree of 100,000 files that takes a second less. Raises OSError."""
    if not is_small(input):
        return None
    assert input.size is not None
    descriptor = os.open(input.name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, input.size + 1)
    finally:
        os.close(descriptor)
    # It is another size by now, or what was asked for came in pieces.
    if len(data) != input.size or data.startswith(_MAGICS):
        return None
    progress.bytes += len(data)
    return (data[len(BOM) :], len(BOM)) if data.startswith(BOM) else (data, 0)


class Text(RawIOBase):
    """The text of an input, without the byte order mark at its beginning. Reading raises Broken and OSError."""

    mark = 0
    """Bytes of the byte order mark, known when the first bytes were read."""

    def __init__(self, input: Input, progress: Progress, whole: bool = False) -> None:
        """`whole` is for `readall`: it spares the copy of a large file."""
        self._pieces = _decompressed(input, progress, whole)
        self._rest: bytes | memoryview | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._next())
        size = min(len(self._rest), len(buffer))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def readall(self) -> bytes:
        return b"".join(iter(self._next, b""))

    def buffered(self) -> BufferedReader:
        return BufferedReader(self, PIECE_BYTES)

    def close(self) -> None:
        if not self.closed:
            self._pieces.close()
        super().close()

    def _next(self) -> bytes:
        """The next piece, empty at the end."""
        piece = next(self._pieces, b"")
        if self._rest is None:
            self._rest = b""
            while len(piece) < len(BOM) and BOM.startswith(piece) and (more := next(self._pieces, b"")):
                piece += more
            if piece.startswith(BOM):
                self.mark = len(BOM)
                return piece[len(BOM) :] or next(self._pieces, b"")
        return piece


def _decompressed(input: Input, progress: Progress, whole: bool) -> Generator[bytes, None, None]:
    """Pieces that are not empty."""
    compression = input.compression
    # Compressed, small ones: the rest behind each of many members is copied.
    size = PIECE_BYTES // 8 if compression else max(PIECE_BYTES, (input.size or 0) + 1) if whole else PIECE_BYTES
    with closing(_stored(input, progress, size)) as pieces:
        head = next(pieces, b"")
        while 0 < len(head) < 4 and (more := next(pieces, b"")):
            head += more
        if not compression:
            compression = next((name for name, magic in MAGIC.items() if head.startswith(magic)), "")
        elif not _begins(head, compression):
            raise Broken(f"not_{compression}", f"its name says {compression} and its content does not")
        stored = _with_head(head, pieces)
        if not compression:
            yield from stored
        elif compression == GZIP:
            yield from _gunzip(stored)
        else:
            yield from _unzstd(stored, input)


def _begins(head: bytes, compression: str) -> bool:
    """Whether these first four bytes, or fewer of a shorter input, can be of that compression."""
    magic = MAGIC[compression]
    return head.startswith(magic) or magic.startswith(head) or compression == ZSTD and head[1:4] == ZSTD_SKIPPED


def _stored(input: Input, progress: Progress, first: int) -> Generator[bytes, None, None]:
    """What the input holds, uncompressed or not, in pieces; the first of at most `first` bytes."""
    with open_stored(input, streamed=True) as file:
        piece = file.read(first)
        while piece:
            progress.bytes += len(piece)
            yield piece
            piece = file.read(min(first, PIECE_BYTES))


def open_stored(input: Input, streamed: bool = False) -> AbstractContextManager[Any]:
    """What the input holds, uncompressed or not, as a binary file, which can seek unless `streamed`. Raises OSError, of
    a remote file InputMissing and StorageFailure."""
    if input.url:
        return RemoteFile(input.url, input.size, streamed)
    if input.name == STDIN:
        return FileIO(0, closefd=False)
    return FileIO(input.name)


def _with_head(head: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from pieces


def _gunzip(pieces: Iterator[bytes]) -> Iterator[bytes]:
    decoder = None
    members = 0
    for piece in pieces:
        while piece:
            if decoder is None:
                if members:
                    piece = piece.lstrip(b"\0")  # a tape's padding
                    if not piece:
                        break
                decoder = zlib.decompressobj(wbits=31)
            try:
                text = decoder.decompress(piece, GZIP_BYTES)
                # Full: there may be more inside although nothing is left to put in.
                while text:
                    yield text
                    text = decoder.decompress(decoder.unconsumed_tail, GZIP_BYTES) if not decoder.eof else b""
            except zlib.error as error:
                raise Broken(TRUNCATED, f"its gzip data are damaged ({error})") from error
            piece = b""
            if decoder.eof:
                piece, decoder, members = decoder.unused_data, None, members + 1
    if decoder or not members:
        raise Broken(TRUNCATED, "its gzip data end too early")


def _unzstd(pieces: Iterator[bytes], input: Input) -> Iterator[bytes]:
    new_decoder, error_class = _zstd(input)
    decoder = None
    frames = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            if decoder is None:
                decoder = new_decoder()
            try:
                text = decoder.decompress(bytes(view[:ZSTD_BYTES]))
            except error_class as error:
                raise Broken(TRUNCATED, f"its zstd data are damaged ({error})") from error
            if text:
                yield text
            view = view[ZSTD_BYTES:]
            if decoder.eof:
                rest = len(decoder.unused_data)
                view, decoder, frames = memoryview(piece)[len(piece) - len(view) - rest :], None, frames + 1
    if decoder or not frames:
        raise Broken(TRUNCATED, "its zstd data end too early")


def _zstd(input: Input) -> tuple[Callable[[], Any], type[Exception]]:
    """What makes a decoder of one frame, and its error."""
    if sys.version_info >= (3, 14):
        from compression import zstd

        options = {zstd.DecompressionParameter.window_log_max: 31}
        return lambda: zstd.ZstdDecompressor(options=options), zstd.ZstdError
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(f"{shown(input.name)}: zstd needs a package: pip install 'llmtrain[zstd]'") from error
    # `zstd --long=31` makes frames that need 2 GiB to be read.
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), zstandard.ZstdError
