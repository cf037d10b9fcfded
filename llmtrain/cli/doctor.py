"""`llmtrain doctor`."""

import json
from typing import Any

import click

from llmtrain.benchmark.doctor import NOTE, OK, WRONG, DoctorConfig, Finding, as_json, examine
from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.storage.errors import LlmtrainError

EPILOG = """Example:

    llmtrain doctor --run-dir runs/default
"""

MARKS = {OK: ("ok", "green"), NOTE: ("note", "yellow"), WRONG: ("WRONG", "red")}


@click.command(cls=ConfigCommand, epilog=EPILOG)
@config_options(DoctorConfig)
@click.option("--json", "print_json", is_flag=True, help="Print everything as one JSON object.")
def command(given: dict[str, Any], print_json: bool) -> None:
    """Say what is right or wrong with this machine, and what to do: driver, torch, Triton, compiler, disk, limits.

    It tries things, for up to a minute: a step of a small model, a kernel, a CUDA graph, a sync of the disk. The exit
    code is 0 where nothing would stop a run, otherwise the one that a run would end with.
    """
    findings = []
    for finding in examine(build(DoctorConfig, given)):
        findings.append(finding)
        if not print_json:
            show(finding)
    if print_json:
        click.echo(json.dumps(as_json(findings), indent=1))
    faults = [finding for finding in findings if finding.verdict == WRONG]
    if faults:
        error = LlmtrainError(
            f"{len(faults)} {'thing' if len(faults) == 1 else 'things'} would stop a run: "
            + "; ".join(f"{one.name}: {one.text}: {one.advice}" for one in faults)
        )
        error.exit_code = faults[0].exit_code
        raise error


def show(finding: Finding) -> None:
    """A line, and one more for what to do."""
    mark, color = MARKS[finding.verdict]
    click.echo(f"{click.style(f'{mark:<6}', fg=color, bold=finding.verdict != OK)}{finding.name:<12}{finding.text}")
    if finding.advice:
        click.echo(f"{'':<18}{click.style('-> ' + finding.advice, dim=finding.verdict == OK)}")
