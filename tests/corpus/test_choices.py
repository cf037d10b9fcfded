"""Questions and text by kind, out of files: what is asked, what is refused, what the counts say."""

import json
from pathlib import Path

import pytest

from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.corpus.choices import accuracies, read_choices, right_answers
from llmtrain.corpus.kinds import read_text, sums_by_kind
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.storage.errors import BadData, InputMissing, LlmtrainError, UsageError

TEXT = "The capital of France is Paris. Question: what is it?\nAnswer: Rome, Berlin, London"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.train([TEXT] * 3, 300), "tokenizer.json")


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n\n" for record in records))
    return str(path)


PROMPT = {"prompt": "The capital of France is", "choices": [" Rome", " Paris"], "answer": 1}


def test_a_prompt_is_continued_and_a_question_is_asked(tmp_path, tokenizer):
    question = {"question": "what is it?", "choices": ["Rome", "Berlin", "London"], "answer": "B"}
    choices = read_choices(write(tmp_path / "few.jsonl", PROMPT, question), tokenizer, 64)
    assert (choices.name, choices.shortened) == ("few", 0)
    one, two = choices.questions
    assert (one.answer, one.lengths) == (1, (5, 6)) and (two.answer, two.lengths) == (1, (4, 6, 6))
    for question, wanted in (
        (one, [("The capital of France is", " Rome"), ("The capital of France is", " Paris")]),
        (two, [("Question: what is it?\nAnswer:", f" {name}") for name in ("Rome", "Berlin", "London")]),
    ):
        for (ids, count), (prompt, choice) in zip(question.rows, wanted, strict=True):
            assert tokenizer.decode(ids[:-count]) == prompt and tokenizer.decode(ids[-count:]) == choice
            assert ids[:-count] == tokenizer.encode_batch([prompt])[0]


def test_what_does_not_fit_loses_its_beginning_and_an_empty_prompt_is_a_documents_beginning(tmp_path, tokenizer):
    empty = {"prompt": "", "choices": ["a", "b"], "answer": "b"}
    choices = read_choices(f"name={write(tmp_path / 'x', PROMPT, empty)}", tokenizer, 3)
    assert choices.name == "name" and choices.shortened == 1
    assert all(len(ids) <= 4 for question in choices.questions for ids, _ in question.rows)
    assert [ids[0] for ids, _ in choices.questions[1].rows] == [tokenizer.eos_id] * 2
    assert choices.questions[1].answer == 1


@pytest.mark.parametrize(
    "words, change",
    [
        ("neither a prompt nor a question", {"prompt": None}),
        ("choices is no list of two texts", {"choices": [" one"]}),
        ("choices is no list of two texts", {"choices": [" one", ""]}),
        ("answer 2 is none of its 2 choices", {"answer": 2}),
        ("answer True is none", {"answer": True}),
        ("answer 'C' is none", {"answer": "C"}),
        ("has 9 tokens, 1 to 8 can be read", {"choices": [" a", "zzzzzzzzz"]}),
    ],
)
def test_a_line_that_is_no_question_is_named(words, change, tmp_path, tokenizer):
    path = write(tmp_path / "bad.jsonl", PROMPT, PROMPT | change)
    with pytest.raises(BadData, match="bad.jsonl: line 3 is no question") as refused:
        read_choices(path, tokenizer, 8)
    assert words in str(refused.value)


def test_files_that_hold_nothing_to_ask_are_refused(tmp_path, tokenizer):
    for error, content in ((BadData, "\n"), (BadData, "{"), (BadData, "[]\n"), (InputMissing, None)):
        path = tmp_path / "q.jsonl"
        path.unlink(missing_ok=True) if content is None else path.write_text(content)
        with pytest.raises(error, match="q.jsonl"):
            read_choices(str(path), tokenizer, 64)


def test_the_likeliest_answers_as_a_whole_and_by_character(tmp_path, tokenizer):
    questions = read_choices(write(tmp_path / "q", PROMPT, PROMPT, PROMPT | {"answer": 0}), tokenizer, 64).questions
    # As a whole Rome, Paris, Rome; by character (5 and 6) Paris, Paris, Rome.
    assert right_answers(questions, [5.0, 5.5, 6.0, 5.0, 1.0, 9.0]) == (2, 3)
    figures = accuracies(3, 2, 3)
    assert (figures["questions"], figures["accuracy"], figures["accuracy_norm"]) == (3, pytest.approx(2 / 3), 1.0)
    # The sample's standard deviation over the root of n: of 1, 1, 0 it is sqrt(1/3) / sqrt(3).
    assert figures["accuracy_stderr"] == pytest.approx(1 / 3) and figures["accuracy_norm_stderr"] == 0.0
    assert accuracies(1, 1, 0)["accuracy_stderr"] == 0.0


DOCUMENTS = [("news", "The capital"), ("code", "Answer: Rome"), ("news", "Paris. " * 6), ("news", "")]


def test_text_is_cut_by_document_and_kinds_add_up(tmp_path, tokenizer):
    records = [{"kind": kind, "body": text} for kind, text in DOCUMENTS]
    text = read_text(f"held={write(tmp_path / 'a.jsonl', *records)}", tokenizer, 8, "body", "kind")
    assert (text.name, text.kinds) == ("held", ("news", "code"))
    wanted = []
    for kind, body in DOCUMENTS[:3]:
        ids = [tokenizer.eos_id, *tokenizer.encode_batch([body])[0], tokenizer.eos_id]
        wanted += [(["news", "code"].index(kind), ids[i : i + 9]) for i in range(0, len(ids) - 1, 8)]
    assert [(one.kind, one.ids) for one in text.windows] == wanted
    sums = sums_by_kind(2, text.windows, [1.0] * len(text.windows))
    for number, kind in enumerate(text.kinds):
        of_kind = [body for k, body in DOCUMENTS[:3] if k == kind]
        targets = sum(len(tokenizer.encode_batch([body])[0]) + 1 for body in of_kind)
        assert sums[number][1:] == [targets, sum(len(body.encode()) for body in of_kind)]
        assert sums[number][0] == sum(k == number for k, _ in wanted)
    assert text.spread(0) == text.windows and len(text.spread(2)) == 2 and text.spread(2)[0] == text.windows[0]


def test_without_kinds_there_is_one_and_plain_text_will_do(tmp_path, tokenizer):
    (tmp_path / "plain.txt").write_text(TEXT)
    text = read_text(str(tmp_path / "plain.txt"), tokenizer, 64)
    assert (text.name, text.kinds) == ("plain", ()) and {one.kind for one in text.windows} == {0}


@pytest.mark.parametrize(
    "error, words, content, fields",
    [
        (BadData, "no text in field 'kind'", '{"text": "a"}\n', {"kind_field": "kind"}),
        (BadData, "holds no document with text", '{"text": ""}\n', {}),
        (BadData, "not JSON", "{\n", {}),
        (UsageError, "plain text has no fields", None, {"kind_field": "kind"}),
    ],
)
def test_text_that_cannot_be_read_is_named(error, words, content, fields, tmp_path, tokenizer):
    path = tmp_path / ("a.txt" if content is None else "a.jsonl")
    path.write_text(content or "text")
    with pytest.raises(LlmtrainError, match=words) as refused:
        read_text(str(path), tokenizer, 8, **fields)
    assert isinstance(refused.value, error)


def test_a_byte_order_mark_is_dropped_and_half_a_surrogate_pair_is_no_text(tmp_path, tokenizer):
    path = tmp_path / "marked.jsonl"
    path.write_text(json.dumps(PROMPT), encoding="utf-8-sig")
    assert len(read_choices(str(path), tokenizer, 64).questions) == 1
    for change in ({"prompt": "\ud800"}, {"choices": ["a", "\ud800"]}):
        with pytest.raises(BadData, match="line 1 is no question .*surrogates not allowed"):
            read_choices(write(path, {**PROMPT, **change}), tokenizer, 64)
