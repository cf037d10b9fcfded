"""The parts of a token file that machines wrote with `tokenize-corpus --shard`, taken as one file, part after part."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.corpus.shards import find_parts
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import manifest_path, read_manifest
from llmtrain.storage.errors import BadData, ConfigMismatch, InputMissing


class _Ids:
    """The ids of all parts as far as a file's are used as an array: by number and by slice."""

    offset = 0

    def __init__(self, parts: list[TokenFile], begins: np.ndarray) -> None:
        self._parts, self._begins = parts, begins
        self.size = int(begins[-1])
        self.dtype = parts[0].id_type
        self.nbytes = self.dtype.itemsize * self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(self.size)
            assert step == 1
            return np.concatenate([*self.pieces(begin, end)] or [np.empty(0, self.dtype)])
        part = int(np.searchsorted(self._begins, index, side="right")) - 1
        return self._parts[part].ids[index - int(self._begins[part])]

    def pieces(self, begin: int, end: int) -> Iterator[np.ndarray]:
        """Views of the ids from `begin` to before `end`."""
        part = int(np.searchsorted(self._begins, begin, side="right")) - 1
        while begin < end:
            first = int(self._begins[part])
            stop = min(end, int(self._begins[part + 1]))
            yield self._parts[part]._flat[begin - first : stop - first]
            begin, part = stop, part + 1


class PartedFile(TokenFile):
    """As a TokenFile whose ids are those of the parts, one after the other. Where documents begin is told from the EOS
    ids, so that nothing has to be held for them."""

    ids: _Ids  # type: ignore[assignment]

    def __init__(self, path: Path, parts: list[TokenFile], manifest: dict[str, Any], vocab_size: int) -> None:
        self.path, self.manifest, self.vocab_size = path, manifest, vocab_size
        self.form = f"{len(parts)} parts of tokenize-corpus --shard"
        self.parts = parts
        self.id_type = parts[0].id_type
        self.doc_ends = None
        self._begins = np.cumsum([0, *(part.tokens for part in parts)])
        self.ids = _Ids(parts, self._begins)
        self.tokens = self.ids.size
        self.documents = manifest["documents"]
        self.eos_id = manifest["eos_id"]

    def window(self, i: int, seq_len: int) -> np.ndarray:
        if not 0 <= i < self.windows(seq_len):
            raise IndexError(f"window {i} of {self.windows(seq_len)}")
        return self.ids[i * seq_len : (i + 1) * seq_len + 1]

    def read_pieces(self, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return self._read_by_part(TokenFile.read_pieces, self.id_type, begins, lengths)

    def read_mask(self, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return self._read_by_part(TokenFile.read_mask, np.dtype(np.uint8), begins, lengths)

    def _read_by_part(
        self, read: Callable[..., np.ndarray], dtype: np.dtype, begins: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        out = np.empty(int(lengths.sum()), dtype)
        at = np.cumsum(lengths) - lengths
        for number, part in enumerate(self.parts):
            first, stop = int(self._begins[number]), int(self._begins[number + 1])
            # Of a piece that crosses a border each part reads its share.
            low, high = np.maximum(begins, first), np.minimum(begins + lengths, stop)
            mine = low < high
            sizes = (high - low)[mine]
            found = read(part, low[mine] - first, sizes)
            places, targets = np.cumsum(sizes) - sizes, (at + low - begins)[mine]
            for target, place, size in zip(targets.tolist(), places.tolist(), sizes.tolist(), strict=True):
                out[target : target + size] = found[place : place + size]
        return out

    def ends_of_documents(self) -> Iterator[np.ndarray]:
        for number, part in enumerate(self.parts):
            for ends in part.ends_of_documents():
                yield ends + int(self._begins[number])

    def read_ahead(self, begins: np.ndarray, lengths: np.ndarray) -> None:
        for number, part in enumerate(self.parts):
            first, stop = int(self._begins[number]), int(self._begins[number + 1])
            low, high = np.maximum(begins, first), np.minimum(begins + lengths, stop)
            mine = low < high
            part.read_ahead(low[mine] - first, (high - low)[mine])

    def verify(self) -> Iterator[int]:
        return chain.from_iterable(part.verify() for part in self.parts)


def open_parts(path: Path, vocab_size: int | None) -> PartedFile | None:
    """The parts of `path`; None where there are none. Raises InputMissing for one that is not there, ConfigMismatch for
    parts that do not belong together, and as `TokenFile.open`."""
    paths = find_parts(path)
    if not paths:
        return None
    manifests = []
    for number, one in enumerate(paths, 1):
        if not manifest_path(one).exists():
            raise InputMissing(
                f"{one}: is missing, part {number} of {len(paths)} of {path.name}: "
                f"make it with `llmtrain tokenize-corpus --shard {number}/{len(paths)}`"
            )
        manifest = read_manifest(one)
        assert manifest
        manifests.append(manifest)
    for one, manifest in zip(paths, manifests, strict=True):
        for what, of in (
            ("tokenizer", lambda manifest: manifest["tokenizer"]["sha256"]),
            ("engine", lambda manifest: manifest["engine"]),
            ("inputs", lambda manifest: manifest.get("shard", {}).get("split")),
            ("choice of what counts in the loss", lambda manifest: manifest.get("mask") is not None),
        ):
            if of(manifest) != of(manifests[0]):
                raise ConfigMismatch(
                    f"{one}: was made with another {what} than {paths[0].name}: make it anew with the same command"
                )
    parts = [
        TokenFile.open(one, vocab_size) for one, manifest in zip(paths, manifests, strict=True) if manifest["tokens"]
    ]
    if not parts:
        raise BadData(f"{path}: all of its {len(paths)} parts are empty: make them anew")
    together = manifests[0] | {
        "tokens": sum(one["tokens"] for one in manifests),
        "documents": sum(one["documents"] for one in manifests),
        "max_id": max(one["max_id"] for one in manifests),
        "sha256": [sha256 for one in manifests for sha256 in one["sha256"]],
        "inputs": [one for manifest in manifests for one in manifest["inputs"]],
    }
    if manifests[0].get("mask"):
        masks = [one["mask"] for one in manifests]
        together["mask"] = {
            "loss_tokens": sum(mask["loss_tokens"] for mask in masks),
            "sha256": [sha256 for mask in masks for sha256 in mask["sha256"]],
        }
    return PartedFile(path, parts, together, min(part.vocab_size for part in parts))
