"""Writes docs/options.md: what every command's help says of its options. `make docs` runs it."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import click

from llmtrain.cli.main import COMMANDS
from llmtrain.cli.options import help_sections

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """# Options of every command

`make docs` writes this page from the fields that the options are made of. A key of a TOML file is the option's name
without the dashes before it and with `_` for those within; the tables of a run's file are `[model]`, `[data]`,
`[optimizer]`, `[schedule]` and `[run]`, as the headings of `llmtrain train` say.
"""


def page() -> str:
    parts = [HEAD]
    for name, (module, line) in COMMANDS.items():
        parts += [f"\n## llmtrain {name}\n\n{line}\n", *tables(importlib.import_module(module).command, name)]
    return "".join(parts)


def tables(command: click.Command, name: str) -> Iterator[str]:
    with click.Context(command, info_name=f"llmtrain {name}") as ctx:
        yield f"\n    {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}\n"
        for heading, records in help_sections(command, ctx).items():
            yield f"\n| {heading} | |\n|---|---|\n"
            for option, meaning in records:
                if not option.endswith("--help"):
                    yield f"| `{cell(option)}` | {cell(meaning)} |\n"
        if isinstance(command, click.Group):
            for sub, subcommand in command.commands.items():
                yield from tables(subcommand, f"{name} {sub}")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
