"""What turns the bytes of documents into ids: `tokenizers`, or gigatoken, about a hundred times as fast, where it is
installed and gives the same ids.

A worker holds one engine; all of a token file, its shards and what is appended come from one and the same. Both are
loaded without added tokens, so that the text of a special token is ordinary text.
"""

import codecs
import ctypes
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any, Literal

import numpy as np
import tokenizers

from llmtrain.corpus.token_manifest import ID_TYPES
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.storage.errors import BadData, ConfigMismatch

TOKENIZERS, GIGATOKEN = "tokenizers", "gigatoken"

# The patterns of GPT-2, GPT-4, Llama 3 and Qwen 2 all cut between an ASCII letter or digit and a space, a newline or a
# punctuation character but the apostrophe, and between a Chinese character and a space or newline; they look at nothing
# before the place where they go on. So the two sides have the ids that they have together.
_SAFE_CUT = re.compile(rb"[0-9A-Za-z](?=[ \n!-&(-/:-@\[-`{-~])|[\xe5-\xe8][\x80-\xbf]{2}(?=[ \n])")

# Bytes that are checked for UTF-8, or searched for a cut, at once.
_STEP = 1 << 20

# What gigatoken's cache may add to the process, and how often that is looked at: 4 MiB of words that were never seen
# add as much again.
_MOST_CACHE_BYTES = 96 << 20
_LOOK_EVERY_BYTES = 4 << 20


class Engine(ABC):
    """Bytes of documents to ids. `piece_bytes` is what the library gets at once of a long document: it needs memory in
    proportion (`tokenizers` about 156 bytes a byte) until the ids are taken."""

    name: str
    version: str
    piece_bytes: int

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.id_type = ID_TYPES[tokenizer.id_type]

    def encode(self, documents: Sequence[bytes]) -> tuple[list[np.ndarray], np.ndarray, list[tuple[int, int]]]:
        """`encode_prompted` without prompts."""
        ids, lengths, _, bad = self.encode_prompted(documents, [0] * len(documents))
        return ids, lengths, bad

    def encode_prompted(
        self, documents: Sequence[bytes], prompts: Sequence[int]
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, list[tuple[int, int]]]:
        """The ids of all documents, each ended by the EOS id, as arrays of `id_type` to be read one after the other;
        the length of each document in ids, int64, 0 where it is empty or bad; how many of those ids are of its prompt,
        which is its first `prompts` bytes and is encoded by itself; and (number, byte) of those that are not UTF-8.
        Raises BadData for an id that must not occur."""
        lengths, of_prompt = np.zeros((2, len(documents)), np.int64)
        bad: list[tuple[int, int]] = []
        parts = []
        eos = np.array([self.tokenizer.eos_id], self.id_type)
        for batch in _batches(self._pieces(documents, prompts, bad), self.piece_bytes):
            numbers, pieces, last, read = zip(*batch, strict=True)
            arrays = self._ids(list(pieces))
            sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
            ended = [array for ids, end in zip(arrays, last, strict=True) for array in ((ids, eos) if end else (ids,))]
            out = np.concatenate(ended, dtype=self.id_type, casting="unsafe")
            if np.count_nonzero(out == eos) != sum(last):
                raise BadData(
                    f"{self.tokenizer.file}: the tokenizer gives its end-of-text id {self.tokenizer.eos_id} for "
                    "ordinary text, so documents could not be told apart: name another tokenizer"
                )
            parts.append(out)
            np.add.at(lengths, list(numbers), sizes + np.array(last))
            if any(read):
                np.add.at(of_prompt, list(numbers), sizes * np.array(read))
        return parts, lengths, of_prompt, bad

    @abstractmethod
    def _ids(self, pieces: list[bytes]) -> list[np.ndarray]:
        """The ids of each piece, of any integer type that holds them. Raises BadData for one beyond the vocabulary."""

    def _pieces(
        self, documents: Sequence[bytes], prompts: Sequence[int], bad: list[tuple[int, int]]
    ) -> Iterator[tuple[int, bytes, bool, bool]]:
        """(number of the document, a piece of it, whether it is the last, whether it is of the prompt) of those that
        hold text."""
        for number, (data, prompt) in enumerate(zip(documents, prompts, strict=True)):
            place = utf8_error(data)
            if place is not None:
                bad.append((number, place))
                continue
            start = 0
            for end in (prompt, len(data)) if prompt else (len(data),):
                while self.tokenizer.can_cut and end - start > self.piece_bytes:
                    cut = _SAFE_CUT.search(data, start + self.piece_bytes - 1, end)
                    if cut is None or cut.end() == end:
                        break
                    yield number, data[start : cut.end()], False, start < prompt
                    start = cut.end()
                if end > start:
                    yield number, data[start:end], end == len(data), start < prompt
                start = end


class _Tokenizers(Engine):
    name, version, piece_bytes = TOKENIZERS, tokenizers.__version__, 1 << 16

    def _ids(self, pieces: list[bytes]) -> list[np.ndarray]:
        lists = self.tokenizer.encode_batch([piece.decode() for piece in pieces])
        # Narrowing would wrap 70000 to 4464 without a word.
        if max(map(max, filter(None, lists)), default=0) >= self.tokenizer.vocab_size:
            raise BadData(
                f"{self.tokenizer.file}: the tokenizer gives ids beyond its {self.tokenizer.vocab_size}: "
                "name another tokenizer"
            )
        return [np.array(ids, np.int64) for ids in lists]


class _Gigatoken(Engine):
    """Its cache of words has no bound, so it is loaded anew when it has grown."""

    name, piece_bytes = GIGATOKEN, 1 << 22

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.version = metadata.version(GIGATOKEN)
        self._load()

    def _load(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._backend: Any = None  # before there is another
        _give_freed_memory_back()
        self._backend = load_hf_json(self.tokenizer.plain)
        if self._backend.vocab_size > self.tokenizer.vocab_size:
            raise ValueError(f"it counts {self._backend.vocab_size} tokens, not {self.tokenizer.vocab_size}")
        self._rss, self._fed = _resident_bytes(), 0

    def _ids(self, pieces: list[bytes]) -> list[np.ndarray]:
        self._fed += sum(map(len, pieces))
        if self._fed >= _LOOK_EVERY_BYTES:
            self._fed = 0
            if _resident_bytes() - self._rss > _MOST_CACHE_BYTES:
                self._load()
        # One by one on this thread: encode_batch would bring in awkward, half a second and 50 MB, and is no faster.
        return [self._backend.encode(piece) for piece in pieces]


ENGINES: dict[str, type[Engine]] = {TOKENIZERS: _Tokenizers, GIGATOKEN: _Gigatoken}


def open_engine(tokenizer: Tokenizer, name: str) -> Engine:
    """The engine of that name. Raises ConfigMismatch where it is not installed or does not take the tokenizer."""
    try:
        return ENGINES[name](tokenizer)
    except BaseException as error:
        raise ConfigMismatch(f"{tokenizer.file}: {_why_not(error)}: give --engine {TOKENIZERS}") from error


def pinned_engine(tokenizer: Tokenizer, pinned: dict[str, str], where: str, asked: str) -> Engine:
    """The engine that made what is at `where`, whose manifest or journal names it. Raises ConfigMismatch where another
    one was `asked` for, or it is not here in that version: ids of two engines are not to be mixed."""
    name, version = pinned.get("name", ""), pinned.get("version", "")
    if asked not in ("auto", name):
        raise ConfigMismatch(f"{where}: was made with --engine {name}, not {asked}: leave the option out")
    if name not in ENGINES:
        raise ConfigMismatch(f"{where}: was made with the engine {name!r}, unknown here: make the token file anew")
    engine = open_engine(tokenizer, name)
    if engine.version != version:
        raise ConfigMismatch(
            f"{where}: was made with {name} {version}, here is {engine.version}: "
            f"pip install {name}=={version}, or make the token file anew"
        )
    return engine


def choose_engine(
    tokenizer: Tokenizer, asked: Literal["auto", "gigatoken", "tokenizers"], probe: Sequence[bytes]
) -> tuple[Engine, str]:
    """The engine that was asked for, or gigatoken where it gives the ids of `tokenizers` for all texts of `probe` and
    some odd ones; and a line that says why where one has to make do with `tokenizers`.

    Raises ConfigMismatch where gigatoken is asked for and cannot be had."""
    slow = _Tokenizers(tokenizer)
    if asked == TOKENIZERS:
        return slow, ""
    try:
        fast = _Gigatoken(tokenizer)
        reason = _difference(slow, fast, [*_ODD, *probe])
    except BaseException as error:  # the library's panics are no Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        reason = _why_not(error)
    if not reason:
        return fast, ""
    if asked == GIGATOKEN:
        raise ConfigMismatch(f"{tokenizer.file}: {reason}: give --engine {TOKENIZERS}")
    return slow, f"engine: {TOKENIZERS} {slow.version}, because {reason}"


# What splits differ on: special tokens as text, runs of whitespace of all kinds, contractions, digits, case, scripts
# without spaces, marks that combine, characters beyond the first plane, controls.
_ODD = [
    text.encode()
    for text in (
        "<|endoftext|>",
        "a<|endoftext|>b <s></s> [EOS]",
        "   x\t\t y \n\n  z\r\n\r\n \u00a0\u3000\u2028w\x0b\x0c\x1c\x85 ",
        "it's I'LL they'Re 'tis ''s don\u2019t O'Neil's",
        "0 12 1234567 3.14 1e-5 \u0663\u0664 \u00bd \u2460 \u216b",
        "camelCase HTTPServer snake_case __init__ x86_64 \u01c5",
        "\u4e2d\u6587\u3002\u65e5\u672c\u8a9e\u3068 \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22",
        "e\u0301 n\u0303 \u0928\u092e\u0938\u094d\u0924\u0947 \u200d\u200b\ufeff",
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001d54f \U00020000",
        "\x00\x01\x7f\ufffd",
        '!!!??? --- ==> /* */ // \\n "\'"',
        " ",
        "\n",
        "\n ",
        "a" * 3000,
        "=" * 500,
        " " * 500 + "x",
        "ab \n" * 400,
    )
]


def _difference(slow: Engine, fast: Engine, texts: Sequence[bytes]) -> str:
    """In words; "" where there is none."""
    parts, lengths, bad = slow.encode(texts)
    others, other_lengths, other_bad = fast.encode(texts)
    ids, other_ids = (np.concatenate(list) if list else np.empty(0, slow.id_type) for list in (parts, others))
    if np.array_equal(ids, other_ids) and np.array_equal(lengths, other_lengths) and bad == other_bad:
        return ""
    return f"{fast.name} {fast.version} gives other ids for a probe of this corpus"


def _why_not(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{GIGATOKEN} is not installed (pip install 'llmtrain[fast]', about a hundred times as fast)"
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{GIGATOKEN} does not take this tokenizer ({line[:200]})"


def utf8_error(data: bytes) -> int | None:
    """The first byte that makes `data` not UTF-8; None where it is. In memory that does not grow with it."""
    if data.isascii():
        return None
    if len(data) <= _STEP:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            return error.start
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(data), _STEP):
        waiting = len(decoder.getstate()[0])
        try:
            decoder.decode(data[begin : begin + _STEP], final=begin + _STEP >= len(data))
        except UnicodeDecodeError as error:
            return begin - waiting + error.start
    return None


_Piece = tuple[int, bytes, bool, bool]


def _batches(items: Iterable[_Piece], most: int) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for item in items:
        if batch and size + len(item[1]) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item[1])
    if batch:
        yield batch


def _give_freed_memory_back() -> None:
    """glibc keeps what was freed in small pieces, and the process would grow by a part of it each time."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
