"""What `train-tokenizer` learns from: a share of the documents in every form, and what it leaves out."""

import gzip
import json
import random
import re
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from llmtrain.corpus.config import TokenizerConfig
from llmtrain.corpus.tokenizer_training import train_tokenizer
from llmtrain.storage.errors import BadData

# Much text in few stored bytes, and much beside the text in JSON.
TEXTS = [f"{number} words and more words " * 20 for number in random.Random(0).sample(range(100_000), 2000)]
BYTES = sum(map(len, TEXTS))


def put(folder: Path) -> list[Path]:
    lines = "".join(json.dumps({"text": one, "id": 1, "more": "x" * 300}) + "\n" for one in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.txt.zst").write_bytes(zstandard.compress("\n".join(TEXTS).encode()))
    (folder / "a.txt").write_text("\n".join(TEXTS))
    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet", row_group_size=100)
    return sorted(folder.iterdir())


def learnt(out: str) -> int:
    """The bytes that it says it learnt from."""
    found = re.search(r"learnt from ([\d.]+) MB", out)
    assert found
    return int(float(found[1]) * 1e6)


def test_a_sample_has_about_the_bytes_asked_for_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text").mkdir()
    for path in put(tmp_path / "text"):
        config = TokenizerConfig((str(path),), tmp_path / "out.json", 300, BYTES // 2, document="line")
        train_tokenizer(config)
        assert abs(learnt(capsys.readouterr().out) - BYTES / 2) < BYTES / 8 + 50_000


def test_damage_is_left_out_of_the_sample_or_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some words"}\n{"body": 1}\n{"text": "more words"}\n{')
    config = TokenizerConfig((str(path),), tmp_path / "out.json", 300)
    with pytest.raises(BadData, match=r"a.jsonl: no text in field 'text' .* at line 2"):
        train_tokenizer(config)
    train_tokenizer(TokenizerConfig((str(path),), tmp_path / "out.json", 300, on_bad="skip"))
    assert "2 documents left out (damaged)" in capsys.readouterr().out
