"""`llmtrain compare`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.report.config import CompareConfig
from llmtrain.storage.atomic import json_bytes
from llmtrain.storage.errors import UsageError

EPILOG = """Example:

    llmtrain compare runs/adamw-0 runs/adamw-1 runs/muon --metric val_loss --plot muon.png
"""

RUN = click.Path(path_type=Path)


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.argument("run_a", type=RUN)
@click.argument("run_a2", type=RUN)
@click.argument("run_b", type=RUN)
@config_options(CompareConfig)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def command(given: dict[str, Any], run_a: Path, run_a2: Path, run_b: Path, as_json: bool) -> None:
    """Say whether RUN_B is better or worse than RUN_A, or that it cannot be told.

    RUN_A2 is RUN_A once more, or with another seed: what those two differ by is what a difference has to exceed. The
    losses of all runs are averaged over the same blocks of tokens at their end.
    """
    config = build(CompareConfig, given)

    from llmtrain.report.compare import along, changes, compare, cut, refuse_no_replicate
    from llmtrain.report.curves import read_curve, read_settings

    of_a = [run_a, run_a2, *config.replicate]
    for i, run in enumerate(of_a):
        if os.path.realpath(run) in map(os.path.realpath, of_a[:i]):
            raise UsageError(f"{run}: is named twice as a run of A: what chance does shows in another run: name that")
    *replicates, changed = [read_curve(run, config.metric, config.source) for run in (*of_a, run_b)]
    settings = read_settings(run_a)
    for run in of_a[1:]:
        refuse_no_replicate(str(run_a), str(run), changes(settings, read_settings(run)))
    result = compare(replicates, changed, config.tail, config.blocks, config.confidence)
    differs = changes(settings, read_settings(run_b))
    blocks = cut([*replicates, changed], config.tail, config.blocks)
    result |= {"metric": config.metric, "changed_settings": differs, "along": along(replicates, changed, blocks)}
    if config.plot is not None:
        from llmtrain.report.plot import draw

        draw(config.plot, replicates, changed, blocks, result)
    if as_json:
        # A setting may be a date or no number, for which JSON has no word.
        plain = json.loads(json.dumps(result, default=str))
        click.echo(json_bytes(plain), nl=False)
        return
    for label, text in lines(result):
        click.echo(f"{label:<12}{text}")


def lines(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is said to people: (label, text)."""
    *replicates, changed = result["runs"]
    for i, run in enumerate(replicates):
        yield f"A{i + 1 if i else ''}", run_text(run)
    yield "B", run_text(changed)
    for name, (before, after) in result["changed_settings"].items():
        yield "changed", f"{name}: {said(before)} in A, {said(after)} in B"
    tail = result["tail"]
    pairing = "paired" if tail["paired"] else "NOT PAIRED (the runs log at different tokens), so batches add noise"
    yield "tail", (
        f"{tail['from']:,.0f} to {tail['to']:,.0f} tokens in {tail['blocks']} blocks, {tail['lines']:,} losses a run, "
        f"{pairing}"
    )
    yield "", f"{'tokens':>15} {'step':>9} {'seconds':>9} {'A':>9} {'B':>9} {'B - A':>9}"
    for row in result["along"]:
        yield "", (
            f"{row['tokens']:>15,.0f} {row['step']:>9,.0f} {row['seconds']:>9,.1f} {row['replicates']:>9.4f} "
            f"{row['changed']:>9.4f} {row['changed'] - row['replicates']:>+9.4f}"
        )
    yield "same loss", same_loss(result["same_loss"])
    yield "gap", (
        f"{result['gap']:.4f} between the means of the replicates, {result['largest_gap']:.4f} in the block where it "
        "is largest"
    )
    floors = f"{abs(result['floors']):.1f} times" if result["floors"] is not None else "above"
    yield "difference", (
        f"{result['difference']:+.4f} nats a token, {floors} the floor of {result['floor']:.4f}, which comes from "
        f"{result['rests_on']} ({result['confidence']:.0%})"
    )
    advice = {
        "better": "better: B has the lower loss",
        "worse": "worse: B has the higher loss",
        "cannot tell": "cannot tell: give another run of A with --replicate, which lowers the floor most"
        if len(replicates) < 3
        else "cannot tell",
    }
    yield "verdict", advice[result["verdict"]]


def run_text(run: dict[str, Any]) -> str:
    return (
        f"{run['name']}: {run['loss']:.4f} over the tail; {run['steps']:,} steps, {run['tokens']:,} tokens, "
        f"{run['seconds']:,.1f} s of training"
    )


def said(value: Any) -> str:
    return "its default" if value is None else str(value)


def same_loss(found: dict[str, Any]) -> str:
    """How much sooner, in words."""
    if found["replicates"] is None:
        return "the two are at no time as low as each other"
    mine, theirs = found["changed"], found["replicates"]
    return (
        f"{found['loss']:.4f}: A after {theirs['tokens']:,.0f} tokens, {theirs['seconds']:,.1f} s; B after "
        f"{mine['tokens']:,.0f} tokens, {mine['seconds']:,.1f} s: {found['tokens_ratio']:.2f} times fewer tokens, "
        f"{found['seconds_ratio']:.2f} times less time"
    )
