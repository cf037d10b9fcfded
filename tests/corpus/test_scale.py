"""A corpus of 50 billion tokens against one of 50 million; its file is sparse."""

import time
import tracemalloc
from pathlib import Path

import pytest

from llmtrain.corpus.batch_stream import BatchStream
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.packing import build, open_packed
from llmtrain.corpus.token_file import TokenFile
from tests.corpus.files import write_sparse

SIZES = (50_000_000, 50_000_000_000)


def resident_files() -> int:
    """Bytes of mapped files in this process' memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


@pytest.mark.parametrize(("packed", "seq_len"), [(False, 1024), (True, 1 << 16)])
def test_the_size_of_a_corpus_shows_neither_in_memory_nor_in_time(packed, seq_len, tmp_path):
    def cost(path: Path) -> tuple[float, int, int]:
        """Seconds, peak of memory and growth of mapped files for the plan's counts and 4 million tokens of batches."""
        mapped = resident_files()
        tracemalloc.start()
        began = time.perf_counter()
        file = TokenFile.open(path)
        cut = open_packed(file, seq_len) if packed else None
        order = SampleOrder([Source("sparse", file, 1.0, cut=cut)], seq_len, seed=0)
        assert abs(order.samples_per_epoch - file.tokens // seq_len) < 100
        assert 0.99 < order.drawn(order.samples_per_epoch)[0] / order.windows[0] < 1.01
        rows = max(1, 65536 // seq_len)
        with BatchStream(
            order, start=10**9, stop=10**9 + 64 * rows, sequences_per_step=rows, batch_size=rows, device="cpu"
        ) as stream:
            assert sum(batch.sequences for batch in stream) == 64 * rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return time.perf_counter() - began, peak, resident_files() - mapped

    paths = [write_sparse(tmp_path / f"{tokens}.u16", tokens) for tokens in SIZES]
    if packed:
        for path in paths:
            build(TokenFile.open(path), seq_len)
    cost(paths[0])  # what is loaded and compiled only once
    small, large = (cost(path) for path in paths)
    assert large[0] < 3 * small[0] + 1
    assert large[1] < 1.1 * small[1] + (1 << 20)
    assert large[2] < (8 << 20)
