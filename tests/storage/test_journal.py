import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain.storage import journal
from llmtrain.storage.errors import CannotCreate, InputMissing, StorageFailure
from llmtrain.storage.journal import JsonLines
from tests.storage.processes import killed_at_each_line, python, small_disk


def line(n: int) -> dict:
    return {"kind": "train", "step": n, "lm_loss": 1 / (n + 3)}


def fill(path: Path, n: int) -> None:
    with JsonLines(path) as journal:
        for i in range(n):
            journal.append(line(i))
        journal.sync()


def test_lines_come_back_as_they_were(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    fill(path, 3)
    fill(path, 2)  # opened again, it goes on
    assert list(JsonLines.read(path)) == [line(0), line(1), line(2), line(0), line(1)]
    assert [json.loads(text) for text in path.read_text().splitlines()] == list(JsonLines.read(path))


def test_a_line_torn_anywhere_is_skipped_and_the_next_line_is_whole(in_memory: Path):
    path = in_memory / "metrics.jsonl"
    fill(path, 2)
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(data)):
        path.write_bytes(data[:size])
        assert list(JsonLines.read(path)) == [line(0)]
        with JsonLines(path) as journal:
            journal.append(line(7))
        assert list(JsonLines.read(path)) == [line(0), line(7)]
        assert path.read_bytes().startswith(data[:last]) and path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 200_000])
def test_what_a_power_cut_left_unwritten_is_cut_off(tmp_path: Path, size: int):
    path = tmp_path / "metrics.jsonl"
    fill(path, 2)
    with open(path, "ab") as file:
        file.write(bytes(size))
    with JsonLines(path) as journal:
        journal.append(line(2))
    assert path.read_bytes().count(b"\0") == 0
    assert list(JsonLines.read(path)) == [line(0), line(1), line(2)]


def test_a_file_with_nothing_but_damage_is_a_journal_without_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(bytes(100_000))
    fill(path, 1)
    assert list(JsonLines.read(path)) == [line(0)]


def test_lines_that_are_no_objects_are_skipped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps(line(n)).encode() for n in range(2)]
    texts = [b"nonsense", good[0], b"\xff\xfe", b"[1]", b"", b"[" * 9999, good[1]]
    path.write_bytes(b"\n".join(texts) + b"\n")
    assert list(JsonLines.read(path)) == [line(0), line(1)]


def test_a_rewrite_keeps_lines_byte_for_byte_and_drops_the_rest(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,  "x":1e-05}\nnonsense\n{"step": 3}\n{"step": 2}\n{"step": 2')
    with JsonLines(path) as journal:
        journal.rewrite(lambda line: line["step"] <= 2)
        assert path.read_bytes() == b'{"step":1,  "x":1e-05}\n{"step": 2}\n'
        journal.append(line(9))
    assert list(JsonLines.read(path)) == [{"step": 1, "x": 1e-05}, {"step": 2}, line(9)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_rewrite_killed_anywhere_leaves_all_lines_or_the_kept_ones(in_memory: Path):
    path = in_memory / "metrics.jsonl"
    whole = [line(i) for i in range(6)]
    fill(path, 6)

    def work() -> None:
        with JsonLines(path) as journal:
            journal.rewrite(lambda line: line["step"] % 2 == 0)

    rewritten = 0
    for _ in killed_at_each_line(work):
        lines = list(JsonLines.read(path))
        if lines != whole:
            assert lines == whole[::2]
            rewritten += 1
            path.unlink()
            fill(path, 6)
    assert rewritten > 0


def test_an_append_killed_anywhere_leaves_whole_lines(in_memory: Path):
    path = in_memory / "metrics.jsonl"
    for n in killed_at_each_line(lambda: fill(path, 3)):
        lines = list(JsonLines.read(path)) if path.exists() else []
        assert lines == [line(i) for i in range(len(lines))] and len(lines) <= 3
        assert n > 1 or lines == []
        path.unlink(missing_ok=True)


APPENDER = """
import sys
from llmtrain.storage.journal import JsonLines
journal = JsonLines(sys.argv[1])
for n in range(10**9):
    journal.append({"step": n, "text": "x" * (n % 300)})
    print(n, flush=True)
"""


def test_every_line_that_a_killed_process_appended_is_there(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with python(APPENDER, path) as process:
        for _ in range(500):
            last = int(process.stdout.readline())
        process.kill()
    steps = [line["step"] for line in JsonLines.read(path)]
    assert steps == list(range(len(steps))) and len(steps) > last


def test_a_reader_beside_a_writer_sees_whole_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with python(APPENDER, path) as process:
        process.stdout.readline()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        for _ in range(6):
            steps = [line["step"] for line in JsonLines.read(path)]
            assert steps == list(range(len(steps)))
        process.kill()


def test_a_line_whose_end_is_written_while_it_is_read_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"st')

    class Grows(io.FileIO):
        """At its end, which it says it has reached, there is more."""

        def readinto(self, buffer) -> int:
            n = super().readinto(buffer)
            if n == 0 and path.stat().st_size < 20:
                with path.open("ab") as more:
                    more.write(b'ep": 1}\n{"step": 2}\n')
            return n

    monkeypatch.setattr(journal, "open_file", lambda path: Grows(path))
    assert [line["step"] for line in JsonLines.read(path)] == [0]
    assert [line["step"] for line in JsonLines.read(path)] == [0, 1, 2]


def test_threads_append_whole_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as journal, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: journal.append({"n": n, "text": "y" * 9000}), range(200)))
    assert sorted(line["n"] for line in JsonLines.read(path)) == list(range(200))


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half_and_later_lines_follow(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "metrics.jsonl"
        with JsonLines(path) as journal:
            journal.append(line(0))
            with pytest.raises(StorageFailure, match="metrics.jsonl: cannot be written: the disk is full"):
                journal.append({"text": "z" * (2 << 20)})
            journal.append(line(1))
            journal.sync()
        assert list(JsonLines.read(path)) == [line(0), line(1)]
        assert path.read_bytes().count(b"\n") == 2


def test_numbers_that_are_not_finite_are_null(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as journal:
        journal.append({"grad_norm": float("inf"), "lm_loss": float("nan"), "text": "two\nlines"})
    assert list(JsonLines.read(path)) == [{"grad_norm": None, "lm_loss": None, "text": "two\nlines"}]
    assert path.read_text().count("\n") == 1


def test_places_for_no_journal_are_named(tmp_path: Path):
    with pytest.raises(CannotCreate, match="missing/m.jsonl: "):
        JsonLines(tmp_path / "missing" / "m.jsonl")
    with pytest.raises(InputMissing, match="m.jsonl"):
        list(JsonLines.read(tmp_path / "m.jsonl"))
