"""Checkpoints of ranks that hold parts of a model: threads stand for the ranks, and share a store as those do."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import BadData, Diverged, StorageFailure
from llmtrain.training import checkpoint, pieces
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters
from llmtrain.training.optimizer import AdamW
from llmtrain.training.snapshot import Snapshot
from llmtrain.training.together import Together

CONFIG = ModelConfig(
    vocab_size=61, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=32, qk_norm=True
)
STATE = {"config": {"model": vars(CONFIG)}}

Held = tuple[FlatParameters, AdamW]


def whole() -> list[Held]:
    return [held(FlatParameters(Transformer(CONFIG, device="meta"), "cpu", torch.float32))]


def rows_of_four() -> list[Held]:
    """A vocabulary of 61 and 48 columns of q make rows that do not divide evenly."""
    models = [Transformer(CONFIG, device="meta") for _ in range(4)]
    return [held(FlatParameters(model, "cpu", torch.float32, shard=(i, 4))) for i, model in enumerate(models)]


def stages() -> list[Held]:
    """Of a pipeline: whole tensors, the tied matrix on both ends."""
    models = [
        Transformer(CONFIG, range(0, 1), True, False, "meta"),
        Transformer(CONFIG, range(1, 3), False, True, "meta"),
    ]
    found = [held(FlatParameters(model, "cpu", torch.float32)) for model in models]
    found[1][0].saved_elsewhere.add("embedding.weight")
    return found


def held(flat: FlatParameters) -> Held:
    return flat, AdamW(flat, OptimizerConfig(ema_decay=0.9))


WAYS: dict[str, Callable[[], list[Held]]] = {"whole": whole, "rows": rows_of_four, "stages": stages}


def fill(ranks: list[Held], seed: int) -> None:
    """Each number from its place in the whole tensor, so that it does not matter who holds it."""
    for flat, optimizer in ranks:
        optimizer.tally.copy_(torch.tensor([seed, 2, 1]))
        for kind, stretch in optimizer.large.items():
            for name, view in flat.views(stretch).items():
                span = flat.spans[name]
                generator = torch.Generator().manual_seed(hash((seed, kind, name)) % 2**32)
                of_whole = torch.empty(span.rows, *view.shape[1:]).normal_(generator=generator)
                view.copy_(of_whole[span.row : span.row + span.shape[0]])


def same(ranks: list[Held], others: list[Held]) -> bool:
    pairs = zip(tensors_of(ranks), tensors_of(others), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def tensors_of(ranks: list[Held]) -> list[torch.Tensor]:
    large = [(flat, stretch) for flat, optimizer in ranks for stretch in optimizer.large.values()]
    return [view for flat, stretch in large for view in flat.views(stretch).values()]


def on_each(ranks: list[Held], work: Callable[[int, Together], object]) -> list[object]:
    """What `work` gave or raised on each rank."""
    store, found = dist.HashStore(), [None] * len(ranks)

    def of_rank(index: int) -> None:
        try:
            found[index] = work(index, Together(index, len(ranks), store, "test"))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=of_rank, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def save(run_dir: Path, step: int, ranks: list[Held]) -> list[object]:
    snapshots = [Snapshot(flat, optimizer) for flat, optimizer in ranks]
    for snapshot in snapshots:
        snapshot.take()
    return on_each(ranks, lambda i, together: checkpoint.save(run_dir, step, snapshots[i], STATE, together))


def restore(run_dir: Path, ranks: list[Held]) -> list[object]:
    def of_rank(index: int, together: Together) -> object:
        return checkpoint.restore_newest(run_dir, *ranks[index], together=together)

    return on_each(ranks, of_rank)


@pytest.mark.parametrize("reads", WAYS)
@pytest.mark.parametrize("writes", WAYS)
def test_what_any_ranks_have_written_any_others_read(writes, reads, tmp_path):
    saved, expected, loaded = WAYS[writes](), WAYS[reads](), WAYS[reads]()
    fill(saved, 5)
    fill(expected, 5)
    assert save(tmp_path, 7, saved) == [checkpoint.folder_of(tmp_path, 7)] * len(saved)
    found = restore(tmp_path, loaded)
    assert [state["step"] for state, _ in found] == [7] * len(loaded)
    assert same(loaded, expected) and int(loaded[-1][1].count) == 5


@pytest.mark.parametrize("writes", ["rows", "stages"])
def test_each_number_is_saved_once_and_every_reader_of_checkpoints_takes_them(writes, tmp_path):
    ranks, one = WAYS[writes](), whole()
    fill(ranks, 3)
    fill(one, 3)
    save(tmp_path, 1, ranks)
    folder = checkpoint.folder_of(tmp_path, 1)
    names = {path.name for path in folder.iterdir()}
    n = len(ranks)
    kinds = ("model", "optimizer", "ema")
    expected = {f"{kind}-{i + 1:05d}-of-{n:05d}.safetensors" for kind in kinds for i in range(n)}
    assert names == expected | {checkpoint.STATE, checkpoint.MANIFEST}
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    elements = sum(
        torch.Size(piece["shape"]).numel() for found in manifest["tensors"]["model"].values() for piece in found
    )
    assert elements == sum(parameter.numel() for parameter in Transformer(CONFIG, device="meta").parameters())
    assert [name for name, _ in checkpoint.verify(folder)] == list(manifest["files"])
    model, _, _ = checkpoint.load_model(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, one[0][0].parameters[name])


def test_damage_that_one_rank_meets_sends_all_to_the_checkpoint_before(tmp_path):
    ranks, loaded = rows_of_four(), rows_of_four()
    for step in (1, 2):
        fill(ranks, step)
        save(tmp_path, step, ranks)
    victim = checkpoint.folder_of(tmp_path, 2) / pieces.file_name(pieces.MODEL, 2, 4)
    data = bytearray(victim.read_bytes())
    data[-20] ^= 4
    victim.write_bytes(data)
    found = restore(tmp_path, loaded)
    assert [state["step"] for state, _ in found] == [1] * 4
    assert all(len(said) == 1 and victim.name in said[0] for _, said in found)
    fill(ranks, 1)
    assert same(loaded, ranks) and checkpoint.list_steps(tmp_path) == [1]


def test_a_tensor_of_which_rows_are_missing_is_not_taken(tmp_path):
    ranks = rows_of_four()
    fill(ranks, 1)
    save(tmp_path, 1, ranks)
    manifest = checkpoint.read_manifest(checkpoint.folder_of(tmp_path, 1))
    del manifest["tensors"]["model"]["embedding.weight"][2]
    flat, optimizer = whole()[0]
    with pytest.raises(BadData, match=r"embedding.weight is not this model's, whose shape is \(61, 32\)"):
        pieces.read(checkpoint.folder_of(tmp_path, 1), manifest, flat, optimizer.large)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_save_that_one_rank_fails_at_fails_on_all_and_leaves_no_trace(victim, tmp_path, monkeypatch):
    ranks = rows_of_four()
    fill(ranks, 1)
    save(tmp_path, 1, ranks)
    write = pieces.tensors.write

    def full(path: Path, *arguments: object) -> object:
        if path.name == pieces.file_name(pieces.OPTIMIZER, victim, 4):
            raise StorageFailure("the disk is full")
        return write(path, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(pieces.tensors, "write", full)
        found = save(tmp_path, 2, ranks)
    assert [(type(error), str(error)) for error in found] == [(StorageFailure, "the disk is full")] * 4
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    ranks[victim][0].master[3] = float("nan")
    assert {type(error) for error in save(tmp_path, 3, ranks)} == {Diverged}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
