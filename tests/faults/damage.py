"""Trials: a bit flipped or an end cut off, anywhere in a checkpoint."""

import random
import shutil
from pathlib import Path

import torch

from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import BadData, LlmtrainError
from llmtrain.training import checkpoint
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.snapshot import Snapshot
from llmtrain.training.step import TrainStep
from tests.faults.runs import Tally

MODEL = ModelConfig(vocab_size=96, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=32)


class State:
    """Weights and moments to save and to load, every number of them random."""

    def __init__(self, seed: int) -> None:
        self.step = TrainStep.build(MODEL, OptimizerConfig(), batch_size=1, seq_len=16, precision="fp32")
        self.large = self.step.optimizer.large.values()
        generator = torch.Generator().manual_seed(seed)
        for stretch in self.large:
            stretch.buffer.copy_(torch.rand(stretch.buffer.shape, generator=generator))

    def save(self, run_dir: Path, step: int) -> Path:
        snapshot = Snapshot(self.step.flat, self.step.optimizer)
        snapshot.take()
        return checkpoint.save(run_dir, step, snapshot, {"config": {}})

    def restore(self, run_dir: Path) -> tuple[int | None, list[str]]:
        """The step of the checkpoint that was loaded, and what was said."""
        state, said = checkpoint.restore_newest(run_dir, self.step.flat, self.step.optimizer)
        return state and state["step"], said

    def equals(self, other: "State") -> bool:
        views = self.step.flat.views  # between the tensors there is padding, which is nobody's
        pairs = [(views(a), views(b)) for a, b in zip(self.large, other.large, strict=True)]
        return all(torch.equal(mine[name], theirs[name]) for mine, theirs in pairs for name in mine)


def damage(chance: random.Random, folder: Path) -> str:
    """Flips a bit of a file of the folder, or cuts it; returns which."""
    path = chance.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if flips := chance.random() < 0.7:
        data[at] ^= 1 << chance.randrange(8)
    else:
        del data[at:]
    path.write_bytes(data)
    return f"{'a flipped bit in' if flips else 'a cut in'} {path.name}"


def damaged(folder: Path, trials: int, seed: int) -> Tally:
    """Damages the newest of two checkpoints, a fresh copy each time. It must be refused by whoever reads it, and the
    one before must be loaded to the bit."""
    chance, tally = random.Random(seed), Tally()
    before, newest, found = State(1), State(2), State(3)
    before.save(folder, 1)
    newest.save(folder, 2)
    assert found.restore(folder) == (2, []) and found.equals(newest)
    sound = folder / "sound"
    shutil.move(checkpoint.folder_of(folder, 2), sound)
    for _ in range(trials):
        victim = Path(shutil.copytree(sound, checkpoint.folder_of(folder, 2)))
        met = damage(chance, victim)
        wrong = None
        try:
            list(checkpoint.verify(victim))
            wrong = f"{met}: verified"
        except BadData:
            pass
        try:
            step, said = found.restore(folder)
            if step != 1 or not found.equals(before):
                wrong = f"{met}: loaded step {step}"
            elif len(said) != 1 or checkpoint.list_steps(folder) != [1]:
                wrong = f"{met}: said {said}"
        except LlmtrainError as error:
            wrong = f"{met}: {error}"
        tally.add(wrong, met)
        shutil.rmtree(victim, ignore_errors=True)
        shutil.rmtree(victim.with_name(victim.name + ".corrupt"), ignore_errors=True)
    return tally
