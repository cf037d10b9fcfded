"""Documents encoded by worker processes, in order.

A worker is a process of its own (nothing forked, so no lock or thread of the parent is copied) with one socket to the
parent. Blocks of documents go out and their ids come back: a line of JSON, and the numbers and bytes that it tells of.
At most two blocks' bytes wait at a worker. A thread of the worker sits in `recv` all the time: it takes the next block
while the present one is encoded, and the end of the socket is how a worker learns that its parent is gone, however that
came about.
"""

import json
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmtrain.corpus.documents import INVALID_UTF8, Document, falls_within
from llmtrain.corpus.engine import Engine, open_engine
from llmtrain.corpus.streams import Damage
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.storage import errors
from llmtrain.storage.errors import STOP_SIGNALS, InternalError, LlmtrainError

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
    """What a worker does with a block; `prompts`: bytes of each document's. Raises BadData as `Engine.encode`."""
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


def encode_blocks(
    blocks: Iterable[list[Document]],
    engine: Engine,
    workers: int,
    holdout: float,
    block_bytes: int,
    check: Callable[[], None],
) -> Generator[Task, None, None]:
    """The blocks in their order, encoded by `workers` processes. The reading of blocks never runs further ahead of the
    taking of results than a few blocks a worker.

    `check` is called several times a second and may raise, to stop. Raises what encoding raises, and InternalError
    where a worker dies. On any end, all workers are gone.
    """
    with ExitStack() as stack:
        pool = [_start(engine, holdout, stack) for _ in range(workers)]
        in_order: deque[Task] = deque()
        source = iter(blocks)
        block = next(source, None)
        while block is not None or in_order:
            check()
            while block is not None and len(in_order) < 4 * workers:
                worker = min(pool, key=lambda worker: worker.waiting_bytes)
                # A long document waits for a worker that has nothing else, so only one is held twice; and those that
                # are done and wait for an earlier one count too.
                if worker.tasks and worker.waiting_bytes + _nbytes(block) > 2 * block_bytes:
                    break
                waiting = sum(task.nbytes for task in in_order)
                if len(in_order) >= workers and waiting + _nbytes(block) > 4 * workers * block_bytes:
                    break
                in_order.append(_send(worker, block))
                block = next(source, None)
            busy = {worker.connection.fileno(): worker for worker in pool if worker.tasks}
            poll = select.poll()
            for descriptor in busy:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(POLL_MS):
                _receive(busy[descriptor], engine.id_type)
            while in_order and in_order[0].encoded is not None:
                yield in_order.popleft()


def _nbytes(block: list[Document]) -> int:
    return sum(len(document.data) for document in block)


def _start(engine: Engine, holdout: float, stack: ExitStack) -> _Worker:
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
    stack.callback(_end, process, ours)
    worker = _Worker(process, ours)
    try:
        _put(ours, {"engine": engine.name, "tokenizer": engine.tokenizer.facts(), "holdout": holdout})
    except OSError as error:
        raise _died(worker) from error
    return worker


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _send(worker: _Worker, block: list[Document]) -> Task:
    files, ordinals, places, sizes, datas, damages, prompts = map(list, zip(*block, strict=True))
    task = Task(files, ordinals, places, sizes, damages, _nbytes(block))
    try:
        lengths = np.array([[len(data) for data in datas], prompts], np.int64)
        joined = datas[0] if len(datas) == 1 else b"".join(datas)
        _put(worker.connection, {"documents": len(datas)}, [lengths, joined])
    except OSError as error:
        raise _died(worker) from error
    worker.tasks.append(task)
    return task


def _receive(worker: _Worker, id_type: np.dtype) -> None:
    try:
        answer = _take(worker.connection)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["line"])
        documents = len(worker.tasks[0].sizes)
        of_documents: list[tuple[int, Any]] = [(documents, np.int64), (documents, np.int64), (documents, np.bool_)]
        lengths, of_prompt, held_out, *ids = (
            _receive_array(worker.connection, size, dtype)
            for size, dtype in (*of_documents, *((size, id_type) for size in answer["sizes"]))
        )
    except (OSError, EOFError) as error:
        raise _died(worker) from error
    left_out = [(number, reason, place) for number, reason, place in answer["left_out"]]
    worker.tasks.popleft().encoded = Encoded(ids, lengths, held_out, left_out, of_prompt)


def _died(worker: _Worker) -> InternalError:
    code = worker.process.wait()
    if code == -signal.SIGKILL:
        return InternalError("a worker was killed, perhaps for want of memory: run again with fewer --workers")
    return InternalError(f"a worker ended with status {code}: its own message is above")


def _put(connection: socket.socket, header: dict[str, Any], buffers: Iterable[Any] = ()) -> None:
    """Sends what `_take` receives, and then bytes as they are: the receiver knows how many."""
    data = json.dumps(header).encode()
    connection.sendall(struct.pack("<Q", len(data)) + data)
    for buffer in buffers:
        connection.sendall(buffer)


def _take(connection: socket.socket) -> dict[str, Any]:
    """Raises EOFError where the other side is gone."""
    (size,) = struct.unpack("<Q", _receive_bytes(connection, 8))
    return json.loads(_receive_bytes(connection, size))


def _receive_array(connection: socket.socket, size: int, dtype: np.dtype | type[np.generic]) -> np.ndarray:
    return np.frombuffer(_receive_bytes(connection, size * np.dtype(dtype).itemsize), dtype)


def _receive_bytes(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        size = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not size:
            raise EOFError
        view = view[size:]


_Block = tuple[np.ndarray, np.ndarray, bytearray]
"""Of each document its bytes and those of its prompt, int64, and all of the documents."""


def main(descriptor: int) -> None:
    """The worker process; `descriptor` is its end of the socket."""
    connection = socket.socket(fileno=descriptor)
    work: queue.SimpleQueue[_Block] = queue.SimpleQueue()
    with _ending_with_the_socket():
        asked = _take(connection)
        engine: Engine | LlmtrainError
        try:
            engine = open_engine(Tokenizer.of_facts(asked["tokenizer"]), asked["engine"])
        except LlmtrainError as error:
            engine = error
        threading.Thread(target=_read, args=(connection, work), daemon=True).start()
        while True:
            _answer(connection, engine, asked["holdout"], *work.get())


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
            of_data, prompts = _receive_array(connection, 2 * _take(connection)["documents"], np.int64).reshape(2, -1)
            work.put((of_data, prompts, _receive_bytes(connection, int(of_data.sum()))))


def _answer(
    connection: socket.socket, engine: Engine | LlmtrainError, holdout: float, lengths: np.ndarray, prompts: np.ndarray,
    data: bytearray,
) -> None:  # fmt: skip
    try:
        if isinstance(engine, LlmtrainError):
            raise engine
        encoded = encode_block(engine, _cut(data, lengths), holdout, prompts.tolist())
    except BaseException as error:  # the library's panics are no Exceptions
        if not isinstance(error, LlmtrainError):
            error = InternalError(f"a worker failed: {type(error).__name__}: {error}")
        _put(connection, {"error": type(error).__name__, "line": str(error)})
        return
    del data
    header = {"sizes": [len(ids) for ids in encoded.ids], "left_out": encoded.left_out}
    _put(connection, header, [encoded.lengths, encoded.of_prompt, encoded.held_out, *encoded.ids])


def _cut(data: bytearray, lengths: np.ndarray) -> list[bytes]:
    view, ends = memoryview(data), lengths.cumsum()
    return [bytes(view[begin:end]) for begin, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
