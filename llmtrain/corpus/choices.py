"""Multiple-choice questions in JSON Lines, as rows of ids, and what a model's likelihoods say of them.

    {"prompt": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome"], "answer": "Paris"}

A prompt is continued by each choice as they stand. A question is asked as "Question: ...\\nAnswer:", and a space comes
before each choice. `answer` is the number of the right choice from 0, its letter, or its text.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.corpus.order import parse_sources
from llmtrain.corpus.streams import BOM
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.storage.errors import BadData, read_error

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    rows: tuple[tuple[list[int], int], ...]
    """Of each choice the ids of the prompt and its own, and how many are its own."""
    lengths: tuple[int, ...]
    """Characters of each choice, as it stands in the file."""
    answer: int


@dataclass(frozen=True)
class Choices:
    """A file of questions."""

    name: str
    questions: tuple[Question, ...]
    shortened: int
    """Questions whose prompt lost its beginning, to fit."""


def named(spec: str, option: str) -> tuple[str, str]:
    """`[NAME=]PATH` -> (NAME, PATH); the file's name without its endings where none is said. Raises UsageError, which
    names the `option`."""
    ((name, path, _, _),) = parse_sources([spec], option)
    return (name.partition(".")[0] or name) if name == Path(path).name else name, path


def read_choices(spec: str, tokenizer: Tokenizer, max_seq_len: int, option: str = "--choices") -> Choices:
    """The questions of the file `[NAME=]PATH`, tokenized: prompt and choice each by itself. What is beyond
    `max_seq_len` tokens is cut off a prompt's beginning. `option`: what names the file, for messages.

    Raises UsageError, InputMissing, StorageFailure, and BadData naming the line that is no question or that has a
    choice which does not fit.
    """
    name, path = named(spec, option)
    try:
        lines = Path(path).read_bytes().removeprefix(BOM).splitlines()
    except OSError as error:
        raise read_error(error, path) from error
    questions, shortened = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question, cut = _question(json.loads(line.decode()), tokenizer, max_seq_len)
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path}: line {number} is no question ({error}): correct it") from None
        questions.append(question)
        shortened += cut
    if not questions:
        raise BadData(f"{path}: holds no question: name another file")
    return Choices(name, tuple(questions), shortened)


def _question(record: Any, tokenizer: Tokenizer, max_seq_len: int) -> tuple[Question, bool]:
    """Raises ValueError saying what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"no object but {type(record).__name__}")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("choices is no list of two texts or more")
    if isinstance(record.get("prompt"), str):
        prompt, before = record["prompt"], ""
    elif isinstance(record.get("question"), str):
        prompt, before = f"Question: {record['question']}\nAnswer:", " "
    else:
        raise ValueError("there is neither a prompt nor a question")
    answer = _answer(record.get("answer"), choices)
    "".join([prompt, *choices]).encode()  # half a surrogate pair is no text: a ValueError
    context, *endings = tokenizer.encode_batch([prompt, *(before + choice for choice in choices)])
    context = context or [tokenizer.eos_id]  # a document begins behind the end of another
    rows, cut = [], False
    for choice, ids in zip(choices, endings, strict=True):
        if not 0 < len(ids) <= max_seq_len:
            raise ValueError(f"the choice {choice[:40]!r} has {len(ids)} tokens, 1 to {max_seq_len} can be read")
        row = [*context, *ids][-(max_seq_len + 1) :]  # the last of them is only a target
        cut |= len(row) < len(context) + len(ids)
        rows.append((row, len(ids)))
    return Question(tuple(rows), tuple(map(len, choices)), answer), cut


def _answer(answer: Any, choices: Sequence[str]) -> int:
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str) and choices.count(answer) == 1:
        return choices.index(answer)
    if isinstance(answer, str) and len(answer) == 1 and answer in LETTERS[: len(choices)]:
        return LETTERS.index(answer)
    raise ValueError(f"answer {answer!r} is none of its {len(choices)} choices by number from 0, letter or text")


def right_answers(questions: Iterable[Question], nats: Sequence[float]) -> tuple[int, int]:
    """How many questions have their likeliest choice right, and how many the one that is likeliest by character; nats:
    of each question's choices, one after the other. Of equal ones the first counts."""
    right = right_by_length = at = 0
    for question in questions:
        of_choices = nats[at : at + len(question.rows)]
        by_length = [of_one / length for of_one, length in zip(of_choices, question.lengths, strict=True)]
        right += of_choices.index(min(of_choices)) == question.answer
        right_by_length += by_length.index(min(by_length)) == question.answer
        at += len(question.rows)
    return right, right_by_length


def accuracies(questions: int, right: int, right_by_length: int) -> dict[str, float]:
    """The shares with their standard errors, sqrt(p (1 - p) / (n - 1)), under the names of metrics.jsonl."""
    figures: dict[str, float] = {"questions": questions}
    for name, count in (("accuracy", right), ("accuracy_norm", right_by_length)):
        share = count / questions
        figures[name] = share
        figures[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(questions - 1, 1))
    return figures
