"""Runs whose ranks share the model out (--parallel fsdp), as real processes over gloo."""

import hashlib
import json
import re
import signal
import time
from pathlib import Path

import pytest

from llmtrain.training import checkpoint
from llmtrain.training.watch import STORE_GONE
from tests.faults.forks import Forks
from tests.faults.test_ranks import OPTIONS, SOON, alone, lines, losses, status

__all__ = ["alone"]

AT_MOST = 180
"""Seconds that a run of a few may take where everything else wants the machine too."""


@pytest.fixture(scope="module")
def forks(sharing_forks: Forks) -> Forks:
    return sharing_forks


FSDP = (*OPTIONS, "--parallel", "fsdp")


# Of 7 sequences, two ranks have 4 and 3, four ranks 2, 2, 2 and 1; in micro-batches of 4, two of four ranks have none.
@pytest.mark.parametrize(("ranks", "batch_size", "shards"), [(2, 1, 0), (4, 4, 0), (4, 1, 2)])
def test_shards_give_the_losses_of_one_process(ranks, batch_size, shards, here, forks, alone):
    name = f"shards{ranks}x{batch_size}x{shards}"
    options = (*FSDP, "--batch-size", batch_size, "--shard-ranks", shards, "--run-dir", name)
    run = forks.start_ranks(here, name, ranks, *options)
    assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
    assert losses(here / name) == pytest.approx(alone, rel=1e-6)
    copies = ", 2 such copies" if shards else ""
    assert f"fsdp, {shards or ranks} ranks share out the weights{copies}, without CUDA graphs: as asked" in run[0].out
    manifest = checkpoint.read_manifest(checkpoint.folder_of(here / name, 50))
    files = {file for file in manifest["files"] if file.startswith("model-")}
    assert len(files) == (shards or ranks)


ON_EACH = """
import json, sys, torch
from functools import partial
from pathlib import Path
from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.training.config import OptimizerConfig, RunConfig
from llmtrain.training.devices import pick_device
from llmtrain.training.flat import FlatParameters
from llmtrain.training.muon import optimizer_of
from llmtrain.training.grid import Grid
from llmtrain.training.parallel import world_of
from llmtrain.training.sharded import ShardedParameters
from llmtrain.training.step import TrainStep

def told_by(world, shards, model, optimizer, dtype, master, mode="none"):
    transformer = Transformer(model, device="meta")
    transformer.checkpoint_activations = mode
    if world.alone:
        flat = FlatParameters(transformer, "cpu", dtype, master)
    else:
        world.arrange(Grid(copies=world.size // shards, shards=shards), torch.device("cpu"))
        flat = ShardedParameters(transformer, "cpu", dtype, world.mesh["shard"], master)
    flat.init_weights(transformer, 0)
    flat.refresh_narrow()
    made = optimizer_of(flat, optimizer, model)
    made.begin_average()
    step = TrainStep(transformer, flat, made, 4, 12)
    if not world.alone:
        step.add_up = partial(world.add_gradients, sharded=flat.n_sharded)
    told = []
    for _ in range(STEPS):
        generator = torch.Generator().manual_seed(0)
        for micro in range(2):
            ids = torch.randint(0, 61, (4, 13), generator=generator)
            # Row i has about 12 / (i + 1) targets, so ranks have very different numbers of them, the last at times none
            kept = torch.rand(4, 12, generator=generator) < 1 / torch.arange(1, 5)[:, None] ** 2
            targets = torch.where(kept, ids[:, 1:], IGNORED)
            share = 4 // world.size
            mine = slice(world.rank * share, (world.rank + 1) * share)
            full, wanted = torch.zeros(4, 12, dtype=torch.int64), torch.full((4, 12), IGNORED)
            full[:share], wanted[:share] = ids[mine, :-1], targets[mine]
            step.micro_step(full, wanted, first=micro == 0)
        step.optimizer_step(1e-2)
        told.append(step.metrics())
    sums = torch.zeros(2, dtype=torch.float64)
    for i, stretch in enumerate((made.large["weight"], made.large.get("ema"))):
        for name, view in flat.views(stretch).items() if stretch else ():
            if name not in flat.saved_elsewhere and world.rank < shards:
                sums[i] += view.double().square().sum()
    told.append(dict(zip(("weights", "average"), world.totals(torch.device("cpu"), *sums.tolist()))))
    return told

# CASES
with world_of(RunConfig(device="cpu"), pick_device) as (world, _):
    told = {}
    for name, arguments in CASES.items():
        told[name] = told_by(world, SHARDS, *arguments)
    if world.first:
        Path(f"each-{world.size}x{SHARDS}.json").write_text(json.dumps(told))
sys.exit(0)
"""
SIZES = "d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=44, vocab_size=61, max_seq_len=12"
EXPERTS = "moe=True, n_experts=6, moe_d_ff=16, tie_embeddings=False"
# Rows that do not divide by 4: the vocabulary, and gate and up's.
CASES = f"""
wide = torch.float64, torch.float64
CASES = {{
    "dense": (ModelConfig({SIZES}, qk_norm=True), OptimizerConfig(ema_decay=0.9), *wide, "full"),
    "experts": (ModelConfig({SIZES}, {EXPERTS}), OptimizerConfig(grad_clip=0.1), *wide, "selective"),
    "muon": (ModelConfig({SIZES}, {EXPERTS}), OptimizerConfig(optimizer="muon", ema_decay=0.9), *wide),
    "bf16": (ModelConfig({SIZES}), OptimizerConfig(), torch.bfloat16, torch.float32),
}}
"""
# Newton-Schulz makes small differences larger. In bf16, gradients of fewer rows are rounded otherwise.
TOLERANCES = {"dense": 1e-10, "experts": 1e-10, "muon": 1e-8, "bf16": 1e-2}


def test_shards_agree_with_one_process_whatever_the_model_the_optimizer_and_the_targets(here, forks):
    told = {}
    for ranks, shards in ((1, 1), (2, 2), (4, 2)):
        asked = f"STEPS, SHARDS = 8, {shards}\n{CASES}\n"
        run = forks.start_ranks(here, "each", ranks, before=ON_EACH.replace("# CASES", asked))
        assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
        told[ranks, shards] = json.loads((here / f"each-{ranks}x{shards}.json").read_text())
    for case, tolerance in TOLERANCES.items():
        one = told[1, 1][case]
        assert one[-2]["lm_loss"] < 0.9 * one[0]["lm_loss"]
        for size, found in told.items():
            for at, (expected, step) in enumerate(zip(one, found[case], strict=True)):
                if case == "bf16":
                    step.pop("grad_norm", None)
                    expected = {name: expected[name] for name in step}
                assert step == pytest.approx(expected, rel=tolerance), (case, size, at)


def test_a_run_goes_on_with_other_ranks_and_another_way_to_share_it(here, forks, alone):
    ways = (
        (4, 12, ("--parallel", "fsdp")),
        (2, 20, ("--parallel", "ddp")),
        (1, 27, ()),
        (2, 34, ("--parallel", "fsdp")),
        (4, 41, ("--parallel", "fsdp", "--shard-ranks", "2")),
    )
    options = (*OPTIONS, "--batch-size", "2", "--run-dir", "ways")
    for ranks, at, how in ways:
        run = forks.start_ranks(here, "ways", ranks, *options, *how, before=SOON)
        run[0].says(f" step {at}/50 ")
        run[ranks - 1].send(signal.SIGTERM)
        assert run.end(AT_MOST) == [75] + [0] * (ranks - 1), [rank.err for rank in run.ranks]
        now = status(here / "ways")
        assert now["state"] == "stopped" and at <= now["step"] < 50
        assert forks.start(here, "verify", "verify", f"ways/checkpoints/step-{now['step']:08d}").end(AT_MOST) == 0
    shown = forks.start(here, "shown", "inspect", f"ways/checkpoints/step-{now['step']:08d}")
    assert shown.end(AT_MOST) == 0 and "optimizer-00002-of-00002.safetensors" in shown.out
    of_one = forks.start(here, "inspect", "inspect", "alone/checkpoints/step-00000050")
    assert of_one.end(AT_MOST) == 0 and re.search(r"[\d,]+ parameters", of_one.out)[0] in shown.out
    run = forks.start_ranks(here, "ways", 2, *options, "--parallel", "fsdp", "--shard-ranks", "0")
    assert run.end(AT_MOST) == [0] * 2, [rank.err for rank in run.ranks]
    assert losses(here / "ways") == pytest.approx(alone, rel=1e-6)


# After each update what was gathered up to now, and the units that there are. The third update finds no finite loss.
COUNTS = SOON + """
from llmtrain.training import sharded
call, update, counts = sharded._Exchange.__call__, step.TrainStep.optimizer_step, [0, 0]
def counted(self, *arguments, **named):
    counts[0] += self._make is sharded._all_gather
    return call(self, *arguments, **named)
def told(self, lr):
    counts[1] += 1
    if counts[1] == 3:
        add_up = self.add_up
        self.add_up = lambda grad, sums: (add_up(grad, sums), sums.fill_(float("nan")))
    update(self, lr)
    if counts[1] == 3:
        self.add_up = add_up
    print("GATHERED", counts[0], len(self.model.layers) + 1, flush=True)
sharded._Exchange.__call__, step.TrainStep.optimizer_step = counted, told
"""
TWO_MICRO_BATCHES = ("--batch-size", "2", "--n-layers", "4", "--total-steps", "12", "--checkpoint-every", "6")
OF_STAGES = ("--parallel", "pipeline", "--shard-ranks", "2", "--pipeline-schedule", "interleaved")


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, ("--parallel", "fsdp", "--ema-decay", "0.9")),
        (2, ("--parallel", "fsdp", "--precision", "bf16", "--optimizer", "muon", "--checkpoint-activations", "full")),
        (4, OF_STAGES),
    ],
)
def test_weights_that_are_kept_until_the_update_are_gathered_once_a_step_and_the_bits_are_the_same(
    ranks, how, here, forks
):
    told, gathered = {}, {}
    for name, more in (("freed", ()), ("kept", ("--no-reshard-after-forward",))):
        run_dir = here / f"{name}{ranks}{how[-1]}"
        options = (*OPTIONS, *TWO_MICRO_BATCHES, "--val-every", "4", "--deterministic", "--verify-every", "5")
        run = forks.start_ranks(
            here, run_dir.name, ranks, *options, *how, *more, "--run-dir", run_dir.name, before=COUNTS
        )
        assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
        assert (", gathered once a step" in run[0].out) == bool(more)
        files = [path for step in (6, 12) for path in checkpoint.folder_of(run_dir, step).glob("*.safetensors")]
        assert len(files) >= 2 * 2 * ranks
        hashes = {(path.parent.name, path.name): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        steps = [(x["step"], x["lm_loss"], x["grad_norm"], x["skipped"]) for x in lines(run_dir, "train")]
        evaluated = [(x["step"], x["val_loss"]) for x in lines(run_dir, "eval")]
        told[name] = hashes, repr(steps), evaluated  # no NaN equals another
        assert [step for step, _ in evaluated] == [0, 4, 8, 12]
        assert steps[-1][-1] == 1 and not [x for x in lines(run_dir, "event") if x["event"] == "mismatch"]
        gathered[name] = [tuple(map(int, two)) for two in re.findall(r"GATHERED (\d+) (\d+)", run[ranks - 1].out)]
    assert told["freed"] == told["kept"]
    units = gathered["kept"][0][1]
    # Steps 5 and 10 are run a second time. An evaluation's are used by the step behind it.
    assert gathered["kept"] == [(units * (i + 1), units) for i in range(12 + 2)]
    (second, _), (third, _) = gathered["freed"][1:3]
    if "fsdp" in how:
        assert units == 5 and third - second == 2 * (2 * 4 + 1)
    else:
        assert third - second > 2 * units


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before_and_the_run_goes_on(
    victim, here, forks, alone
):
    name = f"killed{victim}"
    options = (*FSDP, "--batch-size", "4", "--run-dir", name)
    before = SOON + f"from llmtrain.training import pieces\nif rank == {victim}: dwell(pieces, 'write', 2, 100)\n"
    run = forks.start_ranks(here, name, 2, *options, before=before)
    run[victim].says("HERE")
    run[victim].send(signal.SIGKILL)
    codes = run.end(AT_MOST)
    assert codes[victim] == -9 and codes[1 - victim] == 69, run[1 - victim].err
    named = rf"rank {victim} on \S+ \(process {run[victim].pid}, "
    words = f"{named}|{STORE_GONE}"  # which holds it here
    assert re.search(named if victim else words, run[1 - victim].err)
    folders = {path.name for path in (here / name / "checkpoints").iterdir()}
    assert folders - {"step-00000040.partial"} == {"step-00000020"}
    if victim == 0:
        return
    assert forks.start_ranks(here, name, 2, *options).end(AT_MOST) == [0, 0]
    assert losses(here / name) == pytest.approx(alone, rel=1e-6)
    left = [path.name for path in (here / name / "checkpoints").iterdir()]
    assert sorted(left) == ["step-00000020", "step-00000040", "step-00000050"]


@pytest.mark.parametrize(("signal_of", "timeout"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 6)])
def test_a_rank_lost_in_the_middle_of_a_step_is_named_and_the_run_goes_on(signal_of, timeout, here, forks, alone):
    name = f"lost{int(signal_of)}"
    options = (*FSDP, "--batch-size", "4", "--rank-timeout", timeout, "--run-dir", name)
    run = forks.start_ranks(
        here, name, 2, *options, before=SOON + "if rank == 1: dwell(step.TrainStep, 'micro_step', 40, 100)\n"
    )
    run[1].says("HERE")
    run[1].send(signal_of)
    ends = time.monotonic() + 60
    while signal_of == signal.SIGSTOP and Path(f"/proc/{run[0].pid}").exists() and time.monotonic() < ends:
        time.sleep(0.02)
    run[1].kill()  # as torchrun does, 30 seconds after the first has ended
    assert run.end(AT_MOST) == [69, -9], [rank.err for rank in run.ranks]
    assert re.search(rf"rank 1 on \S+ \(process {run[1].pid}, .*\) (has|is) ", run[0].err), run[0].err
    if signal_of == signal.SIGSTOP:
        return
    assert forks.start_ranks(here, name, 2, *options).end(AT_MOST) == [0, 0]
    assert losses(here / name) == pytest.approx(alone, rel=1e-6)


# In the forward of a layer, of which there are three: in each the other rank waits for it before the next.
SLOW_THEN_HANGS = SOON + """
from llmtrain.model import transformer
forward, calls = transformer.Block.forward, [0]
def slow(self, *arguments):
    calls[0] += 1
    if calls[0] == 3 * 16 + 2:
        print("HERE", flush=True)
        time.sleep(100)
    time.sleep(0.05)
    return forward(self, *arguments)
if rank == 1: transformer.Block.forward = slow
"""


def test_a_rank_that_is_slow_is_named_and_so_it_is_when_it_hangs(here, forks):
    options = (*FSDP, "--n-layers", "3", "--batch-size", "4", "--rank-timeout", "3", "--run-dir", "slow-shard")
    run = forks.start_ranks(here, "slow-shard", 2, *options, before=SLOW_THEN_HANGS)
    run[1].says("HERE", AT_MOST)
    assert run.end(AT_MOST) == [69, 69], [rank.err for rank in run.ranks]
    trained = lines(here / "slow-shard", "train")[-1]
    # The other has waited for it three times a step, which is no part of what it takes itself.
    assert trained["slowest_rank"] == 1 and trained["slowest_rank_ms"] > 150 > 2 * trained["rank_ms"], trained
    said = [event["text"] for event in lines(here / "slow-shard", "event") if event["event"] == "slow_rank"]
    assert len(said) == 1 and "rank 1 on" in said[0] and " ms a step for the forward of 3 layers, " in said[0], said
    named = rf"rank 1 on \S+ \(process {run[1].pid}, log .*rank-00001.log\) has not gone on for \d+ s, in step "
    # One of them may have to say that the store has gone with the other, which said it.
    assert re.search(named, run[0].err + run[1].err), run[0].err + run[1].err
    assert all(rank.err.count("\n") <= 1 for rank in run.ranks), run[0].err + run[1].err


def test_what_shards_cannot_do_is_refused_in_a_line(here, forks):
    for asked, words in (
        (("--precision", "fp8"), "--precision fp8"),
        (("--shard-ranks", "3"), "--shard-ranks 3 does not divide the 2 ranks"),
    ):
        run = forks.start_ranks(here, "refused", 2, *FSDP, "--batch-size", "4", "--run-dir", "refused", *asked)
        assert run.end(AT_MOST)[0] == 2 and words in run[0].err and run[0].err.count("\n") == 1


def test_questions_and_text_are_judged_alike_by_one_process_by_copies_and_by_shards(here, forks):
    folder = here / "judged"
    (folder / "text").mkdir(parents=True)
    pairs = [(f"Question {n}: what is {n} plus {n}?", f"It is {2 * n}{', I think' * (n % 4)}.") for n in range(60)]
    (folder / "text" / "all.txt").write_text("\n".join(f"{question} {answer}" for question, answer in pairs))
    # Of 7 questions ranks have 4 and 3, of different lengths, so unequal numbers of batches.
    records = [{"question": q, "choices": [f"It is {n}", a], "answer": 1} for n, (q, a) in enumerate(pairs[:7])]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    records = [{"text": f"{q} {a}", "kind": "odd" if n % 2 else "even"} for n, (q, a) in enumerate(pairs)]
    (folder / "kinds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for command in ("train-tokenizer --vocab-size 300 --input text", "tokenize-corpus --input text --output c.u16"):
        assert forks.start(folder, command.split()[0], *command.split(), "--document", "line").end(AT_MOST) == 0
    options = [word if word != "corpus.u16" else "c.u16" for word in OPTIONS]
    del options[(at := options.index("--val-tokens")) : at + 2]
    options += ["--val-choices", "quiz.jsonl", "--val-text", "kinds.jsonl", "--val-kind-field", "kind"]
    options += ["--total-steps", "4", "--val-every", "2", "--val-windows", "9"]
    told = {}
    for name, ranks in (("one", 1), ("ddp", 2), ("fsdp", 2)):
        parallel = ["--parallel", name] if ranks > 1 else []
        run = forks.start_ranks(folder, name, ranks, *options, *parallel, "--run-dir", name)
        assert run.end(AT_MOST) == [0] * ranks, [rank.err for rank in run.ranks]
        figures = ("val_loss", "bits_per_byte", "accuracy", "accuracy_norm")
        told[name] = {
            (line["step"], line["source"], figure): line[figure]
            for line in lines(folder / name, "eval")
            for figure in figures
            if figure in line
        }
    expected = {(source, figure) for source in ("kinds/even", "kinds/odd", "kinds") for figure in figures[:2]}
    expected |= {("quiz", figure) for figure in figures[2:]}
    assert set(told["one"]) == {(step, *one) for step in (0, 2, 4) for one in expected}
    assert told["ddp"] == pytest.approx(told["one"], rel=1e-5)
    assert told["fsdp"] == pytest.approx(told["one"], rel=1e-5)
