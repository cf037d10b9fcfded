"""Documents encoded by worker processes, in order.

A worker is a process of its own (nothing forked, so no lock or thread of the parent is copied) with one socket to the
parent. Messages are lines of JSON; the bytes that belong to one lie in memory of their own, whose descriptor goes
along: nobody waits for the other to take them, and they are copied once. Small plain files are read by the worker
itself. At most two blocks' bytes wait at a worker. A thread of the worker sits in `recv` all the time: it takes the
next block while the present one is encoded, and the end of the socket is how a worker learns that its parent is gone,
however that came about.
"""

import json
import mmap
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmtrain.corpus.documents import INVALID_UTF8, Document, falls_within
from llmtrain.corpus.engine import Engine, open_engine
from llmtrain.corpus.inputs import TEXT, Input
from llmtrain.corpus.reading import read_whole
from llmtrain.corpus.streams import Damage, Progress
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.storage import errors
from llmtrain.storage.errors import STOP_SIGNALS, InternalError, LlmtrainError, write_error

# The worker's program. It finds modules where this process does, whatever the current folder holds.
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from llmtrain.corpus.workers import main; main(int(sys.argv[1]))"

# How soon a request to stop is seen while all workers are busy.
POLL_MS = 100


@dataclass
class Encoded:
    """One block as ids. Arrays go by document of the block."""

    ids: list[np.ndarray]
    """All documents, each ended by EOS, of the engine's `id_type`: arrays to be read one after the other."""
    lengths: np.ndarray
    """Ids of each document, int64; 0 for one that was left out."""
    held_out: np.ndarray
    """Whether its content chooses it for the held-out part, bool."""
    left_out: list[tuple[int, str, int]]
    """(number in the block, reason, byte of the document) of those without ids."""
    of_prompt: np.ndarray
    """Ids at the beginning of each document that are its prompt's, int64."""


def encode_block(
    engine: Engine, documents: Sequence[bytes], holdout: float, prompts: Sequence[int] | None = None
) -> Encoded:
    """What a worker does with the documents of a block; `prompts`: bytes of each one's. Raises BadData as
    `Engine.encode`."""
    ids, lengths, of_prompt, bad = engine.encode_prompted(documents, prompts or [0] * len(documents))
    left_out = [(number, INVALID_UTF8, place) for number, place in bad]
    left_out += [(number, "empty", 0) for number, data in enumerate(documents) if not data]
    held_out = np.zeros(len(documents), bool)
    if holdout:
        held_out[:] = [falls_within(data, holdout) for data in documents]
    return Encoded(ids, lengths, held_out, sorted(left_out), of_prompt)


@dataclass
class Task:
    """A block on its way: where its documents come from (see Document), and then its ids."""

    files: list[int]
    ordinals: list[int]
    places: list[int]
    sizes: list[int]
    damages: list[Damage | None]
    prompts: list[int]
    unread: list[str]
    texts: list[bytes]
    """The documents' data, until they are on their way."""
    nbytes: int
    encoded: Encoded | None = None


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    tasks: deque[Task] = field(default_factory=deque)

    @property
    def waiting_bytes(self) -> int:
        return sum(task.nbytes for task in self.tasks)


class Workers:
    """Worker processes. As a context manager: at its end they are all gone, however it comes."""

    def __init__(self, holdout: float) -> None:
        self.pool: list[_Worker] = []
        self._holdout = holdout
        self._open: dict[str, Any] | None = None
        self._tokenizer = -1

    def start(self, count: int) -> None:
        """Makes them `count` at least, and waits for none to be ready."""
        while len(self.pool) < count:
            self.pool.append(_start())
            if self._open:
                self._send_tokenizer(self.pool[-1])

    def open(self, tokenizer: Tokenizer, engine: str) -> None:
        """Gives them the tokenizer, and the engine that they will probably encode with: they get ready for it."""
        self._open = {"engine": engine, "holdout": self._holdout}
        self._tokenizer = _shared([json.dumps(tokenizer.facts()).encode()])
        for worker in self.pool:
            self._send_tokenizer(worker)

    def _send_tokenizer(self, worker: _Worker) -> None:
        assert self._open
        try:
            _put(worker.connection, self._open, self._tokenizer)
        except OSError as error:
            raise _died(worker) from error

    def end(self) -> None:
        """Ends them all, without waiting until they are gone."""
        for worker in self.pool:
            worker.connection.close()
            worker.process.kill()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for worker in self.pool:
            worker.process.wait()
        if self._tokenizer >= 0:
            os.close(self._tokenizer)


def encode_blocks(
    blocks: Iterable[list[Document]],
    workers: Workers,
    engine: Engine,
    block_bytes: int,
    check: Callable[[], None],
) -> Generator[Task, None, None]:
    """The blocks in their order, encoded with an engine like that one. The reading of blocks never runs further ahead
    of the taking of results than a few blocks a worker.

    `check` is called several times a second and may raise, to stop. Raises what reading and encoding raise, and
    InternalError where a worker dies.
    """
    pool = workers.pool
    in_order: deque[Task] = deque()
    source = iter(blocks)
    task = _next_task(source)
    while task is not None or in_order:
        check()
        while task is not None and len(in_order) < 4 * len(pool):
            worker = min(pool, key=lambda worker: worker.waiting_bytes)
            # A long document waits for a worker that has nothing else, so only one is held twice; and those that
            # are done and wait for an earlier one count too.
            if worker.tasks and worker.waiting_bytes + task.nbytes > 2 * block_bytes:
                break
            waiting = sum(task.nbytes for task in in_order)
            if len(in_order) >= len(pool) and waiting + task.nbytes > 4 * len(pool) * block_bytes:
                break
            _send(worker, engine.name, task)
            in_order.append(task)
            task = _next_task(source)
        busy = {worker.connection.fileno(): worker for worker in pool if worker.tasks}
        poll = select.poll()
        for descriptor in busy:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(POLL_MS):
            _receive(busy[descriptor], engine.id_type)
        while in_order and in_order[0].encoded is not None:
            yield in_order.popleft()


def _next_task(blocks: Iterator[list[Document]]) -> Task | None:
    block = next(blocks, None)
    if block is None:
        return None
    files, ordinals, places, sizes, texts, damages, prompts, unread = map(list, zip(*block, strict=True))
    to_read = sum(size for size, path in zip(sizes, unread, strict=True) if path)
    return Task(files, ordinals, places, sizes, damages, prompts, unread, texts, to_read + sum(map(len, texts)))


def _start() -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), *sys.path]
        # One core each: that is what the workers are for.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        # Ctrl-C and a supervisor's signal reach the whole process group; what they mean is the parent's to decide.
        # A blocked signal stays blocked in the child, and comes to the parent afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _Worker(process, ours)


def _send(worker: _Worker, engine: str, task: Task) -> None:
    texts, task.texts = task.texts, []
    lengths = np.array([[len(text) for text in texts], task.prompts], np.int64)
    to_read = [(number, path, task.sizes[number]) for number, path in enumerate(task.unread) if path]
    memory = _shared([lengths, texts[0] if len(texts) == 1 else b"".join(texts)])
    try:
        _put(worker.connection, {"engine": engine, "documents": len(texts), "read": to_read}, memory)
    except OSError as error:
        raise _died(worker) from error
    finally:
        os.close(memory)
    worker.tasks.append(task)


def _receive(worker: _Worker, id_type: np.dtype) -> None:
    try:
        answer, data = _take(worker.connection)
    except (OSError, EOFError) as error:
        raise _died(worker) from error
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["line"])
    task = worker.tasks.popleft()
    for number, place, size, damage in answer["read"]:
        task.places[number], task.sizes[number] = place, size
        task.damages[number] = Damage(*damage) if damage else None
    counts = np.frombuffer(data, np.int64, 3 * len(task.sizes))
    lengths, of_prompt, held_out = counts.reshape(3, -1)
    ids = np.frombuffer(data, id_type, -1, counts.nbytes)
    left_out = [(number, reason, place) for number, reason, place in answer["left_out"]]
    task.encoded = Encoded([ids], lengths, held_out.astype(np.bool_), left_out, of_prompt)


def _died(worker: _Worker) -> InternalError:
    code = worker.process.wait()
    if code == -signal.SIGKILL:
        return InternalError("a worker was killed, perhaps for want of memory: run again with fewer --workers")
    return InternalError(f"a worker ended with status {code}: its own message is above")


def _shared(buffers: Iterable[Any]) -> int:
    """A descriptor of memory that holds these bytes. Raises StorageFailure where the system has none."""
    memory = os.memfd_create("llmtrain") if hasattr(os, "memfd_create") else os.dup(tempfile.TemporaryFile().fileno())
    try:
        with open(memory, "wb", closefd=False) as file:
            file.writelines(buffers)
    except OSError as error:
        os.close(memory)
        raise write_error(error, "memory that is shared with the workers") from error
    return memory


def _put(connection: socket.socket, header: dict[str, Any], memory: int) -> None:
    """Sends what `_take` receives; the memory stays the caller's to close."""
    data = json.dumps(header).encode()
    message = struct.pack("<Q", len(data)) + data
    sent = socket.send_fds(connection, [message], [memory])
    connection.sendall(message[sent:])


def _take(connection: socket.socket) -> tuple[dict[str, Any], mmap.mmap | bytes]:
    """A message and the memory that belongs to it. Raises EOFError where the other side is gone."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
    if not size:
        raise EOFError
    assert len(size) == 8, "a message is sent at once, so its beginning comes at once"
    (memory,) = descriptors
    try:
        data = bytearray(struct.unpack("<Q", size)[0])
        _fill(connection, memoryview(data))
        nbytes = os.fstat(memory).st_size
        # All pages at once: one by one they would cost as much as copying what is in them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return json.loads(data), mmap.mmap(memory, nbytes, flags, mmap.PROT_READ) if nbytes else b""
    finally:
        os.close(memory)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        size = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not size:
            raise EOFError
        view = view[size:]


_Block = tuple[dict[str, Any], mmap.mmap | bytes]


def main(descriptor: int) -> None:
    """The worker process; `descriptor` is its end of the socket."""
    connection = socket.socket(fileno=descriptor)
    work: queue.SimpleQueue[_Block] = queue.SimpleQueue()
    with _ending_with_the_socket():
        asked, data = _take(connection)
        threading.Thread(target=_read, args=(connection, work), daemon=True).start()
        tokenizer = Tokenizer.of_facts(json.loads(data[:]))
        name = asked["engine"]
        engine = _engine(tokenizer, name)
        while True:
            block, data = work.get()
            if block["engine"] != name:
                del engine  # before there is another
                name = block["engine"]
                engine = _engine(tokenizer, name)
            _answer(connection, engine, asked["holdout"], block, data)


def _engine(tokenizer: Tokenizer, name: str) -> Engine | LlmtrainError:
    try:
        return open_engine(tokenizer, name)
    except LlmtrainError as error:
        return error


@contextmanager
def _ending_with_the_socket() -> Iterator[None]:
    """Ends the process, its other threads too, when the parent has closed the socket or is gone: what is being encoded
    is for nobody then."""
    try:
        yield
    except (OSError, EOFError):
        os._exit(0)


def _read(connection: socket.socket, work: "queue.SimpleQueue[_Block]") -> None:
    with _ending_with_the_socket():
        while True:
            work.put(_take(connection))


def _answer(
    connection: socket.socket, engine: Engine | LlmtrainError, holdout: float, block: dict[str, Any], data: Any
) -> None:
    answer: dict[str, Any]
    try:
        if isinstance(engine, LlmtrainError):
            raise engine
        documents, prompts, others = _documents(block, data)
        encoded = encode_block(engine, documents, holdout, prompts)
        answer = {"left_out": encoded.left_out, "read": others}
        counts = np.stack([encoded.lengths, encoded.of_prompt, encoded.held_out.astype(np.int64)])
        memory = _shared([counts, *encoded.ids])
    except BaseException as error:  # the library's panics are no Exceptions
        if not isinstance(error, LlmtrainError):
            error = InternalError(f"a worker failed: {type(error).__name__}: {error}")
        answer, memory = {"error": type(error).__name__, "line": str(error)}, _shared([])
    _put(connection, answer, memory)
    os.close(memory)


def _documents(
    block: dict[str, Any], data: Any
) -> tuple[list[bytes], list[int], list[tuple[int, int, int, Damage | None]]]:
    """The documents of a block; the bytes of their prompts; and (number, place, size, damage) of those that were read
    here and are not what they were expected to be."""
    lengths, prompts = np.frombuffer(data, np.int64, 2 * block["documents"]).reshape(2, -1).copy()
    ends = lengths.cumsum() + 2 * lengths.nbytes
    places = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    documents = [data[begin:end] for begin, end in places]
    data.close()
    others = []
    for number, path, size in block["read"]:
        document = read_whole(0, Input(path, TEXT, "", size, ""), Progress())
        documents[number] = document.data
        if document.place or document.size != size or document.damage:
            others.append((number, document.place, document.size, document.damage))
    return documents, prompts.tolist(), others
