"""A change against the tree without it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(old: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """trees.py where no card is seen."""
    command = [sys.executable, str(ROOT / "scripts/bench/trees.py"), str(old), *words]
    blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=blind, timeout=300)


def test_each_tree_runs_its_own_code_and_the_gain_stands_beside_the_floor(tmp_path: Path):
    old = tmp_path / "old"
    for name in ("llmtrain", "scripts/bench"):
        shutil.copytree(ROOT / name, old / name, ignore=shutil.ignore_patterns("__pycache__"))
    step = old / "llmtrain/benchmark/step.py"
    step.write_text(step.read_text() + "\nimport time\nold_call = TimedSteps.__call__\n"
                    "TimedSteps.__call__ = lambda self: (time.sleep(0.2), old_call(self))[1]\n")  # fmt: skip
    done = run(old, "--smoke", "--rounds", "2", "--seconds", "0.5", "--output", str(tmp_path / "trees.json"))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "trees.json").read_text())
    (row,) = data["rows"]
    assert row["gain"] > 1 and "floor" in done.stdout  # a step takes milliseconds; 0.2 s more are many times that
    assert {name: len(rates) for name, rates in row["tok_per_s"].items()} == {"new": 2, "new, again": 2, "old": 2}
    assert row["losses"]["new"] == row["losses"]["new, again"] == row["losses"]["old"]


def test_what_is_no_tree_is_said_to_be_none(tmp_path: Path):
    done = run(tmp_path, "--smoke")
    assert done.returncode == 2 and "lacks scripts/bench/peer_arm.py" in done.stderr


def test_without_a_card_there_is_one_line(tmp_path: Path):
    done = run(ROOT)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith("--smoke runs a tiny model on the CPU")
