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
SHARDS = ["--pipeline-ranks", "2", "--shard-ranks", "2"]
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
    [
        (2, []),
        (4, ["--pipeline-ranks", "2", "--pipeline-schedule", "zero-bubble", "--checkpoint-activations", "full"]),
        (4, SHARDS),
    ],
)
def test_a_pipeline_gives_the_losses_of_one_rank(ranks, more, here, forks, alone):
    name = f"pipeline{ranks}" + "".join(more)
    run = forks.start_ranks(here, name, ranks, *OPTIONS, *PIPELINE, *more, "--run-dir", name)
    assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
    assert losses(here / name) == pytest.approx(alone, rel=1e-6)
    shared = "2 share out the weights of each stage" if more == SHARDS else ""
    assert re.search(rf"pipeline, .*{shared}.* embedding \+ layer.* head.* the dearest has", run[0].out)
    assert not any(rank.out for rank in run.ranks[1:])
    norms = [[x["grad_norm"] for x in lines(here / one, "train")] for one in (name, "alone4")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


# Each rank sees all micro-batches; row i of a step has about 12 / (i + 1) targets, and the last micro-batch is missing
# in steps 0 and 3, whose losses so compare.
FP64 = """
import json, os, sys, torch
from pathlib import Path
from llmtrain.kernels import weight
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
    "bf16": (ModelConfig(**SHAPE), OptimizerConfig(), "none"),
}
MICRO = 4
delivered, dtype_of = set(), weight.gradient_dtype
weight.gradient_dtype = lambda of: delivered.add(dtype_of(of)) or dtype_of(of)

def run(step, rank, ranks, lr, steps):
    told = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 64, (MICRO, 4, 13), generator=generator)
        kept = torch.rand(MICRO, 4, 12, generator=generator) < 1 / torch.arange(1, 4 * MICRO + 1).view(MICRO, 4, 1)
        targets = torch.where(kept, ids[..., 1:], IGNORED)
        mine = list(range(rank, MICRO - (number % 3 == 0), ranks))
        for i, at in enumerate(mine or [0]):  # a rank that has none left has one without targets
            wanted = targets[at] if mine else torch.full_like(targets[at], IGNORED)
            step.micro_step(ids[at, :, :-1].contiguous(), wanted, first=i == 0)
        step.optimizer_step(lr)
        told.append(step.metrics())
        if number in (3, 49):
            batches = [(ids[i, :, :-1].contiguous(), targets[i], None) for i in range(rank, MICRO, ranks)]
            sums = step.evaluate(batches)
            told[-1]["nats"], told[-1]["held_out"] = world.totals(device, sums.nats, sums.targets)
    return told

with world_of(RunConfig(device="cpu"), pick_device) as (world, device):
    found = {}
    for steps, shards, copies, name, schedule in json.loads(os.environ["CASES"]):
        model, optimizer, mode = MODELS[name]
        shape = dict(batch_size=4, seq_len=12, precision="fp64" if name not in ("fp8", "bf16") else name)
        shape["checkpoint_activations"] = mode
        if world.alone:
            step, rank, ranks = TrainStep.build(model, optimizer, **shape), 0, 1
        else:
            world.arrange(Grid(world.size // copies // shards, copies, shards), device)
            step = build_step(world, schedule, MICRO // copies // shards, model, optimizer, **shape)
            rank, ranks = world.data_rank, world.data_ranks
        told = run(step, rank, ranks, 1e-2 if shape["precision"] == "fp64" else 1e-3, steps)
        found[f"{name} {schedule} {copies} {shards}"] = told
        assert told == world.from_first(lambda: told), "ranks do not tell the same"
    assert delivered <= {torch.float64, torch.float32}, "gradients of gathered weights are narrow"
    if world.first:
        Path(f"stages-{world.size}.json").write_text(json.dumps(found))
sys.exit(0)
"""


Case = tuple[int, int, int, str, str]
"""Steps, ranks that share out a stage, copies of the model, which model, schedule."""


def in_fp64(here, forks, ranks: int, cases: list[Case]) -> dict[str, list[dict]]:
    """What each step of each case tells, all in the same processes."""
    run = forks.start_ranks(here, "stages-fp64", ranks, before=FP64, CASES=json.dumps(cases))
    assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
    told = json.loads((here / f"stages-{ranks}.json").read_text())
    assert len(told) == len(cases)
    return told


@pytest.fixture(scope="module")
def one_in_fp64(here, forks) -> dict[str, list[dict]]:
    lengths = {"tied": 50, "untied": 50, "experts": 20, "deep": 4, "muon": 4, "fp8": 4, "bf16": 4}
    cases = [(steps, 1, 1, name, "") for name, steps in lengths.items()]
    return {case.split()[0]: steps for case, steps in in_fp64(here, forks, 1, cases).items()}


SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
CASES: dict[int, list[Case]] = {
    2: [
        *((steps, 1, 1, model, schedule) for model, steps in (("tied", 50), ("untied", 4)) for schedule in SCHEDULES),
        (4, 1, 1, "experts", "interleaved"), (4, 1, 1, "experts", "zero-bubble"), (4, 1, 1, "muon", "1f1b"),
        (4, 1, 1, "muon", "zero-bubble"), (4, 1, 1, "fp8", "interleaved"), (4, 1, 1, "fp8", "zero-bubble"),
    ],
    4: [
        *((4, 1, 1, "deep", schedule) for schedule in SCHEDULES),
        *((4, 1, 2, "tied", schedule) for schedule in SCHEDULES), (4, 1, 2, "untied", "interleaved"),
        (50, 2, 1, "tied", "1f1b"), (50, 2, 1, "untied", "interleaved"), (20, 2, 1, "experts", "interleaved"),
        (4, 2, 1, "untied", "1f1b"), (4, 2, 1, "tied", "interleaved"), (4, 2, 1, "experts", "1f1b"),
        (4, 2, 1, "muon", "1f1b"), (4, 2, 1, "muon", "interleaved"), (4, 2, 1, "bf16", "1f1b"),
        (4, 2, 1, "bf16", "interleaved"),
    ],
    8: [(4, 2, 2, "tied", "interleaved")],
}  # fmt: skip
# The products of each row are rounded to bf16 as one rank rounds them, the rest is summed in FP32.
TOLERANCES = {"fp8": 0.02, "bf16": 1e-5}


@pytest.mark.parametrize("ranks", CASES)
def test_in_fp64_every_schedule_agrees_to_ten_digits(ranks, here, forks, one_in_fp64):
    for case, steps in in_fp64(here, forks, ranks, CASES[ranks]).items():
        name, *_ = case.split()
        expected = one_in_fp64[name][: len(steps)]
        assert expected[3]["lm_loss"] < expected[0]["lm_loss"]
        for at, (one, many) in enumerate(zip(expected, steps, strict=True)):
            assert many == pytest.approx(one, rel=TOLERANCES.get(name, 1e-10)), (case, at)


def test_a_run_goes_from_any_way_to_share_it_to_any_other(here, forks, alone):
    options = (*OPTIONS, "--run-dir", "stages")
    ddp, zero_bubble = ["--parallel", "ddp"], [*PIPELINE, "--pipeline-schedule", "zero-bubble"]
    shards, interleaved = ([*PIPELINE, *SHARDS, "--pipeline-schedule", name] for name in ("1f1b", "interleaved"))
    ways = [([], 1), (zero_bubble, 2), (ddp, 2), (interleaved, 4), ([], 1), (ddp, 2), (shards, 4)]
    at = 0
    for more, ranks in ways:
        run = forks.start_ranks(here, "stages", ranks, *options, *more, before=SOON)
        if more == shards:
            assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
            continue
        run[0].says(f" step {at + 3}/{STEPS} ", AT_MOST)
        run[ranks - 1].send(signal.SIGTERM)
        assert run.end(AT_MOST) == [75] + [0] * (ranks - 1), [rank.err for rank in run.ranks]
        at = status(here / "stages")["step"]
        newest = checkpoint.folder_of(here / "stages", at)
        names = sorted(path.name for path in newest.glob("model*.safetensors"))
        parts = [f"model-{i + 1:05d}-of-{ranks:05d}.safetensors" for i in range(ranks)]
        assert names == (parts if "pipeline" in more else ["model.safetensors"])
        if more == interleaved:  # the tied matrix is there once, from the ranks of the first stage
            tied = checkpoint.read_manifest(newest)["tensors"]["model"]["embedding.weight"]
            assert [piece["file"] for piece in tied] == parts[:2]
    assert losses(here / "stages") == pytest.approx(alone, rel=1e-6)
    assert {x["attempt"] for x in lines(here / "stages", "train")} == set(range(1, len(ways) + 1))


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


@pytest.mark.parametrize(
    ("what", "lost", "ranks"),
    [("dies", 0, 2), ("dies", 1, 2), ("freezes", 1, 2), ("hangs", 0, 2), ("dies", 3, 4), ("hangs", 3, 4)],
)
def test_a_stage_that_is_lost_is_named_in_a_line_and_the_run_goes_on(what, lost, ranks, here, forks, alone):
    name, goes_on = f"stage-{what}-{lost}", what == "dies" and lost > 0
    options = (*OPTIONS, *PIPELINE, "--pipeline-schedule", "interleaved", "--run-dir", name)
    options += tuple(SHARDS) if ranks == 4 else ()
    # Of two pipelines each has half of the micro-batches.
    before = SOON + DWELLS.format(lost, IN_STEP[31 if goes_on else 6] * 2 // ranks)
    run = forks.start_ranks(here, name, ranks, *options, "--rank-timeout", 3 * ranks // 2, before=before)
    run[lost].says("HERE", AT_MOST)
    if what != "hangs":
        run[lost].send(signal.SIGKILL if what == "dies" else signal.SIGSTOP)
    ends = time.monotonic() + AT_MOST
    others = [rank for rank in range(ranks) if rank != lost]
    while what == "freezes" and run[others[0]].alive() and time.monotonic() < ends:
        time.sleep(0.02)
    if what == "freezes":
        run[lost].kill()  # as torchrun does, 30 seconds after the first has ended
    codes = run.end(AT_MOST)
    assert all(codes[rank] == 69 for rank in others), [rank.err for rank in run.ranks]
    # One that hangs may be the first to say so itself.
    said = "".join(rank.err for rank in run.ranks if what == "hangs" or rank is not run[lost])
    named = rf"rank {lost} on \S+ \(process {run[lost].pid}, log .*\) ({LOST[what]})"
    # There is no launcher here: rank 0 holds the store that ranks speak through.
    assert re.search(f"{named}|{STORE_GONE}" if (what, lost) == ("dies", 0) else named, said), said
    assert all(rank.err.count("\n") <= 1 for rank in run.ranks), said
    if goes_on:
        run = forks.start_ranks(here, name, ranks, *options)
        assert run.end(AT_MOST) == [0] * ranks and "starts at step 20 of 50" in run[0].out
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
    ("ranks", "more", "words"),
    [
        (2, ["--batch-size", "8"], "1f1b: a step of 1 micro-batches does not fill 2 stages"),
        (2, ["--batch-size", "auto"], "--batch-size auto"),
        (2, ["--pipeline-ranks", "3"], "--pipeline-ranks 3 does not divide"),
        (2, ["--n-layers", "2", "--pipeline-schedule", "zero-bubble"], "4 stages are more than the model's 2 layers"),
        (4, [*SHARDS, "--pipeline-schedule", "zero-bubble"], "too late for --shard-ranks 2"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused_in_a_line(ranks, more, words, here, forks):
    run = forks.start_ranks(here, "refused", ranks, *OPTIONS, *PIPELINE, *more, "--run-dir", "refused")
    # Rank 0 looks first, and here the store that ranks speak through ends with it.
    assert run.end(AT_MOST)[0] == 2, [rank.err for rank in run.ranks]
    assert words in run[0].err and len(run[0].err.splitlines()) == 1
    assert not (here / "refused").exists()
