"""Fine-tuning data: a prompt is read, its completion is learned, through all that a token file goes through."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.cli.main import run as llmtrain
from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.corpus.batch_stream import BatchStream
from llmtrain.corpus.batches import IGNORED, assemble, held_out_batches
from llmtrain.corpus.config import TokenizeConfig
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.packing import open_or_build
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import mask_path
from llmtrain.corpus.tokenize import tokenize
from llmtrain.storage.errors import BadData, ConfigMismatch, InputMissing, LlmtrainError, UsageError
from llmtrain.storage.manifest import read_json
from tests.corpus.forms import parquet, store
from tests.corpus.test_going_on import interrupted

PAIRS = [
    (f"Question {n}: what is {n} plus {n}?\n", f"It is {2 * n}, {'as everybody knows ' * (n % 5)}I think.")
    for n in range(120)
]
CONFIG = TokenizeConfig(
    inputs=("pairs.jsonl",), output=Path("pairs.u16"), holdout=0.0, workers=1, engine="tokenizers",
    prompt_field="prompt", completion_field="completion",
)  # fmt: skip


@pytest.fixture(scope="module")
def made() -> bytes:
    return tokenizers.train([prompt + completion for prompt, completion in PAIRS], 400)


@pytest.fixture()
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bytes) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_bytes(made)
    write(PAIRS)
    return tmp_path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, made: bytes) -> Path:
    """A folder where the pairs are tokenized."""
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("tokenizer.json").write_bytes(made)
        write(PAIRS)
        tokenize(CONFIG)
    return folder


@pytest.fixture()
def tokenized(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, made the current folder."""
    monkeypatch.chdir(shutil.copytree(done, tmp_path / "copy"))
    return Path.cwd()


def write(pairs, name: str = "pairs.jsonl") -> None:
    lines = (json.dumps({"prompt": p, "completion": c, "id": n}) for n, (p, c) in enumerate(pairs))
    Path(name).write_text("".join(line + "\n" for line in lines))


def expected(pairs) -> list[tuple[list[int], list[int]]]:
    """(ids, 1 where they count) of each pair: prompt and completion each tokenized by itself, and the EOS."""
    tokenizer = tokenizers.load("tokenizer.json")
    rows = []
    for prompt, completion in pairs:
        read, learned = tokenizer.encode_batch([prompt, completion])
        rows.append(([*read, *learned, tokenizer.eos_id], [0] * len(read) + [1] * (len(learned) + 1)))
    return rows


def content(path: str = "pairs.u16") -> tuple[list[int], list[int]]:
    file = TokenFile.open(path)
    assert sum(file.verify()) == 3 * file.tokens
    mask = np.fromfile(mask_path(path), np.uint8)
    assert file.manifest["mask"]["loss_tokens"] == int(mask.sum())
    return file.ids[:].tolist(), mask.tolist()


def joined(rows) -> tuple[list[int], list[int]]:
    return sum((ids for ids, _ in rows), []), sum((mask for _, mask in rows), [])


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().glob("pairs*.u16*")}


@pytest.mark.parametrize("workers", [1, 2])
def test_prompt_and_completion_are_tokenized_by_themselves_and_the_mask_says_which_is_which(here, workers, capsys):
    tokenize(replace(CONFIG, workers=workers), block_bytes=2000)
    assert content() == joined(expected(PAIRS))
    said = capsys.readouterr().out
    counts = sum(content()[1])
    assert f"{counts:,} tokens ({counts / len(content()[1]):.1%}) in the loss" in said


def test_the_ids_of_a_prompt_are_those_that_generation_gives(here):
    """Here the two together have other ids: the border lies within a word."""
    write([("As everyb", "ody knows")])
    tokenize(CONFIG)
    tokenizer = tokenizers.load("tokenizer.json")
    ids, mask = content()
    read = tokenizer.encode_batch(["As everyb"])[0]
    assert ids[: len(read)] == read and mask[: len(read)] == [0] * len(read) and all(mask[len(read) :])
    assert ids[:-1] != tokenizer.encode_batch(["As everybody knows"])[0]


def test_long_texts_are_cut_into_pieces_on_their_own_side_of_the_border(here):
    """More than the 64 KiB that the library gets at once."""
    long = [("What is it? " * 9000, "It is long. " * 8000), ("", "all counts"), ("x" * 70000, "y" * 70000)]
    write(long)
    tokenize(CONFIG)
    ids, mask = content()
    at = 0
    for prompt, completion in long:
        end = ids.index(0, at)
        tokenizer = tokenizers.load("tokenizer.json")
        counts = mask[at : end + 1]
        border = counts.index(1)
        assert tokenizer.decode(ids[at : at + border]) == prompt
        assert tokenizer.decode(ids[at + border : end]) == completion and all(counts[border:])
        at = end + 1


def test_an_empty_completion_is_left_out_and_a_missing_field_is_named(here, capsys):
    write([("a", ""), *PAIRS[:3]])
    tokenize(CONFIG)
    assert content() == joined(expected(PAIRS[:3]))
    assert "1 empty left out" in capsys.readouterr().out
    Path("pairs.jsonl").write_text('{"prompt": "a"}\n')
    words = r"no text in field 'completion' \(there are: prompt\) at line 1: .*--prompt-field"
    with pytest.raises(BadData, match=words):
        tokenize(CONFIG)
    with pytest.raises(UsageError, match="plain text has no fields"):
        Path("plain.txt").write_text("text")
        tokenize(replace(CONFIG, inputs=("plain.txt",)))
    for fields in ({"prompt_field": None}, {"completion_field": ""}, {"text_field": "text"}):
        with pytest.raises(ValueError, match="_field"):
            replace(CONFIG, **fields)


@pytest.mark.parametrize("form", [".gz", ".zst", "parquet"])
def test_other_forms_give_the_same_file(tokenized, form):
    wanted = content()
    data = Path("pairs.jsonl").read_bytes()
    Path("pairs.jsonl").unlink()
    if form == "parquet":
        import pyarrow as pa

        pairs = pa.array([{"prompt": p, "completion": c} for p, c in PAIRS])
        parquet.write_table(pa.table({"n": range(len(PAIRS)), "pair": pairs}), "pairs.parquet", row_group_size=7)
        names = dict(prompt_field="pair.prompt", completion_field="pair.completion")
        tokenize(replace(CONFIG, inputs=("pairs.parquet",), **names))
    else:
        tokenize(replace(CONFIG, inputs=(str(store(Path("pairs.jsonl"), data, form)),)))
    assert content() == wanted


def test_plain_text_beside_it_counts_as_a_whole(here):
    Path("more.txt").write_text("plain text")
    tokenize(replace(CONFIG, inputs=("pairs.jsonl", "more.txt")))
    assert content() == joined([*expected(PAIRS), *expected([("", "plain text")])])


def test_documents_held_out_keep_their_mask(here):
    tokenize(replace(CONFIG, holdout=0.3))
    kept, held = (set(map(tuple, rows(name))) for name in ("pairs.u16", "pairs.val.u16"))
    assert len(held) > 10 and not kept & held
    assert kept | held == {(*ids, -1, *mask) for ids, mask in expected(PAIRS)}


def rows(name: str) -> list[list[int]]:
    ids, mask = content(name)
    ends = [i + 1 for i, token in enumerate(ids) if token == 0]
    return [[*ids[a:b], -1, *mask[a:b]] for a, b in zip([0, *ends], ends, strict=False)]


def test_a_stopped_run_goes_on_to_the_same_bytes(here, monkeypatch):
    config = replace(CONFIG, holdout=0.3)
    tokenize(config)
    wanted = files()
    for name in wanted:
        os.unlink(name)
    interrupted(monkeypatch, config, 3)
    interrupted(monkeypatch, config, 2, commit_seconds=0)
    tokenize(config, block_bytes=1000)
    assert files() == wanted


def test_a_run_that_was_killed_while_it_published_is_published(tokenized, monkeypatch):
    wanted = files()
    for name in wanted:
        os.unlink(name)
    from llmtrain.corpus import writing

    real, calls = writing._rename, []

    def dies(source: Path, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise LlmtrainError("killed")
        real(source, path)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_rename", dies)
        with pytest.raises(LlmtrainError, match="killed"):
            tokenize(CONFIG)
    tokenize(CONFIG)
    assert files() == wanted


def test_more_is_appended_with_its_mask_and_not_without(here):
    write(PAIRS[:50], "one.jsonl")
    write(PAIRS[50:], "two.jsonl")
    tokenize(replace(CONFIG, inputs=("one.jsonl",)))
    plain = replace(CONFIG, append=True, inputs=("two.jsonl",), prompt_field=None, completion_field=None)
    with pytest.raises(ConfigMismatch, match="has a loss mask: give --prompt-field"):
        tokenize(replace(plain, text_field="completion"))
    tokenize(replace(CONFIG, inputs=("two.jsonl",), append=True))
    assert content() == joined(expected(PAIRS))
    tokenize(replace(plain, append=False, text_field="completion"))
    assert not mask_path("pairs.u16").exists() and not TokenFile.open("pairs.u16").has_mask
    with pytest.raises(ConfigMismatch, match="has no loss mask: leave --prompt-field out"):
        tokenize(replace(CONFIG, inputs=("one.jsonl",), append=True))


def test_shards_are_one_file_with_one_mask(here):
    write(PAIRS[:70], "one.jsonl")
    write(PAIRS[70:], "two.jsonl")
    both = replace(CONFIG, inputs=("one.jsonl", "two.jsonl"))
    for shard in ("1/2", "2/2"):
        tokenize(replace(both, shard=shard))
    parts = TokenFile.open("pairs.u16")
    ids, mask = joined(expected(PAIRS))
    assert parts.has_mask and parts.ids[:].tolist() == ids and sum(parts.verify()) == 3 * len(ids)
    found = parts.read_mask(np.array([0]), np.array([len(ids)]))
    assert found.tolist() == mask
    tokenize(replace(both, shard="2/2", prompt_field=None, completion_field=None, text_field="completion"))
    with pytest.raises(ConfigMismatch, match="another choice of what counts in the loss"):
        TokenFile.open("pairs.u16")


def damage_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "error, words, damage",
    [
        (InputMissing, "pairs.u16.mask: no such file", lambda path: path.unlink()),
        (BadData, "pairs.u16.mask: its length is 9 bytes", lambda path: path.write_bytes(bytes(9))),
        (BadData, "pairs.u16.mask: is damaged", damage_byte),
    ],
)
def test_a_mask_that_is_gone_or_damaged_is_named(tokenized, error, words, damage):
    damage(mask_path("pairs.u16"))
    with pytest.raises(error, match=words):
        list(TokenFile.open("pairs.u16").verify())


def test_a_manifest_whose_mask_does_not_fit_is_refused(tokenized):
    manifest = read_json(Path("pairs.u16.json"))
    for mask in ([], {"loss_tokens": -1, "sha256": ["a"]}, {"loss_tokens": 5, "sha256": []}):
        Path("pairs.u16.json").write_text(json.dumps(manifest | {"mask": mask, "manifest_sha256": ""}))
        with pytest.raises(BadData, match="mask is no object"):
            TokenFile.open("pairs.u16")


def test_the_mask_is_part_of_what_makes_a_corpus_the_same(tokenized):
    one = TokenFile.open("pairs.u16").content_sha256()
    write([("", p + c) for p, c in PAIRS])
    tokenize(CONFIG)
    assert TokenFile.open("pairs.u16").content_sha256() != one


def targets_by_hand(ids: list[int], mask: list[int]) -> np.ndarray:
    """(tokens - 1,) of the whole stream."""
    return np.where(np.array(mask[1:]) == 1, np.array(ids[1:]), IGNORED)


def test_windows_of_the_stream_ignore_what_the_mask_leaves_out(tokenized):
    file, wanted = TokenFile.open("pairs.u16"), targets_by_hand(*content())
    windows = file.windows(16)
    batches = [targets for _, targets, _ in held_out_batches(file, 16, 4, 0, "cpu")]
    got = torch.cat(batches)[:windows].reshape(-1).numpy()
    assert np.array_equal(got, wanted[: windows * 16])


def test_every_completion_is_a_target_once_in_windows_of_whole_documents(tokenized):
    """And a mixture with a source that has no mask leaves that one as it is."""
    tokenize(replace(CONFIG, output=Path("plain.u16"), prompt_field=None, completion_field=None, text_field="prompt"))
    sources = []
    for name in ("pairs", "plain"):
        file = TokenFile.open(f"{name}.u16")
        sources.append(Source(name, file, 1.0, cut=open_or_build(file, 64)))
    for chosen in (sources[:1], sources):
        order = SampleOrder(chosen, 64, seed=3)
        n = sum(cut.windows for cut in order.cuts) if len(chosen) == 1 else 1000
        stream = BatchStream(
            order, start=0, stop=n, sequences_per_step=n, batch_size=4, device="cpu", document_mask=True
        )
        with stream:
            targets = torch.cat([batch.targets for batch in stream]).numpy()
        if len(chosen) == 1:
            found = np.sort(targets[targets != IGNORED])
            wanted = [token for ids, mask in expected(PAIRS) for token, c in zip(ids[1:], mask[1:], strict=True) if c]
            assert np.array_equal(found, np.sort(wanted))
        else:
            from_plain = order.locate(np.arange(n))[0] == 1
            lone = SampleOrder(sources[1:], 64, seed=0)
            counted = [int((assemble(lone, np.arange(sources[1].cut.windows)).targets != IGNORED).sum())]
            share = (targets[:n][from_plain] != IGNORED).sum() / from_plain.sum()
            assert share == pytest.approx(counted[0] / sources[1].cut.windows, rel=0.2)


def test_inspect_shows_the_share_and_marks_what_is_left_out_and_verify_reads_it(tokenized, capsys):
    assert llmtrain(["inspect", "pairs.u16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    counts = sum(content()[1])
    assert any(f"{counts:,} tokens count ({counts / len(content()[1]):.2%})" in line for line in lines)
    first = next(number for number, line in enumerate(lines) if line.startswith("document 1"))
    read, learned = lines[first : first + 2]
    assert json.loads(read.partition("[")[2].removesuffix("]")) == PAIRS[0][0]
    assert json.loads(learned.strip()).startswith(PAIRS[0][1]) and "[" not in learned
    assert llmtrain(["verify", "pairs.u16"]) == 0
    assert "ids, loss mask, manifest and document index are sound" in capsys.readouterr().out
    assert llmtrain(["inspect", "pairs.u16.mask"]) == 2
