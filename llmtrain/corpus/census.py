"""What a token file's ids say of it: how often each occurs, how long documents are, which of them are the same."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO

import numpy as np
from tqdm import tqdm

from llmtrain.corpus.config import U16_VOCAB_SIZE
from llmtrain.corpus.token_file import TokenFile

READ_TOKENS = 1 << 22
"""Ids read at a time."""

HELD_HASHES = 1 << 22
"""Hashes of documents that are in memory at a time: 32 MB, and as much again to sort them."""


@dataclass
class Census:
    """Of the first `tokens` ids of a file, and the documents that end within them."""

    tokens: int = 0
    ids: np.ndarray = field(default_factory=lambda: np.zeros(U16_VOCAB_SIZE, np.int64))
    """How often each id occurs."""
    documents: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))
    """How many documents have from 2^i to 2^(i+1) - 1 tokens, their EOS included."""
    longest: int = 0
    """In tokens."""
    repeated: int = 0
    """Documents that are the same as one before them."""
    shared: int | None = None
    """Documents of another file that are among these; None where none was named."""
    of_shared: int = 0
    """Documents of that file that were looked at."""


class Hashes:
    """64-bit hashes of any number of documents: in memory while they are few, else in a file without a name, from
    which they are taken share by share."""

    def __init__(self, stack: ExitStack) -> None:
        self.count = 0
        self._stack = stack
        self._new: list[np.ndarray] = []
        self._file: IO[bytes] | None = None

    def add(self, hashes: np.ndarray) -> None:
        """hashes (N,) uint64"""
        self._new.append(hashes)
        self.count += hashes.size
        if sum(part.size for part in self._new) > HELD_HASHES:
            if self._file is None:
                self._file = self._stack.enter_context(TemporaryFile())
            self._file.seek(0, 2)
            for part in self._new:
                self._file.write(part.tobytes())
            self._new = []

    def share(self, i: int, n: int) -> np.ndarray:
        """The hashes that fall into share i of n, sorted, uint64."""
        found = [_of_share(part, i, n) for part in self._new]
        if self._file is not None:
            self._file.seek(0)
            while data := self._file.read(8 * HELD_HASHES):
                found.append(_of_share(np.frombuffer(data, np.uint64), i, n))
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.uint64)


def _of_share(hashes: np.ndarray, i: int, n: int) -> np.ndarray:
    return hashes[(hashes >> np.uint64(32)) * np.uint64(n) >> np.uint64(32) == i]


def take_census(file: TokenFile, limit: int = 0, against: TokenFile | None = None) -> Census:
    """Reads the first `limit` ids, all where it is 0, and as many of `against`. Memory does not grow with either file.

    A bar on a terminal's stderr shows how far it is. Raises BadData as `TokenFile.gather`.
    """
    census = Census(ids=np.zeros(max(file.vocab_size, U16_VOCAB_SIZE), np.int64))
    files = [file] if against is None else [file, against]
    total = sum(min(limit or one.tokens, one.tokens) for one in files)
    with ExitStack() as stack, tqdm(total=total, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        ours, theirs = Hashes(stack), Hashes(stack)
        for ids, hashes, lengths in _documents(file, limit):
            census.tokens += ids.size
            census.ids += np.bincount(ids, minlength=census.ids.size)
            census.documents += lengths.size
            census.lengths += np.bincount(np.frexp(np.maximum(lengths, 1))[1] - 1, minlength=64)
            census.longest = max(census.longest, int(lengths.max(initial=0)))
            ours.add(hashes)
            bar.update(ids.size)
        for ids, hashes, _ in _documents(against, limit) if against is not None else ():
            theirs.add(hashes)
            bar.update(ids.size)
        shares = max(ours.count, theirs.count) // HELD_HASHES + 1
        shared = 0
        for i in range(shares):
            one, other = ours.share(i, shares), theirs.share(i, shares)
            census.repeated += int(np.count_nonzero(one[1:] == one[:-1]))
            at = np.searchsorted(one, other)
            shared += int(np.count_nonzero(one[np.minimum(at, one.size - 1)] == other)) if one.size else 0
        if against is not None:
            census.shared, census.of_shared = shared, theirs.count
    return census


def _documents(file: TokenFile, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Some ids at a time, with the hash (uint64) and the length (int64) of each document that ends in them; no
    documents where their ends are not known."""
    stop = min(limit or file.tokens, file.tokens)
    begin = at = 0
    width = file.id_type.itemsize
    digest = hashlib.blake2b(digest_size=8)
    blocks = file.ends_of_documents() if file.has_borders else iter(())
    ends = next(blocks, np.zeros(0, np.int64))
    while at < stop:
        ids = file.read_pieces(np.array([at]), np.array([min(READ_TOKENS, stop - at)]))
        view = memoryview(ids.data).cast("B")
        hashes, lengths, hashed = [], [], at
        while True:
            within = int(np.searchsorted(ends, at + ids.size, side="right"))
            for end in ends[:within].tolist():
                digest.update(view[width * (hashed - at) : width * (end - at)])
                hashes.append(digest.digest())
                lengths.append(end - begin)
                digest = hashlib.blake2b(digest_size=8)
                begin = hashed = end
            ends = ends[within:]
            if ends.size or (more := next(blocks, None)) is None:
                break
            ends = more
        digest.update(view[width * (hashed - at) :])
        at += ids.size
        yield ids, np.frombuffer(b"".join(hashes), np.uint64), np.array(lengths, np.int64)
