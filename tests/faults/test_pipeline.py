"""Pipelines of several ranks, as real processes over gloo: the same losses as one process in every schedule, and what
becomes of them when a rank is stopped, dies or hangs."""

import json
import re
import signal
import time

import pytest

from llmtrain.training import checkpoint
from llmtrain.training.watch import STORE_GONE
from tests.faults.forks import Forks
from tests.faults.test_ranks import SOON, lines, losses, status

STEPS = 50
# At a rate of 0.01 this model makes so much of rounding that one rank, its step split otherwise, differs from itself by
# 4e-6 within 50 steps, ddp by 2e-6 and a pipeline by 5e-6; at 0.001 all of them by about 1e-7.
OPTIONS = [
    "train", "--d-model", "32", "--n-layers", "4", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8",
    "--d-ff", "48", "--seq-len", "16", "--batch-size", "2", "--global-batch-size", "8", "--total-steps", STEPS,
    "--warmup-steps", "4", "--learning-rate", "0.001", "--device", "cpu", "--precision", "fp32", "--log-every", "1",
    "--checkpoint-every", "20", "--val-tokens", "held=val.u16", "--val-every", "25", "--val-windows", "12",
    "--tokens", "corpus.u16", "--resume", "--document-mask",
]  # fmt: skip
PIPELINE = ["--parallel", "pipeline"]
AT_MOST = 180
"""Seconds that a run of a few may take where everything else wants the machine too."""


@pytest.fixture(scope="module")
def forks(sharing_forks: Forks) -> Forks:
    return sharing_forks


@pytest.fixture(scope="module")
def alone(here, forks) -> dict[tuple, float]:
    assert forks.start(here, "alone4", *OPTIONS, "--run-dir", "alone4").end(AT_MOST) == 0
    return losses(here / "alone4")


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(2, []), (4, ["--pipeline-ranks", "2", "--pipeline-schedule", "zero-bubble", "--checkpoint-activations", "full"])],
)
def test_a_pipeline_gives_the_losses_of_one_rank(ranks, more, here, forks, alone):
    name = f"pipeline{ranks}" + "".join(more)
    run = forks.start_ranks(here, name, ranks, *OPTIONS, *PIPELINE, *more, "--run-dir", name)
    assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
    assert losses(here / name) == pytest.approx(alone, rel=1e-6)
    assert re.search(r"pipeline, .* embedding \+ layer.* head.* the dearest has", run[0].out) and not run[1].out
    norms = [[x["grad_norm"] for x in lines(here / one, "train")] for one in (name, "alone4")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


# Each rank sees all micro-batches; row i of a step has about 12 / (i + 1) targets, and the last micro-batch is missing
# in steps 0 and 3, whose losses so compare.
FP64 = """
import json, os, sys, torch
from pathlib import Path
from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import OptimizerConfig, RunConfig
from llmtrain.training.devices import pick_device
from llmtrain.training.grid import Grid
from llmtrain.training.parallel import world_of
from llmtrain.training.pipeline import build_step
from llmtrain.training.step import TrainStep

SHAPE = dict(vocab_size=64, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=12)
AGAIN = dict(qk_norm=True, z_loss=1e-3, window=5, global_every=2)
MODELS = {
    "tied": (ModelConfig(**SHAPE), OptimizerConfig(grad_clip=0.5), "none"),
    "deep": (ModelConfig(**SHAPE | dict(n_layers=8)), OptimizerConfig(), "none"),
    "untied": (ModelConfig(**SHAPE, **AGAIN, tie_embeddings=False), OptimizerConfig(), "full"),
    "experts": (ModelConfig(**SHAPE, moe=True, n_experts=4, moe_d_ff=16), OptimizerConfig(), "selective"),
    "muon": (ModelConfig(**SHAPE), OptimizerConfig(optimizer="muon", ema_decay=0.9), "none"),
    "fp8": (ModelConfig(**SHAPE), OptimizerConfig(), "none"),
}
MICRO = 4

def run(step, rank, ranks, lr):
    told = []
    for number in range(4):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 64, (MICRO, 4, 13), generator=generator)
        kept = torch.rand(MICRO, 4, 12, generator=generator) < 1 / torch.arange(1, 4 * MICRO + 1).view(MICRO, 4, 1)
        targets = torch.where(kept, ids[..., 1:], IGNORED)
        mine = list(range(rank, MICRO - (number % 3 == 0), ranks))
        for i, at in enumerate(mine):
            step.micro_step(ids[at, :, :-1].contiguous(), targets[at], first=i == 0)
        step.optimizer_step(lr)
        told.append(step.metrics())
    batches = [(ids[i, :, :-1].contiguous(), targets[i], None) for i in range(rank, MICRO, ranks)]
    sums = step.evaluate(batches)
    told[-1]["nats"], told[-1]["held_out"] = world.totals(device, sums.nats, sums.targets)
    return told

with world_of(RunConfig(device="cpu"), pick_device) as (world, device):
    found = {}
    for copies, name, schedule in json.loads(os.environ["CASES"]):
        model, optimizer, mode = MODELS[name]
        shape = dict(batch_size=4, seq_len=12, precision="fp8" if name == "fp8" else "fp64")
        shape["checkpoint_activations"] = mode
        if world.alone:
            step, rank, ranks = TrainStep.build(model, optimizer, **shape), 0, 1
        else:
            world.arrange(Grid(stages=world.size // copies, copies=copies), device)
            step = build_step(world, schedule, MICRO // copies, model, optimizer, **shape)
            rank, ranks = world.data_rank, world.data_ranks
        told = run(step, rank, ranks, 1e-3 if name == "fp8" else 1e-2)
        found[f"{name} {schedule} {copies}"] = told
        assert told == world.from_first(lambda: told), "ranks do not tell the same"
    if world.first:
        Path(f"stages-{world.size}.json").write_text(json.dumps(found))
sys.exit(0)
"""


def in_fp64(here, forks, ranks: int, cases: list[tuple[int, str, str]]) -> dict[str, list[dict]]:
    """What each step of each case (pipelines, model, schedule) tells, all in the same processes."""
    run = forks.start_ranks(here, "stages-fp64", ranks, before=FP64, CASES=json.dumps(cases))
    assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
    told = json.loads((here / f"stages-{ranks}.json").read_text())
    assert len(told) == len(cases)
    return told


@pytest.fixture(scope="module")
def one_in_fp64(here, forks) -> dict[str, list[dict]]:
    cases = [(1, name, "") for name in ("tied", "deep", "untied", "experts", "muon", "fp8")]
    return {case.split()[0]: steps for case, steps in in_fp64(here, forks, 1, cases).items()}


SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
CASES = {
    2: [
        *((1, model, schedule) for model in ("tied", "untied") for schedule in SCHEDULES),
        (1, "experts", "interleaved"), (1, "experts", "zero-bubble"), (1, "muon", "1f1b"), (1, "muon", "zero-bubble"),
        (1, "fp8", "interleaved"), (1, "fp8", "zero-bubble"),
    ],
    4: [
        *((1, "deep", schedule) for schedule in SCHEDULES), *((2, "tied", schedule) for schedule in SCHEDULES),
        (2, "untied", "interleaved"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ranks", CASES)
def test_in_fp64_every_schedule_agrees_to_ten_digits(ranks, here, forks, one_in_fp64):
    for case, steps in in_fp64(here, forks, ranks, CASES[ranks]).items():
        name, *_ = case.split()
        expected = one_in_fp64[name]
        assert expected[3]["lm_loss"] < expected[0]["lm_loss"]
        for one, many in zip(expected, steps, strict=True):
            assert many == pytest.approx(one, rel=0.02 if name == "fp8" else 1e-10), case


def test_a_run_goes_from_one_rank_to_a_pipeline_to_data_parallel_and_back(here, forks, alone):
    options = (*OPTIONS, "--run-dir", "stages")
    told = [([], 1, 12), (["--parallel", "pipeline", "--pipeline-schedule", "zero-bubble"], 2, 24),
            (["--parallel", "ddp"], 2, 35), (["--parallel", "pipeline", "--pipeline-ranks", "2"], 4, None)]  # fmt: skip
    for more, ranks, at in told:
        run = forks.start_ranks(here, "stages", ranks, *options, *more, before=SOON)
        if at is None:
            assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
            continue
        run[0].says(f" step {at}/{STEPS} ")
        run[ranks - 1].send(signal.SIGTERM)
        assert run.end(AT_MOST) == [75] + [0] * (ranks - 1), [rank.err for rank in run.ranks]
        newest = checkpoint.folder_of(here / "stages", status(here / "stages")["step"])
        names = sorted(path.name for path in newest.glob("model*.safetensors"))
        parts = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
        assert names == (parts if "pipeline" in more else ["model.safetensors"])
    assert losses(here / "stages") == pytest.approx(alone, rel=1e-6)
    assert {x["attempt"] for x in lines(here / "stages", "train")} == {1, 2, 3, 4}


# In the forward of a stage: of each step 8 on a rank, of each evaluation 16.
IN_STEP = {6: 5 * 8 + 16 + 3, 31: 30 * 8 + 2 * 16 + 3}
DWELLS = """
from llmtrain.training import pipeline
watch.BEAT = 0.5  # who waits is told apart from who is frozen by four beats, which may come late on a loaded machine
if rank == {}: dwell(pipeline._Module, 'forward', {}, 100)
"""
LOST = {
    "dies": "has died|has given no sign of life",
    "freezes": "has given no sign of life|is dead or frozen|has not gone on for",
    "hangs": "has not gone on for",
}


@pytest.mark.parametrize(("what", "lost"), [("dies", 0), ("dies", 1), ("freezes", 1), ("hangs", 0)])
def test_a_stage_that_is_lost_is_named_in_a_line_and_the_run_goes_on(what, lost, here, forks, alone):
    name, goes_on = f"stage-{what}-{lost}", (what, lost) == ("dies", 1)
    options = (*OPTIONS, *PIPELINE, "--pipeline-schedule", "interleaved", "--run-dir", name)
    before = SOON + DWELLS.format(lost, IN_STEP[31 if goes_on else 6])
    run = forks.start_ranks(here, name, 2, *options, "--rank-timeout", "3", before=before)
    run[lost].says("HERE", AT_MOST)
    if what != "hangs":
        run[lost].send(signal.SIGKILL if what == "dies" else signal.SIGSTOP)
    ends = time.monotonic() + AT_MOST
    while what == "freezes" and run[1 - lost].alive() and time.monotonic() < ends:
        time.sleep(0.02)
    if what == "freezes":
        run[lost].kill()  # as torchrun does, 30 seconds after the first has ended
    assert run.end(AT_MOST)[1 - lost] == 69, [rank.err for rank in run.ranks]
    # One that hangs may be the first to say so itself.
    said = "".join(rank.err for rank in run.ranks if what == "hangs" or rank is not run[lost])
    named = rf"rank {lost} on \S+ \(process {run[lost].pid}, log .*\) ({LOST[what]})"
    # There is no launcher here: rank 0 holds the store that ranks speak through.
    assert re.search(f"{named}|{STORE_GONE}" if (what, lost) == ("dies", 0) else named, said), said
    assert all(rank.err.count("\n") <= 1 for rank in run.ranks), said
    if goes_on:
        run = forks.start_ranks(here, name, 2, *options)
        assert run.end(AT_MOST) == [0, 0] and "starts at step 20 of 50" in run[0].out
        assert losses(here / name) == pytest.approx(alone, rel=1e-6)


SLOW = """
from llmtrain.model import transformer
from llmtrain.training import pipeline
forward, update, steps = transformer.Block.forward, pipeline.PipelineStep.optimizer_step, [0]
def slow(self, *arguments):
    time.sleep(0.12 if rank == 1 and steps[0] >= 10 else 0.04)
    return forward(self, *arguments)
def counted(self, lr):
    update(self, lr)
    steps[0] += 1
transformer.Block.forward, pipeline.PipelineStep.optimizer_step = slow, counted
"""


def test_a_rank_is_named_that_becomes_slow_and_not_one_with_the_dearer_stage(here, forks):
    options = [*OPTIONS, *PIPELINE, "--n-layers", "3", "--batch-size", "4", "--total-steps", "24"]
    options += ["--run-dir", "slow-stage"]
    run = forks.start_ranks(here, "slow-stage", 2, *options, before=SOON + SLOW)
    assert run.end(AT_MOST) == [0, 0], [rank.err for rank in run.ranks]
    assert "rank 0 embedding + layers 0-1: " in run[0].out and "rank 1 layer 2 + head: " in run[0].out
    said = [event for event in lines(here / "slow-stage", "event") if event["event"] == "slow_rank"]
    assert [event["text"][:10] for event in said] == ["rank 1 on "] and said[0]["step"] > 10, said
    trained = {line["step"]: line for line in lines(here / "slow-stage", "train")}
    # Two micro-batches of a layer and a half.
    assert trained[24]["slowest_rank"] == 1 and trained[24]["slowest_rank_ms"] > 2 * 1.5 * 120, trained[24]
    assert 2 * 1.5 * 40 < trained[10]["slowest_rank_ms"] < 1.5 * trained[10]["rank_ms"], trained[10]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--batch-size", "8"], "1f1b: a step of 1 micro-batches does not fill 2 stages"),
        (["--batch-size", "auto"], "--batch-size auto"),
        (["--pipeline-ranks", "3"], "--pipeline-ranks 3 does not divide"),
        (["--n-layers", "2", "--pipeline-schedule", "zero-bubble"], "4 stages are more than the model's 2 layers"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused_in_a_line(more, words, here, forks):
    run = forks.start_ranks(here, "refused", 2, *OPTIONS, *PIPELINE, *more, "--run-dir", "refused")
    # Rank 0 looks first, and here the store that ranks speak through ends with it.
    assert run.end(AT_MOST)[0] == 2, [rank.err for rank in run.ranks]
    assert words in run[0].err and len(run[0].err.splitlines()) == 1
    assert not (here / "refused").exists()
