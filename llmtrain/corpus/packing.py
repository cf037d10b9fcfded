"""Windows filled with whole documents, best fit: the index `X.u16.pack-SEQLEN` beside a token file.

    4096 bytes   JSON: counts, the hash of the token file's content, those of the three parts, and its own
    u64, u32     of each piece the token where it begins, and its length in tokens; window by window
    u64, u64     runs of windows that have equally many pieces: how many pieces each, how many windows

A piece is a document, or a part of one that is longer than a window of `seq_len` + 1 tokens. Such a document gives
whole windows first, which share a token with their neighbours, and its rest is packed like a document. What is left of
a window is padding. Documents are packed some hundred thousand windows' worth at a time, so memory does not grow with
the file, and which ones share a window depends on nothing but their lengths.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.windows import Gathered, Pieces
from llmtrain.storage.atomic import AtomicFile, atomic_file
from llmtrain.storage.errors import BadData, LlmtrainError, UsageError, read_error, write_error
from llmtrain.storage.manifest import seal
from llmtrain.storage.reading import open_file

FORMAT = 1
HEADER = 4096
PIECE = np.dtype([("start", "<u8"), ("length", "<u4")])
CHUNK_DOCUMENTS = 1 << 20
CHUNK_WINDOWS = 1 << 18
"""Documents, and windows' worth of tokens, that are packed together. Part of the format: others give other windows."""


def pack_path(path: str | os.PathLike[str], seq_len: int) -> Path:
    """Where the packed windows of the token file `path` are."""
    return Path(f"{os.fspath(path)}.pack-{seq_len}")


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: lengths (N,) int64 that never rise, each from 1 to `capacity` -> the bin of each (N,) int64,
    bins numbered from 0 as they are opened.

    Each goes into the fullest bin that has room for it. Items of a length meet bins of a room as groups, so the work
    grows with the number of different lengths and not with N.
    """
    bins = np.empty(len(lengths), np.int64)
    by_room: dict[int, list[np.ndarray]] = {}
    rooms = 0  # bit r: some bin has room r

    def put(room: int, some: np.ndarray) -> None:
        nonlocal rooms
        if some.size and room:
            by_room.setdefault(room, []).append(some)
            rooms |= 1 << room

    opened = 0
    borders = np.flatnonzero(np.diff(lengths)) + 1
    for begin, end in zip([0, *borders.tolist()], [*borders.tolist(), len(lengths)], strict=True):
        length = int(lengths[begin]) if len(lengths) else 0
        while begin < end:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                some = np.concatenate(by_room.pop(room))
                rooms &= ~(1 << room)
            else:
                room = capacity
                some = np.arange(opened, opened + -(-(end - begin) // (capacity // length)))
                opened += some.size
            fit = room // length  # the fullest bin stays the fullest while it has room
            used = min(some.size, -(-(end - begin) // fit))
            put(room, some[used:])
            taken = min(end - begin, used * fit)
            bins[begin : begin + taken] = np.repeat(some[:used], fit)[:taken]
            whole, part = divmod(taken, fit)
            put(room - fit * length, some[:whole])
            if part:
                put(room - part * length, some[whole:used])
            begin += taken
    return bins


def _pieces_of(begins: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents (N,) -> the start, length and window, from 0, of each piece, by window and start; all int64. Windows of
    few pieces come first."""
    targets = np.maximum(ends - begins - 1, 0)
    whole, rest = np.divmod(targets, seq_len)
    document = np.repeat(np.arange(len(begins)), whole)
    turn = np.arange(document.size) - np.repeat(np.cumsum(whole) - whole, whole)
    full = begins[document] + turn * seq_len
    rests = np.flatnonzero(rest)
    rests = rests[np.argsort(-rest[rests], kind="stable")]
    starts = begins[rests] + whole[rests] * seq_len
    lengths = rest[rests] + 1
    window = best_fit(lengths, seq_len + 1)
    by_count = np.argsort(np.bincount(window), kind="stable")
    rank = np.empty_like(by_count)
    rank[by_count] = np.arange(by_count.size)
    window = rank[window]
    order = np.lexsort((starts, window))
    return (
        np.concatenate([full, starts[order]]),
        np.concatenate([np.full(full.size, seq_len + 1), lengths[order]]),
        np.concatenate([np.arange(full.size), full.size + window[order]]),
    )


def _chunks(file: TokenFile, seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(begins, ends) in tokens, int64, of the documents of each chunk; the same however their ends come."""
    most = CHUNK_WINDOWS * (seq_len + 1)
    begin, ends = 0, np.zeros(0, np.int64)
    blocks = file.ends_of_documents()
    block = next(blocks, None)
    while block is not None or ends.size:
        while block is not None and (ends.size < CHUNK_DOCUMENTS and (not ends.size or ends[-1] < begin + most)):
            ends = np.concatenate([ends, block])
            block = next(blocks, None)
        count = max(1, min(CHUNK_DOCUMENTS, int(np.searchsorted(ends, begin + most, side="right"))))
        chunk, ends = ends[:count], ends[count:]
        yield np.append(begin, chunk[:-1]), chunk
        begin = int(chunk[-1])


def build(file: TokenFile, seq_len: int) -> Path:
    """Writes the packed windows of `file`, whole or not at all. Equal token files give equal bytes.

    Raises UsageError where documents' ends are not known, BadData where they do not rise, CannotCreate, StorageFailure.
    """
    final = pack_path(file.path, seq_len)
    if not file.has_borders:
        raise UsageError(
            f"{file.path}: does not say where documents end: give --eos-id, or leave --packing documents out"
        )
    bar = tqdm(total=file.tokens, unit="token", unit_scale=True, disable=None, desc=f"packing {file.path.name}")
    with bar, atomic_file(final) as out:
        try:
            _write(file, seq_len, out, bar)
        except OSError as error:
            raise write_error(error, final) from error
    return final


def _write(file: TokenFile, seq_len: int, out: AtomicFile, bar: tqdm) -> None:
    counts = {"windows": 0, "pieces": 0, "documents": 0, "split": 0, "padding": 0, "runs": 0}
    digest = hashlib.sha256()
    runs = []
    out.write(bytes(HEADER))
    for begins, ends in _chunks(file, seq_len):
        if np.any(ends < begins) or ends[-1] > file.tokens:
            raise BadData(f"{file.path}: its document index is damaged: make the token file anew")
        starts, lengths, window = _pieces_of(begins, ends, seq_len)
        records = np.empty(len(starts), PIECE)
        records["start"], records["length"] = starts, lengths
        digest.update(records.tobytes())
        out.write(records.tobytes())
        of_window = np.bincount(window)
        runs.append(np.stack(np.unique(of_window, return_counts=True), axis=1))
        counts["documents"] += len(ends)
        counts["split"] += int(np.count_nonzero(ends - begins > seq_len + 1))
        counts["padding"] += of_window.size * (seq_len + 1) - int(lengths.sum())
        counts["windows"] += of_window.size
        counts["pieces"] += len(starts)
        bar.update(int(ends[-1] - begins[0]))
    table = np.concatenate(runs).astype("<u8")
    counts["runs"] = len(table)
    digest.update(table.tobytes())
    out.write(table.tobytes())
    header = {
        "format": FORMAT,
        "seq_len": seq_len,
        "tokens": file.tokens,
        "token_file_sha256": file.content_sha256(),
        **counts,
        "content_sha256": digest.hexdigest(),
    }
    out.seek(0)
    text = json.dumps(seal(header), indent=1).encode()
    assert len(text) < HEADER
    out.write(text.ljust(HEADER - 1) + b"\n")


class Packed:
    """Packed windows of a token file, a `windows.Cut`.

    header     what the index says of itself: windows, pieces, documents, split (documents), padding (tokens), ...
    """

    def __init__(self, file: TokenFile, header: dict[str, Any], path: Path) -> None:
        self.file = file
        self.path = path
        self.header = header
        self.seq_len: int = header["seq_len"]
        self.windows: int = header["windows"]
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        data = os.pread(self._descriptor, 16 * header["runs"], HEADER + PIECE.itemsize * header["pieces"])
        self._of_run, windows = np.frombuffer(data, "<i8").reshape(-1, 2).T
        self._run_ends = np.cumsum(windows)
        self._run_begins = self._run_ends - windows
        pieces = self._of_run * windows
        self._run_pieces = np.cumsum(pieces) - pieces
        if self._run_ends[-1] != self.windows or pieces.sum() != header["pieces"] or np.any(self._of_run < 1):
            raise self._damaged()

    def pieces(self, windows: np.ndarray) -> Pieces:
        # Read and not mapped: a page that is mapped for the first time costs several reads, and stays this process'.
        fd, size = self._descriptor, PIECE.itemsize
        run = np.searchsorted(self._run_ends, windows, side="right")
        counts = self._of_run[run]
        first = self._run_pieces[run] + (windows - self._run_begins[run]) * counts
        data = b"".join(map(os.pread, repeat(fd), (size * counts).tolist(), (HEADER + size * first).tolist()))
        if len(data) != size * int(counts.sum()):
            raise self._damaged()
        records = np.frombuffer(data, PIECE)
        rows = np.repeat(np.arange(len(windows)), counts)
        return Pieces(rows, records["start"].astype(np.int64), records["length"].astype(np.int64))

    def _damaged(self) -> BadData:
        return BadData(f"{self.path}: is damaged: remove it, and train makes it anew")

    def gather(self, windows: np.ndarray, pieces: Pieces | None = None) -> Gathered:
        width = self.seq_len + 1
        rows, starts, lengths = pieces or self.pieces(windows)
        ends = np.bincount(rows, lengths, minlength=len(windows)).astype(np.int64)
        if np.any(starts + lengths > self.file.tokens) or np.any(starts < 0) or np.any(ends > width):
            raise self._damaged()
        ids = self._rows(self.file.read_pieces(starts, lengths), ends)
        counts = self._rows(self.file.read_mask(starts, lengths), ends) if self.file.has_mask else None
        before = np.cumsum(lengths) - lengths
        columns = before - (np.cumsum(ends) - ends)[rows]
        behind = np.flatnonzero(columns)
        return Gathered(ids, rows[behind], columns[behind], ends, counts)

    def _rows(self, read: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """What was read of rows that are `ends` (N,) long, one after the other -> (N, T + 1), 0 behind the ends. Most
        rows are full, and those between two that are not are copied together."""
        width = self.seq_len + 1
        if read.size == len(ends) * width:
            return read.reshape(-1, width)
        rows = np.zeros(len(ends) * width, read.dtype)
        short = np.flatnonzero(ends < width)
        read_ends, row_ends = np.cumsum(ends)[short], short * width + ends[short]
        begin = row_begin = 0
        for end, row_end, next_row in zip(read_ends.tolist(), row_ends.tolist(), (short + 1).tolist(), strict=True):
            rows[row_begin:row_end] = read[begin:end]
            begin, row_begin = end, next_row * width
        rows[row_begin:] = read[begin:]
        return rows.reshape(-1, width)

    def read_index_ahead(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

    def verify(self) -> int:
        """Reads it all and compares with its header; the bytes read. Raises BadData where they differ."""
        with open(self.path, "rb") as file:
            file.seek(HEADER)
            digest = hashlib.sha256()
            while data := file.read(1 << 24):
                digest.update(data)
            size = file.tell()
        if digest.hexdigest() != self.header["content_sha256"]:
            raise self._damaged()
        return size


def open_packed(file: TokenFile, seq_len: int) -> Packed:
    """The packed windows of `file`. Raises InputMissing, StorageFailure, and BadData for an index that is damaged or is
    not of this file as it is now."""
    path = pack_path(file.path, seq_len)
    try:
        with open_file(path) as raw:
            data, size = raw.read(HEADER), os.fstat(raw.fileno()).st_size
    except OSError as error:
        raise read_error(error, path) from error
    bad = BadData(f"{path}: is no index of packed windows, or damaged: remove it, and train makes it anew")
    try:
        header = json.loads(data)
        body = {name: value for name, value in header.items() if name != "sha256"}
        if seal(body) != header or header["format"] != FORMAT or header["seq_len"] != seq_len:
            raise bad
    except (ValueError, AttributeError, KeyError, AssertionError):
        raise bad from None
    if header["windows"] < 1:
        raise BadData(f"{file.path}: none of its documents has two tokens: there is nothing to pack")
    if size != HEADER + PIECE.itemsize * header["pieces"] + 16 * header["runs"]:
        raise bad
    if (header["tokens"], header["token_file_sha256"]) != (file.tokens, file.content_sha256()):
        raise BadData(f"{path}: was made of another {file.path.name}: remove it, and train makes it anew")
    return Packed(file, header, path)


def open_or_build(file: TokenFile, seq_len: int) -> Packed:
    """The packed windows of `file`, made where there are none that fit it. Raises as `build`."""
    try:
        return open_packed(file, seq_len)
    except LlmtrainError:
        build(file, seq_len)
        return open_packed(file, seq_len)
