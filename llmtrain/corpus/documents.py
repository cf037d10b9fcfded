"""What a document is, damaged ones among them, and what can be done with a stream of them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llmtrain.corpus.inputs import Input, shown
from llmtrain.corpus.streams import TRUNCATED, Damage
from llmtrain.storage.errors import BadData

INVALID_UTF8 = "invalid_utf8"
BAD_JSON = "bad_json"
MISSING_FIELD = "missing_field"


class Document(NamedTuple):
    """One document, not known to be UTF-8 yet, and where it comes from."""

    file: int
    """Number of its input in the list of inputs."""
    ordinal: int
    """Number of the document in its input, from 0; empty and damaged ones count."""
    place: int
    """Where it begins: the byte of the (decompressed) text where `data` begins; see inputs.PLACES for other forms."""
    size: int
    """Bytes of text that it stands for. In plain text its line end, its separator and a byte order mark count, so that
    the sizes of an undamaged file's documents, where it has any, add up to the file's."""
    data: bytes
    """Empty where it is damaged."""
    damage: Damage | None = None
    prompt: int = 0
    """Bytes at the beginning of `data` that are a prompt: tokenized by themselves and no targets of the loss."""
    unread: str = ""
    """The path of the small plain file that is to be read for it. `place` and `size` are then what they are unless the
    file has a byte order mark or was changed."""


def document_of(file: int, ordinal: int, place: int, texts: Sequence[bytes]) -> Document:
    """The document of a text, or of a prompt and its completion; where the latter is empty, so is the document."""
    data, size = b"".join(texts), sum(map(len, texts))
    if not texts[-1]:
        return Document(file, ordinal, place, size, b"")
    return Document(file, ordinal, place, size, data, None, size - len(texts[-1]))


def blocks(documents: Iterable[Document], block_bytes: int) -> Iterator[list[Document]]:
    """Whole documents in runs of at most `block_bytes`; a document that is longer is a block of its own."""
    block: list[Document] = []
    size = 0
    for document in documents:
        # Every document counts for something, or a run of empty ones would be a block without end.
        weight = document.size + 16
        if block and size + weight > block_bytes:
            yield block
            block, size = [], 0
        block.append(document)
        size += weight
    if block:
        yield block


# Of a longer document only the beginning and the length are hashed: all of it would take a quarter of gigatoken's time.
_HASHED_BYTES = 4096


def falls_within(data: bytes | memoryview, share: float) -> bool:
    """Whether a document belongs to the `share` (0 to 1) of all documents that its content chooses.

    Equal documents fall on the same side wherever they stand, and those in a share are in every larger one.
    """
    digest = hashlib.blake2b(data[:_HASHED_BYTES], digest_size=8)
    if len(data) > _HASHED_BYTES:
        digest.update(b"%d" % len(data))
    return int.from_bytes(digest.digest(), "big") < share * 2**64


def bad_data(input: Input, place: str, damage: Damage) -> BadData:
    """The error for what stands at `place` (see Input.place) and is no document."""
    what, advice = damage.detail, "leave such documents out"
    if damage.reason == INVALID_UTF8:
        what, cure = what or "not UTF-8", "convert the file"
    elif damage.reason == BAD_JSON:
        cure = "correct it"
    elif damage.reason == MISSING_FIELD:
        cure = "name the field with --text-field, or --prompt-field and --completion-field"
    else:
        cure = "get the file again"
        if damage.reason == TRUNCATED:
            advice = "keep the whole documents before the damage"
    return BadData(f"{shown(input.name)}: {what} at {place}: {cure}, or {advice} with --on-bad skip")
