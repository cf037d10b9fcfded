"""Writes docs/commands/: of every command a page with what its `--help` says. `make docs` runs it."""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from llmtrain.cli.main import COMMANDS
from llmtrain.cli.options import help_sections

FOLDER = Path(__file__).parents[1] / "docs" / "commands"

INDEX = """# Commands

What `--help` of each says. `make docs` writes these pages from the commands themselves.

| command | what it does |
|---|---|
"""

CONFIGURED = """
Every option of `llmtrain train` is also a key of the TOML file given with `--config`: the option's name without the
dashes before it and with `_` for those within. The tables of the file are `[model]`, `[data]`, `[optimizer]`,
`[schedule]` and `[run]`, as the headings of [`llmtrain train`](train.md) say. What stands on the command line goes
before the file, and that before the defaults.
"""


def pages() -> dict[str, str]:
    """File name in docs/commands -> what it holds."""
    rows = [f"| [`llmtrain {name}`]({name}.md) | {cell(line)} |\n" for name, (_, line) in COMMANDS.items()]
    found = {"README.md": "".join([INDEX, *rows, CONFIGURED])}
    for name, (module, _) in COMMANDS.items():
        command = importlib.import_module(module).command
        found[f"{name}.md"] = "".join(["[All commands](README.md)\n", *sections(command, name, "#")])
    return found


def sections(command: click.Command, name: str, heading: str) -> Iterator[str]:
    """A command's title, usage, what it does, example and options; of a group those of its commands too."""
    with click.Context(command, info_name=f"llmtrain {name}") as ctx:
        yield f"\n{heading} llmtrain {name}\n"
        yield f"\n    {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}\n"
        yield f"\n{docstring(command.help or '')}\n\n{(command.epilog or '').strip()}\n"
        for title, records in help_sections(command, ctx).items():
            rows = [(name, says) for name, says in records if says and not name.endswith("--help")]
            if rows:
                yield f"\n| {title} | |\n|---|---|\n"
                yield from (f"| `{cell(option)}` | {cell(meaning)} |\n" for option, meaning in rows)
        if isinstance(command, click.Group):
            yield "\n"
            for sub, one in command.commands.items():
                yield f"- [{sub}](#llmtrain-{name}-{sub}): {one.help}\n"
            for sub, one in command.commands.items():
                yield from sections(one, f"{name} {sub}", heading + "#")


def docstring(text: str) -> str:
    """Help as click has it: a docstring, in which \\b marks what is not to be wrapped."""
    return inspect.cleandoc(text).replace("\b\n", "").strip()


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
