"""The manifest of a token file: what it holds, which tokenizer and engine made it, and a hash of each block of ids."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmtrain import __version__
from llmtrain.corpus.config import MAX_VOCAB_SIZE, U16_VOCAB_SIZE
from llmtrain.storage import atomic
from llmtrain.storage.errors import BadData
from llmtrain.storage.manifest import canonical_sha256, read_json

FORMAT = 1
BLOCK_BYTES = 64 << 20

ID_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""The manifest's `dtype` -> how an id lies in the file."""


def manifest_path(path: str | os.PathLike[str]) -> Path:
    """Where the manifest of the token file `path` is."""
    return Path(f"{os.fspath(path)}.json")


def docs_path(path: str | os.PathLike[str]) -> Path:
    """Where the document index of the token file `path` is."""
    return Path(f"{os.fspath(path)}.docs")


def mask_path(path: str | os.PathLike[str]) -> Path:
    """Where it is said which tokens of the token file `path` count in the loss."""
    return Path(f"{os.fspath(path)}.mask")


def work_folder(path: str | os.PathLike[str]) -> Path:
    """Where the token file `path` is while it is written or appended to."""
    path = Path(path)
    return path.with_name(f".{path.name}.partial")


def held_out_path(path: Path) -> Path:
    """Where the held-out documents of the token file `path` go: X.u16 -> X.val.u16."""
    return path.with_suffix(f".val{path.suffix}")


class BlockHashes:
    """SHA-256 of each 64 MiB block of a stream of ids, fed while it is written or read."""

    def __init__(self, done: Sequence[str] = ()) -> None:
        """`done` are the digests of blocks that came before."""
        self._done = list(done)
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
    return canonical_sha256(rest)


def write_manifest(path: str | os.PathLike[str], **contents: Any) -> None:
    """Writes the manifest of the token file `path`, atomically; ids and index must be in place before. `contents` are
    those of `manifest_bytes`. Raises CannotCreate, StorageFailure."""
    atomic.write_bytes(manifest_path(path), manifest_bytes(**contents))


def manifest_bytes(
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
    dtype: str = "uint16",
    mask: Mapping[str, Any] | None = None,
    shard: Mapping[str, Any] | None = None,
) -> bytes:
    """A manifest as it is written.

    `dtype` is one of ID_TYPES, `tokenizer` is {file, sha256}, `engine` {name, version}, `sha256` what `BlockHashes`
    gives, an input {path, bytes, documents, tokens, skipped: {reason: count}}, `mask` {loss_tokens, sha256} of the mask
    where there is one, `shard` {number, of, split} where it is one of several
    parts. Equal arguments give equal bytes: no time, no host.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "dtype": dtype,
        "tokens": tokens,
        "documents": documents,
        "max_id": max_id,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "tokenizer": dict(tokenizer),
        "engine": dict(engine),
        "sha256": list(sha256),
        "inputs": list(inputs),
        "created_by": f"llmtrain {__version__}",
    }
    if mask:
        manifest["mask"] = dict(mask)
    if shard:
        manifest["shard"] = dict(shard)
    manifest["manifest_sha256"] = _manifest_hash(manifest)
    # A value a line; json's own indenting takes seconds for 100,000 inputs.
    return json.dumps(manifest, separators=(",\n ", ": ")).encode() + b"\n"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest beside the token file `path`, checked in itself; None where there is none."""
    where = manifest_path(path)
    if not os.path.lexists(where):
        return None
    manifest = read_json(where)

    def refuse(what: str) -> NoReturn:
        raise BadData(f"{where}: {what}: make the token file anew with tokenize-corpus")

    if "format" not in manifest:
        refuse("is not the manifest of a token file")
    if manifest["format"] != FORMAT:
        raise BadData(f"{where}: has format {manifest['format']!r}, this llmtrain reads format {FORMAT}: update it")
    if manifest.get("manifest_sha256", "") not in ("", _manifest_hash(manifest)):
        refuse("was altered after it was written, its own hash does not fit")
    if manifest.get("dtype") not in ID_TYPES:
        refuse(f"dtype is {manifest.get('dtype')!r}, not {' or '.join(map(repr, ID_TYPES))}")
    most = U16_VOCAB_SIZE if manifest["dtype"] == "uint16" else MAX_VOCAB_SIZE
    for name, low, high in (
        ("tokens", 0, 1 << 62),
        ("documents", 0, 1 << 62),
        ("vocab_size", 1, most),
        ("max_id", 0, most - 1),
        ("eos_id", 0, most - 1),
    ):
        value = manifest.get(name)
        if type(value) is not int or not low <= value <= high:
            refuse(f"{name} is {value!r}, not a number from {low} to {high}")
    for name in ("max_id", "eos_id"):
        if manifest[name] >= manifest["vocab_size"]:
            refuse(f"{name} {manifest[name]} is beyond its vocab_size {manifest['vocab_size']}")
    for name in ("tokenizer", "engine"):
        if not isinstance(manifest.get(name), dict):
            refuse(f"{name} is {manifest.get(name)!r}, not an object")
    for name in ("file", "sha256"):
        if not isinstance(manifest["tokenizer"].get(name), str):
            refuse(f"the tokenizer's {name} is missing")
    if not isinstance(manifest.get("inputs"), list) or not all(map(_is_input, manifest["inputs"])):
        refuse("inputs is no list of {path, bytes, documents, tokens, skipped}")
    width = ID_TYPES[manifest["dtype"]].itemsize
    if not _hashes_fit(manifest.get("sha256"), width * manifest["tokens"]):
        refuse(f"sha256 does not hold one hash for each of its {-(-manifest['tokens'] * width // BLOCK_BYTES)} blocks")
    mask = manifest.get("mask")
    if mask is not None and not (
        isinstance(mask, dict)
        and type(mask.get("loss_tokens")) is int
        and 0 <= mask["loss_tokens"] <= manifest["tokens"]
        and _hashes_fit(mask.get("sha256"), manifest["tokens"])
    ):
        refuse("mask is no object of {loss_tokens, sha256} that fits its tokens")
    return manifest


def _hashes_fit(hashes: Any, nbytes: int) -> bool:
    """Whether there is one for each block of a file of `nbytes`."""
    return isinstance(hashes, list) and list(map(type, hashes)) == [str] * -(-nbytes // BLOCK_BYTES)


def _is_input(one: Any) -> bool:
    """Whether it is an entry of the manifest's `inputs`."""
    if not isinstance(one, dict) or not isinstance(one.get("path"), str) or not isinstance(one.get("skipped"), dict):
        return False
    counts = [one.get(name) for name in ("bytes", "documents", "tokens")]
    return all(type(count) is int for count in (*counts, *one["skipped"].values()))
