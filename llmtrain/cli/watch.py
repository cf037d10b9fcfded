"""`llmtrain watch`."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtrain.cli.options import ConfigCommand
from llmtrain.storage.errors import StorageFailure, write_error

if TYPE_CHECKING:
    from rich.text import Text

    from llmtrain.report.state import RunState
    from llmtrain.report.terminal import Terminal

EPILOG = """Example:

    llmtrain watch runs/default
"""

EVERY = 1.0
"""Seconds between two looks at the files."""
SHOWN = 8
"""Of the lines so far, how many are shown."""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show how it stands and end, as is done where the output is no terminal.")
def command(run_dir: Path, once: bool) -> None:
    """Show how a run stands, from its files alone: one of another process, of a service, or one that has ended.

    On a terminal it follows the run until that is finished; Ctrl-C leaves it, and does nothing to the run.
    """
    from llmtrain.report.follow import require_run

    require_run(run_dir)
    try:
        watch(run_dir, once)
    except KeyboardInterrupt:
        pass


def watch(run_dir: Path, once: bool) -> None:
    from llmtrain.report.dashboard import frame
    from llmtrain.report.follow import Lines, look
    from llmtrain.report.state import FINISHED, RunState
    from llmtrain.report.terminal import Terminal

    state, lines = RunState(str(run_dir)), Lines(run_dir / "metrics.jsonl")

    def picture(width: int, height: int, ascii_only: bool) -> "Text":
        return frame(state, width, height, ascii_only=ascii_only)

    terminal, first = Terminal(picture, live=not once), True
    follows = terminal.draws
    try:
        while not terminal.lost:
            anew, new = lines.new()
            if anew:
                state = RunState(str(run_dir))
            take(state, new, terminal, SHOWN if first or anew else len(new))
            look(run_dir, state)
            first = False
            if once or not terminal.draws:
                terminal.print_frame()
                break
            terminal.draw()
            if state.state == FINISHED:
                return
            time.sleep(EVERY)
    finally:
        lines.close()
        terminal.close()
    # What follows a run ends with its terminal; a frame for a file or a pipe is there, or the command has failed.
    if terminal.failure is not None and not follows:
        if isinstance(terminal.failure, BrokenPipeError):  # `| head` has read enough
            raise click.exceptions.Exit(StorageFailure.exit_code)
        raise write_error(terminal.failure, "standard output")


def take(state: "RunState", lines: Iterable[dict[str, Any]], terminal: "Terminal", most: int) -> None:
    """Adds the lines to the state, and shows the last `most` that say something to people."""
    from llmtrain.report.state import said

    words = []
    for line in lines:
        state.add(line)
        if text := said(line):
            words.append(text)
    for text in words[len(words) - min(most, len(words)) :]:
        terminal.line(text)
