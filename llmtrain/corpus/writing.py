"""Token files while they are written: in a folder beside them, `.X.u16.partial`, with a journal from which the same
command goes on after it was killed.

    lock       held for as long as a command works there
    journal    JSON lines: what was asked; every few seconds how far it came; at the end that it is being published
    X.u16, X.u16.docs, X.u16.mask, X.val.u16, ...   what was written so far, which may be more than the journal says
    base-N.json   with --append, the manifests as they were; the ids then go to the end of the token files themselves

A line of the journal is written when what it speaks of is on the disk, so that everything beyond it is cut off and made
again. With the last line everything that publishing needs is in the folder, and each of its steps can be done twice.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain.corpus.counts import Counts, Record
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import (
    docs_path,
    manifest_path,
    mask_path,
    read_manifest,
    work_folder,
)
from llmtrain.corpus.writing_part import Part, names
from llmtrain.storage.atomic import fsync_folder, refuse_what_is_no_file, remove_file, write_bytes, write_json
from llmtrain.storage.errors import BadData, CannotCreate, ConfigMismatch, write_error
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.lock import RunLock
from llmtrain.storage.manifest import read_json

FORMAT = 2


class Work:
    """The folder in which the token files `outputs` are written. As a context manager it holds the folder's lock.

    `asked` is what the output depends on; another `asked` than the journal's is refused (ConfigMismatch). `id_type` is
    one of ID_TYPES.
    """

    at = (0, 0)
    """(input, ordinal) of the first document that is not written yet."""
    digest = ""
    """Hash of the documents of a stream that were written; see `tokenize`."""
    publishing: list[list[str]] | None = None
    """The hashes of all blocks of each part, once all is written."""
    publishing_masks: list[list[str]] | None = None
    """Those of their masks, where they have any."""
    engine: dict[str, str] | None = None
    """The engine that the journal names, or that of `start`."""
    committed = False
    """Whether there is anything to go on from."""

    def __init__(
        self, outputs: list[Path], asked: dict[str, Any], append: bool, commit_seconds: float, id_type: str = "uint16"
    ) -> None:
        self.id_type, self.masked = id_type, asked.get("completion_field") is not None
        self.outputs, self.asked, self.append, self.commit_seconds = outputs, asked, append, commit_seconds
        self.folder = work_folder(outputs[0])
        self.parts: list[Part] = []
        self.inputs: dict[int, Record] = {}
        self._states: list[list[int]] | None = None
        self._lines = 0
        self._journal: JsonLines | None = None
        self._lock = RunLock(self.folder / "lock")
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._last = time.monotonic()

    def __enter__(self) -> "Work":
        for path in (name for output in self.outputs for name in names(output)):
            refuse_what_is_no_file(path)
        while True:
            try:
                os.mkdir(self.folder)
            except FileExistsError:
                pass
            except OSError as error:
                raise write_error(error, self.outputs[0], "created") from error
            try:
                self._lock.__enter__()
                break
            except CannotCreate:
                if self.folder.is_dir():
                    raise  # else somebody who has just finished removed it
        try:
            self._read()
            try:
                if not self._lines:
                    self._clear(keep=("lock",))
                self._bases()
            except BaseException:
                if not self._lines:  # nothing that anybody goes on from
                    self._remove()
                raise
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        for part in self.parts:
            if part.base and not self.committed and self.publishing is None:
                part.cut(part.base_state())
            part.close()
        if self._journal:
            self._journal.close()
            self._journal = None
        if not self.committed:
            self._remove()
        self._lock.__exit__(None, None, None)

    def _read(self) -> None:
        """What the journal says, up to its last line that is whole."""
        good, begun, format = 0, self.asked, FORMAT
        for line in _whole_lines(self.folder / "journal"):
            good += 1
            if "asked" in line:
                begun, self.engine, format = line["asked"], line["engine"], line["format"]
            elif "publish" in line:
                self.publishing, self.publishing_masks = line["publish"], line.get("masks")
            elif format != FORMAT:
                raise ConfigMismatch(f"{self.folder}: another version of llmtrain began it: remove it to start over")
            else:
                self.at, self.digest, self._states = tuple(line["at"]), line["digest"], line["parts"]
                self.inputs |= {record.file: record for record in map(Record._make, zip(*line["inputs"], strict=True))}
                self.committed = True
        # Without a line on how far it came there is nothing to go on from.
        if self.committed:
            self._lines = good
            self._compare(begun)
        else:
            self.engine = None

    def _compare(self, begun: dict[str, Any]) -> None:
        for name in sorted(begun.keys() | self.asked.keys()):
            if begun.get(name) != self.asked.get(name):
                raise ConfigMismatch(
                    f"{self.folder}: an unfinished run had {name} {begun.get(name)!r}, this one has "
                    f"{self.asked.get(name)!r}: run the same command, or remove the folder to start over"
                )

    def _bases(self) -> None:
        bases: list[dict[str, Any] | None] = [None] * len(self.outputs)
        if self.append:
            for number, path in enumerate(self.outputs):
                copy = self.folder / f"base-{number}.json"
                if not self._lines and (manifest := _sound_manifest(path)):
                    write_json(copy, manifest)
                bases[number] = read_json(copy) if copy.exists() else None
        self.parts = [
            Part(path, self.folder, base, self.id_type, self.masked)
            for path, base in zip(self.outputs, bases, strict=True)
        ]
        for part, state in zip(self.parts, self._states or [], strict=False):
            part.restore(state)

    def start(self, engine: dict[str, str]) -> None:
        """Opens the parts and the journal to go on, or to begin with `engine`."""
        journal = self.folder / "journal"
        for part in self.parts:
            part.open()
        self._journal = JsonLines(journal)
        if self._lines:
            kept = self._lines
            self._journal.rewrite(lambda line: line.get("n", kept) < kept)
        else:
            fsync_folder(self.folder)
            fsync_folder(self.folder.parent)
            self._append({"format": FORMAT, "asked": self.asked, "engine": engine})
        self.engine = engine
        self._last = time.monotonic()

    def _append(self, line: dict[str, Any]) -> None:
        assert self._journal
        line["n"] = self._lines
        self._journal.append(line)
        self._journal.sync()
        self._lines += 1

    def commit_when_due(self, at: tuple[int, int], digest: str, counts: Counts) -> None:
        """Says in the journal that everything before the document `at` is written, if it said so some time ago. The
        disk is waited for elsewhere; what fails there is raised by a later call."""
        self.at, self.digest = at, digest
        if (self._pending is None or self._pending.done()) and time.monotonic() - self._last >= self.commit_seconds:
            self._commit(counts)

    def commit(self, counts: Counts) -> None:
        """The same now, and waits until it is on the disk."""
        self._commit(counts)
        self._settle()

    def _commit(self, counts: Counts) -> None:
        self._settle()
        line = {
            "at": list(self.at),
            "digest": self.digest,
            "parts": [part.state() for part in self.parts],
            "inputs": counts.take_touched(),
        }
        self._last = time.monotonic()
        self._pending = self._thread.submit(self._write_line, line)

    def _write_line(self, line: dict[str, Any]) -> None:
        for part in self.parts:
            part.sync()
        self._append(line)
        self.committed = True

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def publish(
        self,
        counts: Counts,
        manifest: Callable[[Part, int, list[str], list[str] | None], bytes],
        keep_empty: bool,
    ) -> None:
        """Gives the parts their names. `manifest` makes that of a part, given its number and the hashes of its ids and
        mask. A part without documents is removed, unless `keep_empty`."""
        hashes = self.publishing or [part.hashes.hexdigests() for part in self.parts]
        masks = self.publishing_masks
        if self.masked and masks is None:
            masks = [part.mask_hashes.hexdigests() for part in self.parts]
        if self.publishing is None:
            self._commit(counts)
        # While the disk is waited for.
        manifests = [
            manifest(part, number, hashes[number], masks[number] if masks else None)
            for number, part in enumerate(self.parts)
        ]
        self._settle()
        if self.publishing is None:
            self.publishing, self.publishing_masks = hashes, masks
            self._append({"publish": hashes} | ({"masks": masks} if masks else {}))
        new = [part for part in self.parts if not part.base]
        # From here on nothing vouches for old ids; the new manifests come last.
        for part in new:
            remove_file(manifest_path(part.path))
        for part in new:
            if part.documents or keep_empty:
                _rename(part.docs_at, docs_path(part.path))
                if part.masked:
                    _rename(part.mask_at, mask_path(part.path))
                else:
                    remove_file(mask_path(part.path))  # of a token file that had this name before
                _rename(part.ids_at, part.path)
            elif not self.append:
                # A held-out part of an earlier run may hold documents that are trained on now.
                for path in names(part.path):
                    remove_file(path)
        fsync_folder(self.folder.parent)
        for part, data in reversed(list(zip(self.parts, manifests, strict=True))):
            if part.documents or keep_empty:
                write_bytes(manifest_path(part.path), data)
        self.discard()

    def discard(self) -> None:
        """Leaves nothing behind when the context ends."""
        self.committed = False

    def _remove(self) -> None:
        # Without a journal the rest is nothing that anybody goes on from.
        remove_file(self.folder / "journal")
        self._clear(keep=("lock",))
        self._clear(keep=())
        with suppress(OSError):
            os.rmdir(self.folder)

    def _clear(self, keep: tuple[str, ...]) -> None:
        for path in list(self.folder.iterdir()):
            if path.name not in keep:
                remove_file(path)


def _sound_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the token file `path`, which fits the other files; None where there is none. Raises InputMissing,
    BadData."""
    manifest = read_manifest(path)
    if manifest is None or not manifest["tokens"]:
        return manifest
    if TokenFile.open(path).doc_ends is None:
        raise BadData(f"{docs_path(path)}: is missing, and has to be appended to as well: make the token file anew")
    return manifest


def journal_engine(output: Path) -> dict[str, str] | None:
    """The engine with which the unfinished token file `output` was begun; None where there is none."""
    return next((line["engine"] for line in _whole_lines(work_folder(output) / "journal")), None)


def _rename(source: Path, path: Path) -> None:
    """None there: an earlier attempt renamed it."""
    try:
        os.replace(source, path)
    except FileNotFoundError:
        if not path.exists():
            raise BadData(f"{source}: is gone: remove {source.parent} and start over") from None
    except OSError as error:
        raise write_error(error, path) from error


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal up to the first that a power cut left torn."""
    if not path.exists():
        return
    for number, line in enumerate(JsonLines.read(path)):
        if line.get("n") != number:
            return
        yield line
