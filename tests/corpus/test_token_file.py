import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmtrain.corpus import token_file, token_manifest
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import BLOCK_BYTES, BlockHashes, docs_path, manifest_path, write_manifest
from llmtrain.storage.errors import BadData, ConfigMismatch, InputMissing, UsageError
from tests.corpus.files import some_documents, write_documents, write_flat, write_ids


def ids_of(n: int, seed: int = 0) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(0, 512, n)
    ids[-1] = 0
    return ids


def edit_manifest(path: Path, **fields) -> None:
    """Changes the manifest as somebody would who knows how its hash is made."""
    manifest = json.loads(manifest_path(path).read_text()) | fields
    manifest = {name: value for name, value in manifest.items() if value is not ...}
    manifest["manifest_sha256"] = token_manifest._manifest_hash(manifest)
    manifest_path(path).write_text(json.dumps(manifest))


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_documents_come_back_as_they_went_in(tmp_path):
    documents = some_documents(100)
    file = TokenFile.open(write_documents(tmp_path / "a.u16", documents))
    assert (file.documents, file.eos_id, file.vocab_size) == (100, 0, 512)
    assert file.ids.dtype == np.uint16 and isinstance(file.ids, np.memmap)
    begin = 0
    for document, end in zip(documents, file.doc_ends.tolist(), strict=True):
        assert np.array_equal(file.ids[begin : end - 1], document) and file.ids[end - 1] == 0
        begin = end
    assert begin == file.tokens == file.ids.size


def test_windows_share_a_border_token_and_cover_the_file(tmp_path):
    for tokens, windows in ((8, 0), (9, 1), (16, 1), (17, 2), (1001, 125)):
        file = TokenFile.open(write_ids(tmp_path / "a.u16", np.arange(tokens)), 2000)
        assert file.windows(8) == windows
        for i in range(windows):
            assert file.window(i, 8).tolist() == list(range(8 * i, 8 * i + 9))
        with pytest.raises(IndexError):
            file.window(windows, 8)


def test_gather_returns_the_windows_asked_for_and_where_documents_begin(tmp_path):
    documents = some_documents(400, mean=15)
    with_index = TokenFile.open(write_documents(tmp_path / "a.u16", documents))
    without = TokenFile.open(write_documents(tmp_path / "b.u16", documents, index=False))
    assert with_index.doc_ends is not None and without.doc_ends is None and without.has_borders
    windows = np.random.default_rng(1).integers(0, with_index.windows(64), 50)
    ids = with_index.gather(windows, 64)
    assert ids.tolist() == [with_index.window(i, 64).tolist() for i in windows]
    expected = [(r, c + 1) for r in range(50) for c in range(64) if ids[r, c] == 0]
    for file in (with_index, without):
        rows, columns = file.borders(windows, ids)
        assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == expected


def test_a_flat_file_knows_no_borders(tmp_path):
    file = TokenFile.open(write_ids(tmp_path / "a.u16", ids_of(100)), 512)
    assert (file.manifest, file.eos_id, file.doc_ends, file.documents, file.has_borders) == (None, None, None, 0, False)
    assert [len(part) for part in file.borders(np.arange(3), file.gather(np.arange(3), 8))] == [0, 0]


def test_an_index_without_a_manifest_is_not_trusted(tmp_path):
    path = write_documents(tmp_path / "a.u16", some_documents(10))
    manifest_path(path).unlink()
    assert TokenFile.open(path, 512).doc_ends is None


@pytest.mark.parametrize(
    ("content", "error", "line"),
    [
        (b"", BadData, "a.u16: is empty"),
        (b"\x01\x00\x02", BadData, "a.u16: its length of 3 bytes is odd"),
        (None, InputMissing, "a.u16: no such file: check the path, or make it with `llmtrain tokenize-corpus`"),
    ],
)
def test_what_is_no_token_file_is_refused(tmp_path, content, error, line):
    path = tmp_path / "a.u16"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=line):
        TokenFile.open(path, 512)


@pytest.mark.parametrize("text", ["import os\n" * 60, '{"text": "ein Märchen, häufig"}\n' * 41])
def test_text_is_told_from_ids(tmp_path, text):
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(BadData, match="a.txt: is text, not ids: make a token file of it with `llmtrain tokenize-corp"):
        TokenFile.open(path, 512)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputMissing, match="is a folder"):
        TokenFile.open(tmp_path, 512)


def test_without_a_manifest_the_vocabulary_must_be_said(tmp_path):
    path = write_ids(tmp_path / "a.u16", ids_of(100))
    with pytest.raises(UsageError, match=r"a.u16: has no manifest \(a.u16.json\): say its --vocab-size"):
        TokenFile.open(path)
    with pytest.raises(UsageError, match="--vocab-size 0"):
        TokenFile.open(path, 0)


def test_an_id_beyond_the_vocabulary_is_named_with_its_position(tmp_path):
    ids = ids_of(1000)
    ids[777] = 600
    file = TokenFile.open(write_ids(tmp_path / "a.u16", ids), 512)
    assert file.gather(np.array([0, 11, 13]), 64).shape == (3, 65)
    with pytest.raises(
        BadData, match=r"a.u16: id 600 at token 777 is beyond the vocabulary of 512: check the model's --vocab-size"
    ):
        file.gather(np.array([3, 12]), 64)


def test_a_damaged_id_is_met_although_there_is_a_manifest(tmp_path):
    path = write_flat(tmp_path / "a.u16", ids_of(1000))
    with open(path, "r+b") as file:
        file.seek(2 * 100)
        file.write(b"\xff\xff")
    with pytest.raises(BadData, match="id 65535 at token 100"):
        TokenFile.open(path).gather(np.array([1]), 64)


@pytest.mark.parametrize("change", [-2, 2, 4096])
def test_a_manifest_of_another_length_is_refused(tmp_path, change):
    path = write_flat(tmp_path / "a.u16", ids_of(10_000))
    os.truncate(path, 20_000 + change)
    with pytest.raises(BadData, match=r"a.u16: holds .* tokens, its manifest says 10,000"):
        TokenFile.open(path)


def test_a_file_truncated_while_in_use_is_an_error_and_no_sigbus(tmp_path):
    path = write_flat(tmp_path / "a.u16", ids_of(100_000))
    file = TokenFile.open(path)
    os.truncate(path, 4096)
    with pytest.raises(BadData, match="a.u16: was truncated to 4,096 bytes while in use"):
        file.gather(np.array([40]), 1024)

    path = write_flat(tmp_path / "b.u16", np.tile([1, 0], 50_000))
    file = TokenFile.open(path)
    os.truncate(docs_path(path), 4096)
    with pytest.raises(BadData, match="b.u16.docs: was truncated to 4,096 bytes while in use"):
        list(file.ends_of_documents())


def test_a_vocabulary_too_small_for_the_file_does_not_fit(tmp_path):
    path = write_flat(tmp_path / "a.u16", np.array([5, 300, 0]))
    with pytest.raises(ConfigMismatch, match="holds id 300, the model's vocabulary is 300"):
        TokenFile.open(path, 300)
    assert TokenFile.open(path, 301).vocab_size == 301
    assert TokenFile.open(path, 50_000).vocab_size == 512  # an id beyond the tokenizer's is damage


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"format": 2}, "has format 2, this llmtrain reads format 1"),
        ({"format": ...}, "is not the manifest of a token file"),
        ({"dtype": "uint64"}, "dtype is 'uint64'"),
        ({"tokens": "many"}, "tokens is 'many', not a number"),
        ({"tokens": True}, "tokens is True"),
        ({"documents": -1}, "documents is -1"),
        ({"vocab_size": 70_000}, "vocab_size is 70000"),
        ({"vocab_size": 100}, "max_id 511 is beyond its vocab_size 100"),
        ({"eos_id": 512}, "eos_id 512 is beyond"),
        ({"eos_id": None}, "eos_id is None"),
        ({"tokenizer": None}, "tokenizer is None"),
        ({"tokenizer": {"file": "t.json"}}, "the tokenizer's sha256 is missing"),
        ({"sha256": []}, "sha256 does not hold one hash for each of its 1 blocks"),
        ({"sha256": ...}, "sha256 does not hold"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(tmp_path, fields, line):
    path = write_flat(tmp_path / "a.u16", np.arange(511, -1, -1))
    edit_manifest(path, **fields)
    with pytest.raises(BadData, match=r"a.u16.json: " + line):
        TokenFile.open(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "nonsense", "\0"])
def test_a_torn_manifest_is_refused(tmp_path, text):
    path = write_flat(tmp_path / "a.u16", ids_of(100))
    manifest_path(path).write_text(text)
    with pytest.raises(BadData, match="a.u16.json"):
        TokenFile.open(path)


def test_an_altered_manifest_is_refused(tmp_path):
    path = write_flat(tmp_path / "a.u16", ids_of(100))
    text = manifest_path(path).read_text()
    manifest_path(path).write_text(text.replace("0" * 64, "0" * 63 + "1"))
    with pytest.raises(BadData, match="was altered after it was written"):
        TokenFile.open(path)


def test_equal_arguments_give_equal_manifests(tmp_path):
    one, two = (write_flat(tmp_path / name, ids_of(100)) for name in ("a.u16", "b.u16"))
    assert manifest_path(one).read_bytes() == manifest_path(two).read_bytes()


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    path = write_documents(tmp_path / "a.u16", some_documents(10))
    ends = docs_path(path).read_bytes()
    docs_path(path).write_bytes(ends[:-8])
    with pytest.raises(BadData, match=r"a.u16.docs: its length is 72 bytes, 10 documents take 80"):
        TokenFile.open(path)
    docs_path(path).write_bytes(ends[8:] + ends[:8])
    with pytest.raises(BadData, match=r"a.u16.docs: its last document ends at"):
        TokenFile.open(path)


def test_block_hashes_do_not_depend_on_how_the_bytes_come(monkeypatch):
    for module in (token_file, token_manifest):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    data = np.random.default_rng(0).integers(0, 256, 4500).astype(np.uint8).tobytes()
    expected = None
    for size in (1, 7, 999, 1000, 1001, 4500):
        hashes = BlockHashes()
        for begin in range(0, len(data), size):
            hashes.update(data[begin : begin + size])
        expected = expected or hashes.hexdigests()
        assert hashes.hexdigests() == expected and len(expected) == 5
    assert BlockHashes().hexdigests() == []


def test_verify_finds_a_sound_file_sound_and_names_every_damage(tmp_path, monkeypatch):
    for module in (token_file, token_manifest):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1024)
    path = write_documents(tmp_path / "a.u16", some_documents(100))
    size = path.stat().st_size
    assert sum(TokenFile.open(path).verify()) == size and size > 4 * 1024

    for offset in (0, 1023, 1024, size - 2):
        flip(path, offset)
        block = offset // 1024 * 1024
        with pytest.raises(BadData, match=rf"a.u16: bytes {block:,} to {min(block + 1024, size):,} are damaged"):
            list(TokenFile.open(path, 65536).verify())
        flip(path, offset)

    flip(docs_path(path), 8 * 50)
    with pytest.raises(BadData, match=r"a.u16.docs: is damaged"):
        list(TokenFile.open(path).verify())
    flip(docs_path(path), 8 * 50)

    list(TokenFile.open(path).verify())
    edit_manifest(path, max_id=510 if TokenFile.open(path).manifest["max_id"] == 511 else 511)
    with pytest.raises(BadData, match=r"a.u16.json: max_id is"):
        list(TokenFile.open(path).verify())


def test_verify_counts_documents_where_there_is_no_index(tmp_path):
    path = write_documents(tmp_path / "a.u16", some_documents(100), index=False)
    list(TokenFile.open(path).verify())
    edit_manifest(path, documents=99)
    with pytest.raises(BadData, match=r"documents is 99, the file has 100"):
        list(TokenFile.open(path).verify())


def test_without_a_manifest_there_is_nothing_to_verify(tmp_path):
    with pytest.raises(InputMissing, match="has no manifest"):
        list(TokenFile.open(write_ids(tmp_path / "a.u16", [1, 2]), 512).verify())


OPEN_HUGE = """
import resource, sys, time
import numpy as np, torch
from llmtrain.corpus.batch_stream import BatchStream
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile

def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024

def first_batch(path, vocab_size):
    order = SampleOrder([Source("huge", TokenFile.open(path, vocab_size), 1.0)], 1024, 0)
    with BatchStream(order, start=0, stop=10**7, sequences_per_step=64, batch_size=8, device="cpu") as stream:
        return next(stream)

first_batch(sys.argv[1], 512)
for path in sys.argv[2:]:
    before, began = anonymous(), time.process_time()  # what it takes, whatever else the machine is doing
    batch = first_batch(path, 512 if path.endswith("flat.u16") else None)
    print(anonymous() - before, time.process_time() - began, int(batch.ids.sum()))
"""


def huge(path: Path, documents: int | None) -> Path:
    """100 GB of ids 0; with a manifest unless `documents` is None, and with an index where there are any."""
    path.touch()
    os.truncate(path, 100_000_000_000)
    tokens = 50_000_000_000
    if documents:
        # Sparse up to its last entry: 400 MB that must not be read, let alone converted.
        with open(docs_path(path), "wb") as file:
            file.truncate(8 * documents)
            file.seek(-8, os.SEEK_END)
            file.write(tokens.to_bytes(8, "little"))
    if documents is not None:
        write_manifest(
            path,
            tokens=tokens,
            documents=documents,
            max_id=0,
            vocab_size=512,
            eos_id=1,
            tokenizer={"file": "tokenizer.json", "sha256": "0" * 64},
            engine={"name": "tokenizers", "version": "1"},
            sha256=["0" * 64] * (-(-tokens * 2 // BLOCK_BYTES)),
            inputs=[],
        )
    return path


def test_100_gb_open_at_once(tmp_path):
    small = write_ids(tmp_path / "small.u16", np.ones(20_000))
    forms = {"flat": None, "manifest": 0, "index": 50_000_000}
    paths = [huge(tmp_path / f"{form}.u16", documents) for form, documents in forms.items()]
    done = subprocess.run([sys.executable, "-c", OPEN_HUGE, small, *paths], capture_output=True, text=True, check=True)
    found = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == len(forms)
    for megabytes, seconds, total in found:
        assert (total, megabytes < 50, seconds < 1) == (0, True, True), found


@pytest.mark.parametrize("which", ["", ".json", ".docs"])
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting_for_a_writer(which: str, tmp_path: Path):
    path = write_documents(tmp_path / "c.u16", some_documents(5))
    Path(f"{path}{which}").unlink()
    os.mkfifo(f"{path}{which}")
    with pytest.raises(BadData, match="pipe"):
        TokenFile.open(path)


@pytest.mark.parametrize(
    "inputs", [3, [3], [{}], [{"path": "a", "bytes": "many", "documents": 1, "tokens": 1, "skipped": {}}],
               [{"path": "a", "bytes": 1, "documents": 1, "tokens": 1, "skipped": {"empty": "some"}}]],
)  # fmt: skip
def test_a_manifest_whose_inputs_are_something_else_is_refused(inputs: object, tmp_path: Path):
    path = write_documents(tmp_path / "c.u16", some_documents(5))
    manifest = json.loads(manifest_path(path).read_text())
    del manifest["manifest_sha256"]
    manifest_path(path).write_text(json.dumps(manifest | {"inputs": inputs}))
    with pytest.raises(BadData, match="inputs"):
        TokenFile.open(path)
