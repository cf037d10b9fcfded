import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.cli.main import run

CONFIGS = Path(__file__).parents[2] / "configs"
PLAN = ["plan", "--config", str(CONFIGS / "102m.toml"), "--card", "H200", "--total-tokens", "2B"]


def test_a_plan_needs_neither_the_card_nor_the_text(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(PLAN) == 0
    out = capsys.readouterr().out
    assert "model       101,671,680 parameters" in out
    for label in ("step", "run", "schedule", "corpus", "memory", "fits", "tokens", "disk", "cost", "time", "energy"):
        assert re.search(rf"^{label} +\S", out, re.M), label
    assert "suggestion  --learning-rate" in out and "arXiv 2503.04715" in out
    assert not re.search("^activations", out, re.M) and not list(tmp_path.iterdir())
    assert run([*PLAN, "--all"]) == 0
    assert re.search(r"^activations 20.40 GiB", capsys.readouterr().out, re.M)


def test_the_options_of_train_lie_over_the_configuration(capsys: pytest.CaptureFixture):
    assert run([*PLAN, "--batch-size", "auto", "--global-batch-size", "512", "--n-layers", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["sequences"] == 512 and found["step"]["batch_size"] == 512
    parameters = found["parameters"]["total"]
    assert parameters < 101_671_680 and found["disk"]["checkpoint"] == 12 * parameters
    assert {"memory", "largest_batch_size", "flops", "time", "energy", "sources", "suggestions"} <= found.keys()


def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture):
    for more, said in (
        (["--card", "H300"], "known are B200, H200"),
        (["--mfu", "0"], "mfu must be above 0"),
        (["--mfu", "0.4", "--measured", "run"], "both say how fast"),
        (["--ranks", "0"], "ranks must be 1 or more"),
        (["--total-steps", "5"], "give one"),
    ):
        assert run([*PLAN, *more]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert run([*PLAN, "--measured", "nowhere.json"]) == 66


def test_on_a_terminal_it_fits_a_screen():
    """24 rows of 100 columns, what is suggested included."""
    mine, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "100", "LINES": "30", "PYTHONPATH": str(CONFIGS.parent)}
    process = subprocess.Popen([sys.executable, "-m", "llmtrain", *PLAN], stdout=theirs, env=environment)
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        said += piece
    assert process.wait(60) == 0
    os.close(mine)
    rows = said.decode().splitlines()
    assert len(rows) <= 28 and max(map(len, rows)) <= 100
    assert all(row[:12].strip() or row.startswith(" " * 12) for row in rows)
