"""The token file: flat little-endian ids, beside it a manifest (`.json`) and a document index (`.docs`).

    X.u16        ids of two bytes, of four where the vocabulary is beyond 65,536 (by custom X.u32),
                 and nothing else, so that nanoGPT-style readers open it
    X.u16.json   what it holds, which tokenizer made it, and the SHA-256 of each 64 MiB block of ids
    X.u16.docs   u64, the end of each document in tokens; each document ends with the EOS id
    X.u16.mask   u8, of fine-tuning data: 1 for a token that counts in the loss, 0 for one of a prompt

A file without a manifest can be read too, in the forms of `foreign`; then the caller says the vocabulary and, unless
the form does, which id ends a document.
"""

import hashlib
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.corpus.foreign import Form, recognise, refuse_text
from llmtrain.corpus.token_manifest import (
    BLOCK_BYTES,
    ID_TYPES,
    docs_path,
    held_out_path,
    manifest_path,
    mask_path,
    read_manifest,
    work_folder,
)
from llmtrain.storage.errors import BadData, ConfigMismatch, InputMissing, UsageError, read_error
from llmtrain.storage.reading import open_file

OURS = "flat u{bits} ids with a manifest"

# So many of some hundred pieces are looked at before the disk is asked for all. Where a twentieth of the file is not in
# the page cache, these few are all there in one of five cases; then the twentieth is waited for.
LOOKED_AT = 32


def _size(path: Path) -> int:
    """Bytes of a plain file that can be read. Raises InputMissing, StorageFailure, BadData."""
    with open_file(path, _if_missing(path)) as file:
        return os.fstat(file.fileno()).st_size


def _if_missing(path: Path) -> str:
    """What to do where there is no such file: that of held-out documents is not written where there are none."""
    corpus = path.with_name(path.stem.removesuffix(".val") + path.suffix)
    if corpus != path and held_out_path(corpus) == path and corpus.is_file():
        return (
            f"nothing was held out of {corpus}: raise --holdout of `llmtrain tokenize-corpus`, or see its --document; "
            f"`train --tokens {corpus}` without --val-tokens goes without"
        )
    return "check the path, or make it with `llmtrain tokenize-corpus`"


def _size_and_manifest(path: Path) -> tuple[int, dict[str, Any] | None]:
    """The bytes that count, and the manifest: of a file that is appended to, those that the manifest counts."""
    for last in (False, True):
        manifest = read_manifest(path)
        size = _size(path)
        whole = 0 if manifest is None else ID_TYPES[manifest["dtype"]].itemsize * manifest["tokens"]
        if manifest is None or size <= whole:
            break
        if _is_appended_to(path):
            return whole, manifest
        # Its writer may have finished in between: then there is a new manifest.
        if last:
            break
    return size, manifest


def _is_appended_to(path: Path) -> bool:
    """Whether there is work under way, or unfinished, that adds to it."""
    stem, suffix = path.stem, path.suffix
    trained_on = path.with_name(stem.removesuffix(".val") + suffix)
    return any(work_folder(one).is_dir() for one in (path, trained_on))


def mapping_of(array: np.memmap) -> mmap.mmap:
    """What an array is mapped by."""
    assert isinstance(array.base, mmap.mmap)
    return array.base


def _truncated(path: Path, size: int) -> BadData:
    return BadData(f"{path}: was truncated to {size:,} bytes while in use: make the token file anew")


def _check_mask(path: Path, tokens: int) -> None:
    """Raises InputMissing, StorageFailure, BadData where the mask is not there, or of another length."""
    size = _size(mask_path(path))
    if size != tokens and not (size > tokens and _is_appended_to(path)):
        raise BadData(
            f"{mask_path(path)}: its length is {size:,} bytes, {tokens:,} tokens take one each: make the token file "
            "anew"
        )


def _read_pieces(fd: int, path: Path, begins: np.ndarray, sizes: np.ndarray) -> bytes:
    """Pieces of a file, in bytes, one after the other. Raises BadData, StorageFailure."""
    # Read and not copied out of the mapping: of a large file most windows lie in pages that were never mapped, and
    # mapping them costs several times as much, grows the process, and kills it where the file was truncated. Every
    # operation of Python between two reads shows, so there is none.
    try:
        data = b"".join(map(os.pread, repeat(fd), sizes.tolist(), begins.tolist()))
    except OSError as error:
        raise read_error(error, path) from error
    if len(data) != sizes.sum():
        raise _truncated(path, os.fstat(fd).st_size)
    return data


class TokenFile:
    """An open token file. Nothing is read or hashed but what is asked for: a file of 100 GB opens at once.

    path        the file's
    form        how it lies there, in words
    tokens      how many ids it holds
    documents   how many documents, 0 where unknown
    manifest    as written by `write_manifest`, None where there is none
    vocab_size  every id is below it: the manifest's and the caller's, whichever is smaller
    eos_id      the id that ends each document, None where unknown
    ids         (tokens,) of `id_type`, mapped
    id_type     uint16 or uint32
    doc_ends    (documents,) uint64, mapped where it is a file of ours: the end of each document in tokens; None where
                there is no index
    """

    def __init__(
        self,
        path: Path,
        form: str,
        manifest: dict[str, Any] | None,
        vocab_size: int,
        eos_id: int | None,
        ids: np.memmap,
        doc_ends: np.ndarray | None,
    ) -> None:
        self.path = path
        self.form = form
        self.manifest = manifest
        self.vocab_size = vocab_size
        self.ids = ids
        self.id_type: np.dtype = ids.dtype
        self.doc_ends = doc_ends
        self.tokens = ids.size
        self.documents: int = manifest["documents"] if manifest else 0 if doc_ends is None else doc_ends.size
        self.eos_id: int | None = manifest["eos_id"] if manifest else eos_id
        self._flat = np.asarray(ids)  # slices of a np.memmap cost microseconds more than those of an array
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        if hasattr(os, "posix_fadvise"):
            # Windows are read in random order: without this the system would read 128 KiB around a window of 2.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._mask = -1
        if self.has_mask:
            self._mask = os.open(mask_path(path), os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._mask)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], vocab_size: int | None = None, eos_id: int | None = None
    ) -> "TokenFile":
        """Opens `path` and checks that file, manifest and index fit each other, in time that does not grow with them.

        `vocab_size` is the model's; it must be given where there is no manifest. `eos_id` ends the documents of a file
        that does not say by itself what does.
        Raises InputMissing (66): no such file; BadData (65): empty, odd length, a manifest or index that does not
        fit; ConfigMismatch (78): ids beyond `vocab_size` by the manifest; UsageError (2): no vocabulary known.
        """
        path = Path(path)
        if vocab_size is not None and not 0 < vocab_size:
            raise UsageError(f"--vocab-size {vocab_size}: is not above 0")
        if not path.exists():
            from llmtrain.corpus.parts import open_parts

            if parts := open_parts(path, vocab_size):
                return parts
        size, manifest = _size_and_manifest(path)
        if size == 0:
            raise BadData(f"{path}: is empty: make the token file anew")
        id_type = ID_TYPES[manifest["dtype"] if manifest else "uint16"]
        width = id_type.itemsize
        if manifest is None:
            refuse_text(path)
        if size % width:
            odd = "odd" if size % 2 else "no multiple of 4"
            raise BadData(
                f"{path}: its length of {size:,} bytes is {odd}, u{8 * width} ids take {width} each: make the token "
                "file anew"
            )
        form = Form(OURS.format(bits=8 * width))
        if manifest is None:
            form = recognise(path, size)
            if vocab_size is None:
                raise UsageError(f"{path}: has no manifest ({manifest_path(path).name}): say its --vocab-size")
            if eos_id is not None and not 0 <= eos_id < vocab_size:
                raise UsageError(f"--eos-id {eos_id}: is not an id of the vocabulary of {vocab_size}")
        else:
            if manifest["tokens"] * width != size:
                raise BadData(
                    f"{path}: holds {size // width:,} tokens, its manifest says {manifest['tokens']:,}: "
                    "make the token file anew"
                )
            if vocab_size is not None and manifest["max_id"] >= vocab_size:
                raise ConfigMismatch(
                    f"{path}: holds id {manifest['max_id']}, the model's vocabulary is {vocab_size}: "
                    f"name another file, or give the model --vocab-size {manifest['vocab_size']}"
                )
        known = [vocab_size] if vocab_size is not None else []
        limit = min(known + [manifest["vocab_size"]] if manifest else known)
        try:
            ids = np.memmap(path, id_type, "r", form.begin, ((size - form.begin) // width,))
            doc_ends = cls._open_index(path, manifest) if manifest else form.doc_ends
            if manifest and manifest.get("mask"):
                _check_mask(path, manifest["tokens"])
        except OSError as error:
            raise read_error(error, path) from None
        if form.begin + ids.nbytes != size:
            raise BadData(f"{path}: changes while it is opened: wait for its writer")
        return cls(path, form.name, manifest, limit, eos_id, ids, doc_ends)

    @staticmethod
    def _open_index(path: Path, manifest: Mapping[str, Any]) -> np.memmap | None:
        """The document index, whose length and last entry must fit the manifest; None where there is none."""
        where = docs_path(path)
        documents = manifest["documents"]
        if not where.exists() or not documents:
            return None
        size = _size(where)
        if size > documents * 8 and _is_appended_to(path):
            size = documents * 8
        if size != documents * 8:
            raise BadData(
                f"{where}: its length is {size:,} bytes, {documents:,} documents take {documents * 8:,}: "
                "make the token file anew"
            )
        ends = np.memmap(where, "<u8", "r", shape=(documents,))
        if int(ends[-1]) != manifest["tokens"]:
            raise BadData(
                f"{where}: its last document ends at {int(ends[-1]):,}, the file at {manifest['tokens']:,}: "
                "make the token file anew"
            )
        return ends

    @property
    def has_mask(self) -> bool:
        """Whether only some of its tokens count in the loss."""
        return self.manifest is not None and self.manifest.get("mask") is not None

    @property
    def has_borders(self) -> bool:
        """Whether it is known where documents begin."""
        return self.doc_ends is not None or self.eos_id is not None

    def windows(self, seq_len: int) -> int:
        """How many windows of `seq_len` + 1 tokens it holds; neighbours share a token, the tail is dropped."""
        return max(0, (self.tokens - 1) // seq_len)

    def window(self, i: int, seq_len: int) -> np.ndarray:
        """Window `i`: a view, (seq_len + 1,)."""
        if not 0 <= i < self.windows(seq_len):
            raise IndexError(f"window {i} of {self.windows(seq_len)}")
        return self._flat[i * seq_len : (i + 1) * seq_len + 1]

    def gather(self, windows: np.ndarray, seq_len: int) -> np.ndarray:
        """windows (N,) int64 -> their ids, (N, seq_len + 1), read-only, every one below `vocab_size`.

        Raises BadData naming the position of an id that is not, or when the file was truncated since it was opened.
        """
        ids = self.read_pieces(windows * seq_len, np.full(len(windows), seq_len + 1))
        return ids.reshape(len(windows), seq_len + 1)

    def read_pieces(self, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Pieces (N,) int64, `begins` and `lengths` in tokens of the file -> the ids of one after the other, (M,) of
        `id_type`, read-only. Raises BadData as `gather`."""
        width = self.id_type.itemsize
        data = _read_pieces(self._descriptor, self.path, width * begins + self.ids.offset, width * lengths)
        ids = np.frombuffer(data, self.id_type)
        if ids.size and int(ids.max()) >= self.vocab_size:
            place = int(np.argmax(ids >= self.vocab_size))
            ends = np.cumsum(lengths)
            piece = int(np.searchsorted(ends, place, side="right"))
            raise self._beyond(int(begins[piece] + lengths[piece] - ends[piece]) + place)
        return ids

    def read_mask(self, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """As `read_pieces`, of a file with a mask: 1 for each token that counts in the loss and 0 for the others, (M,)
        uint8."""
        return np.frombuffer(_read_pieces(self._mask, mask_path(self.path), begins, lengths), np.uint8)

    def _beyond(self, token: int) -> BadData:
        return BadData(
            f"{self.path}: id {int(self.ids[token])} at token {token:,} is beyond the vocabulary of {self.vocab_size}: "
            + ("make it anew" if self.manifest else "check the model's --vocab-size")
        )

    def ends_of_documents(self) -> Iterator[np.ndarray]:
        """The end of each document in tokens, int64, a good many at a time: from the index where there is one, else
        from the EOS ids, for which the whole file is read. Ids behind the last EOS are a document too."""
        if self.doc_ends is not None:
            for first in range(0, self.doc_ends.size, 1 << 20):
                mapping = mapping_of(self.doc_ends) if isinstance(self.doc_ends, np.memmap) else None
                # Reading the lost part of a mapped file would kill the process (SIGBUS).
                if mapping and mapping.size() < self.doc_ends.nbytes:
                    raise _truncated(docs_path(self.path), mapping.size())
                yield np.asarray(self.doc_ends[first : first + (1 << 20)]).astype(np.int64)
                if mapping:  # what was read stays in the page cache, but need not count as this process'
                    mapping.madvise(mmap.MADV_DONTNEED)
            return
        end = 0
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.ids.offset)
            of_block = BLOCK_BYTES // self.id_type.itemsize
            for begin in range(0, self.tokens, of_block):
                ids = np.fromfile(file, self.id_type, min(of_block, self.tokens - begin))
                ends = np.flatnonzero(ids == self.eos_id) + (begin + 1)
                end = int(ends[-1]) if ends.size else end
                yield ends
        if end < self.tokens:
            yield np.array([self.tokens])

    def content_sha256(self) -> str:
        """What tells its content from another's, without reading it all: of the hashes in the manifest, a mask's too;
        without one, of the first and last MiB of ids."""
        if self.manifest is not None:
            of_mask = self.manifest["mask"]["sha256"] if self.has_mask else []
            return hashlib.sha256("".join(self.manifest["sha256"] + of_mask).encode()).hexdigest()
        digest = hashlib.sha256(self.ids[: 1 << 19].tobytes())
        digest.update(self.ids[-(1 << 19) :].tobytes())
        return digest.hexdigest()

    def borders(self, windows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin in gathered windows: windows (N,), ids (N, T + 1) -> rows (M,), columns (M,), int64.

        A border is a column c in 1..T with a document beginning there; row-major order. Column 0 is not looked at.
        From the index of a form of others that has one, else from the EOS ids, which in a file of ours stand where the
        index says and nowhere else: searching them in tokens that are at hand costs less than reading the index. None
        where neither is known.
        """
        seq_len = ids.shape[1] - 1
        if self.doc_ends is not None and self.manifest is None:
            begins = windows * seq_len
            # Keys of the index' own type: a search with int64 keys would convert the whole index to float64.
            first = np.searchsorted(self.doc_ends, begins.astype(np.uint64), side="right")
            last = np.searchsorted(self.doc_ends, (begins + seq_len).astype(np.uint64), side="right")
            counts = last - first
            rows = np.repeat(np.arange(len(windows)), counts)
            which = np.arange(rows.size) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            return rows, np.asarray(self.doc_ends[which]).astype(np.int64) - begins[rows]
        if self.eos_id is not None:
            # Flat, because np.nonzero takes ten times as long on two dimensions.
            rows, columns = np.divmod(np.flatnonzero(ids.reshape(-1) == self.eos_id), seq_len + 1)
            inside = columns < seq_len
            return rows[inside], columns[inside] + 1
        none = np.zeros(0, np.int64)
        return none, none

    def read_ahead(self, begins: np.ndarray, lengths: np.ndarray) -> None:
        """Asks the system to bring pieces (N,), in tokens, into the page cache, unless some of them, looked at, are all
        there. The thread that asks may wait for the disk's queue, but no other (mmap.madvise would hold Python's lock
        meanwhile)."""
        places = (self.id_type.itemsize * begins + self.ids.offset).tolist()
        if not hasattr(os, "posix_fadvise") or self._are_cached(places[:: max(1, len(places) // LOOKED_AT)]):
            return
        fd, advise, willneed = self._descriptor, os.posix_fadvise, os.POSIX_FADV_WILLNEED
        for begin, length in zip(places, (self.id_type.itemsize * lengths).tolist(), strict=True):
            advise(fd, begin, length, willneed)

    def _are_cached(self, places: list[int]) -> bool:
        """Whether the bytes at all of these places can be read without the disk."""
        byte = bytearray(1)
        try:
            return all(os.preadv(self._descriptor, [byte], place, os.RWF_NOWAIT) for place in places)
        except (OSError, AttributeError):  # it is not, or one cannot ask here
            return False

    def verify(self) -> Iterator[int]:
        """Reads it all and compares with manifest and index; yields the bytes of each piece when found sound.

        Raises BadData naming the first block, document or count that differs; InputMissing without a manifest.
        """
        if self.manifest is None:
            raise InputMissing(
                f"{self.path}: has no manifest ({manifest_path(self.path).name}), so there is nothing to verify "
                "against: copy that too, or tokenize the text again"
            )
        documents, max_id, buffer = 0, 0, bytearray(BLOCK_BYTES)
        with open(self.path, "rb") as file:
            for block, sha256 in enumerate(self.manifest["sha256"]):
                begin = block * BLOCK_BYTES
                n = min(BLOCK_BYTES, self.ids.nbytes - begin)
                view = memoryview(buffer)[:n]
                if file.readinto(view) != n or hashlib.sha256(view).hexdigest() != sha256:
                    raise BadData(
                        f"{self.path}: bytes {begin:,} to {begin + n:,} are damaged (their hash differs): make the "
                        "token file anew"
                    )
                ids = np.frombuffer(view, self.id_type)
                max_id = max(max_id, int(ids.max()))
                ends = np.flatnonzero(ids == self.eos_id) + (begin // self.id_type.itemsize + 1)
                if self.doc_ends is not None:
                    said = self.doc_ends[documents : documents + len(ends)]
                    if not np.array_equal(said, ends.astype(np.uint64)):
                        raise BadData(
                            f"{docs_path(self.path)}: is damaged: a document does not end where its EOS id is"
                        )
                documents += len(ends)
                yield n
        for name, found in (("documents", documents), ("max_id", max_id)):
            if self.manifest[name] != found:
                raise BadData(f"{manifest_path(self.path)}: {name} is {self.manifest[name]:,}, the file has {found:,}")
        if self.has_mask:
            yield from self._verify_mask(self.manifest["mask"])

    def _verify_mask(self, said: Mapping[str, Any]) -> Iterator[int]:
        where, loss_tokens = mask_path(self.path), 0
        with open(where, "rb") as file:
            for sha256 in said["sha256"]:
                data = file.read(min(BLOCK_BYTES, self.tokens - file.tell()))
                if hashlib.sha256(data).hexdigest() != sha256:
                    raise BadData(f"{where}: is damaged before byte {file.tell():,} (its hash differs)")
                loss_tokens += int(np.count_nonzero(np.frombuffer(data, np.uint8) == 1))
                yield len(data)
        if loss_tokens != said["loss_tokens"]:
            raise BadData(
                f"{manifest_path(self.path)}: loss_tokens is {said['loss_tokens']:,}, the mask has {loss_tokens:,}"
            )
