import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.corpus.batches import assemble, held_out_batches, micro_batches
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.storage.errors import BadData, UsageError
from tests.corpus.files import counting_file, counting_order, some_documents, write_documents, write_ids

T = 8


def test_micro_batches_split_steps_and_fill_up_the_last_group():
    groups = [g.tolist() for g in micro_batches(start=10, stop=21, sequences_per_step=5, batch_size=2)]
    assert groups == [[10, 11], [12, 13], [14, -1], [15, 16], [17, 18], [19, -1], [20, -1]]


@given(start=st.integers(0, 50), length=st.integers(0, 100), per_step=st.integers(1, 30), batch_size=st.integers(1, 40))
def test_micro_batches_hold_each_sample_once_in_order_and_never_mix_steps(start, length, per_step, batch_size):
    stop = start + length
    groups = list(micro_batches(start=start, stop=stop, sequences_per_step=per_step, batch_size=batch_size))
    assert all(group.shape == (batch_size,) and group.dtype == np.int64 for group in groups)
    assert [s for group in groups for s in group.tolist() if s >= 0] == list(range(start, stop))
    assert all(len({(s - start) // per_step for s in group.tolist() if s >= 0}) == 1 for group in groups)
    full, rest = divmod(length, per_step)
    assert len(groups) == full * -(-per_step // batch_size) + -(-rest // batch_size)


@given(st.integers(0, 20), st.integers(0, 40), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_ranks_share_the_samples_of_each_step_and_have_as_many_micro_batches(start, count, per_step, batch_size, ranks):
    whole = {"start": start, "stop": start + count, "sequences_per_step": per_step, "batch_size": batch_size}
    of_ranks = [list(micro_batches(**whole, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert len({len(groups) for groups in of_ranks}) == 1
    together = [i for groups in zip(*of_ranks, strict=True) for group in groups for i in group.tolist() if i >= 0]
    assert together == list(range(start, start + count))
    steps = -(-count // per_step)
    assert len(of_ranks[0]) <= steps * -(-per_step // (batch_size * ranks))


def test_a_batch_is_ids_and_what_follows_them(tmp_path):
    order = counting_order(tmp_path, 50, T)
    _, window = order.locate(np.arange(6))
    batch = assemble(order, np.arange(6))
    expected = window[:, None] * T + np.arange(T)
    assert batch.ids.tolist() == expected.tolist() and batch.targets.tolist() == (expected + 1).tolist()
    assert not batch.doc_start.any() and batch.sequences == 6
    assert (batch.ids.dtype, batch.targets.dtype, batch.doc_start.dtype) == (torch.int64, torch.int64, torch.int32)
    assert all(part.is_contiguous() for part in (batch.ids, batch.targets, batch.doc_start))


def test_missing_samples_are_rows_that_do_not_count(tmp_path):
    batch = assemble(counting_order(tmp_path, 50, T), np.array([-1, 3, -1]))
    assert batch.sequences == 1
    for row in (0, 2):
        assert not batch.ids[row].any() and not batch.doc_start[row].any()
        assert batch.targets[row].tolist() == [-100] * T
    assert batch.ids[1].tolist() == assemble(counting_order(tmp_path, 50, T), np.array([3])).ids[0].tolist()
    empty = assemble(counting_order(tmp_path, 50, T), np.array([-1, -1]))
    assert empty.sequences == 0 and (empty.targets == -100).all()


def plain_doc_start(ids: list[int]) -> list[int]:
    """Token by token: the column after the last EOS before it."""
    starts, begin = [], 0
    for column in range(len(ids)):
        if column and ids[column - 1] == 0:
            begin = column
        starts.append(begin)
    return starts


@pytest.mark.parametrize("mean", [1, 5, 40, 1000])
def test_documents_are_found_by_index_by_eos_and_by_going_through_the_tokens(tmp_path, mean):
    documents = some_documents(3000 // mean, mean)
    with_index = TokenFile.open(write_documents(tmp_path / "a.u16", documents))
    without = TokenFile.open(write_documents(tmp_path / "b.u16", documents, index=False))
    assert with_index.doc_ends is not None and without.doc_ends is None
    samples = np.arange(with_index.windows(32))
    for document_mask in (False, True):
        one, two = (
            assemble(SampleOrder([Source("s", file, 1.0)], 32, 0), samples, document_mask)
            for file in (with_index, without)
        )
        for part in ("ids", "targets", "doc_start"):
            assert torch.equal(getattr(one, part), getattr(two, part))
        assert one.doc_start.tolist() == [plain_doc_start(row) for row in one.ids.tolist()]
        after_eos = one.ids == 0
        assert after_eos.any()
        assert (one.targets[after_eos] == -100).all() == document_mask
        assert (one.targets[~after_eos] >= 0).all()
        columns = torch.arange(32, dtype=torch.int32)
        seen = columns - one.doc_start + 1 if document_mask else columns.expand_as(one.doc_start) + 1
        assert one.pairs == int(seen.sum())
        # Two of three layers have a window of 3.
        windowed = assemble(SampleOrder([Source("s", with_index, 1.0)], 32, 0), samples, document_mask, (3, None, 3))
        assert windowed.pairs == pytest.approx(float(2 * seen.clamp_max(3).sum() + seen.sum()) / 3)


def test_a_mixture_puts_each_row_where_its_sample_is(tmp_path):
    documents = [some_documents(200, mean, seed=mean) for mean in (5, 30)]
    files = [TokenFile.open(write_documents(tmp_path / f"{i}.u16", part)) for i, part in enumerate(documents)]
    files.append(TokenFile.open(write_ids(tmp_path / "2.u16", np.arange(1, 500)), 512))
    order = SampleOrder([Source(str(i), file, 1.0) for i, file in enumerate(files)], 16, 0)
    samples = np.array([5, -1, 900, 17, 33, 2, -1, 1001])
    batch = assemble(order, samples)
    source, window = order.locate(np.maximum(samples, 0))
    assert set(source[samples >= 0]) == {0, 1, 2}
    for row in np.flatnonzero(samples >= 0):
        expected = files[source[row]].window(window[row], 16).tolist()
        assert batch.ids[row].tolist() == expected[:-1] and batch.targets[row].tolist() == expected[1:]
        if source[row] < 2:
            assert batch.doc_start[row].tolist() == plain_doc_start(expected[:-1])
    with pytest.raises(UsageError, match=r"2.u16: does not say where documents end: give --eos-id"):
        assemble(order, samples, document_mask=True)


def test_held_out_batches_are_spread_over_the_file_in_order(tmp_path):
    file = counting_file(tmp_path / "val.u16", 100 * T + 1)

    def windows(count: int, batch_size: int) -> list[list[int]]:
        found = []
        for ids, targets, doc_start in held_out_batches(file, T, batch_size, count, "cpu"):
            assert ids.shape == targets.shape == (batch_size, T) and doc_start is None
            found.append((ids[targets[:, 0] != -100, 0] // T).tolist())
        return found

    assert windows(5, 2) == [[0, 20], [40, 60], [80]]
    assert [w for group in windows(0, 7) for w in group] == list(range(100))
    assert windows(1000, 100) == [list(range(100))]
    with pytest.raises(BadData, match=r"val.u16: holds 801 tokens"):
        next(held_out_batches(file, 801, 1, 0, "cpu"))
