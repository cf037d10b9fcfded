"""`llmtrain sweep`."""

from pathlib import Path
from typing import Any, get_args

import click

from llmtrain.benchmark.config import Shape, SweepConfig, SweepRow, TimingConfig
from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.cli.presets import preset_path
from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.storage.errors import InternalError, UsageError
from llmtrain.storage.manifest import read_toml

EPILOG = """Example:

    llmtrain sweep --config sweep-cpu --device cpu
"""

TABLES = {"sweep", "timing", "model", "rows"}
ROW_KEYS = {"name", "batch_size", "seq_len", "accumulate", "model", "checkpoint_activations"}


def rows_from(tables: dict[str, Any], path: Path) -> list[SweepRow]:
    """The rows of a sweep's TOML file: [model] holds what they share, a row's own `model` what it changes; its
    `checkpoint_activations` stands above that of [timing]."""
    unknown = sorted(set(tables) - TABLES)
    if unknown:
        raise UsageError(f"{path}: unknown table {unknown[0]!r}; known are {', '.join(sorted(TABLES))}")
    if not tables.get("rows"):
        raise UsageError(f"{path}: has no [[rows]]; each needs name, batch_size and seq_len")
    rows = []
    for i, row in enumerate(tables["rows"], 1):
        where = f"{path} row {i}"
        unknown = sorted(set(row) - ROW_KEYS)
        missing = sorted({"name", "batch_size", "seq_len"} - set(row))
        if unknown or missing:
            raise UsageError(f"{where}: unknown key {unknown[0]!r}" if unknown else f"{where}: {missing[0]} is missing")
        shared = {"max_seq_len": row["seq_len"]} | tables.get("model", {})
        model = build(ModelConfig, {}, shared | row.get("model", {}), f"{where} model")
        try:
            shape = Shape(model, row["batch_size"], row["seq_len"], row.get("accumulate", 1))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{where}: {error}") from error
        mode = row.get("checkpoint_activations")
        if mode not in (None, *get_args(CheckpointActivations)):
            known = ", ".join(get_args(CheckpointActivations))
            raise UsageError(f"{where}: checkpoint_activations must be one of {known}, not {mode!r}")
        rows.append(SweepRow(row["name"], shape, mode))
    return rows


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.option(
    "--config", "preset", metavar="FILE|NAME", default="sweep", show_default=True,
    help="TOML file with the rows, or the name of one in configs/.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="Markdown table to write; its JSON goes to data/ beside it.  [default: docs/baseline.md, "
    "docs/baseline-cpu.md on a CPU]",
)  # fmt: skip
@config_options(SweepConfig, TimingConfig)
def command(preset: str, output: Path | None, given: dict[str, Any]) -> None:
    """Measure training throughput and memory over many shapes.

    Every row runs in a process of its own, so that one which runs out of memory is recorded and the sweep goes on.
    """
    config = preset_path(preset, of_sweep=True)
    tables = read_toml(config)
    rows = rows_from(tables, config)
    sweep = build(SweepConfig, given, tables.get("sweep", {}), f"{config} [sweep]")
    timing = build(TimingConfig, given, tables.get("timing", {}), f"{config} [timing]")

    from llmtrain.benchmark.statistics import NOISY_SPREAD
    from llmtrain.benchmark.sweep import run_sweep
    from llmtrain.benchmark.tables import data_path, make_places, sweep_cells, sweep_markdown, write_page
    from llmtrain.training.devices import pick_device

    on_card = pick_device(timing.device).type == "cuda"
    output = output or Path("docs/baseline.md" if on_card else "docs/baseline-cpu.md")
    make_places(output)

    def tell(data: dict[str, Any]) -> None:
        row = data["replicate"] or data["rows"][-1]
        cells = sweep_cells(row)
        unit = " tok/s" if row["status"] == "ok" else ""
        again = " (again)" if data["replicate"] else ""
        click.echo(f"{len(data['rows'])}/{data['planned']}  {cells[0]}{again}: {cells[1]}{unit} {cells[-1]}".rstrip())
        write_page(output, data, sweep_markdown)

    click.echo(
        f"{len(rows)} rows, each given up after {sweep.row_timeout:g} s; ~: its bursts spread over "
        f"{NOISY_SPREAD:.0%}, c: the machine was not idle"
    )
    data = run_sweep(rows, sweep, timing, on_card, tell)
    click.echo(f"wrote {output} and {data_path(output)}")
    failed = [row for row in data["rows"] if row["status"] == "failed"]
    if failed:
        raise InternalError(f"{len(failed)} of {len(rows)} rows failed; {failed[0]['name']}: {failed[0]['reason']}")
