"""What came of each input: bytes, documents and tokens by part, and what was left out with its first places."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from llmtrain.corpus.documents import bad_data
from llmtrain.corpus.inputs import Input, shown, total_size
from llmtrain.corpus.streams import Damage
from llmtrain.corpus.workers import Task
from llmtrain.storage.units import plural

# Of each reason to leave documents of a file out, the manifest names so many places.
FIRST_PLACES = 5

# A terminal's worth: the counts of more files would push everything else out of sight, and the manifest has them.
MOST_PRINTED = 100


class Record(NamedTuple):
    """What the journal keeps of an input."""

    file: int
    name: str
    size: int | None
    version: str
    bytes: int
    left_out: dict[str, int]
    first: dict[str, list[str]]
    documents: list[int]
    tokens: list[int]


class Counts:
    """Of the inputs `files`, for `parts` token files."""

    def __init__(self, files: list[Input], on_bad: str, parts: int) -> None:
        self.files, self.on_bad = files, on_bad
        self.total = total_size(files)
        self.bytes = [0] * len(files)
        self.left_out: list[dict[str, int]] = [{} for _ in files]
        self.first: list[dict[str, list[str]]] = [{} for _ in files]
        self.documents = np.zeros((parts, len(files)), np.int64)
        self.tokens = np.zeros((parts, len(files)), np.int64)
        self._touched: set[int] = set()
        self._reported = 0

    def check(self, task: Task) -> None:
        """Raises BadData for a damaged document that may not be left out."""
        if self.on_bad == "error":
            for file, damage, place in self._left_out(task):
                if damage.reason != "empty":
                    raise bad_data(self.files[file], place, damage)

    def add(self, task: Task) -> None:
        """All of an encoded block but what `add_written` counts."""
        for file, damage, place in self._left_out(task):
            self.left_out[file][damage.reason] = self.left_out[file].get(damage.reason, 0) + 1
            first = self.first[file].setdefault(damage.reason, [])
            if len(first) < FIRST_PLACES:
                first.append(place)
        for file, size in zip(task.files, task.sizes, strict=True):
            self.bytes[file] += size
        self._touched.update(task.files)

    def _left_out(self, task: Task) -> Iterator[tuple[int, Damage, str]]:
        assert task.encoded is not None
        for number, reason, offset in task.encoded.left_out:
            file = task.files[number]
            place = self.files[file].place(task.places[number], offset)
            yield file, task.damages[number] or Damage(reason, ""), place

    def add_written(self, part: int, lengths: np.ndarray, files: np.ndarray) -> None:
        """Documents that went into a part: of each its ids and the number of its file."""
        np.add.at(self.documents[part], files, 1)
        np.add.at(self.tokens[part], files, lengths)

    def take_touched(self) -> list[list[Any]]:
        """A copy of what is known of the inputs that changed since the last call: a list for each field of `Record`,
        because words repeated for 100,000 inputs would take longer than what they say."""
        touched = sorted(self._touched)
        self._touched.clear()
        files = [self.files[file] for file in touched]
        return [
            touched,
            [one.name for one in files],
            [one.size for one in files],
            [one.version for one in files],
            [self.bytes[file] for file in touched],
            [dict(self.left_out[file]) for file in touched],
            [{reason: list(places) for reason, places in self.first[file].items()} for file in touched],
            self.documents[:, touched].T.tolist(),
            self.tokens[:, touched].T.tolist(),
        ]

    def restore(self, record: Record) -> None:
        """What `take_touched` gave of an input."""
        file = record.file
        self.bytes[file], self.left_out[file], self.first[file] = record.bytes, record.left_out, record.first
        self.documents[:, file], self.tokens[:, file] = record.documents, record.tokens

    def damaged(self) -> bool:
        """Whether anything but empty documents was left out."""
        return any(set(one) - {"empty"} for one in self.left_out)

    def report(self, end: int) -> None:
        """Prints the counts of the files before number `end` that were not printed yet; of very many, only those of
        files with a damaged document."""
        lines = []
        for file in range(self._reported, end):
            if len(self.files) > MOST_PRINTED and not set(self.left_out[file]) - {"empty"}:
                continue
            documents, tokens = int(self.documents[:, file].sum()), int(self.tokens[:, file].sum())
            line = f"{shown(self.files[file].name)}: {tokens:,} tokens, {plural(documents, 'document')}"
            for reason, count in sorted(self.left_out[file].items()):
                line += f", {count:,} {reason} left out (the first at {self.first[file][reason][0]})"
            lines.append(line)
        if lines:
            tqdm.write("\n".join(lines))
        self._reported = max(self._reported, end)

    def inputs(self, part: int) -> list[dict[str, Any]]:
        """The manifest's `inputs` of a part: with the part that is trained on all of them and what was left out; with a
        held-out part those that gave it documents."""
        documents, tokens = self.documents[part].tolist(), self.tokens[part].tolist()
        inputs: list[dict[str, Any]] = []
        for file in range(len(self.files)) if part == 0 else np.flatnonzero(self.documents[part]).tolist():
            one = self.files[file]
            entry = {"path": one.name, "bytes": self.bytes[file], "documents": documents[file], "tokens": tokens[file]}
            entry["skipped"] = {}
            if part == 0 and self.left_out[file]:
                entry["skipped"] = dict(sorted(self.left_out[file].items()))
                entry["skipped_at"] = dict(sorted(self.first[file].items()))
            inputs.append(entry)
        return inputs
