"""`llmtrain completion`."""

import click

from llmtrain.cli.main import COMPLETION, cli
from llmtrain.cli.options import ConfigCommand

EPILOG = """Example:

    eval "$(llmtrain completion bash)"
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what makes a shell complete commands, options and file names.

    For every new shell: put the line of the example (with zsh, the same with its name) into ~/.bashrc or ~/.zshrc; for
    fish, llmtrain completion fish > ~/.config/fish/completions/llmtrain.fish.
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "llmtrain", COMPLETION).source())
