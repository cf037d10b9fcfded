from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.corpus import census
from llmtrain.corpus.census import take_census
from llmtrain.corpus.token_file import TokenFile
from tests.corpus.files import some_documents, write_documents, write_ids

# Few different ones, so that many are the same.
DOCUMENTS = st.lists(st.lists(st.integers(1, 3), max_size=4).map(tuple), min_size=1, max_size=60)


@given(ours=DOCUMENTS, theirs=DOCUMENTS, index=st.booleans(), read=st.sampled_from([1, 7, 1000]),
       held=st.sampled_from([1, 10, 1000]), limit=st.sampled_from([0, 0, 25]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_going_through_the_documents(tmp_path_factory, ours, theirs, index, read, held, limit):
    folder = tmp_path_factory.mktemp("census")
    one, other = (
        TokenFile.open(write_documents(folder / name, [np.array(x, int) for x in documents], index=index))
        for name, documents in (("a.u16", ours), ("b.u16", theirs))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "READ_TOKENS", read)
        patch.setattr(census, "HELD_HASHES", held)
        found = take_census(one, limit, other)
    if limit:
        ours, theirs = (
            [x for x, end in zip(documents, np.cumsum([len(x) + 1 for x in documents]), strict=True) if end <= limit]
            for documents in (ours, theirs)
        )
    assert found.tokens == min(limit or one.tokens, one.tokens)
    assert found.ids.tolist() == np.bincount(one.ids[: found.tokens], minlength=1 << 16).tolist()
    assert found.documents == len(ours) and found.repeated == len(ours) - len(set(ours))
    assert found.longest == max((len(x) + 1 for x in ours), default=0)
    lengths = Counter((len(x) + 1).bit_length() - 1 for x in ours)
    assert {i: n for i, n in enumerate(found.lengths.tolist()) if n} == lengths
    assert (found.shared, found.of_shared) == (sum(x in set(ours) for x in theirs), len(theirs))


def test_a_file_without_borders_has_ids_only(tmp_path):
    found = take_census(TokenFile.open(write_ids(tmp_path / "a.u16", [5, 5, 9]), 512))
    assert (found.tokens, found.documents, found.ids[5], found.ids[9], found.shared) == (3, 0, 2, 1, None)


def test_a_document_longer_than_what_is_read_at_a_time_is_hashed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(census, "READ_TOKENS", 10)
    [long] = some_documents(1, mean=500, seed=3)
    assert len(long) > 100
    other = long.copy()
    other[50] += 1
    path = write_documents(tmp_path / "a.u16", [long, other, long, long[:50]], vocab_size=1024)
    assert take_census(TokenFile.open(path)).repeated == 1
