"""`llmtrain report`."""

from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.report.config import ReportConfig

EPILOG = """Example:

    llmtrain report runs/adamw runs/muon --output report.html --png figures
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@config_options(ReportConfig)
def command(given: dict[str, Any], runs: tuple[Path, ...]) -> None:
    """Draw runs as one HTML page: their curves, what happened, what differs between them.

    The page opens from a file, on a phone too, and asks nothing of a network. A run may be running, or have crashed.
    """
    config = build(ReportConfig, given)

    from llmtrain.report.figures import write_figures
    from llmtrain.report.page import page
    from llmtrain.report.runs import names_of, read_run
    from llmtrain.report.series import charts_of, draw, mark_end
    from llmtrain.storage import atomic

    read = [read_run(path, name) for path, name in zip(runs, names_of(runs), strict=True)]
    charts, more = charts_of([run.history for run in read])
    drawn = [draw(run.name, run.history, [*charts, *more], config.points) for run in read]
    for run, one in zip(read, drawn, strict=True):
        if run.state in ("failed", "gone"):
            mark_end(one, f"{run.state}: {run.reason}")
    atomic.make_parent(config.output)
    atomic.write_bytes(config.output, page(read, drawn, charts, more).encode(errors="backslashreplace"))
    click.echo(f"{config.output}: {len(charts) + len(more)} charts of {', '.join(run.name for run in read)}")
    if config.png is not None:
        for path in write_figures(config.png, drawn, [*charts, *more], config.png_axis):
            click.echo(str(path))
