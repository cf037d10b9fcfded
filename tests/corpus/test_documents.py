"""Which files a corpus is made of, and which documents are in them."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmtrain.corpus.documents import Document, blocks, falls_within
from llmtrain.corpus.inputs import find_inputs
from llmtrain.corpus.reading import Reading, read_documents
from llmtrain.corpus.streams import BOM, MAGIC
from llmtrain.storage.errors import InputMissing


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """b.txt, a.txt, sub/c.txt, sub/deep/d.py, a hidden file, a hidden folder, links and a pipe."""
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.py", ".hidden", "sub/.git/config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "sub" / "again.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "sub" / "broken.txt").symlink_to(tmp_path / "none")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "sub" / "itself").symlink_to("itself")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*inputs: str, exclude: Sequence[Path] = ()) -> list[str]:
    return [one.name for one in find_inputs(inputs, exclude)]


def test_a_folder_means_every_plain_file_below_it_sorted(tree: Path):
    assert found("sub") == ["sub/again.txt", "sub/c.txt", "sub/deep/d.py"]


def test_a_file_is_taken_once_however_often_it_is_named(tree: Path):
    assert found("b.txt", ".", "./b.txt", str(tree / "b.txt")) == ["b.txt", "a.txt", "sub/c.txt", "sub/deep/d.py"]


def test_inputs_keep_their_order(tree: Path):
    assert found("sub/c.txt", "a.txt") == ["sub/c.txt", "a.txt"]


def test_globs_cross_folders_with_two_stars(tree: Path):
    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("**/*.py") == ["sub/deep/d.py"]
    assert found("s*") == ["sub/again.txt", "sub/c.txt", "sub/deep/d.py"]


def test_a_file_whose_name_is_a_pattern_is_that_file(tree: Path):
    (tree / "[ab].txt").write_text("brackets")
    assert found("[ab].txt") == ["[ab].txt"]


def test_a_hidden_file_is_input_only_when_named(tree: Path):
    assert found(".hidden") == [".hidden"]


def test_what_is_excluded_is_no_input(tree: Path):
    assert found("sub", exclude=[tree / "sub/c.txt"]) == ["sub/again.txt", "sub/deep/d.py"]


@pytest.mark.parametrize("missing", ["none.txt", "none*.txt", "a.txt/x"])
def test_an_input_that_names_nothing_is_missing(tree: Path, missing: str):
    with pytest.raises(InputMissing, match="none|a.txt/x"):
        find_inputs(["a.txt", missing])


def test_a_file_that_goes_away_is_missing(tree: Path):
    inputs = find_inputs(["a.txt"])
    (tree / "a.txt").unlink()
    with pytest.raises(InputMissing, match="a.txt"):
        list(read_documents(inputs, Reading()))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents") / "file"


def read(path: Path, data: bytes, document: str) -> list[Document]:
    path.write_bytes(data)
    documents = list(read_documents(find_inputs([str(path)]), Reading(document)))
    assert sum(one.size for one in documents) == (len(data) if documents else 0)
    assert documents or data in (b"", BOM)
    for one in documents:
        assert data[one.place : one.place + len(one.data)] == one.data
    return documents


@pytest.mark.parametrize(
    ("document", "data", "expected"),
    [
        ("file", b"a\r\nb\n", [b"a\r\nb\n"]),
        ("file", BOM + b"a", [b"a"]),
        ("file", b"", [b""]),
        ("file", BOM + BOM, [BOM]),
        ("line", b"", []),
        ("line", b"a\nb\r\n\nc", [b"a", b"b", b"", b"c"]),
        ("line", BOM + b"a\n" + BOM + b"b\n", [b"a", BOM + b"b"]),
        ("line", b"a\rb\x0bc\xe2\x80\xa8d\n", [b"a\rb\x0bc\xe2\x80\xa8d"]),
        ("---", b"a\nb\n---\nc\n", [b"a\nb\n", b"c\n"]),
        ("---", b"a\n---\r\n---\n --- \n----\n", [b"a\n", b"", b" --- \n----\n"]),
        ("---", BOM + b"---\na\n---", [b"", b"a\n"]),
        ("---", BOM + b"a", [b"a"]),
        ("---", b"", []),
    ],
)
def test_documents_of_a_file(tmp_path: Path, document: str, data: bytes, expected: list[bytes]):
    assert [one.data for one in read(tmp_path / "file", data, document)] == expected


@settings(deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["file", "line", "-"]))
def test_the_sizes_of_documents_add_up_to_the_file(scratch: Path, data: bytes, document: str):
    assume(not data.startswith(tuple(MAGIC.values())))
    read(scratch, data.replace(b"\x00", b"\n").replace(b"\x01", b"\n-\n"), document)


def test_a_pipe_can_be_read(tmp_path: Path):
    reader, writer = os.pipe()
    os.write(writer, BOM + b"a\nb\n")
    os.close(writer)
    assert [one.data for one in read_documents(find_inputs([f"/dev/fd/{reader}"]), Reading("line"))] == [b"a", b"b"]
    os.close(reader)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_blocks_are_whole_documents_and_only_one_document_is_longer(sizes: list[int], limit: int):
    documents = [Document(0, number, 0, size, b"x" * size) for number, size in enumerate(sizes)]
    cut = list(blocks(documents, limit))
    assert [one for block in cut for one in block] == documents
    assert all(block and (len(block) == 1 or sum(one.size for one in block) <= limit) for block in cut)


def test_the_share_is_of_the_content_and_grows_with_the_fraction():
    documents = [str(number).encode() for number in range(20_000)]
    small = {one for one in documents if falls_within(one, 0.01)}
    large = {one for one in documents if falls_within(one, 0.1)}
    assert small < large
    assert 150 < len(small) < 250 and 1800 < len(large) < 2200
    assert not any(falls_within(one, 0) for one in documents) and all(falls_within(one, 1) for one in documents)
    assert falls_within(memoryview(documents[0]), 0.5) == falls_within(documents[0], 0.5)
