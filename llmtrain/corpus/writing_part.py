"""One token file while it is written: its ids, its index and its mask, open at the end of what they hold."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.corpus.token_manifest import (
    BLOCK_BYTES,
    ID_TYPES,
    BlockHashes,
    docs_path,
    manifest_path,
    mask_path,
)
from llmtrain.storage.errors import BadData, write_error


def names(path: Path) -> list[Path]:
    """All files of the token file `path`, the one that vouches for the others first."""
    return [manifest_path(path), docs_path(path), mask_path(path), path]


class Part:
    """One token file while it is written. `base` is the manifest of what it already holds, with --append; `id_type` one
    of ID_TYPES; `masked`: whether it has a mask."""

    def __init__(self, path: Path, folder: Path, base: dict[str, Any] | None, id_type: str, masked: bool) -> None:
        self.path, self.base, self.id_type, self.masked = path, base, ID_TYPES[id_type], masked
        self.tokens = self.documents = self.max_id = self.loss_tokens = 0
        if base:
            self.restore(self.base_state())
        self.ids_at = path if base else folder / path.name
        self.docs_at, self.mask_at = docs_path(self.ids_at), mask_path(self.ids_at)
        self._open: dict[Path, int] = {}
        self.hashes = BlockHashes()
        self.mask_hashes = BlockHashes()

    def base_state(self) -> list[int]:
        """The `state` that `base` says."""
        assert self.base
        counts = [self.base[name] for name in ("tokens", "documents", "max_id")]
        return counts + ([self.base["mask"]["loss_tokens"]] if self.masked and self.base.get("mask") else [])

    def state(self) -> list[int]:
        return [self.tokens, self.documents, self.max_id, *([self.loss_tokens] if self.masked else [])]

    def restore(self, state: list[int]) -> None:
        """What `state` gave."""
        self.tokens, self.documents, self.max_id, *of_mask = state
        self.loss_tokens = of_mask[0] if of_mask else 0

    def _sizes(self) -> dict[Path, int]:
        """Each file and the bytes that are said to be written to it."""
        sizes = {self.ids_at: self.id_type.itemsize * self.tokens, self.docs_at: 8 * self.documents}
        return sizes | ({self.mask_at: self.tokens} if self.masked else {})

    def open(self) -> None:
        """Opens the files, cut to what is said to be written. Raises BadData where they are shorter than that."""
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if self.tokens else os.O_CREAT)
        for place, size in self._sizes().items():
            try:
                self._open[place] = descriptor = os.open(place, flags, 0o666)
                if os.fstat(descriptor).st_size < size:
                    advice = "make the token file anew" if self.base else f"remove {place.parent} and start over"
                    raise BadData(f"{place}: is shorter than was written to it: {advice}")
                os.ftruncate(descriptor, size)
                os.lseek(descriptor, size, os.SEEK_SET)
            except OSError as error:
                raise write_error(error, place) from error
        self.hashes = self._hashes_of(self.ids_at, self.id_type.itemsize, self.base)
        if self.masked:
            self.mask_hashes = self._hashes_of(self.mask_at, 1, self.base and self.base["mask"])

    def _hashes_of(self, place: Path, width: int, base: dict[str, Any] | None) -> BlockHashes:
        """Of what is written of a file of `width` bytes a token; `base` knows those of whole blocks."""
        known = base["sha256"][: self.base["tokens"] * width // BLOCK_BYTES] if base and self.base else []
        hashes, at = BlockHashes(known), len(known) * BLOCK_BYTES
        while at < width * self.tokens:
            piece = os.pread(self._open[place], min(1 << 20, width * self.tokens - at), at)
            hashes.update(piece)
            at += len(piece)
        return hashes

    def add(self, ids: list[np.ndarray], lengths: np.ndarray, of_prompt: np.ndarray) -> None:
        """Documents: all their ids, and of each its length in ids and how many of those are its prompt's. Raises
        CannotCreate, StorageFailure; then nothing was added."""
        if not len(lengths):
            return
        for data in ids:
            _write(self._open[self.ids_at], data.astype(self.id_type, copy=False), self.path)
        ends = (self.tokens + np.cumsum(lengths)).astype("<u8")
        _write(self._open[self.docs_at], ends, self.path)
        if self.masked:
            runs = np.stack([of_prompt, lengths - of_prompt], axis=1).reshape(-1)
            mask = np.repeat(np.tile(np.array([0, 1], np.uint8), len(lengths)), runs)
            _write(self._open[self.mask_at], mask, self.path)
            self.mask_hashes.update(mask)
            self.loss_tokens += int(runs[1::2].sum())
        for data in ids:
            self.hashes.update(data.astype(self.id_type, copy=False))
            self.max_id = max(self.max_id, int(data.max(initial=0)))
        self.tokens += int(lengths.sum())
        self.documents += len(lengths)

    def cut(self, state: list[int]) -> None:
        """Back to an earlier state. What comes next can only be a commit."""
        self.restore(state)
        for place, size in self._sizes().items():
            if place in self._open:
                with suppress(OSError):
                    # Never beyond its end: zeros would look like ids.
                    os.ftruncate(self._open[place], min(size, os.fstat(self._open[place]).st_size))

    def sync(self) -> None:
        for descriptor in self._open.values():
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise write_error(error, self.path) from error

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}


def _write(descriptor: int, array: np.ndarray, path: Path) -> None:
    data = memoryview(array).cast("B")  # type: ignore[arg-type]
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise write_error(error, path) from error
