"""scripts/corpus: a mixture is streamed from a stand-in of the hub, and a pilot is judged."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.corpus.token_file import TokenFile

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "scripts" / "corpus"
sys.path.insert(0, str(SCRIPTS))

import verdict  # noqa: E402

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

SHARDS, DOCUMENTS = 2, 40


def words(name: str, shard: int, i: int) -> str:
    return f"{name} {shard} {i} " + " ".join(f"w{(i * 7 + j * 3 + shard) % 97}" for j in range(30))


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Three data sets in the forms of the real ones: Parquet of text, JSON Lines, Parquet of blobs' names."""
    import pyarrow.parquet

    hub = tmp_path / "hub"
    for folder in ("web/data", "maths/train", "stack/data/Python", "content"):
        (hub / folder).mkdir(parents=True)
    for shard in range(SHARDS):
        texts = [words("web", shard, i) for i in range(DOCUMENTS)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": texts}), hub / f"web/data/{shard}.parquet")
        lines = "".join(json.dumps({"text": words("maths", shard, i)}) + "\n" for i in range(DOCUMENTS))
        (hub / f"maths/train/{shard}.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
        ids = [f"blob{shard}x{i}" for i in range(DOCUMENTS)]
        for i, blob in enumerate(ids):
            if i % 10:  # every tenth is not in the archive
                (hub / "content" / blob).write_bytes(gzip.compress((words("code", shard, i) + " é").encode("latin-1")))
        table = pyarrow.table({"blob_id": ids, "src_encoding": ["latin-1"] * DOCUMENTS})
        pyarrow.parquet.write_table(table, hub / f"stack/data/Python/train-{shard}.parquet")
    return hub


def recipe(tmp_path: Path, shares: tuple[float, float, float] = (0.5, 0.3, 0.2)) -> Path:
    path = tmp_path / "recipe.toml"
    inputs = ("stack/data/Python/*.parquet", "web/data/*.parquet", "maths/train/*.jsonl.zst")
    path.write_text(
        f'folder = "{tmp_path}/out"\ntokenizer = "{tmp_path}/tokenizer.json"\ntokens = "1B"\ndisk = "1GB"\n'
        'arguments = ["--workers", "1", "--holdout", "0", "--engine", "tokenizers"]\n'
        + "".join(
            f'[[source]]\nname = "{name}"\nshare = {share}\nblobs = {str(name == "stack").lower()}\n'
            f'inputs = ["hf://datasets/{pattern}"]\n'
            for name, share, pattern in zip(("stack", "web", "maths"), shares, inputs, strict=True)
        )
    )
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(words(name, 0, i) for name in ("web", "code", "maths") for i in range(20)))
    command = [sys.executable, "-m", "llmtrain", "train-tokenizer", "--input", str(text), "--vocab-size", "400"]
    subprocess.run([*command, "--output", str(tmp_path / "tokenizer.json")], check=True, capture_output=True)


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, str(SCRIPTS / "stream.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def documents(path: Path) -> int:
    file = TokenFile.open(path)
    assert file.manifest is not None
    return file.manifest["documents"]


def test_a_mixture_is_streamed_by_its_shares_and_a_killed_stream_goes_on(hub: Path, tokenizer: None, tmp_path: Path):
    out = tmp_path / "out"
    process = start(recipe(tmp_path), "--hub", hub)
    end = time.monotonic() + 60
    while not (out / "web.u16.json").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    os.killpg(process.pid, 9)
    process.communicate()

    process = start(recipe(tmp_path), "--hub", hub)
    text, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert documents(out / "web.u16") == documents(out / "maths.u16") == SHARDS * DOCUMENTS
    assert documents(out / "stack.u16") == SHARDS * (DOCUMENTS - DOCUMENTS // 10)
    assert "blobs are not there" in err
    command = text.splitlines()[-1]
    assert command.startswith("llmtrain train --tokens stack=") and f"web={out}/web.u16:{3 * 10**8}" in command


def test_it_stops_at_the_tokens_asked_and_within_the_budget_of_the_disk(hub: Path, tokenizer: None, tmp_path: Path):
    few = start(recipe(tmp_path), "--hub", hub, "--tokens", "2K")  # less than one shard of each source has
    text, err = few.communicate(timeout=120)
    assert few.returncode == 0, err
    assert documents(tmp_path / "out/web.u16") == DOCUMENTS
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.u16")}
    small = start(recipe(tmp_path), "--hub", hub, "--disk", "1K")
    text, err = small.communicate(timeout=60)
    assert small.returncode == 0 and "might pass the budget of 1,000" in text, err
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").glob("*.u16")}


def test_shares_that_do_not_add_up_are_refused(hub: Path, tmp_path: Path):
    process = start(recipe(tmp_path, (0.5, 0.3, 0.3)), "--hub", hub)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "the shares add up to 1.1" in err and err.count("\n") == 1


def test_a_jump_of_the_loss_and_a_loop_of_words_are_seen():
    falling = [10 - 0.05 * i for i in range(100)]
    assert verdict.jumps(falling) == [] and verdict.fall(falling) == pytest.approx(1.0)
    falling[50] += 1
    assert verdict.jumps(falling) == [50]
    assert abs(verdict.fall([3.0] * 50)) < verdict.FALLS
    assert verdict.distinct("one two three four " * 50) < 0.1 < verdict.DISTINCT
    assert verdict.distinct(" ".join(map(str, range(100)))) == 1.0
