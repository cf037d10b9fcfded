"""What benchmarks feed a step with."""

from pathlib import Path

import pytest
import torch

from llmtrain.benchmark.data import corpus_batches, corpus_read
from llmtrain.corpus.batch_stream import BatchStream
from llmtrain.corpus.order import SampleOrder
from llmtrain.storage.errors import BadData
from llmtrain.training.run_corpus import open_sources
from tests.training.conftest import VOCAB, write_corpus

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.u16", 16 * 10 + 1)


def order_of(file: Path, vocab_size: int = 0) -> SampleOrder:
    return SampleOrder(open_sources((str(file),), vocab_size, None), 16, seed=3)


def test_batches_of_a_corpus_are_those_that_a_run_reads_beyond_its_first_epoch_too(file):
    order = order_of(file)
    batches = corpus_batches(order, 6, 3, CPU)
    # As a run of three steps of two micro-batches: 18 samples of 10 windows.
    with BatchStream(order, start=0, stop=18, sequences_per_step=6, batch_size=3, device=CPU) as stream:
        read = list(stream)
    assert len(batches) == len(read) == 6
    for (ids, targets), batch in zip(batches, read, strict=True):
        assert ids.dtype == targets.dtype == torch.int64
        assert torch.equal(ids, batch.ids) and torch.equal(targets, batch.targets)


def test_what_was_read_is_named_by_its_content(file):
    (of,) = corpus_read(order_of(file))
    assert (of["file"], of["tokens"], len(of["sha256"])) == ("corpus.u16", 161, 64)


def test_an_id_beyond_the_vocabulary_is_refused(file, tmp_path):
    bare = tmp_path / "bare.u16"
    bare.write_bytes(file.read_bytes())
    with pytest.raises(BadData, match="beyond the vocabulary of 40"):
        corpus_batches(order_of(bare, 40), 4, 3, CPU)
    assert corpus_batches(order_of(bare, VOCAB), 4, 3, CPU)
