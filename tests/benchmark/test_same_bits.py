"""The script that looks for steps that do not give the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmtrain.benchmark.config import Shape

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def same_bits(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import same_bits

    return same_bits


def test_processes_at_once_give_the_bits_of_one_alone(tmp_path):
    output = tmp_path / "same-bits.json"
    command = [sys.executable, str(SCRIPTS / "same_bits.py"), "--smoke", "--processes", "2", "--repeats", "2"]
    done = subprocess.run(
        [*command, "--steps", "3", "--output", str(output)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "6 runs of 3 steps, 18 in all: 0 differ" in done.stdout
    found = json.loads(output.read_text())
    assert found["losses"][2] < found["losses"][0] and len(found["runs"]) == 6


def test_a_bit_that_differs_is_found_with_its_step_and_its_parameters(same_bits):
    steps = same_bits.Steps(Shape(same_bits.SMALL, 2, 32), "fp32", torch.device("cpu"))
    before, _ = steps.run(3)
    again, _ = steps.run(3)
    assert same_bits.first_difference(before.tolist(), again.tolist(), steps.names) is None

    update, taken = steps.timed.step.optimizer_step, []

    def one_bit(lr: float) -> None:
        taken.append(lr)
        if len(taken) == 2:  # of the second step, in the last gradient of the flat buffer
            steps.timed.step.flat.view(steps.timed.step.flat.grad, steps.names[-2]).view(-1)[:1].nextafter_(
                torch.tensor(9.0)
            )
        update(lr)

    steps.timed.step.optimizer_step = one_bit
    wrong, _ = steps.run(3)
    found = same_bits.first_difference(before.tolist(), wrong.tolist(), steps.names)
    assert found is not None and found["step"] == 2 and steps.names[-2] in found["different"]
