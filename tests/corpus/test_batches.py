import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.corpus import batches
from llmtrain.corpus.batches import Batch, BatchStream, assemble, held_out_batches, micro_batches
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.storage.errors import BadData, UsageError
from tests.corpus.files import counting_file, some_documents, write_documents, write_ids

T = 8


def counting_order(folder: Path, windows: int, seed: int = 0) -> SampleOrder:
    """One source whose window w begins with the id w * T."""
    return SampleOrder([Source("count", counting_file(folder / "count.u16", windows * T + 1), 1.0)], T, seed)


def stream(order: SampleOrder, start: int, stop: int, per_step: int, batch_size: int, **more) -> BatchStream:
    return BatchStream(
        order, start=start, stop=stop, sequences_per_step=per_step, batch_size=batch_size, device="cpu", **more
    )


def windows_of(parts: list[Batch]) -> list[int]:
    """The windows of a counting file that the batches hold, in turn."""
    found = []
    for batch in parts:
        present = batch.targets[:, 0] != -100
        assert batch.sequences == int(present.sum())
        found += (batch.ids[present, 0] // T).tolist()
    return found


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
    order = counting_order(tmp_path, 50)
    _, window = order.locate(np.arange(6))
    batch = assemble(order, np.arange(6))
    expected = window[:, None] * T + np.arange(T)
    assert batch.ids.tolist() == expected.tolist() and batch.targets.tolist() == (expected + 1).tolist()
    assert not batch.doc_start.any() and batch.sequences == 6
    assert (batch.ids.dtype, batch.targets.dtype, batch.doc_start.dtype) == (torch.int64, torch.int64, torch.int32)
    assert all(part.is_contiguous() for part in (batch.ids, batch.targets, batch.doc_start))


def test_missing_samples_are_rows_that_do_not_count(tmp_path):
    batch = assemble(counting_order(tmp_path, 50), np.array([-1, 3, -1]))
    assert batch.sequences == 1
    for row in (0, 2):
        assert not batch.ids[row].any() and not batch.doc_start[row].any()
        assert batch.targets[row].tolist() == [-100] * T
    assert batch.ids[1].tolist() == assemble(counting_order(tmp_path, 50), np.array([3])).ids[0].tolist()
    empty = assemble(counting_order(tmp_path, 50), np.array([-1, -1]))
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
    with pytest.raises(UsageError, match="--document-mask"):
        stream(order, 0, 8, 8, 8, document_mask=True)


@given(
    windows=st.integers(1, 60),
    per_step=st.integers(1, 20),
    batch_size=st.integers(1, 24),
    cut=st.floats(0, 1),
    fill_tokens=st.sampled_from([1, 50, 65536]),
    depth=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_every_window_of_every_epoch_comes_once_whatever_the_batches_and_the_resume_point(
    tmp_path_factory, windows, per_step, batch_size, cut, fill_tokens, depth
):
    order = counting_order(tmp_path_factory.mktemp("order"), windows)
    stop = 3 * windows
    resume = int(cut * stop) // per_step * per_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "FILL_TOKENS", fill_tokens)
        patch.setattr(batches, "LOCATE_ROWS", 17)
        with stream(order, 0, resume, per_step, batch_size, depth=depth) as before:
            seen = windows_of(list(before))
        with stream(order, resume, stop, per_step, batch_size, depth=depth) as after:
            seen += windows_of(list(after))
    assert seen == order.locate(np.arange(stop))[1].tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_a_stream_gives_what_assemble_gives(tmp_path):
    files = [TokenFile.open(write_documents(tmp_path / f"{i}.u16", some_documents(300, 20, seed=i))) for i in range(2)]
    order = SampleOrder([Source("a", files[0], 3.0), Source("b", files[1], 1.0)], 16, 0)
    groups = list(micro_batches(start=6, stop=2500, sequences_per_step=6, batch_size=4))
    with stream(order, 6, 2500, 6, 4, document_mask=True) as made:
        for batch, samples in zip(made, groups, strict=True):
            expected = assemble(order, samples, document_mask=True)
            assert (batch.sequences, batch.pairs) == (expected.sequences, expected.pairs)
            for part in ("ids", "targets", "doc_start"):
                assert torch.equal(getattr(batch, part), getattr(expected, part))


def test_a_batch_is_the_consumers_own(tmp_path):
    order = counting_order(tmp_path, 64)
    with stream(order, 0, 256, 8, 8, depth=2) as made:
        kept = []
        for batch in made:
            kept.append((batch, batch.ids.clone()))
            batch.targets.fill_(7)
    assert all(torch.equal(batch.ids, ids) for batch, ids in kept)
    assert all((batch.targets == 7).all() for batch, _ in kept)


def test_a_bad_id_is_raised_in_the_consumer_after_the_batches_before_it(tmp_path):
    ids = np.arange(1, 20 * T + 2)
    ids[13 * T + 3] = 60_000
    order = SampleOrder([Source("s", TokenFile.open(write_ids(tmp_path / "bad.u16", ids), 512), 1.0)], T, 0)
    first = order.locate(np.arange(20))[1].tolist().index(13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "FILL_TOKENS", 1)
        with stream(order, 0, 20, 1, 1) as made:
            for _ in range(first):
                next(made)
            with pytest.raises(BadData, match=r"bad.u16: id 60000 at token 107 is beyond the vocabulary of 512"):
                next(made)
            with pytest.raises(StopIteration):
                next(made)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_closing_ends_the_thread_wherever_it_is(tmp_path):
    order = counting_order(tmp_path, 50)
    for taken in (0, 1, 3):
        made = stream(order, 0, 10**9, 8, 8, depth=2)
        for _ in range(taken):
            next(made)
        assert threads()
        made.close()
        assert not threads()
        with pytest.raises(StopIteration):
            next(made)
        made.close()


def test_the_thread_is_never_further_ahead_than_its_buffers(tmp_path, monkeypatch):
    order = counting_order(tmp_path, 50)
    monkeypatch.setattr(batches, "FILL_TOKENS", 1)
    filled = []
    inner = batches._fill
    monkeypatch.setattr(batches, "_fill", lambda *args: filled.append(1) or inner(*args))
    with stream(order, 0, 10**6, 4, 4, depth=3) as made:
        for taken in range(1, 5):
            next(made)
            deadline = time.monotonic() + 10
            while len(filled) < taken + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02)
            assert len(filled) == taken + 3


def test_waiting_for_the_thread_is_measured(tmp_path, monkeypatch):
    order = counting_order(tmp_path, 50)
    inner = batches._fill
    monkeypatch.setattr(batches, "FILL_TOKENS", 1)
    monkeypatch.setattr(batches, "_fill", lambda *args: time.sleep(0.05) or inner(*args))
    with stream(order, 0, 16, 4, 4) as made:
        next(made)
        waited = made.wait_seconds
        assert waited >= 0.04
        deadline = time.monotonic() + 10
        while made._ready.qsize() < 4 and time.monotonic() < deadline:  # three batches and the end
            time.sleep(0.001)
        list(made)
        assert made.wait_seconds - waited < 0.04


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_buffers_are_not_written_before_their_copy_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "FILL_TOKENS", 1)  # each batch a buffer of its own
    order = counting_order(tmp_path, 8000)
    with stream(order, 0, 4000, 40, 40) as made:
        expected = [batch.ids.clone() for batch in made]
    busy = torch.randn(8192, 8192, device="cuda")
    with BatchStream(order, start=0, stop=4000, sequences_per_step=40, batch_size=40, device="cuda", depth=2) as made:
        found = []
        while True:
            for _ in range(3):
                busy = busy @ busy * 1e-2  # the copies queue up behind it
            batch = next(made, None)
            if batch is None:
                break
            found.append(batch)
    assert len(found) == len(expected)
    for batch, ids in zip(found, expected, strict=True):
        assert batch.ids.is_cuda and torch.equal(batch.ids.cpu(), ids) and torch.equal(batch.targets.cpu(), ids + 1)
