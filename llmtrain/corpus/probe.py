"""A bounded sample of a corpus, the same each time: to choose the engine by, and to say how much will be written."""

import shutil
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain.corpus.documents import Document
from llmtrain.corpus.engine import Engine
from llmtrain.corpus.inputs import TEXT, Input, shown
from llmtrain.corpus.reading import FILE, Reading, read_documents
from llmtrain.corpus.streams import Progress
from llmtrain.storage.disk import existing_folder
from llmtrain.storage.errors import StorageFailure, read_error
from llmtrain.storage.units import in_bytes, plural

# So many inputs, evenly spaced, and of each so much from its beginning: a quarter of a second's work for `tokenizers`.
INPUTS = 32
BYTES_EACH = 16 << 10


@dataclass
class Probe:
    """What was read."""

    texts: list[bytes] = field(default_factory=list)
    """Beginnings of documents, UTF-8."""
    documents: int = 0
    text: int = 0
    """Bytes of these documents."""
    stored: int = 0
    """Bytes of the inputs that they stand for, as they are stored."""

    def add(self, documents: Iterable[Document], most: int, progress: Progress | None = None) -> int:
        """Takes documents until they hold `most` bytes; gives the bytes that they stand for.

        With `progress`, which is ahead of the documents by what is read at once, it counts on until more is read, and
        gives the bytes of the input up to there.
        """
        taken = size = read = 0
        for document in documents:
            if taken >= most:
                assert progress is not None
                if read and progress.bytes > read:
                    return read
                read = progress.bytes
            self.documents += 1
            self.text += len(document.data)
            size += document.size
            text = document.data[: max(0, most - taken)].decode(errors="ignore").encode()
            if text:
                self.texts.append(text)
            taken += len(document.data) + 16
            if taken >= most and progress is None:
                break
        return size if progress is None else progress.bytes


def draw(inputs: list[Input], reading: Reading) -> Probe:
    """From those inputs that can be read twice. Raises InputMissing, StorageFailure."""
    probe = Probe()
    usable = [one for one in inputs if one.size]
    for number in range(min(INPUTS, len(usable))):
        one = usable[number * len(usable) // min(INPUTS, len(usable))]
        progress = Progress()
        # The documents of what is plain text say what they took of the file.
        ahead = None if one.format == TEXT and not one.compression else progress
        with closing(read_documents([one], reading, progress)) as documents:
            probe.stored += probe.add(documents, BYTES_EACH, ahead)
    return probe


def expected_bytes(probe: Probe, engine: Engine, inputs: list[Input], reading: Reading) -> int | None:
    """About how much tokenizing `inputs` will write; None where an input's size is not known."""
    if any(one.size is None for one in inputs):
        return None
    total = sum(one.size or 0 for one in inputs)
    if not total or not probe.stored:
        return 0
    scale = total / probe.stored
    whole = reading.document == FILE and all(one.format == TEXT for one in inputs)
    documents = len(inputs) if whole else round(probe.documents * scale)
    _, lengths, _ = engine.encode(probe.texts)
    tokens = (int(lengths.sum()) - len(lengths)) / max(1, sum(map(len, probe.texts))) * probe.text * scale
    of_token = engine.id_type.itemsize + (reading.completion_field is not None)
    return of_token * (round(tokens) + documents) + 8 * documents


def free_bytes(folder: Path) -> int:
    """Of the disk that `folder` is on, for this user."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise read_error(error, folder, "make the folder of --output") from error


def say_what_would_be_written(output: Path, expected: int | None, inputs: list[Input], engine: Engine) -> None:
    """Prints it. Raises StorageFailure where the disk does not hold it."""
    free = free_bytes(existing_folder(output.parent))
    stored = sum(one.size or 0 for one in inputs)
    print(f"{plural(len(inputs), 'input')} of {in_bytes(stored)}, engine {engine.name} {engine.version}")
    if expected is None:
        print(f"{shown(output)}: an input does not say its size; its disk has {in_bytes(free)} free")
        return
    if expected > free:
        raise StorageFailure(
            f"{output}: about {in_bytes(expected)} would be written, its disk has {in_bytes(free)} free: "
            "free space or name another disk with --output"
        )
    print(f"{shown(output)}: about {in_bytes(expected)} would be written, its disk has {in_bytes(free)} free")
