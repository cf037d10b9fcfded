"""docs/troubleshooting.md quotes what llmtrain says, and commands and exit codes that it has."""

import ast
import functools
import re
from pathlib import Path

import pytest

from llmtrain.cli.main import cli
from llmtrain.storage import errors
from tests.cli.examples import parse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for block in re.findall(r"(?s)```sh\n(.*?)```", PAGE) for line in block.strip().splitlines()]
QUOTED = [line.strip() for line in re.sub(r"(?s)```.*?```", "", PAGE).splitlines() if line.startswith("    ")]


@functools.cache
def literals() -> set[str]:
    """Every stretch of text in the source: strings, and what stands between the braces of f-strings; no docstrings."""
    found = set()
    for path in (ROOT / "llmtrain").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        }
    return found


def is_said(words: str) -> bool:
    """Whether `words` are part of a literal, or of literals of which one ends where the next begins, as in messages
    that are put together."""
    return any(words in one for one in literals()) or any(
        words[:cut] in ENDS and goes_on(words[cut:]) for cut in range(1, len(words))
    )


def goes_on(words: str) -> bool:
    return words in BEGINS or any(words[:cut] in PIECES and goes_on(words[cut:]) for cut in range(1, len(words)))


# Between two others only what has some letters, or none: from single ones anything can be spelt.
PIECES = {one for one in literals() if len(one) > 2 or not any(letter.isalnum() for letter in one)}
BEGINS = {one[:cut] for one in literals() for cut in range(1, len(one) + 1)}
ENDS = {one[cut:] for one in literals() for cut in range(len(one))}


def test_what_is_quoted_stands_in_the_source():
    assert len(QUOTED) > 20
    for line in QUOTED:
        pieces = [piece.strip(" :,;") for piece in line.removeprefix("llmtrain: error: ").split("...")]
        pieces = [piece for piece in pieces if len(piece) > 3]
        assert max(map(len, pieces)) > 12, line
        for piece in pieces:
            assert is_said(piece), (piece, line)


def test_what_is_not_said_is_seen():
    assert is_said("lower --learning-rate or raise --warmup-steps")
    assert not is_said("lower --learning-rate and raise --warmup-steps")


def test_words_of_the_table_of_ranks_stand_in_the_source():
    table = PAGE[PAGE.index("## torchrun") : PAGE.index("## The machine computes wrong")]
    said = [words for row in re.findall(r"(?m)^\| (`[a-z].*?) \|", table) for words in re.findall(r"`(.*?)`", row)]
    assert len(said) > 3
    for words in said:
        assert is_said(words), words


@pytest.mark.parametrize("line", COMMANDS)
def test_its_commands_are_taken(line: str):
    parse(line)


def test_exit_codes_are_those_of_the_errors():
    codes = {one.exit_code for one in vars(errors).values() if isinstance(one, type) and hasattr(one, "exit_code")}
    for page in ((ROOT / "README.md").read_text(encoding="utf-8"), PAGE):
        text = page[page.index("## Exit codes") :]
        listed = re.findall(r"(?m)^\| (\d+) \|", text[: text.index("\n## ", 1)])
        assert list(map(int, listed)) == sorted({0, *codes})
    assert cli.help is not None
    assert list(map(int, re.findall(r"\d+", cli.help.partition("Exit codes:")[2]))) == sorted({0, *codes})


def test_links_within_the_page_lead_to_its_headings():
    headings = {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"(?m)^## (.*)$", PAGE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= headings
