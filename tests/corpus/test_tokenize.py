"""Text files into token files: what comes back, what does not depend on how it was made, and what a failure leaves."""

import gzip
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from llmtrain.corpus import tokenize as work
from llmtrain.corpus import writing
from llmtrain.corpus.batches import assemble
from llmtrain.corpus.census import take_census
from llmtrain.corpus.config import TokenizeConfig, TokenizerConfig
from llmtrain.corpus.documents import falls_within
from llmtrain.corpus.engine import TOKENIZERS, open_engine
from llmtrain.corpus.order import SampleOrder, Source, parse_sources
from llmtrain.corpus.packing import open_or_build
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import held_out_path
from llmtrain.corpus.tokenize import tokenize
from llmtrain.corpus.tokenizer import EOS, Tokenizer
from llmtrain.corpus.tokenizer_training import train_tokenizer
from llmtrain.corpus.workers import encode_block
from llmtrain.storage.errors import BadData, CannotCreate, InputMissing, StorageFailure, UsageError
from tests.corpus.forms import STORED, json_lines, store, write_parquet
from tests.corpus.test_workers import no_worker_is_left
from tests.corpus.texts import CONFIG, TEXTS, left, output_bytes, put, read


def test_files_come_back_as_documents_in_order(here: Path, capsys: pytest.CaptureFixture[str]):
    put(TEXTS)
    tokenize(CONFIG)
    assert read() == TEXTS
    assert left() == ["corpus.u16", "corpus.u16.docs", "corpus.u16.json"]
    lines = capsys.readouterr().out.splitlines()
    manifest = json.loads(Path("corpus.u16.json").read_text())
    assert [f"{one['path']}: {one['tokens']:,} tokens, 1 document" for one in manifest["inputs"]] == lines[:5]
    assert lines[5] == f"corpus.u16: {manifest['tokens']:,} tokens, 5 documents"
    assert lines[6].startswith("in all: 5 files, ")
    assert [one["bytes"] for one in manifest["inputs"]] == [len(text.encode()) for text in TEXTS]
    assert manifest["engine"]["name"] == "tokenizers" and manifest["vocab_size"] == 500


def test_of_very_many_files_only_the_damaged_ones_are_printed(here: Path, capsys: pytest.CaptureFixture[str]):
    put(["a b c"] * 7 + [""] + [b"\xff"] + ["a b c"] * 100)
    tokenize(replace(CONFIG, on_bad="skip"))
    damaged, output, in_all, hint = capsys.readouterr().out.splitlines()
    assert damaged.startswith("text/008.txt: 0 tokens") and "invalid_utf8 left out" in damaged
    assert output.startswith("corpus.u16: ") and in_all.startswith("in all: 109 files, ")
    assert hint == "the count of each file is in corpus.u16.json"
    assert len(json.loads(Path("corpus.u16.json").read_text())["inputs"]) == 109


ODD = st.sampled_from([EOS, "x" * 300, "\ufeff", "a b\n" * 50])
DOCUMENTS = st.lists(st.one_of(st.text(max_size=40), ODD), max_size=12)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=DOCUMENTS, form=st.sampled_from(["file", "line", "%%"]), block_bytes=st.sampled_from([1, 60, 1 << 20]))
def test_any_documents_come_back_whatever_the_workers_and_blocks(
    here: Path, documents: list[str], form: str, block_bytes: int
):
    for path in Path("text").iterdir():
        path.unlink()
    if form == "file":
        put(["first", *documents])
        # One byte order mark at the beginning of a file is no text.
        documents = [one.removeprefix("\ufeff") for one in documents]
    elif form == "line":
        documents = [one.replace("\n", " ").replace("\r", " ") for one in documents]
        each = ["first", *documents]
        for suffix in STORED:
            store(Path("text/lines"), "".join(one + "\n" for one in each).encode(), suffix, [5, 50])
            store(Path("text/objects.jsonl"), json_lines(each), suffix, [5, 50])
        write_parquet(Path("text/rows.parquet"), each)
        documents = documents + each * 6
    else:
        documents = [one.replace("%", "") + "\n" for one in documents]
        put(["first\n%%\n" + "%%\n".join(documents)])
    first = "first\n" if form == "%%" else "first"
    made = []
    for workers in (1, 2):
        tokenize(replace(CONFIG, document=form, workers=workers), block_bytes=block_bytes)
        made.append(output_bytes())
        assert read() == [first, *(one for one in documents if one)]
    assert made[0] == made[1]


@settings(deadline=None)
@given(documents=st.lists(st.text(max_size=30), max_size=8))
def test_a_block_says_of_each_document_what_became_of_it(trained: bytes, documents: list[str]):
    engine = open_engine(Tokenizer(trained, "t"), TOKENIZERS)
    encoded = encode_block(engine, [one.encode() for one in documents] + [b"\xff"], 0.5)
    assert [int(length > 0) for length in encoded.lengths] == [int(one != "") for one in documents] + [0]
    assert encoded.left_out == [(i, "empty", 0) for i, one in enumerate(documents) if not one] + [
        (len(documents), "invalid_utf8", 0)
    ]
    assert encoded.held_out.tolist() == [falls_within(one, 0.5) for one in [o.encode() for o in documents] + [b"\xff"]]


def test_output_is_byte_equal_for_every_number_of_workers_and_block_size(here: Path):
    put([*TEXTS, "", b"\xef\xbb\xbfmarked", *(f"small {i}" for i in range(50)), b"bad \xff", TEXTS[0] * 5])
    made = []
    for workers, block_bytes in ((1, 1 << 20), (2, 1 << 14), (3, 1000), (2, 1)):
        config = replace(CONFIG, holdout=0.3, on_bad="skip", workers=workers)
        tokenize(config, block_bytes=block_bytes)
        assert left() == sorted(f"corpus{val}.u16{end}" for val in ("", ".val") for end in ("", ".docs", ".json"))
        made.append(output_bytes())
    assert all(one == made[0] for one in made)


def test_held_out_documents_are_chosen_by_content_and_lie_in_their_own_file(here: Path):
    documents = [f"document {number}" for number in range(300)] * 2
    Path("text/all.txt").write_text("\n".join(documents))
    tokenize(replace(CONFIG, document="line", holdout=0.1))
    trained_on, held_out = read(), read(Path("corpus.val.u16"))
    assert held_out == [one for one in documents if falls_within(one.encode(), 0.1)]
    assert trained_on == [one for one in documents if not falls_within(one.encode(), 0.1)]
    assert not set(trained_on) & set(held_out) and 20 < len(held_out) < 120


def test_no_document_held_out_removes_what_an_earlier_run_held_out(here: Path, capsys: pytest.CaptureFixture[str]):
    put(TEXTS)
    for end in ("", ".docs", ".json"):
        Path(f"corpus.val.u16{end}").write_text("of an earlier run")
    tokenize(replace(CONFIG, holdout=1e-9))
    assert left() == ["corpus.u16", "corpus.u16.docs", "corpus.u16.json"]
    said = capsys.readouterr().out
    assert "corpus.val.u16: not written, none of " in said and "raise --holdout" in said and "--document" in said


def test_of_a_single_document_it_is_said_what_makes_many_and_not_to_hold_out_more(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    put(["only\nthis"])
    tokenize(replace(CONFIG, holdout=1e-9))
    said = capsys.readouterr().out
    assert "none of 1 document fell" in said and "--document line" in said and "raise --holdout" not in said
    with pytest.raises(BadData, match="its only document fell .*--document line"):
        tokenize(replace(CONFIG, holdout=0.999999))
    Path("one.txt").write_text("a line")
    with pytest.raises(BadData, match="add documents, or give --holdout 0"):
        tokenize(replace(CONFIG, inputs=("one.txt",), document="line", holdout=0.999999))


def test_holding_out_nothing_leaves_another_files_names_alone(here: Path):
    put(TEXTS)
    Path("corpus.val.u16").write_text("mine")
    tokenize(CONFIG)
    assert Path("corpus.val.u16").read_text() == "mine"


def test_bad_utf8_stops_and_says_where(here: Path):
    put(["good", b"\xef\xbb\xbfab\ncd\xffe\n"])
    with pytest.raises(BadData, match=r"text/001.txt: not UTF-8 at byte 8: .*--on-bad skip"):
        tokenize(CONFIG)
    with pytest.raises(BadData, match=r"text/001.txt: not UTF-8 at byte 8"):
        tokenize(replace(CONFIG, document="line"))
    assert left() == []


def test_bad_utf8_can_be_left_out_and_is_counted_by_reason(here: Path, capsys: pytest.CaptureFixture[str]):
    put(["good", b"one\n\ntwo \xc3\nthree\n\xed\xa0\x80\n\n", b"\xff\xfea\x00"])
    tokenize(replace(CONFIG, document="line", on_bad="skip"))
    assert read() == ["good", "one", "three"]
    skipped = [one["skipped"] for one in json.loads(Path("corpus.u16.json").read_text())["inputs"]]
    assert skipped == [{}, {"empty": 2, "invalid_utf8": 2}, {"invalid_utf8": 1}]
    out = capsys.readouterr().out
    assert "2 invalid_utf8 left out (the first at byte 9)" in out
    assert "2 empty left out, 3 invalid_utf8 left out" in out.splitlines()[-1]


def test_every_form_goes_into_one_token_file(here: Path):
    put(["plain"])
    Path("text/a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n') + gzip.compress(b'{"text": "two"}\n'))
    Path("text/b.txt.zst").write_bytes(zstandard.compress(b"three"))
    parquet.write_table(pyarrow.table({"text": ["four", "five"]}), "text/c.parquet")
    tokenize(CONFIG)
    assert read() == ["plain", "one", "two", "three", "four", "five"]
    inputs = json.loads(Path("corpus.u16.json").read_text())["inputs"]
    assert [one["bytes"] for one in inputs] == [5, 6, 5, 8] and not any("skipped_at" in one for one in inputs)


def test_damage_is_left_out_and_the_manifest_says_where(here: Path, capsys: pytest.CaptureFixture[str]):
    lines = b'{"text": "%d"}\n{"text": ""}\n{\n{"id": %d}\n'
    Path("text/a.jsonl").write_bytes(b"".join(lines % (number, number) for number in range(7)))
    whole = gzip.compress(b'{"text": "x"}\n' * 3)
    Path("text/b.jsonl.gz").write_bytes(whole + gzip.compress(b'{"text": "x"}\n')[:-3])
    Path("text/c.jsonl.gz").write_bytes(b"no gzip")
    made = []
    for workers in (1, 2):
        tokenize(replace(CONFIG, on_bad="skip", workers=workers), block_bytes=30)
        made.append(output_bytes())
    assert made[0] == made[1] and read() == [*map(str, range(7)), "x", "x", "x", "x"]
    first, torn, wrong = json.loads(Path("corpus.u16.json").read_text())["inputs"]
    assert first["skipped"] == {"bad_json": 7, "empty": 7, "missing_field": 7}
    assert first["skipped_at"]["bad_json"] == ["line 3", "line 7", "line 11", "line 15", "line 19"]
    assert first["skipped_at"]["empty"][0] == "line 2" and first["skipped_at"]["missing_field"][0] == "line 4"
    assert torn["skipped"] == {"truncated": 1} and torn["skipped_at"] == {"truncated": ["line 5"]}
    assert wrong["skipped"] == {"not_gzip": 1}
    assert "1 truncated left out (the first at line 5)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text"', r"a.jsonl: not JSON \(.*\) at line 2: correct it, or leave such docu"),
        ("a.jsonl", b'{"body": "a"}', r"no text in field 'text' \(there are: body\) at line 1: name .*--text-field"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0)[:-1], r"gz: its gzip data end too early at byte 0: get .* skip"),
        ("a.gz", b"text", r"a.gz: its name says gzip and its content does not at byte 0: get the file again"),
        ("a.parquet", b"PAR1 PAR1", r"a.parquet: its Parquet data are damaged \(.*\) at row 1: get the file again"),
    ],
)
def test_damage_stops_the_command_unless_it_may_be_left_out(here: Path, name: str, data: bytes, line: str):
    Path(f"text/{name}").write_bytes(data)
    with pytest.raises(BadData, match=line):
        tokenize(CONFIG)
    assert left() == []


@pytest.mark.parametrize("texts", [[], ["", b"\xef\xbb\xbf"]])
def test_a_corpus_without_text_is_bad_data(here: Path, texts: list[str]):
    put(texts)
    with pytest.raises(BadData, match="no files in it|no document that holds text in 2 files"):
        tokenize(CONFIG)
    assert left() == []


def test_a_corpus_that_is_all_held_out_is_bad_data(here: Path):
    put(["all", "these"])
    with pytest.raises(BadData, match=r"all documents \(2\) .*lower --holdout"):
        tokenize(replace(CONFIG, holdout=0.999999))
    assert left() == []


def with_a_last_token(trained: bytes, number: int) -> None:
    spec = json.loads(trained)
    spec["added_tokens"].append(spec["added_tokens"][0] | {"content": "<|last|>", "id": number})
    Path("tokenizer.json").write_text(json.dumps(spec))


def test_a_vocabulary_beyond_all_bounds_is_refused_before_anything_is_written(here: Path, trained: bytes):
    put(TEXTS)
    with_a_last_token(trained, 1 << 20)
    with pytest.raises(BadData, match="1048577 does not fit"):
        tokenize(replace(CONFIG, inputs=("nothing",), output=Path("none/corpus.u16")))


@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_ids_of_a_large_vocabulary_take_four_bytes_and_are_the_same_ids(here: Path, trained: bytes, engine: str):
    """Tokenized, appended to and held out; packed, counted, and mixed with a file of two bytes."""
    put(TEXTS)
    Path("more").mkdir()
    put(TEXTS[:2], "more")
    config = replace(CONFIG, holdout=0.4, engine=engine)
    for inputs, append in ((("text",), False), (("more",), True)):
        tokenize(replace(config, inputs=inputs, append=append))
    with_a_last_token(trained, 69_999)
    with pytest.raises(UsageError, match="70,000 take four bytes: name it with --output corpus.u32"):
        tokenize(config)
    for inputs, append in ((("text",), False), (("more",), True)):
        tokenize(replace(config, inputs=inputs, append=append, output=Path("corpus.u32")))
    for two, four in (("corpus.u16", "corpus.u32"), ("corpus.val.u16", "corpus.val.u32")):
        narrow, wide = TokenFile.open(two), TokenFile.open(four)
        assert (wide.id_type.itemsize, wide.tokens, wide.documents) == (4, narrow.tokens, narrow.documents)
        assert wide.ids[:].tolist() == narrow.ids[:].tolist() and sum(wide.verify()) == 4 * wide.tokens
        assert wide.vocab_size == 70_000 and parse_sources([four])[0].name == parse_sources([two])[0].name
        packed = [open_or_build(file, 64) for file in (narrow, wide)]
        assert packed[0].windows == packed[1].windows
        orders = [SampleOrder([Source(two, cut.file, 1.0, cut=cut)], 64, 0) for cut in packed]
        orders += [SampleOrder([Source("a", narrow, 1.0), Source("b", wide, 1.0)], 64, 0)]
        one, other, mixed = (assemble(order, np.arange(4)) for order in orders)
        assert one.ids.tolist() == other.ids.tolist() and one.targets.tolist() == other.targets.tolist()
        plain = assemble(SampleOrder([Source("a", narrow, 1.0)], 64, 0), np.arange(packed[0].windows)).ids
        assert mixed.ids.shape == (4, 64) and set(mixed.ids.flatten().tolist()) <= set(plain.flatten().tolist()) | {0}
        assert take_census(wide).ids[: 1 << 16].tolist() == take_census(narrow).ids.tolist()


def test_a_missing_input_is_missing(here: Path):
    with pytest.raises(InputMissing, match="none"):
        tokenize(replace(CONFIG, inputs=("none",)))
    assert left() == []


@pytest.mark.parametrize("taken", ["corpus.u16", "corpus.u16.docs", "corpus.u16.json", "corpus.val.u16.json"])
def test_an_output_whose_name_is_a_folder_is_refused_at_once(here: Path, taken: str):
    put([b"\xff"])  # would be bad data, were it read
    Path(taken).mkdir()
    with pytest.raises(CannotCreate, match=taken):
        tokenize(replace(CONFIG, holdout=0.5))
    assert left() == [taken]


def test_outputs_in_the_input_folder_are_not_input(here: Path):
    put(TEXTS)
    config = replace(CONFIG, output=Path("text/corpus.u16"), holdout=0.4)
    tokenize(config)
    before = [path.read_bytes() for path in sorted(Path("text").glob("corpus*"))]
    tokenize(config)
    assert [path.read_bytes() for path in sorted(Path("text").glob("corpus*"))] == before and len(before) == 6


def test_a_failed_run_leaves_the_output_of_the_last_one(here: Path):
    put(TEXTS)
    tokenize(CONFIG)
    before = output_bytes()
    put(["good", b"\xff"])
    with pytest.raises(BadData):
        tokenize(CONFIG)
    assert output_bytes() == before


def test_a_run_that_fails_while_it_publishes_is_finished_by_the_next(here: Path, monkeypatch: pytest.MonkeyPatch):
    put(TEXTS)
    config = replace(CONFIG, holdout=0.4)
    tokenize(config)
    expected = output_bytes()
    written: list[Path] = []
    real = writing.write_bytes

    def full_at_the_second(path: Path, data: bytes) -> None:
        if written:
            raise StorageFailure("the disk is full")
        written.append(path)
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_bytes", full_at_the_second)
        with pytest.raises(StorageFailure):
            tokenize(config)
    assert written == [Path("corpus.val.u16.json")] and not Path("corpus.u16.json").exists()
    monkeypatch.setattr(work, "encode_blocks", None)  # nothing is encoded again
    tokenize(config)
    assert output_bytes() == expected and len(left()) == 6


def test_it_can_be_called_from_another_thread(here: Path):
    put(TEXTS)
    thread = threading.Thread(target=tokenize, args=(CONFIG,))
    thread.start()
    thread.join()
    assert read() == TEXTS


def test_no_worker_is_left_after_a_run(here: Path):
    put(TEXTS)
    tokenize(replace(CONFIG, workers=2), block_bytes=1)
    assert no_worker_is_left()


def test_names_of_the_held_out_file():
    for name, expected in (("data/c.u16", "data/c.val.u16"), ("c", "c.val"), ("a.b.bin", "a.b.val.bin")):
        assert held_out_path(Path(name)) == Path(expected)


def test_names_that_are_not_utf8_are_counted_and_recorded(here: Path, capsys: pytest.CaptureFixture[str]):
    (Path("text") / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    tokenize(CONFIG)
    assert read() == ["text"]
    assert "text/caf\ufffd.txt: " in capsys.readouterr().out


@pytest.mark.parametrize("output", ["tokenizer.json", "tokenizer", "a.txt", "links/../a.txt", "link"])
def test_an_output_that_would_replace_what_is_read_is_refused(output: str, here: Path):
    Path("a.txt").write_text("a text")
    Path("link").symlink_to("a.txt")
    Path("links").mkdir()
    before = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
    with pytest.raises(UsageError, match="would be written"):
        tokenize(replace(CONFIG, inputs=("a.txt", "text"), output=Path(output)))
    if output != "tokenizer":
        config = TokenizerConfig(inputs=("tokenizer.json", "a.txt"), output=Path(output), vocab_size=300)
        with pytest.raises(UsageError, match="would be written"):
            train_tokenizer(config)
    assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == before


def test_an_output_whose_name_is_too_long_is_one_error(here: Path):
    put(["text"])
    with pytest.raises(CannotCreate, match="name is too long"):
        tokenize(replace(CONFIG, output=Path("y" * 300)))


def test_an_output_without_a_name_is_refused():
    for config in (TokenizeConfig, TokenizerConfig):
        with pytest.raises(ValueError, match="names no file"):
            config(output=Path(""))
