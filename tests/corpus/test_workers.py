"""Blocks through worker processes: in order, never far ahead, and no process left however it ends."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmtrain.corpus import workers as workers_room
from llmtrain.corpus.documents import Document
from llmtrain.corpus.engine import TOKENIZERS, Engine, open_engine
from llmtrain.corpus.tokenizer import EOS, Tokenizer, train
from llmtrain.corpus.workers import Task, Workers
from llmtrain.storage.errors import BadData, InternalError, StopRequested


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(Tokenizer(train(["some words for a few merges, words and merges"], 300), "t"), TOKENIZERS)


def never() -> None:
    pass


def encode_blocks(
    blocks: Iterable[list[Document]], engine: Engine, count: int, block_bytes: int, check: Callable[[], None] = never
) -> Iterator[Task]:
    with Workers(0.0) as workers:
        workers.open(engine.tokenizer, engine.name)
        workers.start(count)
        yield from workers_room.encode_blocks(blocks, workers, engine, block_bytes, check)


def no_worker_is_left() -> bool:
    """Whether no process runs the workers' program for this one."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            if b"corpus.workers" in Path(f"/proc/{child}/cmdline").read_bytes():
                return False
    return True


def of(text: str) -> list[Document]:
    data = text.encode()
    return [Document(0, 0, 0, len(data), data)]


def test_blocks_come_in_order_though_they_take_unequal_time(engine: Engine):
    texts = ["words " * (20_000 if number % 5 == 0 else 1) + str(number) for number in range(40)]
    tasks = encode_blocks(map(of, texts), engine, 3, 1000)
    decoded = [engine.tokenizer.decode(np.concatenate(task.encoded.ids)[:-1]) for task in tasks if task.encoded]
    assert decoded == texts
    assert no_worker_is_left()


def test_reading_stays_a_few_blocks_ahead_of_what_was_taken(engine: Engine):
    read = 0

    def source() -> Iterator[list[Document]]:
        nonlocal read
        for number in range(200):
            read += 1
            yield of(str(number))

    for taken, _ in enumerate(encode_blocks(source(), engine, 2, 1 << 20), 1):
        assert read <= taken + 4 * 2 + 1
        assert taken == 200 or not no_worker_is_left()
    assert read == 200


def test_a_long_document_waits_until_its_worker_has_nothing_else(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    waiting: list[int] = []
    send = workers_room._send

    def watched(worker: workers_room._Worker, engine: str, task: Task) -> None:
        send(worker, engine, task)
        waiting.append(worker.waiting_bytes)

    monkeypatch.setattr(workers_room, "_send", watched)
    texts = ["x" * size for size in (10, 10, 5000, 10, 4000, 10)]
    assert len(list(encode_blocks(map(of, texts), engine, 1, 100))) == 6
    assert waiting[2] == 5000 and waiting[4] == 4000 and max(waiting) == 5000


def test_an_error_of_the_tokenizer_arrives_and_ends_the_workers():
    words = Tokenizer(
        b'{"model": {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"}, '
        b'"pre_tokenizer": {"type": "WhitespaceSplit"}, "version": "1.0"}',
        "words.json",
    )
    with pytest.raises(BadData, match="words.json: the tokenizer gives its end-of-text id 1"):
        list(encode_blocks([of("a"), of(f"a {EOS}")], open_engine(words, TOKENIZERS), 2, 1))
    assert no_worker_is_left()


def test_an_error_while_reading_ends_the_workers(engine: Engine):
    def source() -> Iterator[list[Document]]:
        yield of("one")
        raise BadData("the second file is torn")

    with pytest.raises(BadData, match="torn"):
        list(encode_blocks(source(), engine, 2, 1))
    assert no_worker_is_left()


def test_a_stop_ends_the_workers_even_when_they_are_busy(engine: Engine):
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise StopRequested("stopped")

    with pytest.raises(StopRequested):
        list(encode_blocks(map(of, ["word " * 2_000_000] * 2), engine, 2, 1 << 20, check))
    assert no_worker_is_left()


def test_a_worker_that_cannot_start_is_one_error(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_room, "_BOOT", "raise SystemExit(3)")
    with pytest.raises(InternalError, match="status 3"):
        list(encode_blocks([of("one")], engine, 1, 1))
    assert no_worker_is_left()
