"""docs/formats.md names what is written: its tables are held to the files of a small run and to the source."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmtrain.cli.main import cli
from llmtrain.storage.journal import JsonLines

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
SHAPE = "--d-model 16 --n-layers 1 --n-heads 2 --n-kv-heads 1 --head-dim 8 --d-ff 16 --seq-len 16 --batch-size 4"
RUN = f"{SHAPE} --total-steps 4 --warmup-steps 1 --checkpoint-every 2 --log-every 1 --val-windows 2 --device cpu"


def table(first: str) -> list[list[str]]:
    """The cells of the rows of the table whose first heading is `first`."""
    rows = [[cell.strip() for cell in line.split(" | ")] for line in re.sub(r"(?m)^\| |\|$", "", PAGE).splitlines()]
    begin = next(i for i, row in enumerate(rows) if row[0] == first) + 2
    end = next(i for i in range(begin, len(rows)) if rows[i] == [""])
    return rows[begin:end]


def keys(first: str) -> tuple[set[str], set[str]]:
    """The keys of a table, and those of them that are said to be there always."""
    rows = table(first)
    names = [row[0].strip("`") for row in rows]
    return set(names), {name for name, row in zip(names, rows, strict=True) if row[-1] == "always"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a token file, one with a mask, parts, a run of four steps, and its export."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "data").mkdir()
    (folder / "t.txt").write_text("".join(f"a small line of text, number {i}\n" for i in range(300)))
    (folder / "p.jsonl").write_text('{"prompt": "a small", "completion": " line of text"}\n' * 4)
    (folder / "q.jsonl").write_text('{"prompt": "a small", "choices": [" line", " text"], "answer": 0}\n')
    (folder / "k.jsonl").write_text('{"text": "a small line of text, once more", "lang": "en"}\n')
    val = "--val-tokens data/corpus.val.u16 --val-choices q=q.jsonl --val-text k=k.jsonl --val-kind-field lang"
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for words in (
            "train-tokenizer --input t.txt --vocab-size 300",
            "tokenize-corpus --input t.txt --document line --holdout 0.2 --workers 1",
            "tokenize-corpus --input t.txt --document line --holdout 0 --workers 1 --shard 1/1 --output data/s.u16",
            "tokenize-corpus --input p.jsonl --prompt-field prompt --completion-field completion --holdout 0 "
            "--workers 1 --output data/p.u16",
            f"train --run-dir run {RUN} {val} --ema-decay 0.9 --optimizer muon --packing documents",
            "generate --run-dir run --prompt a --max-new-tokens 2 --keep --device cpu",
            "export run --output exported",
        ):
            done = CliRunner().invoke(cli, words.split())
            assert done.exit_code == 0, done.output + repr(done.exception)
    return folder


def lines(made: Path, kind: str) -> list[dict]:
    return [line for line in JsonLines.read(made / "run/metrics.jsonl") if line["kind"] == kind]


def test_manifests_hold_the_keys_of_their_table(made: Path):
    known, always = keys("key of the manifest")
    manifests = {name: json.loads((made / f"data/{name}.json").read_text()) for name in ("corpus.u16", "p.u16")}
    manifests["s"] = json.loads((made / "data/s.1-of-1.u16.json").read_text())
    assert manifests["corpus.u16"].keys() == always
    assert set().union(*manifests.values()) == known


def test_the_files_beside_a_token_file_are_in_their_table(made: Path):
    known = {row[0].strip("`").replace("1024", "16").replace("2-of-8", "1-of-1") for row in table("file of a corpus")}
    there = {re.sub(r"^(corpus|p|s)\.", "X.", path.name) for path in (made / "data").iterdir()}
    own = {"X.val.u16.json", "X.val.u16.docs", "X.1-of-1.u16.json", "X.1-of-1.u16.docs"}
    assert own < there and there - own <= known
    assert known - there == {"X.u32", ".X.u16.partial"}


@pytest.mark.parametrize("kind", ["a train", "an eval"])
def test_lines_of_metrics_jsonl_hold_the_keys_of_their_tables(kind: str, made: Path):
    known, always = keys(f"key of {kind} line")
    of_every = keys("key of every line")[0]
    written = [line.keys() - of_every for line in lines(made, kind.split()[1])]
    assert written and all(always <= one <= known for one in written)
    elsewhere = {row[0].strip("`") for row in table(f"key of {kind} line") if row[-1].startswith("with ")}
    assert set().union(*written) == known - elsewhere
    source = "".join(path.read_text() for path in (ROOT / "llmtrain/training").glob("*.py"))
    assert all(f'"{name}"' in source for name in elsewhere)  # this machine has no card, this run one rank


def test_events_and_their_keys_are_those_of_the_source(made: Path):
    said = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in table("event")}
    source = "".join(path.read_text() for path in (ROOT / "llmtrain/training").glob("*.py"))
    named = re.findall(r"""\.event\((?:[^()"]|\([^()]*\))*"(\w+)",|event="(\w+)\"""", source)
    assert {a or b for a, b in named} == said.keys()
    for fields in said.values():
        assert all(f'"{name}"' in source or f"{name}=" in source for name in fields)
    of_every = keys("key of every line")[0] | {"event", "text"}
    for line in lines(made, "event"):
        assert line.keys() - of_every <= said[line["event"]]


def test_the_run_directory_and_its_checkpoints_hold_what_is_said(made: Path):
    run = made / "run"
    top = {path.name for path in run.iterdir()} - {"checkpoints"}
    assert top <= keys("file of a run")[0]
    assert {"config.toml", "tokenizer.json", "metrics.jsonl", "status.json", "lock", "samples.jsonl"} == top
    assert json.loads((run / "status.json").read_text()).keys() == keys("key of status.json")[0]
    checkpoint = run / "checkpoints/step-00000004"
    assert {path.name for path in checkpoint.iterdir()} == keys("file of a checkpoint")[0]
    assert json.loads((checkpoint / "state.json").read_text()).keys() == keys("key of state.json")[1]
    assert json.loads((checkpoint / "MANIFEST.json").read_text()).keys() == keys("key of MANIFEST.json")[0]


def test_an_export_holds_the_files_of_its_table(made: Path):
    assert {path.name for path in (made / "exported").iterdir()} == keys("file of an export")[0]
