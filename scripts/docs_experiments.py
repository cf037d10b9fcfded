"""Writes docs/experiments.md: the questions of scripts/experiments, and the verdicts of those that were done.

`make docs` runs it, and so does scripts/bench/card.py. What has no result.json yet is said to be not measured.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.tables import table
from llmtrain.storage.atomic import write_bytes

ROOT = Path(__file__).parents[1]

HEAD = """# Experiments

Questions that runs of whole models answer, each with replicates: a difference counts where it is larger than theirs,
the floor. [scripts/experiments](../scripts/experiments/README.md) says how they are done, and holds the results.
`scripts/docs_experiments.py` makes this page.
"""


def verdict_cells(found: dict[str, Any]) -> list[str]:
    arms = found["arms"]
    floors = "" if found["floors"] is None else f"{abs(found['floors']):.1f}"
    return [found["name"], arms["b"], arms["a"], f"{found['difference']:+.4f}", floors, found["verdict"]]


def run_cells(name: str, run: dict[str, Any]) -> list[str]:
    curve = run["val_loss"]
    evaluated = []
    for options, lines in run["evaluations"].items():
        losses = ", ".join(f"{line['loss']:.4f}" for line in lines)
        evaluated.append(f"{options.lstrip('-')}: {losses}")
    ends = f"{curve['tokens'][-1] / 1e6:.1f}M", f"{curve['loss'][-1]:.4f}"
    return [name, *ends, "; ".join(evaluated), f"{run['seconds']:.0f}"]


def experiment_lines(folder: Path) -> list[str]:
    lines = [f"## {folder.name}", "", tomllib.loads((folder / "experiment.toml").read_text())["question"], ""]
    source = folder / "result.json"
    if not source.exists():
        command = f"python scripts/experiments/run.py scripts/experiments/{folder.name}"
        return [*lines, f"Not measured yet (`{command}`).", ""]
    result = json.loads(source.read_text())
    where = f"scripts/experiments/{folder.name}/result.json"
    lines += [f"From [{where}](../{where})."]
    if result["missing"]:
        lines[-1] += f" Not done yet: {', '.join(result['missing'])}."
    header = ("question", "change", "against", "difference", "in floors", "verdict")
    cells = [verdict_cells(found) for found in result["comparisons"]]
    lines += ["", *table(header, cells, 3), ""] if cells else [""]
    header = ("run", "tokens", "held-out loss", "evaluated", "s")
    lines += [*table(header, [run_cells(name, run) for name, run in result["runs"].items()]), ""]
    machines: dict[str, list[str]] = {}
    for name, run in result["runs"].items():
        # The time it was taken at differs from run to run, the machine need not.
        of_run = {**run["machine"], "taken": run["machine"]["taken"][:10]}
        machines.setdefault(headline(of_run), []).append(name)
    return [*lines, *(f"- {', '.join(names)}: {line}" for line, names in machines.items()), ""]


def page(folder: Path) -> str:
    lines = [HEAD]
    for plan in sorted(folder.glob("*/experiment.toml")):
        lines += experiment_lines(plan.parent)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    write_bytes(ROOT / "docs" / "experiments.md", page(ROOT / "scripts" / "experiments").encode())
