"""What can be said to the commands that make a tokenizer and a token file."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llmtrain.corpus.reading import FILE, LINE, Reading

# Ids are stored in two bytes where they fit, else in four.
MAX_VOCAB_SIZE = 1 << 20
U16_VOCAB_SIZE = 1 << 16

MOST_SHARDS = 100_000

# The 256 bytes and the end-of-text token: a byte-level vocabulary can hold nothing less.
MIN_VOCAB_SIZE = 257


def _check_files(inputs: tuple[str, ...], output: Path, document: str, text_field: str | None) -> None:
    if not inputs or not all(inputs):
        raise ValueError(f"inputs = {inputs!r}: name at least one file, folder or glob")
    if not output.name:
        raise ValueError(f"output = '{output}': names no file")
    if text_field == "":
        raise ValueError("text_field = '': must name a field")
    if document not in (FILE, LINE) and (not document or "\n" in document):
        raise ValueError(f"document = {document!r}: must be 'file', 'line' or the text of a separator line")


@dataclass(frozen=True)
class TokenizerConfig:
    """`train-tokenizer`."""

    inputs: tuple[str, ...] = field(default=("data/text",), metadata={"option": "--input", "metavar": "PATH[:WEIGHT]"})
    """Text to learn from: a file, a folder (all below it), a quoted glob (`**` crosses folders), a URL (s3, hf, https)
    or `-`, standard input. Repeatable; with weights (PATH:0.7, PATH:0.3) the sample mixes the inputs so."""

    output: Path = Path("tokenizer.json")
    """Where the tokenizer goes."""

    vocab_size: int = 16384
    """Tokens in the vocabulary, the 256 bytes and <|endoftext|> included; at most 65536."""

    sample_bytes: int = 1_000_000_000
    """Bytes of text to learn from. Of a larger corpus a share is taken, chosen by content: documents, and parts of long
    ones; of standard input what comes first."""

    document: str = FILE
    """What one document of plain text is: `file`, `line`, or the text of a line that separates documents."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the inputs hold. `auto` goes by each name: .jsonl and .ndjson, .parquet; all else is plain text."""

    text_field: str | None = None
    """Field of JSON Lines and Parquet that holds the text (a.b: b of the object a); `text` when not given."""

    on_bad: Literal["error", "skip"] = "error"
    """What damage does (no UTF-8, no JSON, no such field, a torn file): stop the command, or be left out."""

    @property
    def reading(self) -> Reading:
        return Reading(self.document, self.text_field or Reading.text_field)

    def __post_init__(self) -> None:
        _check_files(self.inputs, self.output, self.document, self.text_field)
        if not MIN_VOCAB_SIZE <= self.vocab_size <= U16_VOCAB_SIZE:
            raise ValueError(f"vocab_size = {self.vocab_size}: must be from {MIN_VOCAB_SIZE} to {U16_VOCAB_SIZE}")
        if self.sample_bytes < 1:
            raise ValueError(f"sample_bytes = {self.sample_bytes}: must be at least 1")


@dataclass(frozen=True)
class TokenizeConfig:
    """`tokenize-corpus`."""

    tokenizer: Path = Path("tokenizer.json")
    """The tokenizer, in the form of the tokenizers library; `llmtrain train-tokenizer` makes one."""

    inputs: tuple[str, ...] = field(default=("data/text",), metadata={"option": "--input", "metavar": "PATH"})
    """Text to tokenize: a file, a folder (all below it), a quoted glob (`**` crosses folders), a URL (s3, hf, https)
    or `-`, standard input. Repeatable."""

    output: Path = Path("data/corpus.u16")
    """Where the ids go; the manifest (.json) and the document index (.docs) come to lie beside it. Ids of a tokenizer
    of more than 65,536 tokens take four bytes: name it X.u32."""

    holdout: float = 0.005
    """Share of the documents, chosen by content, to hold out: of X.u16 they go into X.val.u16. 0 holds out none."""

    workers: int | None = None
    """Worker processes; one for each core when not given. The output does not depend on it."""

    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto"
    """What encodes: gigatoken where it is installed and gives the ids of tokenizers on a probe of the corpus."""

    append: bool = False
    """Add the inputs to the token file that is there. Those that its manifest names already are left out."""

    shard: str | None = field(default=None, metadata={"metavar": "I/N"})
    """Tokenize only the I-th (from 1) of N shares of the inputs, into X.I-of-N.u16; `--tokens X.u16` takes all N."""

    dry_run: bool = False
    """Write nothing; say about how many bytes would be written and whether the disk holds them."""

    document: str = FILE
    """What one document of plain text is: `file`, `line`, or the text of a line that separates documents."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the inputs hold. `auto` goes by each name: .jsonl and .ndjson, .parquet; all else is plain text."""

    text_field: str | None = None
    """Field of JSON Lines and Parquet that holds the text (a.b: b of the object a); `text` when not given."""

    prompt_field: str | None = None
    """Fine-tuning data: the field that is only read. It is tokenized by itself, as a prompt is, and is no target."""

    completion_field: str | None = None
    """Fine-tuning data: the field that is learned, with the end of the text; a mask beside the ids says where."""

    on_bad: Literal["error", "skip"] = "error"
    """What damage does (no UTF-8, no JSON, no such field, a torn file): stop the command, or be left out, counted."""

    @property
    def reading(self) -> Reading:
        return Reading(
            self.document, self.text_field or Reading.text_field, self.prompt_field, self.completion_field
        )

    def __post_init__(self) -> None:
        _check_files(self.inputs, self.output, self.document, self.text_field)
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError(
                f"prompt_field = {self.prompt_field!r}, completion_field = {self.completion_field!r}: give both or none"
            )
        if self.completion_field is not None and self.text_field is not None:
            raise ValueError(f"text_field = {self.text_field!r}: leave it out, prompt and completion are the text")
        if "" in (self.prompt_field, self.completion_field):
            raise ValueError("prompt_field and completion_field must name a field")
        if not (math.isfinite(self.holdout) and 0 <= self.holdout < 1):
            raise ValueError(f"holdout = {self.holdout}: must be at least 0 and less than 1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers = {self.workers}: must be at least 1")
        if self.shard is not None:
            number, _, of = self.shard.partition("/")
            # No more digits than MOST_SHARDS has: int() would refuse very many.
            digits = self.shard.isascii() and number.isdecimal() and of.isdecimal() and len(number) <= len(of) <= 6
            if not (digits and 1 <= int(number) <= int(of) <= MOST_SHARDS):
                raise ValueError(
                    f"shard = {self.shard!r}: must be I/N with I from 1 to N, such as 2/8, and N at most {MOST_SHARDS}"
                )
            if self.append:
                raise ValueError("append = True: cannot be with shard: add to the token file of one share by its name")
