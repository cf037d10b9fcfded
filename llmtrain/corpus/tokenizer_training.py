"""A tokenizer learnt from text files: the work of `train-tokenizer`."""

import time
from collections.abc import Iterator
from contextlib import closing

from tqdm import tqdm

from llmtrain.corpus import tokenizer
from llmtrain.corpus.config import TokenizerConfig
from llmtrain.corpus.documents import INVALID_UTF8, bad_data, falls_within, plural
from llmtrain.corpus.inputs import TEXT, Input, find_inputs, refuse_to_overwrite, shown, total_size
from llmtrain.corpus.reading import read_documents
from llmtrain.corpus.streams import Damage, Progress
from llmtrain.storage.atomic import write_bytes
from llmtrain.storage.errors import BadData

# How much of how many inputs is read to learn how much text the corpus holds: a second's work.
PROBED_FILES = 8
PROBED_BYTES = 16 << 20


def train_tokenizer(config: TokenizerConfig) -> None:
    """Writes the tokenizer that `config` asks for and prints what it was learnt from.

    Raises InputMissing, BadData, CannotCreate, StorageFailure.
    """
    begin = time.perf_counter()
    refuse_to_overwrite(config.inputs, [config.output])
    files = find_inputs(config.inputs, [config.output], config.format, config.text_field)
    total = total_size(files)
    counts = {"documents": 0, "bytes": 0, "left out": 0}
    # A bar where stderr is a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="reading") as bar:
        texts = _texts(config, files, _share(config, files), counts, bar)
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
    if vocab_size < config.vocab_size:
        print(f"The text has too few different words for {config.vocab_size:,} tokens; {vocab_size:,} were found.")


def _share(config: TokenizerConfig, files: list[Input]) -> float:
    """The share of the documents whose text comes to about the bytes that were asked for; 1 where the size of an input
    is not known. How much text is in stored bytes is found out by reading the beginnings of some inputs."""
    total = total_size(files)
    if total is None or total == 0:
        return 1.0
    if all(one.format == TEXT and not one.compression for one in files):
        return config.sample_bytes / total
    stored = text = 0
    for number in range(0, len(files), -(-len(files) // PROBED_FILES)):
        progress, found = Progress(), 0
        with closing(read_documents(files[number : number + 1], config.reading, progress)) as documents:
            for document in documents:
                found += len(document.data)
                if found >= PROBED_BYTES:
                    break
        stored, text = stored + progress.bytes, text + found
    return config.sample_bytes / max(total * text / max(stored, 1), 1)


def _texts(
    config: TokenizerConfig, files: list[Input], share: float, counts: dict[str, int], bar: tqdm
) -> Iterator[str]:
    """The text of the documents in the `share`; what was seen is added to `counts`."""
    progress = Progress()
    unknown = total_size(files) is None
    for document in read_documents(files, config.reading, progress):
        bar.update(progress.bytes - bar.n)
        if unknown and counts["bytes"] >= config.sample_bytes:
            break
        if not document.damage and not falls_within(document.data, share):
            continue
        damage, offset = document.damage, 0
        try:
            text = document.data.decode()
        except UnicodeDecodeError as error:
            damage, offset = Damage(INVALID_UTF8, ""), error.start
        if damage:
            input = files[document.file]
            if config.on_bad == "error":
                raise bad_data(input, input.place(document.place, offset), damage)
            counts["left out"] += 1
            continue
        counts["documents"] += 1
        counts["bytes"] += len(document.data)
        yield text
