"""`llmtrain plan`."""

import json
import shutil
import sys
import textwrap
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.cli.presets import complete_preset, preset_path
from llmtrain.cli.train import configuration
from llmtrain.training.config import SECTIONS
from llmtrain.training.plan_config import PlanConfig

EPILOG = """Example:

    llmtrain plan --config 102m --card 4090 --total-tokens 2B
"""

LABEL = 12
"""Columns of a line's label."""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.option(
    "--config", "preset", metavar="FILE|NAME", shell_complete=complete_preset,
    help="TOML file with any of the settings, or the name of one in configs/.",
)  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Say all that train says before its first step.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@config_options(PlanConfig, *SECTIONS.values())
def command(given: dict[str, Any], preset: str | None, everything: bool, as_json: bool) -> None:
    """Say what a run will cost before it starts, on a card that need not be here.

    It takes the options of `llmtrain train`, and writes nothing. Token files are opened where they are there.
    """
    config = configuration(given, preset_path(preset) if preset else None, resume=False)
    asked = build(PlanConfig, given)

    from llmtrain.training.forecast import figures, forecast, lines

    found = forecast(config, asked)
    if as_json:
        click.echo(json.dumps(figures(found), indent=1))
        return
    for line in lines(found, everything):
        click.echo(folded(line, LABEL))
    for one in found.suggestions:
        click.echo(folded(f"suggestion  {one.option} {one.text}: {one.why} ({one.source})", LABEL))


def folded(line: str, indent: int) -> str:
    """Within the terminal's width; as it is where nobody's terminal is."""
    if not sys.stdout.isatty():
        return line
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
