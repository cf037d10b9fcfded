"""A signal in every phase of a run: saved, exit code 75, and `--resume` ends in the bits of an undisturbed run."""

import json
import signal
import time

import pytest

from tests.faults.conftest import DWELL, OPTIONS, result

# Phase -> (where it dwells, the step whose checkpoint is there in the end). Micro-step 3n + 1 begins step n + 1.
PHASES = {
    "starting": ("dwell(start, 'start', 1)", 0),
    "evaluating first": ("dwell(step.TrainStep, 'evaluate', 1)", 0),
    "compiling": ("dwell(step.TrainStep, 'micro_step', 1)", 0),
    "warming up": ("dwell(step.TrainStep, 'micro_step', 5)", 1),
    "between the micro-batches of a step": ("dwell(step.TrainStep, 'micro_step', 17)", 5),
    "updating": ("dwell(step.TrainStep, 'optimizer_step', 6)", 6),
    "evaluating": ("dwell(step.TrainStep, 'evaluate', 2)", 3),
    "saving": ("dwell(atomic, 'publish_folder', 1)", 4),
    "evaluating last": ("dwell(step.TrainStep, 'evaluate', 4)", 8),
    "waiting for data": ("batch_stream.FILL_TOKENS = 96\ndwell(batch_stream, 'fill_batch', 6, seconds=1000)", 5),
}
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]


@pytest.mark.parametrize(("phase", "number"), list(zip(PHASES, SIGNALS * 2, strict=True)))
def test_a_signal_in_any_phase_saves_and_ends_with_75_and_no_bit_is_lost(phase, number, here, forks, undisturbed):
    name = f"signal {phase}"  # the folder is shared with other tests
    run_dir, (dwells, saved) = here / name, PHASES[phase]
    process = forks.start(here, name, *OPTIONS, "--run-dir", name, before=DWELL + dwells)
    process.says("HERE")
    if phase == "waiting for data":
        process.says(" step 5/8 ")  # what was made before
    asked = time.monotonic()
    process.send(number)
    assert process.end() == 75, process.err
    assert time.monotonic() - asked < 10
    newest = max(int(p.name.removeprefix("step-")) for p in (run_dir / "checkpoints").glob("step-" + "[0-9]" * 8))
    assert newest == saved or (phase == "saving" and newest > saved)  # training goes on meanwhile
    assert process.err.count("\n") == 1 and f"stopped by {number.name} at step {newest}" in process.err
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", newest, 75)
    assert forks.start(here, name, *OPTIONS, "--run-dir", name).end() == 0
    assert result(run_dir) == undisturbed


def test_a_second_signal_ends_at_once_and_leaves_the_last_checkpoint_whole(here, forks, undisturbed):
    dwells = "dwell(atomic, 'publish_folder', 2, seconds=1000)"
    process = forks.start(here, "twice", *OPTIONS, "--run-dir", "twice", before=DWELL + dwells)
    process.says("HERE")
    process.send(signal.SIGUSR1)
    process.says("SIGUSR1: saves and stops")
    asked = time.monotonic()
    process.send(signal.SIGTERM)
    assert process.end() == 128 + signal.SIGTERM
    assert time.monotonic() - asked < 5
    assert [p.name for p in (here / "twice/checkpoints").glob("step-" + "[0-9]" * 8)] == ["step-00000004"]
    assert forks.start(here, "twice", *OPTIONS, "--run-dir", "twice").end() == 0
    assert result(here / "twice") == undisturbed
