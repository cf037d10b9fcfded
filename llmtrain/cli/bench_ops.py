"""`llmtrain bench rmsnorm|swiglu|attention|head|gemm`: an op by itself against its peers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llmtrain.benchmark import config
from llmtrain.cli.options import ConfigCommand, build, config_options, of_cpu
from llmtrain.storage.errors import UsageError


def example(words: str) -> str:
    return f"Example:\n\n    llmtrain bench {words}\n"


def show(data: dict[str, Any], markdown: str, output: Path | None) -> None:
    from llmtrain.benchmark.tables import write_table

    click.echo(markdown, nl=False)
    if output is not None:
        write_table(output, data, markdown)


def op_command(name: str, summary: str, shapes: type) -> click.Command:
    """A command that times the cases which `name`_cases of llmtrain.benchmark.ops makes of `shapes`, small ones by
    default on a CPU."""

    @click.command(name, cls=ConfigCommand, help=summary, epilog=example(f"{name} --output {name}.md"))
    @click.option(
        "--output", type=click.Path(path_type=Path), metavar="FILE",
        help="Also write the Markdown there, and its JSON to data/ beside it.",
    )  # fmt: skip
    @config_options(config.OpTimingConfig, shapes)
    def command(given: dict[str, Any], output: Path | None) -> None:
        timing = build(config.OpTimingConfig, given)

        from llmtrain.benchmark import ops
        from llmtrain.benchmark.tables import make_places
        from llmtrain.training.devices import pick_device
        from llmtrain.training.fit import out_of_memory

        device = pick_device(timing.device)
        wanted: Any = build(shapes, given, of_cpu(shapes) if device.type == "cpu" else {})
        make: Callable[..., list] = getattr(ops, f"{name}_cases")
        make_places(output)
        try:
            cases = make(wanted, device)
            data = ops.measure_op(name, cases, timing, tell=lambda line: click.echo(line, err=True))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise UsageError(f"the shapes do not fit the device: take fewer --tokens ({error})") from None
        show(data, ops.op_markdown(data), output)

    return command


COMMANDS = (
    op_command("rmsnorm", "RMSNorm against its peers: error and time.", config.NormShapesConfig),
    op_command("swiglu", "SwiGLU and the rotation of q and k against their peers.", config.SwiGLUShapesConfig),
    op_command("attention", "Attention within documents against its peers.", config.AttentionShapesConfig),
    op_command("head", "The head: loss, both gradients and memory, against its peers.", config.HeadShapesConfig),
    op_command("gemm", "The matrix products of a linear layer against the ceiling.", config.GemmShapesConfig),
)
