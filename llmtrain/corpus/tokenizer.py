"""The tokenizer: text to ids and back, and how a byte-level BPE one is trained.

A tokenizer file is that of the `tokenizers` library. It is loaded without its added tokens, so the text "<|endoftext|>"
in a document is ordinary text, and without what would make ids depend on anything but the text: truncation, padding,
templates and dropout.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llmtrain.corpus.config import MAX_VOCAB_SIZE, U16_VOCAB_SIZE
from llmtrain.storage.errors import BadData, read_error

EOS = "<|endoftext|>"

# What end-of-text is called in the tokenizers of others, in the order in which it is looked for.
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")

# Characters that the trainer gets at once: it needs about 156 bytes of memory for each.
BATCH_CHARS = 1 << 16


class Tokenizer:
    """Text to ids and back. `load` makes one from a file."""

    vocab_size: int
    """One more than the highest id, added tokens included."""
    eos_id: int
    sha256: str
    """Of the file's bytes."""
    file: str
    """The path that it was loaded from."""
    data: bytes
    """The file's bytes."""
    added_ids: set[int]
    byte_level: bool
    """Whether the characters of its tokens stand for bytes."""
    can_cut: bool
    """Whether its splitting is one of which it is known where it always cuts."""
    splitting: str | None
    """Whose splitting it is, where it is known: "gpt2", "llama3" (GPT-4's too) or "qwen2"."""
    plain: str
    """The file's text without added tokens and what else would make ids depend on more than the text."""

    def __init__(self, data: bytes, file: str) -> None:
        """From the bytes of a tokenizer file; `file` is for messages and the manifest. Raises BadData."""
        self.file, self.data = file, data
        self.sha256 = hashlib.sha256(data).hexdigest()
        spec = _parse(data, file)
        self.plain = _plain(spec)
        added = {str(token["content"]): int(token["id"]) for token in spec["added_tokens"]}
        vocab = self.vocab
        highest = max(chain(vocab.values(), added.values()), default=-1)
        self.vocab_size = highest + 1
        eos_id = next((ids[name] for name in EOS_NAMES for ids in (added, vocab) if name in ids), None)
        if eos_id is None:
            raise BadData(f"{file}: the tokenizer has no end-of-text token such as {EOS}: name another tokenizer")
        self.eos_id = eos_id
        self.added_ids = set(added.values())
        self.byte_level = '"ByteLevel"' in json.dumps(spec.get("decoder"))
        self.can_cut = _cuts_are_known(spec)
        self.splitting = _splitting(spec)

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        # A worker with another engine has no use for it, and it takes a third of a second to build.
        return _build(self.plain, self.file)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token to id, added tokens excluded unless the vocabulary itself holds them."""
        return self._library.get_vocab()

    def facts(self) -> dict[str, Any]:
        """What was found out of the file but its bytes, as JSON takes it: enough for another process to encode."""
        known = ("file", "sha256", "vocab_size", "eos_id", "byte_level", "can_cut", "splitting", "plain")
        return {name: getattr(self, name) for name in known} | {"added_ids": sorted(self.added_ids)}

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> "Tokenizer":
        """The tokenizer whose `facts` these are, without `data`; the file is not read and the library not built."""
        tokenizer = cls.__new__(cls)
        tokenizer.__dict__.update(facts | {"added_ids": set(facts["added_ids"])})
        return tokenizer

    @property
    def id_type(self) -> str:
        """What holds its ids in a token file, one of token_manifest.ID_TYPES. Raises BadData where none does."""
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise BadData(
                f"{self.file}: a vocabulary of {self.vocab_size} does not fit a token file, whose ids end at "
                f"{MAX_VOCAB_SIZE - 1}: name a tokenizer of at most {MAX_VOCAB_SIZE} tokens"
            )
        return "uint16" if self.vocab_size <= U16_VOCAB_SIZE else "uint32"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without any special token."""
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token(self, number: int) -> str:
        """The token of an id, as it stands in the file. Raises KeyError."""
        added = {int(token["id"]): str(token["content"]) for token in json.loads(self.data).get("added_tokens", [])}
        return added[number] if number in added else {known: text for text, known in self.vocab.items()}[number]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 come as U+FFFD, special tokens as their text."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in the file `path`. Raises InputMissing, BadData."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        hint = "check the path, or make one with `llmtrain train-tokenizer`"
        raise read_error(error, path, hint) from error
    return Tokenizer(data, os.fspath(path))


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text that each id stands for, (vocab_size,) int64; 0 for EOS and whatever no text is turned into."""
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    for token, number in tokenizer.vocab.items():
        if tokenizer.byte_level:
            sizes[number] = len(token)  # a character of such a vocabulary stands for one byte
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            sizes[number] = 1
        else:
            sizes[number] = len(token.replace("\u2581", " ").encode())
    sizes[[*tokenizer.added_ids, tokenizer.eos_id]] = 0
    return sizes


def train(texts: Iterable[str], vocab_size: int, *, progress: bool = False) -> bytes:
    """The file of a byte-level BPE tokenizer with GPT-2's splitting, learnt from `texts`; EOS has id 0.

    Equal texts give equal bytes. Few texts give fewer than `vocab_size` tokens.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        # All 256 bytes, also those that the texts lack: no text is without ids.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    library.train_from_iterator(pieces(texts), trainer)
    return library.to_str(pretty=True).encode()


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """`texts` with the long ones cut after a line, for the trainer, whose memory grows with the longest."""
    for text in texts:
        start = 0
        while len(text) - start > BATCH_CHARS:
            end = text.rfind("\n", start, start + BATCH_CHARS) + 1 or start + BATCH_CHARS
            yield text[start:end]
            start = end
        yield text[start:]


def _parse(data: bytes, file: str) -> dict[str, Any]:
    """The tokenizer's description; only what this module reads is checked, the rest is for the library to refuse."""
    try:
        spec = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(file, f"no JSON, {error}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise _bad(file, "it holds no model")
    added = spec.setdefault("added_tokens", [])
    if not isinstance(added, list) or not all(map(_is_added_token, added)):
        raise _bad(file, "added_tokens is no list of {id, content}")
    return spec


def _is_added_token(token: Any) -> bool:
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        return False
    return type(token.get("id")) is int and token["id"] >= 0


def _plain(spec: dict[str, Any]) -> str:
    plain = spec | {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    plain["model"] = spec["model"] | ({"dropout": None} if "dropout" in spec["model"] else {})
    return json.dumps(plain)


def _build(plain: str, file: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(plain)
    except BaseException as error:
        # The library's panics are no Exceptions.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise _bad(file, str(error)) from error


def _bad(file: str, why: str) -> BadData:
    return BadData(f"{file}: no tokenizer file that can be read ({why}): make one with `llmtrain train-tokenizer`")


# The patterns of GPT-4, Llama 3 and Qwen 2; GPT-2's is ByteLevel's own.
_PATTERNS = {
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": name
    for digits, name in (("", "qwen2"), ("{1,3}", "llama3"))
}


def _cuts_are_known(spec: dict[str, Any]) -> bool:
    """Whether the splitting is byte-level with a known pattern."""
    splitter = spec.get("pre_tokenizer") or {}
    steps = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    kinds = {step.get("type") for step in steps}
    if spec.get("normalizer") is not None or "ByteLevel" not in kinds or kinds - {"ByteLevel", "Digits", "Split"}:
        return False
    splits = [step for step in steps if step["type"] == "Split"]
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    if any(step.get("add_prefix_space", True) for step in levels):
        return False
    if splits:
        return all(
            (step.get("pattern") or {}).get("Regex") in _PATTERNS
            and step.get("behavior") == "Isolated"
            and not step.get("invert")
            for step in splits
        )
    return all(step.get("use_regex", True) for step in levels)


def _splitting(spec: dict[str, Any]) -> str | None:
    """Whose splitting it is; None where it is none of those known. Qwen 2 composes characters first (NFC)."""
    splitter = spec.get("pre_tokenizer") or {}
    steps = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    normalizer = (spec.get("normalizer") or {}).get("type")
    if [step.get("type") for step in steps] == ["ByteLevel"] and normalizer is None:
        return "gpt2" if steps[0].get("use_regex", True) and not steps[0].get("add_prefix_space", True) else None
    if [step.get("type") for step in steps] == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        name = _PATTERNS.get((steps[0].get("pattern") or {}).get("Regex", ""))
        return name if normalizer is None or (normalizer == "NFC" and name == "qwen2") else None
    return None
