"""Unfinished runs, files that are added to, and shares of a corpus: what the next command makes of them."""

import gzip
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.corpus import tokenize as work
from llmtrain.corpus import writing
from llmtrain.corpus.config import TokenizeConfig
from llmtrain.corpus.counts import Counts
from llmtrain.corpus.inputs import Input
from llmtrain.corpus.shards import find_parts, share
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.tokenize import tokenize
from llmtrain.corpus.tokenizer import load
from llmtrain.storage.errors import (
    BadData,
    ConfigMismatch,
    InputMissing,
    StopRequested,
    StorageFailure,
    UsageError,
)
from tests.corpus.texts import CONFIG, TEXTS, left, output_bytes, put, read

LINES = "".join(f"line {number} of a text, {number * number}\n" for number in range(400))


def stop_after(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Makes the next run stop after some blocks."""
    real, seen = Counts.check, [0]

    def check(self: Counts, task: Any) -> None:
        seen[0] += 1
        if seen[0] > blocks:
            raise StopRequested("stop")
        real(self, task)

    monkeypatch.setattr(Counts, "check", check)


def interrupted(monkeypatch: pytest.MonkeyPatch, config: TokenizeConfig, blocks: int = 4, **options: Any) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, blocks)
        with pytest.raises(StopRequested):
            tokenize(config, block_bytes=1000, **options)
    assert left() == [f".{work._outputs(config)[0].name}.partial", *(name for name in left() if name[0] != ".")]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Documents of each block that is encoded from here on."""
    seen: list[int] = []
    real = Counts.add
    monkeypatch.setattr(Counts, "add", lambda self, task: (seen.append(len(task.files)), real(self, task))[1])
    return seen


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_a_stopped_run_goes_on_where_it_was(here: Path, monkeypatch: pytest.MonkeyPatch, holdout: float):
    put([LINES, *TEXTS, LINES[:3000]])
    config = replace(CONFIG, document="line", holdout=holdout)
    tokenize(config)
    expected = output_bytes()
    for path in Path().glob("corpus*"):
        path.unlink()
    interrupted(monkeypatch, config, 6)
    interrupted(monkeypatch, config, 5, commit_seconds=0)
    seen = counted(monkeypatch)
    tokenize(replace(config, workers=2))
    assert output_bytes() == expected
    lines = sum(len(Path(path).read_text().splitlines()) for path in sorted(Path("text").iterdir()))
    assert 0 < sum(seen) < lines - 100


def test_it_cannot_go_on_with_what_has_changed(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES, *TEXTS])
    config = replace(CONFIG, document="line", holdout=0.1)
    interrupted(monkeypatch, config)
    for other, why in (
        (replace(config, holdout=0.2), r"had holdout 0.1, this one has 0.2: run the same command"),
        (replace(config, document="file"), "had document 'line'"),
        (replace(config, append=True), "had append False"),
        (replace(config, engine="gigatoken"), "made with --engine tokenizers, not gigatoken"),
    ):
        with pytest.raises(ConfigMismatch, match=why):
            tokenize(other)
    os.utime("text/000.txt", ns=(1, 1))
    with pytest.raises(ConfigMismatch, match="text/000.txt: was changed, moved or left out since"):
        tokenize(config)


def test_another_version_of_the_engine_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES])
    config = replace(CONFIG, document="line")
    interrupted(monkeypatch, config)
    monkeypatch.setattr("llmtrain.corpus.engine._Tokenizers.version", "0.1")
    with pytest.raises(ConfigMismatch, match="pip install tokenizers=="):
        tokenize(config)


def test_what_was_not_read_yet_may_change(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES, b"\xff\n", "the last"])
    config = replace(CONFIG, document="line")
    interrupted(monkeypatch, config)
    with pytest.raises(BadData, match="001.txt"):
        tokenize(config, block_bytes=1000)
    Path("text/001.txt").write_text("mended")
    tokenize(config, block_bytes=1000)
    assert read() == [*LINES.splitlines(), "mended", "the last"]


def test_damage_may_be_left_out_from_here_on_but_not_become_an_error(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([b"good\n\xff\n" + LINES.encode()])
    config = replace(CONFIG, document="line", on_bad="skip")
    interrupted(monkeypatch, config)
    with pytest.raises(ConfigMismatch, match="begun with --on-bad skip"):
        tokenize(replace(config, on_bad="error"))
    tokenize(config)
    assert read() == ["good", *LINES.splitlines()]


def give_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    Path("stdin").write_text(text)
    descriptor = os.open("stdin", os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)


@pytest.fixture
def stdin():
    """Standard input, given back at the end."""
    kept = os.dup(0)
    yield
    os.dup2(kept, 0)
    os.close(kept)


def test_standard_input_goes_on_behind_what_was_read_of_it(here: Path, monkeypatch: pytest.MonkeyPatch, stdin: None):
    config = replace(CONFIG, document="line", inputs=("-",))
    give_stdin(monkeypatch, LINES)
    interrupted(monkeypatch, config)
    give_stdin(monkeypatch, LINES.replace("line 3", "line X"))
    with pytest.raises(ConfigMismatch, match="-: does not begin with the text that was read before"):
        tokenize(config)
    give_stdin(monkeypatch, LINES[:300])
    with pytest.raises(ConfigMismatch, match="does not begin with"):
        tokenize(config)
    give_stdin(monkeypatch, LINES)
    seen = counted(monkeypatch)
    tokenize(config)
    assert read() == LINES.splitlines() and sum(seen) < 390


def test_a_journal_torn_by_a_power_cut_goes_on_from_its_last_whole_line(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES])
    config = replace(CONFIG, document="line")
    interrupted(monkeypatch, config, 8, commit_seconds=0)
    journal = Path(".corpus.u16.partial/journal")
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 2
    journal.write_bytes(b"".join(lines[:2]) + b"\0" * 50 + b"\n" + lines[-1])
    seen = counted(monkeypatch)
    tokenize(config)
    assert read() == LINES.splitlines() and 0 < sum(seen) < 400


def test_ids_shorter_than_the_journal_says_are_bad_data(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES])
    config = replace(CONFIG, document="line")
    interrupted(monkeypatch, config)
    os.truncate(".corpus.u16.partial/corpus.u16", 10)
    with pytest.raises(BadData, match="shorter than was written to it: remove"):
        tokenize(config)


def test_a_full_disk_keeps_what_is_whole_and_the_same_command_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES])
    config = replace(CONFIG, document="line", holdout=0.3)
    tokenize(config)
    expected = output_bytes()
    room = [4000]
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if not isinstance(data, memoryview):
            return real(descriptor, data)  # the journal, for which cutting off made room
        if len(data) > room[0]:
            size = real(descriptor, data[: room[0]])  # what fits is written
            room[0] = 0
            if not size:
                raise OSError(28, "No space left on device")
            return size
        room[0] -= len(data)
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "write", write)
        with pytest.raises(StorageFailure, match="the disk is full"):
            tokenize(config, block_bytes=1000, commit_seconds=1e9)
    seen = counted(monkeypatch)
    tokenize(config)
    assert output_bytes() == expected and len(left()) == 6 and 0 < sum(seen) < 400


def test_one_command_at_a_time(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES])
    config = replace(CONFIG, document="line")
    waiting, go = threading.Event(), threading.Event()
    real = Counts.add

    def add(self: Counts, task: Any) -> None:
        waiting.set()
        assert go.wait(60)
        real(self, task)

    monkeypatch.setattr(Counts, "add", add)
    thread = threading.Thread(target=tokenize, args=(config,))
    thread.start()
    assert waiting.wait(60)
    with pytest.raises(ConfigMismatch, match=f"in use by process {os.getpid()}"):
        tokenize(config)
    go.set()
    thread.join()
    assert read() == LINES.splitlines() and left() == ["corpus.u16", "corpus.u16.docs", "corpus.u16.json"]


# --append


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.lists(st.text(min_size=1, max_size=30), max_size=6), more=st.lists(st.text(max_size=30), max_size=6))
def test_appending_gives_the_bytes_of_all_at_once(here: Path, first: list[str], more: list[str]):
    for name in ("a", "b"):
        Path(name).mkdir(exist_ok=True)
        for path in Path(name).iterdir():
            path.unlink()
    put(["first", *first], "a")
    put(["more", *more], "b")
    config = replace(CONFIG, holdout=0.3, inputs=("a", "b"))
    for path in Path().glob("corpus*"):
        path.unlink()
    try:
        tokenize(config)
    except BadData:
        return  # all held out
    expected = output_bytes()
    for path in Path().glob("corpus*"):
        path.unlink()
    try:
        tokenize(replace(config, inputs=("a",)))
    except BadData:
        return
    tokenize(replace(config, inputs=("b",), append=True), block_bytes=20)
    assert output_bytes() == expected
    tokenize(replace(config, append=True))  # all of it is there already
    assert output_bytes() == expected


def test_readers_see_what_the_manifest_counts_while_it_is_added_to(here: Path, monkeypatch: pytest.MonkeyPatch):
    put(TEXTS)
    config = replace(CONFIG, holdout=0.3, document="line")
    tokenize(config)
    before = {path: read(path) for path in (Path("corpus.u16"), Path("corpus.val.u16"))}
    Path("more.txt").write_text(LINES)
    append = replace(config, inputs=("more.txt",), append=True)
    interrupted(monkeypatch, append, 8)
    for path, documents in before.items():
        assert path.stat().st_size > 2 * TokenFile.open(path).tokens
        file = TokenFile.open(path)
        sum(file.verify())
        assert file.doc_ends is not None and file.documents == len(documents) == len(file.doc_ends)
    tokenize(append)
    assert sum(map(len, map(read, before))) == sum(map(len, before.values())) + 400
    # Without work under way, more than the manifest counts is damage.
    with open("corpus.u16", "ab") as ids:
        ids.write(b"\0\0")
    with pytest.raises(BadData, match="its manifest says"):
        TokenFile.open("corpus.u16")


def test_appending_that_fails_at_once_leaves_the_file_as_it_was(here: Path):
    put(TEXTS)
    tokenize(CONFIG)
    before = output_bytes()
    put(["good" * 1000, b"\xff"], ".")
    with pytest.raises(BadData):
        tokenize(replace(CONFIG, inputs=("000.txt", "001.txt"), append=True), block_bytes=1)
    assert output_bytes() == before


def of_manifest(**fields: Any) -> Callable[[], object]:
    """Writes other values into the manifest, or with none an empty one."""
    path = Path("corpus.u16.json")
    return lambda: path.write_text(json.dumps(json.loads(path.read_text()) | fields if fields else {}))


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda: os.truncate("corpus.u16", 10), "corpus.u16: holds 5 tokens, its manifest says"),
        (lambda: os.truncate("corpus.u16.docs", 8), "corpus.u16.docs: its length is 8 bytes"),
        (lambda: os.remove("corpus.u16.docs"), "corpus.u16.docs: is missing"),
        (of_manifest(), "is not the manifest of a token file"),
        (of_manifest(tokens=10**6), "was altered after it was written"),
        (of_manifest(tokens="5", manifest_sha256=""), "tokens is '5'"),
        (of_manifest(documents=1, manifest_sha256=""), "corpus.u16.docs: its last document ends at"),
    ],
)
def test_a_damaged_token_file_is_not_added_to_and_nothing_of_it_changes(here: Path, damage: Any, words: str):
    put(TEXTS)
    tokenize(CONFIG)
    damage()
    before = output_bytes()
    put(["new"], ".")
    with pytest.raises(BadData, match=words):
        tokenize(replace(CONFIG, inputs=("000.txt",), append=True))
    assert output_bytes() == before, "and no folder of work is left"


def test_a_token_file_that_is_cut_while_it_is_added_to_is_not_filled_up(here: Path, monkeypatch: pytest.MonkeyPatch):
    put([LINES])
    tokenize(replace(CONFIG, document="line"))
    put([LINES], ".")

    def cut(self: Counts, task: Any) -> None:
        os.truncate("corpus.u16", 10)
        raise BadData("stop")

    monkeypatch.setattr(Counts, "check", cut)
    with pytest.raises(BadData, match="stop"):
        tokenize(replace(CONFIG, document="line", inputs=("000.txt",), append=True))
    assert Path("corpus.u16").stat().st_size == 10, "zeros would be taken for ids"


def test_only_a_token_file_of_the_same_tokenizer_and_engine_is_added_to(here: Path):
    put(TEXTS)
    append = replace(CONFIG, append=True)
    with pytest.raises(InputMissing, match="no token file with a manifest to append to"):
        tokenize(append)
    assert left() == []
    tokenize(CONFIG)
    Path("new.txt").write_text("new")
    append = replace(append, inputs=("new.txt",))
    with pytest.raises(ConfigMismatch, match="made with --engine tokenizers, not gigatoken"):
        tokenize(replace(append, engine="gigatoken"))
    spec = json.loads(Path("tokenizer.json").read_text())
    Path("tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigMismatch, match="made with another tokenizer"):
        tokenize(append)
    assert len(left()) == 4


# --shard


@given(sizes=st.lists(st.integers(0, 100), max_size=40), of=st.integers(1, 6))
def test_shares_hold_each_input_once_in_order_and_are_about_equal(sizes: list[int], of: int):
    inputs = [Input(str(number), "text", "", size, "") for number, size in enumerate(sizes)]
    shares = [share(inputs, number, of) for number in range(1, of + 1)]
    assert sorted(int(one.name) for part in shares for one in part) == list(range(len(sizes)))
    assert all(part == sorted(part, key=lambda one: int(one.name)) for part in shares)
    loads = [sum((one.size or 0) + 1 for one in part) for part in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0) + 1


@pytest.mark.parametrize("shard", ["1/100001", "1/" + "9" * 5000, "\u0661/\u0662", "0/2", "3/2", "1"])
def test_what_is_no_share_is_refused(shard: str):
    with pytest.raises(ValueError, match="must be I/N with I from 1 to N, such as 2/8, and N at most 100000"):
        replace(CONFIG, shard=shard)


def test_a_file_that_is_called_like_a_part_of_very_many_is_none(here: Path):
    Path("corpus.1-of-99999999999.u16").touch()
    assert find_parts(Path("corpus.u16")) == []


def test_parts_are_read_as_one_file(here: Path):
    put([*TEXTS, LINES, LINES[:2000], "", "x", "y"])
    config = replace(CONFIG, document="line", holdout=0.1)
    for number in (3, 1, 2):
        tokenize(replace(config, shard=f"{number}/3"))
    parts = [TokenFile.open(path) for path in find_parts(Path("corpus.u16"))]
    whole = TokenFile.open("corpus.u16")
    ids = np.concatenate([part.ids for part in parts])
    assert whole.tokens == len(ids) and whole.documents == sum(part.documents for part in parts)
    assert np.array_equal(whole.ids[:], ids) and np.array_equal(whole.ids[-50:], ids[-50:]) and whole.ids[7] == ids[7]
    every = np.arange(whole.windows(33))[::-1]
    gathered = whole.gather(every, 33)
    assert np.array_equal(gathered, np.stack([ids[33 * i : 33 * i + 34] for i in every]))
    assert all(np.array_equal(whole.window(int(i), 33), row) for i, row in zip(every, gathered, strict=True))
    ends = np.concatenate(list(whole.ends_of_documents()))
    assert np.array_equal(ends, np.flatnonzero(ids == whole.eos_id) + 1)
    rows, columns = whole.borders(every, gathered)
    inside = ends[ends <= 33 * len(every)]
    assert np.array_equal(np.sort(33 * every[rows] + columns), inside)
    whole.read_ahead(33 * every, np.full(len(every), 34))
    assert sum(whole.verify()) == 2 * len(ids)
    assert TokenFile.open("corpus.val.u16").tokens > 0
    # All documents of the whole corpus are there.
    tokenize(replace(config, output=Path("whole.u16")))
    assert whole.tokens == TokenFile.open("whole.u16").tokens


def test_a_share_without_documents_is_a_part_too(here: Path):
    put(["only one"])
    for number in (1, 2):
        tokenize(replace(CONFIG, shard=f"{number}/2", holdout=0.001))
    assert TokenFile.open("corpus.u16").documents == 1
    with pytest.raises(BadData, match="all of its 2 parts are empty"):
        TokenFile.open("corpus.val.u16")


def test_parts_that_do_not_belong_together_are_refused(here: Path):
    put(TEXTS)
    tokenize(replace(CONFIG, shard="1/2"))
    with pytest.raises(InputMissing, match="corpus.2-of-2.u16: is missing, part 2 of 2 of corpus.u16"):
        TokenFile.open("corpus.u16")
    Path("text/more.txt").write_text("more")
    tokenize(replace(CONFIG, shard="2/2"))
    with pytest.raises(ConfigMismatch, match="made with another inputs than"):
        TokenFile.open("corpus.u16")
    tokenize(replace(CONFIG, shard="1/3"))
    with pytest.raises(UsageError, match="has parts of 2 and 3"):
        TokenFile.open("corpus.u16")


def test_shares_take_the_engine_of_those_that_are_there(here: Path):
    pytest.importorskip("gigatoken")
    put(TEXTS)
    tokenize(replace(CONFIG, shard="1/2"))
    tokenize(replace(CONFIG, shard="2/2", engine="auto"))
    assert json.loads(Path("corpus.2-of-2.u16.json").read_text())["engine"]["name"] == "tokenizers"


# --dry-run


def test_a_dry_run_says_about_how_much_would_be_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    put([LINES] * 20)
    config = replace(CONFIG, document="line", dry_run=True)
    tokenize(config)
    said = capsys.readouterr().out
    assert left() == [] and "20 inputs of " in said and "engine tokenizers" in said
    tokenize(replace(config, dry_run=False))
    written = sum(path.stat().st_size for path in (Path("corpus.u16"), Path("corpus.u16.docs")))
    assert f"about {written / 1e3:.0f}"[:8] in said
    monkeypatch.setattr("llmtrain.corpus.probe.free_bytes", lambda folder: 1000)
    with pytest.raises(StorageFailure, match="would be written, its disk has 1,?000 bytes free|1.00 kB free"):
        tokenize(config)


@pytest.mark.parametrize("name, documents", [("a.jsonl", 400), ("b.jsonl.gz", 400), ("c.jsonl", 16_000)])
def test_a_dry_run_counts_what_it_read_ahead(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, documents: int
):
    # All of the first two, and of the third far more than the sample, is read at once.
    record = json.dumps({"text": "one of many lines that are all of one length, and a few words more of it"}) + "\n"
    data = (record * documents).encode()
    Path("text", name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    config = replace(CONFIG, dry_run=True)
    tokenize(config)
    said = re.search(r"about ([\d.,]+) (kB|MB) would be written", capsys.readouterr().out)
    assert said is not None
    expected = float(said[1]) * {"kB": 1e3, "MB": 1e6}[said[2]]
    ids = len(load(CONFIG.tokenizer).encode_batch([json.loads(record)["text"]])[0]) + 1
    assert expected == pytest.approx(documents * (2 * ids + 8), rel=0.1)
