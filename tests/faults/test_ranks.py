"""Runs of several ranks, as real processes over gloo: the same losses as one process, and what becomes of them when a
rank is stopped, dies, freezes, fails or is slow."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.conftest import DWELL

STEPS = 50
OPTIONS = [
    "train", "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8",
    "--d-ff", "48", "--seq-len", "16", "--global-batch-size", "7", "--total-steps", STEPS, "--warmup-steps", "4",
    "--learning-rate", "0.01", "--device", "cpu", "--precision", "fp32", "--log-every", "1", "--checkpoint-every", "20",
    "--val-tokens", "held=val.u16", "--val-every", "25", "--val-windows", "8", "--tokens", "corpus.u16", "--resume",
]  # fmt: skip
# Beats that come soon, so that silence is seen soon; and what one rank alone does.
SOON = DWELL + """
import os
from llmtrain.training import watch
watch.BEAT = 0.1
rank = int(os.environ["RANK"])
"""


def lines(run_dir: Path, kind: str) -> list[dict]:
    told = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in told if line["kind"] == kind]


def losses(run_dir: Path) -> dict[tuple, float]:
    """All that a run has told, by where it stood."""
    trained = {(x["step"], "train"): x["lm_loss"] for x in lines(run_dir, "train")}
    return trained | {(x["step"], x["source"]): x["val_loss"] for x in lines(run_dir, "eval")}


def status(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


@pytest.fixture(scope="module")
def alone(here, forks) -> dict[tuple, float]:
    assert forks.start(here, "alone", *OPTIONS, "--batch-size", "7", "--run-dir", "alone").end() == 0
    return losses(here / "alone")


# Of 7 sequences two ranks have 4 and 3, four ranks 2, 2, 2 and 1; in micro-batches of 4, two of four ranks have none.
@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 4), (4, 1), (4, 4)])
def test_any_number_of_ranks_gives_the_losses_of_one(ranks, batch_size, here, forks, alone):
    name = f"ranks{ranks}x{batch_size}"
    run = forks.start_ranks(here, name, ranks, *OPTIONS, "--batch-size", batch_size, "--run-dir", name)
    assert run.end() == [0] * ranks, [rank.err for rank in run.ranks]
    assert losses(here / name) == pytest.approx(alone, rel=1e-6)
    assert f"device      {ranks} x " in run[0].out and not run[1].out
    assert status(here / name)["state"] == "finished"


FP64 = """
import json, sys, torch
from pathlib import Path
from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import OptimizerConfig, RunConfig
from llmtrain.training.parallel import world_of
from llmtrain.training.devices import pick_device
from llmtrain.training.step import TrainStep
model = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=12)
step = TrainStep.build(model, OptimizerConfig(), batch_size=4, seq_len=12, precision="fp64")
generator, told = torch.Generator().manual_seed(0), []
with world_of(RunConfig(device="cpu"), pick_device) as (world, _):
    step.add_up = None if world.alone else world.add_gradients
    for _ in range(50):
        ids = torch.randint(0, 64, (4, 13), generator=generator)
        # Row i has about 12 / (i + 1) targets, so ranks have very different numbers of them, the last at times none.
        kept = torch.rand(4, 12, generator=generator) < 1 / torch.arange(1, 5)[:, None] ** 2
        targets = torch.where(kept, ids[:, 1:], IGNORED)
        share = 4 // world.size
        mine = slice(world.rank * share, (world.rank + 1) * share)
        full, wanted = torch.zeros(4, 12, dtype=torch.int64), torch.full((4, 12), IGNORED)
        full[:share], wanted[:share] = ids[mine, :-1], targets[mine]
        step.micro_step(full, wanted, first=True)
        step.optimizer_step(1e-3)
        told.append(step.metrics())
if world.first:
    Path(f"fp64-{world.size}.json").write_text(json.dumps(told))
sys.exit(0)
"""


def test_in_fp64_ranks_with_unequal_numbers_of_targets_agree_to_ten_digits(here, forks):
    told = {}
    for ranks in (1, 2, 4):
        assert forks.start_ranks(here, "fp64", ranks, before=FP64).end() == [0] * ranks
        told[ranks] = json.loads((here / f"fp64-{ranks}.json").read_text())
    assert told[1][-1]["lm_loss"] < told[1][0]["lm_loss"]
    for ranks in (2, 4):
        for one, many in zip(told[1], told[ranks], strict=True):
            assert many == pytest.approx(one, rel=1e-10)


def test_a_run_goes_on_with_another_number_of_ranks_and_one_that_is_told_to_stop_stops_all(here, forks, alone):
    options = (*OPTIONS, "--batch-size", "2", "--run-dir", "sizes")
    for ranks, at in ((4, 12), (2, 24), (1, 35)):  # the second right before an evaluation
        told = ranks - 1
        run = forks.start_ranks(here, "sizes", ranks, *options, before=SOON)
        run[0].says(f" step {at}/{STEPS} ")
        run[told].send(signal.SIGTERM)
        assert run.end() == [75] + [0] * (ranks - 1), [rank.err for rank in run.ranks]
        now = status(here / "sizes")
        assert now["state"] == "stopped" and at <= now["step"] < 50 and now["exit_code"] == 75
        by = f"SIGTERM, which rank {told} on .* got," if told else "SIGTERM"
        assert re.search(f"{by} at step {now['step']} of", run[0].err)
    run = forks.start_ranks(here, "sizes", 4, *options)
    assert run.end() == [0] * 4, [rank.err for rank in run.ranks]
    assert losses(here / "sizes") == pytest.approx(alone, rel=1e-6)
    assert {x["attempt"] for x in lines(here / "sizes", "train")} == {1, 2, 3, 4}


DWELLS = "if rank == 1: dwell(step.TrainStep, 'micro_step', 40, 100)\n"
FAILS = """
from llmtrain.storage.errors import StorageFailure
update, calls = step.TrainStep.optimizer_step, [0]
def fails(self, lr):
    calls[0] += 1
    if rank == 1 and calls[0] == 40:
        print("HERE", flush=True)
        raise StorageFailure("its disk is gone")
    update(self, lr)
step.TrainStep.optimizer_step = fails
"""
ENDS = {
    "dies": (DWELLS, "has died"),
    "freezes": (DWELLS, "has (given no sign of life|not gone on) for"),
    "hangs": (DWELLS, "has not gone on for"),
    "fails": (FAILS, "has failed: its disk is gone"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_rank_that_is_lost_is_named_and_the_run_goes_on_from_its_checkpoint(what, here, forks, alone):
    does, words = ENDS[what]
    options = (*OPTIONS, "--batch-size", "4", "--run-dir", what)
    run = forks.start_ranks(here, what, 2, *options, "--rank-timeout", "1.5", before=SOON + does)
    run[1].says("HERE")
    began = time.monotonic()
    if what in ("dies", "freezes"):
        run[1].send(signal.SIGKILL if what == "dies" else signal.SIGSTOP)
    if what == "freezes":
        while Path(f"/proc/{run[0].pid}").exists() and time.monotonic() - began < 20:
            time.sleep(0.02)
        run[1].send(signal.SIGKILL)  # as torchrun does, 30 seconds after the first has ended
    code, _ = run.end()
    assert code == 69 and time.monotonic() - began < 20
    named = rf"rank 1 on \S+ \(process {run[1].pid}, log .*rank-00001.log\).* {words}"
    assert re.search(named, run[0].err) and run[0].err.count("\n") == 1, run[0].err
    now = status(here / what)
    assert now["state"] == "failed" and re.search(words, now["reason"])
    assert forks.start_ranks(here, what, 2, *options).end() == [0, 0]
    assert losses(here / what) == pytest.approx(alone, rel=1e-6)


def test_killed_in_the_middle_of_a_save_it_goes_on_from_the_one_before(here, forks, alone):
    options = (*OPTIONS, "--batch-size", "4", "--run-dir", "saving")
    before = SOON + "if rank == 0: dwell(atomic, 'publish_folder', 2, 100)\n"
    run = forks.start_ranks(here, "saving", 2, *options, before=before)
    run[0].says("HERE")
    run[0].send(signal.SIGKILL)
    assert run.end()[1] == 69, run[1].err
    assert [p.name for p in (here / "saving/checkpoints").glob("step-" + "[0-9]" * 8)] == ["step-00000020"]
    assert forks.start_ranks(here, "saving", 2, *options).end() == [0, 0]
    assert losses(here / "saving") == pytest.approx(alone, rel=1e-6)


def test_a_slow_rank_is_named(here, forks):
    slows = """
micro = step.TrainStep.micro_step
def slow(self, *arguments, **named):
    time.sleep(0.1)
    micro(self, *arguments, **named)
if rank == 1: step.TrainStep.micro_step = slow
"""
    options = (*OPTIONS, "--batch-size", "4", "--total-steps", "16", "--run-dir", "slow")
    run = forks.start_ranks(here, "slow", 2, *options, before=SOON + slows)
    assert run.end() == [0, 0]
    said = [x for x in lines(here / "slow", "event") if x["event"] == "slow_rank"]
    assert any("rank 1 on" in event["text"] for event in said) and "is slow" in run[0].out
    trained = lines(here / "slow", "train")[-1]
    assert trained["slowest_rank"] == 1 and trained["slowest_rank_ms"] > 100 > trained["rank_ms"]


def test_torchrun_starts_a_killed_rank_again_and_an_agreed_stop_is_a_success(here, alone):
    (here / "rank.py").write_text("""
import os, signal
from llmtrain.cli.main import main
from llmtrain.training import step

micro, calls = step.TrainStep.micro_step, [0]
first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
def ends(self, *arguments, **named):
    calls[0] += 1
    if os.environ["RANK"] == "1" and calls[0] == (25 if first_attempt else 6):
        os.kill(os.getpid(), signal.SIGKILL if first_attempt else signal.SIGTERM)
    micro(self, *arguments, **named)
step.TrainStep.micro_step = ends
main()
""")
    options = [str(option) for option in OPTIONS if option != "--resume"]  # a restart goes on all the same
    options += ["--batch-size", "4", "--run-dir", "torchrun"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*launcher, "--max-restarts", "1", "rank.py", *options],
        cwd=here, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "starts at step 20 of 50" in done.stdout and "llmtrain: stopped by SIGTERM, which rank 1 on" in done.stderr
    now = status(here / "torchrun")
    assert (now["state"], now["step"], now["exit_code"]) == ("stopped", 28, 75)
    told = losses(here / "torchrun")
    assert told == pytest.approx({at: alone[at] for at in told}, rel=1e-6) and (28, "train") in told
