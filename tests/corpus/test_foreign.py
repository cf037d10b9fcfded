import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.cli.main import run
from llmtrain.corpus import foreign
from llmtrain.corpus.batches import assemble
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.storage.errors import BadData, LlmtrainError, UsageError
from tests.corpus.files import EOS, some_documents, write_documents, write_ids

DOCUMENTS = [np.append(ids, EOS) for ids in some_documents(60, 20, seed=4)]
IDS = np.concatenate(DOCUMENTS).astype("<u2")


def write_llm_c(path: Path, ids: np.ndarray = IDS, magic: int = 20240520, version: int = 1) -> Path:
    """As llm.c's dev/data/data_common.py does."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    return path


def write_megatron(path: Path, documents: list[list[np.ndarray]], dtype: int = 8, version: int = 1) -> Path:
    """As Megatron's IndexedDatasetBuilder does: documents of sequences of ids."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = np.cumsum(np.append(0, 2 * lengths[:-1]), dtype=np.int64)
    first = np.cumsum([0] + [len(document) for document in documents], dtype=np.int64)
    path.write_bytes(b"".join(sequence.astype("<u2").tobytes() for sequence in sequences))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, dtype, len(lengths), len(first))
        + lengths.tobytes() + pointers.tobytes() + first.tobytes()
    )  # fmt: skip
    return path


def test_the_same_documents_give_the_same_batches_from_every_form(tmp_path, capsys):
    halves = [[document[: len(document) // 2], document[len(document) // 2 :]] for document in DOCUMENTS]
    files = {
        foreign.FLAT: write_ids(tmp_path / "nano.bin", IDS),
        foreign.LLM_C: write_llm_c(tmp_path / "c.bin"),
        foreign.MEGATRON: write_megatron(tmp_path / "megatron.bin", [[document] for document in DOCUMENTS]),
        foreign.MEGATRON + " ": write_megatron(tmp_path / "halves.bin", halves),
    }
    ours = TokenFile.open(write_documents(tmp_path / "ours.u16", [document[:-1] for document in DOCUMENTS]))
    samples = np.arange(ours.windows(16))
    expected = assemble(SampleOrder([Source("s", ours, 1.0)], 16, 0), samples, document_mask=True)
    for form, path in files.items():
        file = TokenFile.open(path, 512, eos_id=EOS)
        assert (file.form, file.tokens, file.manifest) == (form.strip(), len(IDS), None)
        file.read_ahead(samples * 16, np.full(len(samples), 17))
        found = assemble(SampleOrder([Source("s", file, 1.0)], 16, 0), samples, document_mask=True)
        for part in ("ids", "targets", "doc_start"):
            assert np.array_equal(getattr(found, part), getattr(expected, part)), form
        assert run(["inspect", str(path)]) == 0 and form.strip() in capsys.readouterr().out
    megatron = TokenFile.open(files[foreign.MEGATRON], 512)
    assert megatron.has_borders and megatron.documents == 60 and np.array_equal(megatron.doc_ends, ours.doc_ends)


def test_an_id_beyond_the_vocabulary_has_its_token_named_behind_a_header(tmp_path):
    ids = IDS.copy()
    ids[100] = 600
    file = TokenFile.open(write_llm_c(tmp_path / "c.bin", ids), 512)
    with pytest.raises(BadData, match=r"c.bin: id 600 at token 100 is beyond the vocabulary of 512"):
        file.gather(np.array([6]), 16)
    with open(file.path, "r+b") as shorter:
        shorter.truncate(1024 + 2 * 16)
    with pytest.raises(BadData, match="c.bin: was truncated to 1,056 bytes while in use"):
        file.gather(np.array([0]), 16)


def test_an_eos_id_must_be_one_and_is_for_files_that_name_none(tmp_path):
    path = write_ids(tmp_path / "nano.bin", IDS)
    with pytest.raises(UsageError, match="--eos-id 512: is not an id of the vocabulary of 512"):
        TokenFile.open(path, 512, eos_id=512)
    assert TokenFile.open(path, 512, eos_id=7).eos_id == 7
    assert TokenFile.open(write_documents(tmp_path / "a.u16", some_documents(3)), 512, eos_id=7).eos_id == EOS


def test_what_does_not_fit_its_header_or_index_is_refused_by_name(tmp_path):
    documents = [[document] for document in DOCUMENTS]

    def refused(path: Path, line: str) -> None:
        with pytest.raises(BadData, match=line):
            TokenFile.open(path, 512)

    refused(write_llm_c(tmp_path / "c.bin", version=7), "c.bin: is an llm.c file of version 7; only version 1")
    with open(write_llm_c(tmp_path / "c.bin"), "ab") as file:
        file.write(b"\0\0")
    refused(tmp_path / "c.bin", r"c.bin: its llm.c header counts [\d,]+ tokens, so [\d,]+ bytes in all")
    refused(write_megatron(tmp_path / "m.bin", documents, dtype=4), r"m.idx: holds ids of 32 bits, u16 is needed")
    refused(write_megatron(tmp_path / "m.bin", documents, version=2), r"m.idx: has version 2, known is 1")
    with open(write_megatron(tmp_path / "m.bin", documents), "ab") as file:
        file.write(b"\0\0")
    refused(tmp_path / "m.bin", r"m.idx: its last sequence ends at byte [\d,]+, m.bin at [\d,]+")
    index = write_megatron(tmp_path / "m.bin", documents).with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-8])
    refused(tmp_path / "m.bin", r"m.idx: its length does not fit its 60 sequences")
    assert TokenFile.open(write_ids(tmp_path / "plain.bin", IDS), 512).form == foreign.FLAT


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_header_or_index_is_a_token_file_or_one_line(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    target = data.draw(st.sampled_from(["c", "idx"]))
    if target == "c":
        path = damaged = write_llm_c(folder / "c.bin")
    else:
        path = write_megatron(folder / "m.bin", [[document] for document in DOCUMENTS[:5]])
        damaged = path.with_suffix(".idx")
    content = bytearray(damaged.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(content), 140) - 1))
        content[at] = data.draw(st.integers(0, 255))
    damaged.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        file = TokenFile.open(path, 512)
        ids = file.gather(np.arange(file.windows(8)), 8)
        file.borders(np.arange(file.windows(8)), ids)
    except LlmtrainError as error:
        assert str(error).count("\n") == 0
