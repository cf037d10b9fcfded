from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.corpus import packing
from llmtrain.corpus.batch_stream import BatchStream
from llmtrain.corpus.batches import assemble
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.packing import best_fit, build, open_or_build, open_packed, pack_path
from llmtrain.corpus.token_file import TokenFile
from llmtrain.storage.errors import BadData, InputMissing, UsageError
from tests.corpus.files import some_documents, write_documents, write_ids
from tests.corpus.test_token_file import flip


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """Documents of these lengths, EOS included, in which every token but the EOS occurs once in all."""
    ids = np.arange(1, sum(lengths) + 1)
    ends = np.cumsum([length - 1 for length in lengths])
    return np.split(ids, ends)[: len(lengths)]


def order_of(cut: packing.Packed) -> SampleOrder:
    return SampleOrder([Source("s", cut.file, 1.0, cut=cut)], cut.seq_len, 0)


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """The loads of best-fit decreasing, one item after the other."""
    loads: list[int] = []
    for length in lengths:
        fitting = [load for load in loads if load + length <= capacity]
        if fitting:
            loads.remove(max(fitting))
            loads.append(max(fitting) + length)
        else:
            loads.append(length)
    return sorted(loads)


@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
def test_groups_are_packed_as_one_after_the_other_would_be(case):
    capacity, lengths = case
    lengths = sorted(lengths, reverse=True)
    bins = best_fit(np.array(lengths, np.int64), capacity)
    loads = np.bincount(bins, lengths).astype(int).tolist() if lengths else []
    assert 0 not in loads and sorted(loads) == one_by_one(lengths, capacity)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=40),
    seq_len=st.integers(1, 24),
    index=st.booleans(),
    chunk=st.sampled_from([(1, 1), (3, 2), (1000, 1000)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_every_token_of_every_document_is_a_target_once(tmp_path_factory, lengths, seq_len, index, chunk, seed):
    lengths = [*lengths, 2]  # something to predict
    path = tmp_path_factory.mktemp("packed") / "a.u16"
    file = TokenFile.open(write_documents(path, documents_of(lengths), 4096, index))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNK_DOCUMENTS", chunk[0])
        patch.setattr(packing, "CHUNK_WINDOWS", chunk[1])
        cut = open_or_build(file, seq_len)
    order = SampleOrder([Source("s", file, 1.0, cut=cut)], seq_len, seed)
    batch = assemble(order, np.arange(cut.windows), document_mask=True)
    found: Counter[tuple[int, int]] = Counter()
    for ids, targets, starts in zip(batch.ids.tolist(), batch.targets.tolist(), batch.doc_start.tolist(), strict=True):
        for column, (one, other, start) in enumerate(zip(ids, targets, starts, strict=True)):
            assert start <= column and (start == starts[start])
            if other != -100:
                found[one, other] += 1
                assert one != 0 and (column == start or ids[column - 1] + 1 == one)  # its context is its document's
    expected: Counter[tuple[int, int]] = Counter()
    for document in documents_of(lengths):
        whole = [*document.tolist(), 0]
        expected.update(zip(whole[:-1], whole[1:], strict=True))
    assert found == expected
    text = sum(found.values()) + cut.header["pieces"]
    assert text + cut.header["padding"] == cut.windows * (seq_len + 1)
    assert cut.header["split"] == sum(length > seq_len + 1 for length in lengths)


def test_without_a_mask_only_what_follows_the_last_document_is_ignored(tmp_path):
    file = TokenFile.open(write_documents(tmp_path / "a.u16", documents_of([5, 3, 4, 9]), 4096))
    batch = assemble(order_of(open_or_build(file, 8)), np.arange(3), document_mask=False)
    rows = {tuple(ids): targets for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)}
    assert rows == {
        (10, 11, 12, 13, 14, 15, 16, 17): [11, 12, 13, 14, 15, 16, 17, 0],
        (1, 2, 3, 4, 0, 7, 8, 9): [2, 3, 4, 0, 7, 8, 9, 0],
        (5, 6, 0, 0, 0, 0, 0, 0): [6, 0, -100, -100, -100, -100, -100, -100],
    }


def test_equal_files_give_equal_bytes_with_and_without_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK_DOCUMENTS", 7)
    documents = some_documents(500, 30)
    indices = []
    for name, index in (("a", True), ("b", True), ("c", False)):
        path = write_documents(tmp_path / f"{name}.u16", documents, index=index)
        indices.append(build(TokenFile.open(path), 64).read_bytes())
    assert indices[0] == indices[1] == indices[2]
    assert not list(tmp_path.glob(".*"))


def test_a_stream_of_packed_windows_is_what_assemble_gives_and_every_window_once(tmp_path):
    file = TokenFile.open(write_documents(tmp_path / "a.u16", some_documents(900, 30)))
    order = order_of(open_or_build(file, 64))
    assert order.samples_per_epoch < 1.05 * file.tokens / 65
    with BatchStream(
        order, start=0, stop=order.samples_per_epoch, sequences_per_step=8, batch_size=8, device="cpu",
        document_mask=True,
    ) as stream:  # fmt: skip
        made = list(stream)
    expected = assemble(order, np.arange(order.samples_per_epoch), document_mask=True)
    for part in ("ids", "targets", "doc_start"):
        rows = torch.cat([getattr(batch, part)[: batch.sequences] for batch in made])
        assert torch.equal(rows, getattr(expected, part))
    assert sum(batch.pairs for batch in made) == expected.pairs


def test_an_index_is_made_once_and_anew_for_another_file(tmp_path):
    path = write_documents(tmp_path / "a.u16", some_documents(50))
    made = open_or_build(TokenFile.open(path), 32)
    before = made.path.stat()
    assert open_or_build(TokenFile.open(path), 32).header == made.header
    assert made.path.stat().st_ino == before.st_ino
    write_documents(path, some_documents(50, seed=1))
    with pytest.raises(BadData, match=r"a.u16.pack-32: was made of another a.u16"):
        open_packed(TokenFile.open(path), 32)
    assert open_or_build(TokenFile.open(path), 32).header["token_file_sha256"] != made.header["token_file_sha256"]
    with pytest.raises(InputMissing):
        open_packed(TokenFile.open(path), 33)


def test_a_damaged_index_is_made_anew_or_named(tmp_path):
    file = TokenFile.open(write_documents(tmp_path / "a.u16", some_documents(50)))
    path = build(file, 32)
    sound = path.read_bytes()
    for damage in (sound[:-8], sound + bytes(8), sound[:100], b"", b"[]" + sound[2:], sound[:50] + b"7" + sound[51:]):
        path.write_bytes(damage)
        with pytest.raises(BadData, match=r"a.u16.pack-32: "):
            open_packed(file, 32)
        assert open_or_build(file, 32).path.read_bytes() == sound
    flip(path, 4096 + 7)  # the start of a piece is far behind the file's end now
    cut = open_packed(file, 32)
    with pytest.raises(BadData, match=r"a.u16.pack-32: is damaged: remove it"):
        cut.gather(np.arange(cut.windows))
    with pytest.raises(BadData, match=r"a.u16.pack-32: is damaged: remove it"):
        cut.verify()
    path.write_bytes(sound)
    assert open_packed(file, 32).verify() > 0


def test_what_cannot_be_packed_is_one_line(tmp_path):
    flat = TokenFile.open(write_ids(tmp_path / "flat.u16", range(100)), 512)
    with pytest.raises(UsageError, match=r"flat.u16: does not say where documents end: give --eos-id"):
        open_or_build(flat, 8)
    empty = TokenFile.open(write_documents(tmp_path / "empty.u16", [np.zeros(0, int)] * 3))
    with pytest.raises(BadData, match=r"empty.u16: none of its documents has two tokens"):
        open_or_build(empty, 8)
    ids = np.concatenate([np.arange(1, 300), [0], np.arange(300, 600), [0]])
    beyond = TokenFile.open(write_ids(tmp_path / "beyond.u16", ids), 512, eos_id=0)
    cut = open_or_build(beyond, 400)
    with pytest.raises(BadData, match=r"beyond.u16: id 512 at token 512 is beyond the vocabulary of 512"):
        cut.gather(np.arange(cut.windows))


def test_the_pieces_of_a_window_say_where_it_lies(tmp_path: Path):
    file = TokenFile.open(write_documents(tmp_path / "a.u16", documents_of([5, 3, 4, 9]), 4096))
    cut = open_or_build(file, 8)
    rows, starts, lengths = cut.pieces(np.array([2, 0, 1]))
    assert (rows.tolist(), cut.path) == ([0, 0, 1, 2], pack_path(file.path, 8))
    found = cut.gather(np.array([2, 0, 1])).ids
    assert np.array_equal(found[0], [*file.ids[starts[0] : starts[0] + lengths[0]], *file.ids[starts[1] :][:4]])
    assert found[1:, 0].tolist() == file.ids[starts[2:]].tolist()
