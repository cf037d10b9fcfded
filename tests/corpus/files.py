"""Token files for the tests of this room."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import BLOCK_BYTES, BlockHashes, docs_path, write_manifest

EOS = 0


def write_ids(path: Path, ids: Sequence[int] | np.ndarray) -> Path:
    """A flat file without a manifest."""
    np.asarray(ids, "<u2").tofile(path)
    return path


def write_documents(path: Path, documents: Sequence[np.ndarray], vocab_size: int = 512, index: bool = True) -> Path:
    """A token file of documents without their EOS, with manifest and, unless said otherwise, index."""
    ids = np.concatenate([np.append(document, EOS) for document in documents]).astype("<u2")
    return write_flat(path, ids, vocab_size, index)


def write_flat(path: Path, ids: np.ndarray, vocab_size: int = 512, index: bool = True, **fields: Any) -> Path:
    """The ids with index and manifest, whose fields may be said otherwise."""
    write_ids(path, ids)
    ends = np.flatnonzero(ids == EOS) + 1
    if index:
        ends.astype("<u8").tofile(docs_path(path))
    hashes = BlockHashes()
    hashes.update(np.asarray(ids, "<u2"))
    manifest: dict[str, Any] = dict(
        tokens=len(ids),
        documents=len(ends),
        max_id=int(np.max(ids)),
        vocab_size=vocab_size,
        eos_id=EOS,
        tokenizer={"file": "tokenizer.json", "sha256": "0" * 64},
        engine={"name": "tokenizers", "version": "1"},
        sha256=hashes.hexdigests(),
        inputs=[],
    )
    write_manifest(path, **(manifest | fields))
    return path


def some_documents(n: int, mean: int = 40, vocab_size: int = 512, seed: int = 0) -> list[np.ndarray]:
    """Random documents, some of them empty, without EOS."""
    random = np.random.default_rng(seed)
    return [random.integers(1, vocab_size, length) for length in random.integers(0, 2 * mean, n)]


def counting_file(path: Path, tokens: int) -> TokenFile:
    """A file whose id at position p is p: a window says by itself which one it is."""
    return TokenFile.open(write_ids(path, np.arange(tokens)), 1 << 16)


def counting_order(folder: Path, windows: int, seq_len: int) -> SampleOrder:
    """One source whose window w begins with the id w * seq_len."""
    return SampleOrder([Source("count", counting_file(folder / "count.u16", windows * seq_len + 1), 1.0)], seq_len, 0)


def write_sparse(path: Path, tokens: int, documents: int = 50) -> Path:
    """A token file of zeros, none of which is on the disk, in documents of one length."""
    with open(path, "wb") as file:
        file.truncate(2 * tokens)
    (np.arange(1, documents + 1) * (tokens // documents)).astype("<u8").tofile(docs_path(path))
    hashes = BlockHashes()
    hashes.update(bytes(BLOCK_BYTES))
    write_manifest(
        path, tokens=tokens, documents=documents, max_id=0, vocab_size=96, eos_id=1, inputs=[],
        tokenizer={"file": "tokenizer.json", "sha256": "0" * 64}, engine={"name": "tokenizers", "version": "1"},
        sha256=hashes.hexdigests() * -(-2 * tokens // BLOCK_BYTES),
    )  # fmt: skip
    return path
