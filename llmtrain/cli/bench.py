"""`llmtrain bench`: a training step by itself, in figures and by kernel, and the ops that it is made of."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtrain.benchmark.config import BatchesConfig, Shape, TimingConfig
from llmtrain.cli.bench_ops import COMMANDS as OP_COMMANDS
from llmtrain.cli.bench_ops import example, show
from llmtrain.cli.options import ConfigCommand, ExampleGroup, build, config_options
from llmtrain.cli.presets import complete_preset, preset_path
from llmtrain.cli.train import read_tables
from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import UsageError
from llmtrain.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig, of_auto

if TYPE_CHECKING:
    from llmtrain.corpus.order import SampleOrder

RANDOM_VOCABULARY = 16384
"""Where neither the command line nor the configuration says one: there is no token file to ask."""


@click.group(cls=ExampleGroup, invoke_without_command=True, epilog=example("step --config 102m"))
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure a training step, or one of its ops."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for op_command in OP_COMMANDS:
    command.add_command(op_command)


def step_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that `bench step` and `bench profile` share."""
    size = click.IntRange(min=1)
    options: list[Callable[..., Any]] = [
        click.option(
            "--config", "preset", default="31m", show_default=True, metavar="FILE|NAME",
            shell_complete=complete_preset,
            help="TOML file of a run, or the name of one in configs/.",
        ),
        click.option("--batch-size", type=size, help="Sequences of a micro-batch.  [default: the configuration's]"),
        click.option("--seq-len", type=size, help="Tokens of a sequence.  [default: the configuration's]"),
        click.option("--accumulate", type=size, help="Micro-batches of a step.  [default: the configuration's]"),
        click.option(
            "--output", type=click.Path(path_type=Path), metavar="FILE",
            help="Also write the Markdown there, and its JSON to data/ beside it.",
        ),
        config_options(BatchesConfig, TimingConfig, ModelConfig),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def what_to_run(
    given: dict[str, Any], preset: str, batch_size: int | None, seq_len: int | None, accumulate: int | None
) -> "tuple[Shape, TimingConfig, SampleOrder | None]":
    """The shape, the method and, unless tokens are random, the samples, from the command line over the configuration of
    a run."""
    path = preset_path(preset)
    tables = read_tables(path)
    model = build(ModelConfig, given, tables["model"], f"{path} [model]")
    data = build(DataConfig, {}, tables["data"], f"{path} [data]")
    run = build(RunConfig, {}, tables["run"], f"{path} [run]")
    names = ("precision", "fp8_scaling", "device", "attention", "checkpoint_activations")
    shared = {name: getattr(run, name) for name in names}
    timing = build(TimingConfig, shared | given)
    seq_len = seq_len or data.seq_len
    batch_size = batch_size or of_auto(run.batch_size)
    accumulate = accumulate or max(1, run.sequences_per_step // batch_size)
    model = replace(model, max_seq_len=max(model.max_seq_len, seq_len))
    tokens, order = build(BatchesConfig, given).tokens, None
    if tokens:
        data = replace(data, tokens=tokens, seq_len=seq_len)
        model, order = open_corpus(TrainConfig(model, data, OptimizerConfig(), ScheduleConfig(), run))
    model = replace(model, vocab_size=model.vocab_size or RANDOM_VOCABULARY)
    try:
        return Shape(model, batch_size, seq_len, accumulate), timing, order
    except ValueError as error:
        raise UsageError(str(error)) from error


def open_corpus(config: TrainConfig) -> "tuple[ModelConfig, SampleOrder]":
    """The model, with the corpus' vocabulary where it names none, and the samples as a run with `config` takes them."""
    from llmtrain.training.run_corpus import open_sources, order_of_run, resolve

    sources = open_sources(config.data.tokens, config.model.vocab_size, config.data.eos_id)
    config = resolve(config, sources)
    return config.model, order_of_run(config, sources)


def measured(measure: Callable[..., dict[str, Any]], shape: Shape, timing: TimingConfig) -> dict[str, Any]:
    """What `measure` returns, and the machine before it; UsageError where the shape does not fit the device."""
    from llmtrain.benchmark.machine import describe
    from llmtrain.training.devices import pick_device
    from llmtrain.training.fit import out_of_memory

    machine = describe(pick_device(timing.device).type == "cuda")
    try:
        return {"machine": machine} | measure(shape, timing)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        reason = str(error).split("\n")[0]
        raise UsageError(f"batch {shape} does not fit the device: lower --batch-size or --seq-len ({reason})") from None


@command.command(cls=ConfigCommand, epilog=example("step --config 102m --batch-size 64"))
@step_options
def step(given: dict[str, Any], preset: str, output: Path | None, **batch: int | None) -> None:
    """Tokens per second, MFU and peak memory of a training step."""
    shape, timing, order = what_to_run(given, preset, **batch)

    from llmtrain.benchmark.step import measure_step
    from llmtrain.benchmark.step_tables import step_markdown
    from llmtrain.benchmark.tables import make_places

    make_places(output)
    told = functools.partial(measure_step, tell=functools.partial(click.echo, err=True), order=order)
    data = {"kind": "step"} | measured(told, shape, timing)
    show(data, step_markdown(data), output)


@command.command(cls=ConfigCommand, epilog=example("profile --config 31m"))
@step_options
def profile(given: dict[str, Any], preset: str, output: Path | None, **batch: int | None) -> None:
    """A training step by kernel, and by part against its floor."""
    shape, timing, order = what_to_run(given, preset, **batch)

    from llmtrain.benchmark.profile import profile_step
    from llmtrain.benchmark.step_tables import profile_markdown
    from llmtrain.benchmark.tables import make_places

    make_places(output)
    data = measured(functools.partial(profile_step, order=order), shape, timing)
    show(data, profile_markdown(data), output)
