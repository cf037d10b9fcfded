"""Bytes of documents to ids: what any engine keeps to, where long documents may be cut, and which engine is taken."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers

import llmtrain
from llmtrain.corpus import engine as engine_room
from llmtrain.corpus.engine import GIGATOKEN, TOKENIZERS, Engine, choose_engine, open_engine, pinned_engine, utf8_error
from llmtrain.corpus.tokenizer import _PATTERNS, EOS, Tokenizer, train
from llmtrain.storage.errors import BadData, ConfigMismatch

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(llmtrain.__file__).parents[1])}
CODE = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()


@pytest.fixture(scope="module")
def data() -> bytes:
    return train([CODE], 600)


@pytest.fixture(scope="module", params=[TOKENIZERS, GIGATOKEN])
def engine(data: bytes, request: pytest.FixtureRequest) -> Engine:
    if request.param == GIGATOKEN:
        pytest.importorskip("gigatoken")
    return open_engine(Tokenizer(data, "tokenizer.json"), request.param)


def encode(engine: Engine, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    ids, lengths, bad = engine.encode([text.encode() for text in texts])
    assert not bad
    return np.concatenate(ids) if ids else np.empty(0, np.uint16), lengths


def test_documents_end_with_eos_and_nothing_else_holds_it(engine: Engine):
    texts = ["one", f"two {EOS}", "three\n"]
    ids, lengths = encode(engine, texts)
    assert ids.dtype == np.uint16 and lengths.sum() == len(ids)
    ends = np.cumsum(lengths)
    assert np.flatnonzero(ids == engine.tokenizer.eos_id).tolist() == (ends - 1).tolist()
    assert [engine.tokenizer.decode(part[:-1]) for part in np.split(ids, ends[:-1])] == texts


def test_no_documents_are_no_ids(engine: Engine):
    ids, lengths = encode(engine, [])
    assert len(ids) == len(lengths) == 0


@settings(deadline=None)
@given(texts=st.lists(st.text(), max_size=6))
def test_every_engine_gives_the_ids_of_the_library(engine: Engine, texts: list[str]):
    whole = engine.tokenizer.encode_batch(texts)
    expected = [[*ids, 0] if text else [] for text, ids in zip(texts, whole, strict=True)]
    ids, lengths = encode(engine, texts)
    assert ids.tolist() == sum(expected, []) and lengths.tolist() == list(map(len, expected))


@settings(deadline=None)
@given(documents=st.lists(st.binary(max_size=12), max_size=6), step=st.integers(1, 5))
def test_what_is_no_utf8_is_named_by_its_first_byte_and_leaves_the_others_alone(documents: list[bytes], step: int):
    places = []
    for one in documents:
        try:
            one.decode()
            places.append(None)
        except UnicodeDecodeError as error:
            places.append(error.start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_room, "_STEP", step)
        assert list(map(utf8_error, documents)) == places


def test_a_damaged_document_among_others_has_no_ids(engine: Engine):
    ids, lengths, bad = engine.encode([b"one", b"tw\xff", b"", b"three"])
    assert bad == [(1, 2)] and (lengths > 0).tolist() == [True, False, False, True]
    whole, _ = encode(engine, ["one", "three"])
    assert np.concatenate(ids).tolist() == whole.tolist()


TEXTS = st.lists(st.text(st.sampled_from("ab1 \n\r\t'.,é\u3000\u0085s中文国"), max_size=60), max_size=8)


def splitter(name: str) -> object:
    if name == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(Regex(sorted(_PATTERNS)[int(name)]), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


@pytest.mark.parametrize("name", ["trained", "digits", "0", "1"])
@settings(deadline=None, max_examples=60)
@given(texts=TEXTS, limit=st.integers(1, 12))
def test_long_documents_are_cut_without_a_change_of_ids(data: bytes, name: str, texts: list[str], limit: int):
    if name != "trained":
        library = tokenizers.Tokenizer.from_str(data.decode())
        library.pre_tokenizer = splitter(name)  # type: ignore[assignment]
        data = library.to_str().encode()
    engine = open_engine(Tokenizer(data, "t"), TOKENIZERS)
    assert engine.tokenizer.can_cut
    whole = [[*ids, 0] if text else [] for text, ids in zip(texts, engine.tokenizer.encode_batch(texts), strict=True)]
    engine.piece_bytes = limit
    ids, lengths = encode(engine, texts)
    assert lengths.tolist() == [len(one) for one in whole]
    assert ids.tolist() == sum(whole, [])


def test_a_long_document_is_really_cut(data: bytes):
    engine = open_engine(Tokenizer(data, "t"), TOKENIZERS)
    engine.piece_bytes = 100
    for text in (CODE.encode(), CODE.replace(" ", "").replace("\n", ";").encode(), "中文国家\n".encode() * 500):
        cut = [piece for _, piece, *_ in engine._pieces([text], [0], [])]
        assert b"".join(cut) == text and len(cut) > len(text) / 300


def test_a_tokenizer_with_unknown_splitting_is_not_cut(data: bytes):
    for fields in ({"pre_tokenizer": None}, {"normalizer": {"type": "NFC"}}):
        engine = open_engine(Tokenizer(json.dumps(json.loads(data) | fields).encode(), "t"), TOKENIZERS)
        engine.piece_bytes = 1
        assert len(list(engine._pieces([b"one two three four"], [0], []))) == 1


def word_level(size: int, **more: int) -> Tokenizer:
    vocab = {f"w{i}": i for i in range(size)} | more
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return Tokenizer(library.to_str().encode(), "t")


def test_the_largest_vocabulary_fits():
    ids, _ = encode(open_engine(word_level(65535, **{EOS: 65535}), TOKENIZERS), ["w65534 w1"])
    assert ids.tolist() == [65534, 1, 65535]


def test_ids_that_must_not_occur_are_seen_before_they_are_narrowed(monkeypatch: pytest.MonkeyPatch):
    engine = open_engine(word_level(100, **{EOS: 100}), TOKENIZERS)
    with pytest.raises(BadData, match="end-of-text id 100"):
        encode(engine, [f"w1 {EOS} w2"])  # a whole word of this tokenizer
    monkeypatch.setattr(engine.tokenizer, "encode_batch", lambda texts: [[70000] for _ in texts])
    with pytest.raises(BadData, match="beyond its 101"):
        encode(engine, ["x"])


def test_gigatoken_is_taken_where_its_ids_are_the_same(data: bytes):
    pytest.importorskip("gigatoken")
    engine, why = choose_engine(Tokenizer(data, "t"), "auto", [CODE.encode()])
    assert engine.name == GIGATOKEN and why == ""
    assert choose_engine(Tokenizer(data, "t"), TOKENIZERS, [CODE.encode()])[0].name == TOKENIZERS


def test_other_ids_for_the_probe_are_a_reason_to_take_tokenizers(data: bytes, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("gigatoken")
    ids = engine_room._Gigatoken._ids

    def one_differs(self: Engine, pieces: list[bytes]) -> list[np.ndarray]:
        *others, last = ids(self, pieces)  # type: ignore[arg-type]
        return [*others, np.append(last[:-1], 1)]

    monkeypatch.setattr(engine_room._Gigatoken, "_ids", one_differs)
    engine, why = choose_engine(Tokenizer(data, "t"), "auto", [CODE.encode()])
    assert engine.name == TOKENIZERS and "gives other ids for a probe of this corpus" in why
    with pytest.raises(ConfigMismatch, match="other ids"):
        choose_engine(Tokenizer(data, "t"), "gigatoken", [CODE.encode()])


def test_a_tokenizer_that_gigatoken_does_not_take_is_a_reason_too():
    engine, why = choose_engine(word_level(100, **{EOS: 100}), "auto", [b"w1 w2"])
    assert engine.name == TOKENIZERS and why.startswith("engine: tokenizers ") and "gigatoken" in why


def test_without_gigatoken_the_line_says_how_to_get_it(data: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    monkeypatch.setitem(__import__("sys").modules, "gigatoken.gigatoken_rs", None)
    engine, why = choose_engine(Tokenizer(data, "t"), "auto", [])
    assert engine.name == TOKENIZERS and "pip install 'llmtrain[fast]'" in why


def test_a_pinned_engine_is_that_one_or_refused(data: bytes):
    tokenizer = Tokenizer(data, "t")
    pinned = {"name": TOKENIZERS, "version": tokenizers.__version__}
    assert pinned_engine(tokenizer, pinned, "x.u16", "auto").name == TOKENIZERS
    for other, asked, why in (
        (pinned | {"version": "0.0"}, "auto", "pip install tokenizers==0.0"),
        (pinned, "gigatoken", "leave the option out"),
        ({"name": "magic", "version": "1"}, "auto", "unknown here"),
    ):
        with pytest.raises(ConfigMismatch, match=why):
            pinned_engine(tokenizer, other, "x.u16", asked)


def test_gigatokens_cache_is_dropped_when_it_has_grown(data: bytes, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("gigatoken")
    monkeypatch.setattr(engine_room, "_LOOK_EVERY_BYTES", 1)
    monkeypatch.setattr(engine_room, "_MOST_CACHE_BYTES", -1 << 40)
    engine = open_engine(Tokenizer(data, "t"), GIGATOKEN)
    before = engine._backend  # type: ignore[attr-defined]
    ids, _ = encode(engine, [CODE])
    assert engine._backend is not before  # type: ignore[attr-defined]
    assert ids[:-1].tolist() == engine.tokenizer.encode_batch([CODE])[0]


def test_memory_does_not_grow_with_the_words_that_were_seen(data: bytes, tmp_path: Path):
    pytest.importorskip("gigatoken")
    (tmp_path / "tokenizer.json").write_bytes(data)
    program = """
import random, resource, sys
from llmtrain.corpus.engine import open_engine
from llmtrain.corpus.tokenizer import load
engine, words = open_engine(load(sys.argv[1]), "gigatoken"), random.Random(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(20):
    # Letters only: a digit would end a word.
    text = words.randbytes(1 << 20).hex(" ", 4).translate({48 + i: 103 + i for i in range(10)})
    engine.encode([text.encode()])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")]
    grown = int(subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT).stdout)
    assert grown < 200, f"{grown} MiB"
