"""Command lines in help and in docs: whether llmtrain would take them."""

import shlex
from collections.abc import Iterator

import click

from llmtrain.cli.main import cli


def commands(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command, and every command of a group, by its name."""
    with click.Context(group) as ctx:
        for sub in group.list_commands(ctx):
            command = group.get_command(ctx, sub)
            assert command is not None
            yield f"{name}{sub}", command
            if isinstance(command, click.Group):
                yield from commands(command, f"{name}{sub} ")


ALL = dict(commands(cli))


def parse(line: str) -> None:
    """Raises where `line` is no command of llmtrain, or has an option that its command has not."""
    llmtrain, *words = shlex.split(line)
    assert llmtrain == "llmtrain"
    own = next(own for own in (words[:2], words[:1]) if " ".join(own) in ALL)
    ALL[" ".join(own)].make_context("", words[len(own) :])
