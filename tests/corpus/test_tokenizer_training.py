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
from llmtrain.corpus.inputs import split_weight
from llmtrain.corpus.tokenizer_training import train_tokenizer
from llmtrain.storage.errors import BadData, UsageError

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


def mix_of(out: str) -> dict[str, float]:
    """Input -> MB, as the lines behind the first say."""
    lines = re.findall(r"^  (.*): ([\d.]+) MB, [\d.]+% of the text$", out, re.M)
    return {Path(name).name: float(mb) for name, mb in lines}


def test_weighed_inputs_are_mixed_so_whatever_their_sizes_and_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "web").mkdir()
    put(tmp_path / "web")
    (tmp_path / "code.txt").write_text("\n".join(one.upper() for one in TEXTS))
    web, code = tmp_path / "web/a.jsonl.gz", tmp_path / "code.txt"
    for sample, together in ((BYTES // 2, BYTES / 2), (10 * BYTES, BYTES / 0.7)):  # then all of the code there is
        mix = (f"{code}:0.7", f"{web}:0.3")
        train_tokenizer(TokenizerConfig(mix, tmp_path / "out.json", 300, sample, document="line"))
        found = mix_of(capsys.readouterr().out)
        assert found["code.txt"] == pytest.approx(0.7 * together / 1e6, rel=0.1, abs=0.08)
        assert found["a.jsonl.gz"] == pytest.approx(0.3 * together / 1e6, rel=0.1, abs=0.08)
    train_tokenizer(TokenizerConfig((str(code), str(web)), tmp_path / "out.json", 300, document="line"))
    assert not mix_of(capsys.readouterr().out)


def test_a_weight_is_a_number_behind_a_name_that_is_no_file(tmp_path: Path):
    (tmp_path / "a:0.5").touch()
    assert split_weight(str(tmp_path / "a:0.5")) == (str(tmp_path / "a:0.5"), None)
    assert split_weight("a:0.5") == ("a", 0.5) and split_weight("a*.txt:3") == ("a*.txt", 3.0)
    assert split_weight("https://host:80/a.gz") == ("https://host:80/a.gz", None)
    for wrong in ("a:0", "a:-1", "a:nan", "a:inf"):
        with pytest.raises(UsageError, match=f"--input {wrong}: the weight"):
            split_weight(wrong)
    (tmp_path / "b.txt").touch()
    with pytest.raises(UsageError, match=r"b.txt: how much text it holds is not known: leave weights out"):
        train_tokenizer(TokenizerConfig((f"{tmp_path}/b.txt:1",), tmp_path / "out.json", 300))


def test_a_few_long_documents_do_not_decide_what_a_sample_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = [f"{number} caf\u00e9 and more words\n" for number in range(200_000)]
    (tmp_path / "long.txt").write_text("".join(lines))  # one document
    size = (tmp_path / "long.txt").stat().st_size
    train_tokenizer(TokenizerConfig((str(tmp_path / "long.txt"),), tmp_path / "out.json", 300, size // 4))
    assert learnt(capsys.readouterr().out) == pytest.approx(size / 4, rel=0.4)
