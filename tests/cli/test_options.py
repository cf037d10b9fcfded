"""Options out of dataclasses: what the command line accepts, what counts as given, what a TOML table may hold."""

import runpy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.storage.errors import UsageError


@dataclass(frozen=True)
class Shape:
    d_model: int = 512
    """Width of the residual stream, in
    features."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = True
    """One matrix for embedding and head."""
    window: int | None = None
    """Attention window in tokens."""

    def __post_init__(self) -> None:
        if self.d_model < 1:
            raise ValueError(f"d_model = {self.d_model} must be at least 1")


@dataclass(frozen=True)
class Data:
    tokenizer: Path
    """Tokenizer file."""
    inputs: tuple[str, ...] = field(default=("data/text",), metadata={"option": "--input", "metavar": "PATH"})
    """What to read."""
    batch_size: int | Literal["auto"] = 8
    """Sequences per device batch."""
    on_bad: Literal["error", "skip"] = "error"
    """What to do with a bad file."""
    resume: bool = False
    """Go on."""


def given_by(args: Sequence[str]) -> dict[str, Any]:
    @click.command()
    @config_options(Shape, Data)
    @click.option("--config")
    def command(given: dict[str, Any], config: str | None) -> dict[str, Any]:
        return given

    return command.main(list(args), standalone_mode=False)


def refusal(args: Sequence[str]) -> str:
    with pytest.raises(click.UsageError) as refused:
        given_by(args)
    return refused.value.format_message()


def test_only_what_stands_on_the_command_line_is_given():
    assert given_by([]) == {}
    assert given_by(["--d-model", "512", "--config", "x"]) == {"d_model": 512}


def test_each_kind_of_field_has_its_option():
    assert given_by(["--rope-theta", "5e5", "--no-tie-embeddings", "--window", "64"]) == {
        "rope_theta": 5e5,
        "tie_embeddings": False,
        "window": 64,
    }
    assert given_by(["--input", "a", "--input", "b"]) == {"inputs": ("a", "b")}
    assert given_by(["--tokenizer", "t.json"]) == {"tokenizer": Path("t.json")}
    assert given_by(["--batch-size", "auto"]) == {"batch_size": "auto"}
    assert given_by(["--batch-size", "16"]) == {"batch_size": 16}
    assert given_by(["--on-bad", "skip", "--resume"]) == {"on_bad": "skip", "resume": True}


def test_a_value_of_the_wrong_type_names_its_option():
    assert "--d-model" in refusal(["--d-model", "wide"])
    assert "--batch-size" in refusal(["--batch-size", "huge"]) and "auto|integer" in refusal(["--batch-size", "huge"])
    assert "--on-bad" in refusal(["--on-bad", "ignore"])


def test_the_command_line_lies_over_the_table_and_that_over_the_defaults():
    table = {"d_model": 256, "window": 128}
    assert build(Shape, {}) == Shape()
    assert build(Shape, {}, table) == Shape(d_model=256, window=128)
    assert build(Shape, {"d_model": 64, "resume": True}, table) == Shape(d_model=64, window=128)


def test_a_table_is_read_as_its_fields_types():
    data = build(Data, {}, {"tokenizer": "t.json", "inputs": ["a", "b"], "batch_size": "auto"})
    assert data == Data(Path("t.json"), ("a", "b"), "auto")
    theta = build(Shape, {}, {"rope_theta": 10000}).rope_theta
    assert (theta, type(theta)) == (10000.0, float)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"d_modle": 512}, ["unknown key 'd_modle'", "d_model"]),
        ({"d_model": "512"}, ["d_model = '512' is not integer"]),
        ({"d_model": 512.0}, ["d_model = 512.0 is not integer"]),
        ({"d_model": True}, ["d_model = True is not integer"]),
        ({"tie_embeddings": 1}, ["tie_embeddings = 1 is not boolean"]),
        ({"d_model": -1}, ["d_model = -1 must be at least 1"]),
    ],
)
def test_a_wrong_table_is_a_usage_error_that_names_file_and_key(table: dict[str, Any], said: list[str]):
    with pytest.raises(UsageError) as refused:
        build(Shape, {}, table, "x.toml [model]")
    assert all(part in str(refused.value) for part in ["x.toml [model]", *said])
    assert "\n" not in str(refused.value)


def test_a_list_in_a_table_must_hold_the_right_type():
    for wrong in ("a", [1], 3):
        with pytest.raises(UsageError, match="inputs = .* is not a list of text"):
            build(Data, {"tokenizer": Path("t")}, {"inputs": wrong}, "x.toml")


def test_a_value_out_of_range_is_one_usage_error():
    with pytest.raises(UsageError, match="^d_model = 0 must be at least 1$"):
        build(Shape, {"d_model": 0})


def test_a_missing_value_is_named_by_its_option():
    with pytest.raises(UsageError, match="missing --tokenizer"):
        build(Data, {})


def test_help_shows_the_doc_line_and_the_default_of_each_field():
    @click.command()
    @config_options(Shape, Data)
    def command(given: dict[str, Any]) -> None: ...

    text = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=200).output.split())
    assert "--d-model INTEGER Width of the residual stream, in features. [default: 512]" in text
    assert "--tie-embeddings / --no-tie-embeddings One matrix for embedding and head. [default: tie-embeddings]" in text
    assert "--window INTEGER Attention window in tokens. --tokenizer" in text
    assert "--input PATH What to read. [default: data/text]" in text
    assert "--batch-size [auto|integer] Sequences per device batch. [default: 8]" in text
    assert text.index("--d-model") < text.index("--rope-theta") < text.index("--tokenizer")


def test_help_has_a_heading_for_each_of_several_dataclasses():
    def headings(*configs: type) -> list[str]:
        @click.command(cls=ConfigCommand)
        @click.option("--config", help="A file.")
        @config_options(*configs)
        def command(given: dict[str, Any], config: str | None) -> None: ...

        lines = CliRunner().invoke(command, ["--help"]).output.splitlines()[1:]
        return [line for line in lines if line and not line.startswith(" ")]

    assert headings(Shape, Data) == ["Options:", "Shape:", "Data:"]
    assert headings(Shape) == ["Options:"]


def test_two_dataclasses_with_one_option_are_refused():
    @dataclass(frozen=True)
    class Other:
        d_model: int = 1
        """Again."""

    with pytest.raises(AssertionError, match="d_model"):
        config_options(Shape, Other)


def test_a_field_without_a_doc_line_is_refused():
    @dataclass(frozen=True)
    class Bare:
        d_model: int = 1

    with pytest.raises(AssertionError, match="d_model has no doc line"):
        config_options(Bare)


def test_the_pages_of_commands_are_what_the_commands_say():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "docs_commands.py"))
    there = {page.name: page.read_text(encoding="utf-8") for page in script["FOLDER"].iterdir()}
    wanted = script["pages"]()
    assert there.keys() == wanted.keys(), "run `make docs` and commit docs/commands"
    differ = [name for name in wanted if there[name] != wanted[name]]
    assert not differ, "run `make docs` and commit docs/commands"
