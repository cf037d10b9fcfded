"""The token file: flat little-endian u16 ids, beside it a manifest (`.json`) and a document index (`.docs`).

    X.u16        ids and nothing else, so that nanoGPT-style readers open it
    X.u16.json   what it holds, which tokenizer made it, and the SHA-256 of each 64 MiB block of ids
    X.u16.docs   u64, the end of each document in tokens; each document ends with the EOS id

A file without a manifest can be read too; then the caller says the vocabulary and nothing is known of documents.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain import __version__
from llmtrain.storage import atomic

FORMAT = 1
BLOCK_BYTES = 64 << 20


def manifest_path(path: str | os.PathLike[str]) -> Path:
    """Where the manifest of the token file `path` is."""
    return Path(f"{os.fspath(path)}.json")


def docs_path(path: str | os.PathLike[str]) -> Path:
    """Where the document index of the token file `path` is."""
    return Path(f"{os.fspath(path)}.docs")


class BlockHashes:
    """SHA-256 of each 64 MiB block of a stream of ids, fed while it is written or read."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash = hashlib.sha256()
        self._room = BLOCK_BYTES

    def update(self, data: Any) -> None:
        """Takes the next bytes: anything with the buffer interface, of any length."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: self._room]
            self._hash.update(part)
            self._room -= len(part)
            view = view[len(part) :]
            if self._room == 0:
                self._done.append(self._hash.hexdigest())
                self._hash, self._room = hashlib.sha256(), BLOCK_BYTES

    def hexdigests(self) -> list[str]:
        """One digest a block, the last block being what has come of it so far."""
        return self._done + ([self._hash.hexdigest()] if self._room < BLOCK_BYTES else [])


def _manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Of everything but the field that holds it. (`sha256` is the name of the blocks' hashes.)"""
    rest = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(
    path: str | os.PathLike[str],
    *,
    tokens: int,
    documents: int,
    max_id: int,
    vocab_size: int,
    eos_id: int,
    tokenizer: Mapping[str, str],
    engine: Mapping[str, str],
    sha256: Sequence[str],
    inputs: Sequence[Mapping[str, Any]],
) -> None:
    """Writes the manifest of the token file `path`, atomically; ids and index must be in place before.

    `tokenizer` is {file, sha256}, `engine` {name, version}, `sha256` what `BlockHashes` gives, an input
    {path, bytes, documents, tokens, skipped: {reason: count}}. Equal arguments give equal bytes: no time, no host.
    Raises CannotCreate, StorageFailure.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "dtype": "uint16",
        "tokens": tokens,
        "documents": documents,
        "max_id": max_id,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "tokenizer": dict(tokenizer),
        "engine": dict(engine),
        "sha256": list(sha256),
        "inputs": [dict(one) for one in inputs],
        "created_by": f"llmtrain {__version__}",
    }
    manifest["manifest_sha256"] = _manifest_hash(manifest)
    atomic.write_json(manifest_path(path), manifest)
