"""Text to ids and back, and what a tokenizer file may not be."""

import json
import sysconfig
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from llmtrain.corpus import tokenizer as tokenizer_room
from llmtrain.corpus.tokenizer import EOS, Tokenizer, load, pieces, token_bytes, train
from llmtrain.storage.errors import BadData, InputMissing

CODE = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()


@pytest.fixture(scope="module")
def data() -> bytes:
    return train([CODE], 600)


@pytest.fixture(scope="module")
def tokenizer(data: bytes) -> Tokenizer:
    return Tokenizer(data, "tokenizer.json")


def changed(data: bytes, **fields: object) -> bytes:
    return json.dumps(json.loads(data) | fields).encode()


def test_training_gives_the_vocabulary_asked_for_and_equal_bytes_each_time(data: bytes, tokenizer: Tokenizer):
    assert tokenizer.vocab_size == 600 and tokenizer.eos_id == 0
    assert train([CODE], 600) == data


def test_few_texts_give_a_smaller_vocabulary_that_still_holds_every_byte():
    small = Tokenizer(train(["a"], 16384), "tokenizer.json")
    assert small.vocab_size == 257
    text = "".join(map(chr, range(1, 0x800))) + "\N{GRINNING FACE}"
    assert small.decode(small.encode_batch([text])[0]) == text


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


def test_the_text_of_a_special_token_is_ordinary_text(tokenizer: Tokenizer):
    text = f"a{EOS}b {EOS}"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_truncation_padding_templates_and_dropout_of_the_file_change_no_ids(data: bytes, tokenizer: Tokenizer):
    library = tokenizers.Tokenizer.from_str(data.decode())
    library.enable_truncation(3)
    library.enable_padding(length=10)
    library.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{EOS} $A {EOS}", special_tokens=[(EOS, 0)]
    )
    other = json.loads(library.to_str())
    other["model"]["dropout"] = 0.5
    texts = [CODE[:2000], "x"]
    assert Tokenizer(json.dumps(other).encode(), "t").encode_batch(texts) == tokenizer.encode_batch(texts)


@settings(deadline=None)
@given(st.text())
def test_the_bytes_of_a_texts_ids_are_the_texts(tokenizer: Tokenizer, text: str):
    sizes = token_bytes(tokenizer)
    assert sizes.shape == (tokenizer.vocab_size,)
    (ids,) = tokenizer.encode_batch([text])
    assert sizes[ids].sum() == len(text.encode())


def test_bytes_of_tokens_that_are_text_or_single_bytes():
    vocab = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "<0x0A>": 3, "\u00e9": 4}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    library.add_special_tokens(["<unk>", "</s>"])
    assert token_bytes(Tokenizer(library.to_str().encode(), "t")).tolist() == [0, 0, 4, 1, 2]


def test_pieces_for_the_trainer_hold_the_whole_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer_room, "BATCH_CHARS", 10)
    texts = ["", "short", "a line\nand another one\n", "x" * 35]
    assert "".join(pieces(texts)) == "".join(texts)
    assert max(map(len, pieces(texts))) <= 10


def word_level(size: int, **more: int) -> bytes:
    vocab = {f"w{i}": i for i in range(size)} | more
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return library.to_str().encode()


def test_a_vocabulary_of_65536_fits_two_bytes_and_one_more_takes_four():
    assert Tokenizer(word_level(65535, **{EOS: 65535}), "t").id_type == "uint16"
    assert Tokenizer(word_level(65535, **{EOS: 65536}), "t").id_type == "uint32"
    with pytest.raises(BadData, match="1048577 does not fit"):
        assert Tokenizer(word_level(300, **{EOS: 1 << 20}), "t").id_type


def test_an_added_token_counts_for_the_vocabulary(data: bytes):
    added = [json.loads(data)["added_tokens"][0] | {"content": "</s>", "id": 70000}]
    tokenizer = Tokenizer(changed(data, added_tokens=added), "t")
    assert tokenizer.vocab_size == 70001 and tokenizer.eos_id == 0  # <|endoftext|> is in the vocabulary itself


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"model": 3}',
        b'{"model": {"type": "BPE"}}',
        b'{"model": {"type": "Nothing", "vocab": {}}}',
        b'{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [{"content": 3, "id": 1}]}',
        b'{"model": {"type": "BPE", "vocab": {"a": 1}, "merges": [["a", "b"]]}}',
        b"[" * 100_000,
    ],
)
def test_a_broken_tokenizer_is_bad_data_that_names_the_file(tmp_path: Path, broken: bytes):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(broken)
    with pytest.raises(BadData, match=str(path)) as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_a_torn_tokenizer_is_bad_data(tmp_path: Path, data: bytes):
    path = tmp_path / "tokenizer.json"
    for end in range(0, len(data), len(data) // 17):
        path.write_bytes(data[:end])
        with pytest.raises(BadData):
            load(path)


def test_a_tokenizer_without_an_end_of_text_token_is_bad_data():
    with pytest.raises(BadData, match="no end-of-text token"):
        Tokenizer(word_level(10), "t")


def test_a_missing_tokenizer_is_a_missing_input(tmp_path: Path):
    with pytest.raises(InputMissing, match="no such file: .* make one with `llmtrain train-tokenizer`"):
        load(tmp_path / "none.json")


