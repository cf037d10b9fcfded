"""Where reading goes on in an unfinished run, in inputs that can be opened in the middle and in those that cannot."""

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import chain

from llmtrain.corpus.documents import Document
from llmtrain.corpus.inputs import Input, shown
from llmtrain.corpus.writing import Work
from llmtrain.storage.errors import ConfigMismatch


class Resumed:
    """Streams, which cannot be opened in the middle: the hash of the documents that were read of the one at hand goes
    into the journal, and is looked at when a stream is given again."""

    def __init__(self, files: list[Input], work: Work) -> None:
        self._files, self._at, self._digest = files, work.at, work.digest
        self._file, self._hash = -1, hashlib.sha256()
        self.digests: deque[str] = deque()
        """Of each block that was read, in order."""
        again = work.at[0] < len(files) and files[work.at[0]].size is None
        self.start = (work.at[0], 0) if again else work.at

    def skip_what_was_read(self, documents: Iterator[Document]) -> Iterator[Document]:
        if self.start != self._at:
            for document in documents:
                if (document.file, document.ordinal) >= self._at:
                    documents = chain([document], documents)
                    break
                self._add(document)
            if self._hash.hexdigest() != self._digest:
                name = shown(self._files[self._at[0]].name)
                raise ConfigMismatch(
                    f"{name}: does not begin with the text that was read before: give the same again, or remove the "
                    "folder of the unfinished run to start over"
                )
        return documents

    def watch(self, blocks: Iterable[list[Document]]) -> Generator[list[Document], None, None]:
        for block in blocks:
            for document in block:
                if self._files[document.file].size is None:
                    self._add(document)
            self.digests.append(self._hash.hexdigest() if self._file == block[-1].file else "")
            yield block

    def _add(self, document: Document) -> None:
        if document.file != self._file:
            self._file, self._hash = document.file, hashlib.sha256()
        self._hash.update(b"%d %d %d\n" % (document.size, len(document.data), document.prompt))
        self._hash.update(document.data)
