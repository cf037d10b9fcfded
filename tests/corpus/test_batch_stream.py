import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.corpus import batch_stream
from llmtrain.corpus.batch_stream import BatchStream
from llmtrain.corpus.batches import Batch, assemble, micro_batches
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.storage.errors import BadData, UsageError
from tests.corpus.files import counting_order, some_documents, write_documents, write_ids

T = 8


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
    order = counting_order(tmp_path_factory.mktemp("order"), windows, T)
    stop = 3 * windows
    resume = int(cut * stop) // per_step * per_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_stream, "FILL_TOKENS", fill_tokens)
        patch.setattr(batch_stream, "LOCATE_ROWS", 17)
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


def test_a_stream_refuses_a_document_mask_where_borders_are_not_known(tmp_path):
    order = counting_order(tmp_path, 50, T)
    with pytest.raises(UsageError, match=r"count.u16: .*--document-mask"):
        stream(order, 0, 8, 8, 8, document_mask=True)


def test_a_batch_is_the_consumers_own(tmp_path):
    order = counting_order(tmp_path, 64, T)
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
        patch.setattr(batch_stream, "FILL_TOKENS", 1)
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
    order = counting_order(tmp_path, 50, T)
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
    order = counting_order(tmp_path, 50, T)
    monkeypatch.setattr(batch_stream, "FILL_TOKENS", 1)
    filled = []
    inner = batch_stream.fill_batch
    monkeypatch.setattr(batch_stream, "fill_batch", lambda *args: filled.append(1) or inner(*args))
    with stream(order, 0, 10**6, 4, 4, depth=3) as made:
        for taken in range(1, 5):
            next(made)
            deadline = time.monotonic() + 10
            while len(filled) < taken + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02)
            assert len(filled) == taken + 3


def test_waiting_for_the_thread_is_measured(tmp_path, monkeypatch):
    order = counting_order(tmp_path, 50, T)
    inner = batch_stream.fill_batch
    monkeypatch.setattr(batch_stream, "FILL_TOKENS", 1)
    monkeypatch.setattr(batch_stream, "fill_batch", lambda *args: time.sleep(0.05) or inner(*args))
    with stream(order, 0, 16, 4, 4) as made:
        next(made)
        waited = made.wait_seconds
        assert waited >= 0.04
        deadline = time.monotonic() + 10
        while made._ready.qsize() < 4 and time.monotonic() < deadline:  # three batches and the end
            time.sleep(0.001)
        list(made)
        assert made.wait_seconds - waited < 0.04


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_buffers_are_not_written_before_their_copy_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_stream, "FILL_TOKENS", 1)  # each batch a buffer of its own
    order = counting_order(tmp_path, 8000, T)
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
