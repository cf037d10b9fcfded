"""Text as it comes: whole characters, in time, and in sum the decoded text."""

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from llmtrain.corpus.tokenizer import Tokenizer, train
from llmtrain.inference.text_stream import UNFINISHED, TextStream

TEXTS = ["for x in range(10):\n    print(x)\n", "na\u00efve caf\u00e9 \u20ac5 \N{GRINNING FACE} \u4f60\u597d"] * 3


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer(train(TEXTS, 300), "tokenizer.json")


def with_leading_spaces() -> Tokenizer:
    """As Llama's: words carry the space before them, and decoding drops the first."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for piece in ("\u2581", "a", "b", "\u2581a", "\u2581b"):
        vocab[piece] = len(vocab)
    library = tokenizers.Tokenizer(
        models.BPE(vocab, [("\u2581", "a"), ("\u2581", "b")], unk_token="<unk>", byte_fallback=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    library.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(library.to_str().encode(), "tokenizer.json")


@pytest.fixture(scope="module", params=[byte_level, with_leading_spaces])
def tokenizer(request) -> Tokenizer:
    return request.param()


@given(text=st.text())
@settings(deadline=None)
def test_text_comes_in_whole_characters_and_none_is_held_back(tokenizer, text):
    text = text.replace(UNFINISHED, "")
    (ids,) = tokenizer.encode_batch([text])
    stream = TextStream(tokenizer.decode)
    pieces = [stream.push(token) for token in ids]
    assert not any(UNFINISHED in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert stream.flush() == ""


@given(data=st.data())
@settings(deadline=None)
def test_bytes_that_are_no_text_come_out_as_they_decode_in_one(data):
    """A young model gives such ids."""
    tokenizer = byte_level()
    id_ = st.integers(0, tokenizer.vocab_size - 1)
    prompt, ids = data.draw(st.lists(id_, max_size=5)), data.draw(st.lists(id_, max_size=30))
    stream = TextStream(tokenizer.decode, prompt)
    pieces = [stream.push(token) for token in ids]
    whole = tokenizer.decode([*prompt, *ids])
    start = tokenizer.decode(prompt)
    if start.endswith(UNFINISHED):
        return  # a prompt is text, so it does not end within a character
    assert start + "".join(pieces) + stream.flush() == whole


def test_a_character_of_four_bytes_appears_with_its_last(tokenizer):
    table = {token: i for token, i in tokenizer.vocab.items()}
    byte_ids = []
    for byte in "\N{SNOWMAN}x".encode():
        names = [f"<0x{byte:02X}>", *(k for k in table if tokenizer.byte_level and len(k) == 1 and is_byte(k, byte))]
        byte_ids.append(next(table[name] for name in names if name in table))
    stream = TextStream(tokenizer.decode)
    assert [stream.push(token) for token in byte_ids] == ["", "", "\N{SNOWMAN}", "x"]


def is_byte(character: str, byte: int) -> bool:
    """Whether byte-level vocabularies write `byte` as `character`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return character == (chr(byte) if byte in printable else chr(256 + rest.index(byte)))


def test_the_space_between_prompt_and_text_is_kept():
    tokenizer = with_leading_spaces()
    (ids,) = tokenizer.encode_batch(["a b b"])
    stream = TextStream(tokenizer.decode, ids[:1])
    assert [stream.push(token) for token in ids[1:]] == [" b", " b"]
