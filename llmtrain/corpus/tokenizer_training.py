"""A tokenizer learnt from text files: the work of `train-tokenizer`."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from tqdm import tqdm

from llmtrain.corpus import tokenizer
from llmtrain.corpus.config import TokenizerConfig
from llmtrain.corpus.documents import INVALID_UTF8, bad_data, falls_within
from llmtrain.corpus.inputs import TEXT, Input, find_inputs, refuse_to_overwrite, shown, split_weight, total_size
from llmtrain.corpus.reading import read_documents
from llmtrain.corpus.streams import Damage, Progress
from llmtrain.storage.atomic import make_place, write_bytes
from llmtrain.storage.errors import BadData, UsageError
from llmtrain.storage.units import plural

# How much of how many inputs is read to learn how much text the corpus holds: a second's work.
PROBED_FILES = 8
PROBED_BYTES = 16 << 20

# A document longer than this is chosen from piece by piece, or a few long ones would decide what a sample is.
PIECE_BYTES = 1 << 16


def train_tokenizer(config: TokenizerConfig) -> None:
    """Writes the tokenizer that `config` asks for and prints what it was learnt from.

    Raises InputMissing, BadData, CannotCreate, StorageFailure.
    """
    begin = time.perf_counter()
    parts = parts_of(config)
    files = [one for part in parts for one in part.files]
    total = total_size(files)
    make_place(config.output)
    counts = {"documents": 0, "bytes": 0, "left out": 0}
    # A bar where stderr is a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="reading") as bar:
        texts = _texts(config, parts, files, counts, bar)
        data = tokenizer.train(texts, config.vocab_size)
    if not counts["bytes"]:
        raise BadData(f"{', '.join(config.inputs)}: no text to learn from: check what --input names")
    write_bytes(config.output, data)
    vocab_size = tokenizer.load(config.output).vocab_size
    seconds = time.perf_counter() - begin
    print(
        f"{shown(config.output)}: {vocab_size:,} tokens, learnt from {counts['bytes'] / 1e6:,.1f} MB in "
        f"{plural(counts['documents'], 'document')} of {plural(len(files), 'file')} in {seconds:,.1f} s"
        + (f", {plural(counts['left out'], 'document')} left out (damaged)" if counts["left out"] else "")
    )
    for part in parts if len(parts) > 1 else []:
        print(f"  {shown(part.name)}: {part.taken / 1e6:,.1f} MB, {part.taken / counts['bytes']:.1%} of the text")
    if vocab_size < config.vocab_size:
        print(f"The text has too few different words for {config.vocab_size:,} tokens; {vocab_size:,} were found.")


@dataclass
class Part:
    """Inputs of which the same share is taken."""

    name: str
    files: list[Input]
    share: float = 1.0
    """Of its documents, those to learn from; above 1: all."""
    taken: int = 0
    """Bytes of text that were."""


def parts_of(config: TokenizerConfig) -> list[Part]:
    """All inputs as one part, or, where they are weighed, each as one of its own. The sample is then as large as was
    asked for, or as the part allows that is the first to be used up: repeating a part would teach nothing."""
    named = [split_weight(name) for name in config.inputs]
    paths = [path for path, _ in named]
    refuse_to_overwrite(paths, [config.output])
    files = find_inputs(paths, [config.output], config.format, config.text_field)
    if all(weight is None for _, weight in named):
        text = _text_bytes(config, files)
        return [Part("", files, config.sample_bytes / text if text else 1.0)]
    parts = []
    left = dict.fromkeys(files)
    for path in paths:
        mine = [one for one in find_inputs([path], [config.output], config.format) if one in left]
        parts.append(Part(path, mine))
        for one in mine:
            del left[one]
    texts = [_text_bytes(config, part.files) for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not text:
            raise UsageError(f"--input {shown(part.name)}: how much text it holds is not known: leave weights out")
    weights = [1.0 if weight is None else weight for _, weight in named]
    per_weight = min(text / weight for text, weight in zip(texts, weights, strict=True) if text)
    per_weight = min(per_weight, config.sample_bytes / sum(weights))
    for part, text, weight in zip(parts, texts, weights, strict=True):
        part.share = per_weight * weight / (text or 1)
    return parts


def _text_bytes(config: TokenizerConfig, files: list[Input]) -> float | None:
    """About how much text there is; None where the size of an input is not known. How much is in stored bytes is found
    out by reading the beginnings of some inputs."""
    total = total_size(files)
    if total is None or total == 0 or all(one.format == TEXT and not one.compression for one in files):
        return total
    stored = text = 0
    for number in range(0, len(files), -(-len(files) // PROBED_FILES)):
        progress, found = Progress(), 0
        with closing(read_documents(files[number : number + 1], config.reading, progress)) as documents:
            for document in documents:
                found += len(document.data)
                if found >= PROBED_BYTES:
                    break
        stored, text = stored + progress.bytes, text + found
    return total * text / max(stored, 1)


def _texts(
    config: TokenizerConfig, parts: list[Part], files: list[Input], counts: dict[str, int], bar: tqdm
) -> Iterator[str]:
    """The text of the documents in each part's share; what was seen is added to `counts` and to the parts."""
    progress = Progress()
    part_of = [part for part in parts for _ in part.files]
    unknown = total_size(files) is None
    for document in read_documents(files, config.reading, progress):
        bar.update(progress.bytes - bar.n)
        if unknown and counts["bytes"] >= config.sample_bytes:
            break
        part = part_of[document.file]
        damage, offset, before = document.damage, 0, part.taken
        for begin, piece in pieces_of(document.data) if part.share < 1 else [(0, document.data)]:
            if damage or not falls_within(piece, part.share):
                continue
            try:
                text = piece.decode()
            except UnicodeDecodeError as error:
                damage, offset = Damage(INVALID_UTF8, ""), begin + error.start
                break
            part.taken += len(piece)
            yield text
        if damage:
            input = files[document.file]
            if config.on_bad == "error":
                raise bad_data(input, input.place(document.place, offset), damage)
            counts["left out"] += 1
        counts["documents"] += part.taken > before
        counts["bytes"] += part.taken - before


def pieces_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """A document as pieces that end where lines do, with the byte where each begins; a short one is one piece."""
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin + PIECE_BYTES) + 1 or len(data)
        yield begin, data[begin:end]
        begin = end
