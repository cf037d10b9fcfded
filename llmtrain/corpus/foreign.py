"""Token files that others wrote: told apart by their first bytes and by what lies beside them.

    llm.c      256 int32 (magic 20240520, version, tokens), then the ids; version 1 holds u16
    Megatron   X.bin of ids, beside it X.idx: magic, version, dtype, counts, length and byte of each sequence, and of
               each document its first sequence
    nanoGPT    ids and nothing else
"""

import codecs
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from llmtrain.storage.errors import BadData, read_error

FLAT = "flat u16 ids (as nanoGPT's)"
LLM_C = "llm.c's u16 ids behind a header"
MEGATRON = "Megatron's 16-bit ids with an .idx"

LLM_C_MAGIC = 20240520
LLM_C_HEADER = 1024

TEXT_BYTES = 512
"""From the beginning of a file, to see whether it is text."""

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_U16 = 8
MEGATRON_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4}
"""Bytes of an id by Megatron's code of a dtype, for the refusal of others than u16."""


@dataclass(frozen=True)
class Form:
    """How the ids lie in a file."""

    name: str
    begin: int = 0
    """Byte of the first id."""
    doc_ends: np.ndarray | None = None
    """As TokenFile has them, where the form says them."""


def megatron_index(path: Path) -> Path:
    """Where the .idx of a Megatron .bin is."""
    return path.with_suffix(".idx")


def recognise(path: Path, size: int) -> Form:
    """The form of a file of `size` bytes that has no manifest. Raises BadData for one that cannot be read, or whose
    header or index does not fit it; StorageFailure."""
    try:
        with open(path, "rb") as file:
            header = file.read(12)
        if len(header) == 12 and struct.unpack("<i", header[:4])[0] == LLM_C_MAGIC:
            return _llm_c(path, size, *struct.unpack("<ii", header[4:]))
        index = megatron_index(path)
        if path.suffix == ".bin" and index.is_file():
            with open(index, "rb") as file:
                if file.read(len(MEGATRON_MAGIC)) == MEGATRON_MAGIC:
                    return _megatron(index, file, path, size)
    except OSError as error:
        raise read_error(error, path) from error
    return Form(FLAT)


def refuse_text(path: Path) -> None:
    """Raises BadData for a file that begins as text does: ids, of two bytes each, are hardly ever letters alone."""
    try:
        with open(path, "rb") as file:
            head = codecs.getincrementaldecoder("utf-8")().decode(file.read(TEXT_BYTES))
    except UnicodeDecodeError:
        return
    except OSError as error:
        raise read_error(error, path) from error
    if len(head) >= TEXT_BYTES // 8 and all(c.isprintable() or c.isspace() for c in head):
        raise BadData(f"{path}: is text, not ids: make a token file of it with `llmtrain tokenize-corpus`")


def _llm_c(path: Path, size: int, version: int, tokens: int) -> Form:
    if version != 1:
        raise BadData(
            f"{path}: is an llm.c file of version {version}; only version 1 holds u16 ids: tokenize the text again"
        )
    if tokens < 1 or size != LLM_C_HEADER + 2 * tokens:
        raise BadData(
            f"{path}: its llm.c header counts {tokens:,} tokens, so {LLM_C_HEADER + 2 * tokens:,} bytes in all; the "
            f"file has {size:,}: copy it or make it again"
        )
    return Form(LLM_C, LLM_C_HEADER)


def _megatron(index: Path, file: BinaryIO, path: Path, size: int) -> Form:
    def refuse(what: str, todo: str = "copy both files again, or make them anew") -> NoReturn:
        raise BadData(f"{index}: {what}: {todo}")

    fixed = file.read(25)
    if len(fixed) < 25:
        refuse("ends in its header")
    version, dtype, sequences, entries = struct.unpack("<QBQQ", fixed)
    if version != 1:
        refuse(f"has version {version}, known is 1", "make it anew with a Megatron that writes that one")
    if dtype != MEGATRON_U16:
        what = f"{8 * MEGATRON_BYTES[dtype]} bits" if dtype in MEGATRON_BYTES else f"an unknown type ({dtype})"
        refuse(f"holds ids of {what}, u16 is needed", "a vocabulary below 65,536 gives that: tokenize the text again")
    lengths_at = len(MEGATRON_MAGIC) + 25
    bytes_at, documents_at = lengths_at + 4 * sequences, lengths_at + 12 * sequences
    if os.fstat(file.fileno()).st_size != documents_at + 8 * entries or not sequences or entries < 2:
        refuse(f"its length does not fit its {sequences:,} sequences and {entries:,} entries for documents")
    file.seek(documents_at - 8)
    (last_byte,) = struct.unpack("<q", file.read(8))
    file.seek(bytes_at - 4)
    (last_length,) = struct.unpack("<i", file.read(4))
    if last_byte + 2 * last_length != size:
        refuse(f"its last sequence ends at byte {last_byte + 2 * last_length:,}, {path.name} at {size:,}")
    begins = np.memmap(index, "<i8", "r", bytes_at, (sequences,))
    documents = np.memmap(index, "<i8", "r", documents_at, (entries,))
    # A document's end is the begin of the next one; the last ends where the file does.
    first = np.asarray(documents[1:-1])
    if documents[0] != 0 or documents[-1] != sequences or np.any((first < 0) | (first >= sequences)):
        refuse("its documents do not go from its first sequence to its last")
    ends = np.append(begins[first] // 2, size // 2).astype(np.uint64)
    if np.any(ends[1:] < ends[:-1]):
        refuse("its documents do not follow one another")
    return Form(MEGATRON, doc_ends=ends)
