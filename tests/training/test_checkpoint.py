import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import BadData, Diverged, InputMissing, StorageFailure
from llmtrain.training import checkpoint
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters
from llmtrain.training.optimizer import AdamW
from llmtrain.training.snapshot import Snapshot

CONFIG = ModelConfig(
    vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=32, qk_norm=True
)


def state(seed: int, config: ModelConfig = CONFIG) -> tuple[FlatParameters, AdamW]:
    """Parameters and moments of random values."""
    model = Transformer(config, device="meta")
    flat = FlatParameters(model, "cpu", torch.bfloat16)
    optimizer = AdamW(flat, OptimizerConfig())
    generator = torch.Generator().manual_seed(seed)
    for name in flat.spans:
        for buffer in (flat.master, optimizer.exp_avg, optimizer.exp_avg_sq):
            flat.view(buffer, name).normal_(generator=generator)
    optimizer.tally.copy_(torch.tensor([seed, 2, 1]))
    flat.refresh_narrow()
    return flat, optimizer


def taken(flat: FlatParameters, optimizer: AdamW) -> Snapshot:
    snapshot = Snapshot(flat, optimizer)
    snapshot.take()
    return snapshot


def save(run_dir: Path, step: int, seed: int) -> Path:
    return checkpoint.save(run_dir, step, taken(*state(seed)), {"config": {"model": vars(CONFIG)}})


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    flat, optimizer = state(5)
    folder = checkpoint.save(tmp_path, 7, taken(flat, optimizer), {"samples": 42})
    other, its_optimizer = state(6)
    loaded = checkpoint.load(folder, other, its_optimizer)
    counts = {"count": 5, "skipped": 2, "skipped_in_a_row": 1}
    assert (loaded["step"], loaded["samples"], loaded["optimizer"]) == (7, 42, counts)
    assert torch.equal(other.master, flat.master)
    assert torch.equal(other.narrow, flat.narrow)
    assert torch.equal(its_optimizer.exp_avg, optimizer.exp_avg)
    assert torch.equal(its_optimizer.exp_avg_sq, optimizer.exp_avg_sq)
    assert torch.equal(its_optimizer.tally, optimizer.tally)


def test_the_safetensors_library_reads_the_weights(tmp_path):
    flat, optimizer = state(1)
    folder = checkpoint.save(tmp_path, 1, taken(flat, optimizer), {})
    weights = safetensors.torch.load_file(folder / checkpoint.MODEL)
    assert set(weights) == set(flat.parameters)
    for name, parameter in flat.parameters.items():
        assert torch.equal(weights[name], parameter.detach())


def test_a_weights_file_is_four_bytes_a_parameter(tmp_path):
    flat, optimizer = state(1)
    path = checkpoint.save(tmp_path, 1, taken(flat, optimizer), {}) / checkpoint.MODEL
    with open(path, "rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    assert path.stat().st_size == 8 + header + 4 * sum(p.numel() for p in flat.parameters.values())


def test_the_manifest_names_the_pieces_of_every_tensor_and_ends_with_its_own_hash(tmp_path):
    folder = save(tmp_path, 3, 1)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    assert list(manifest)[-1] == "sha256"
    assert set(manifest["files"]) == {checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE}
    piece = {"file": checkpoint.MODEL, "offsets": [0, 0], "shape": [64, 32]}
    assert manifest["tensors"]["model"]["embedding.weight"] == [piece]
    assert "exp_avg_sq.layers.1.attention.q_norm.weight" in manifest["tensors"]["optimizer"]


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE, checkpoint.MANIFEST])
def test_a_flipped_bit_or_a_cut_in_any_file_sends_the_reader_to_the_checkpoint_before(name: str, tmp_path):
    for damage in (lambda data: data[:-3], lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:]):
        run_dir = tmp_path / f"run{damage(b' ' * 50)[40]}"
        run_dir.mkdir()
        save(run_dir, 1, 1)
        victim = save(run_dir, 2, 2) / name
        victim.write_bytes(damage(victim.read_bytes()))
        flat, optimizer = state(9)
        found, said = checkpoint.restore_newest(run_dir, flat, optimizer)
        assert found is not None and found["step"] == 1
        assert torch.equal(flat.master, state(1)[0].master)
        assert len(said) == 1 and "step-00000002" in said[0]
        assert checkpoint.list_steps(run_dir) == [1]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("damage", [Path.unlink, flip_a_bit, cut])
@pytest.mark.parametrize("name", [checkpoint.OPTIMIZER, checkpoint.MANIFEST])
def test_rotation_keeps_the_newest_and_never_counts_a_damaged_one(name, damage, tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, step)
    damage(checkpoint.folder_of(tmp_path, 4) / name)
    sound: dict[int, bool] = {}
    (said,) = checkpoint.rotate(tmp_path, 2, 0, sound)
    assert "step-00000004" in said and "not counted" in said
    assert checkpoint.list_steps(tmp_path) == [4, 3, 2]
    assert sound == {4: False, 3: True, 2: True}
    save(tmp_path, 5, 5)
    assert checkpoint.rotate(tmp_path, 2, 0, sound | {5: True}) == []
    assert checkpoint.list_steps(tmp_path) == [5, 4, 3]


def test_rotation_hashes_only_what_this_process_does_not_know_and_that_once(tmp_path, monkeypatch):
    hashed: list[str] = []
    verify = checkpoint.verify
    monkeypatch.setattr(checkpoint, "verify", lambda folder: [hashed.append(folder.name), *verify(folder)])
    for step in (1, 2, 3):
        save(tmp_path, step, step)
    sound = {3: True}
    for _ in range(2):
        checkpoint.rotate(tmp_path, 2, 0, sound)
    assert hashed == ["step-00000002"] and checkpoint.list_steps(tmp_path) == [3, 2]


def test_what_keep_every_divides_is_kept_for_good_and_does_not_keep_the_others(tmp_path):
    sound = {}
    for step in range(2, 20, 2):
        save(tmp_path, step, step)
        sound[step] = True
        checkpoint.rotate(tmp_path, 2, 6, sound)
    assert checkpoint.list_steps(tmp_path) == [18, 16, 12, 6]


def test_what_is_not_finite_is_never_written_nor_loaded(tmp_path, monkeypatch):
    save(tmp_path, 1, 1)
    for buffer in ("master", "exp_avg", "exp_avg_sq"):
        flat, optimizer = state(2)
        getattr(flat if buffer == "master" else optimizer, buffer)[3] = float("nan" if buffer == "master" else "inf")
        with pytest.raises(Diverged):
            checkpoint.save(tmp_path, 2, taken(flat, optimizer), {})
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    with monkeypatch.context() as patched:  # as another program might
        patched.setattr(checkpoint, "not_finite", lambda buffers: None)
        checkpoint.save(tmp_path, 2, taken(flat, optimizer), {})
    found, said = checkpoint.restore_newest(tmp_path, *state(9))
    assert found is not None and found["step"] == 1 and "not finite" in said[0]


def test_where_no_checkpoint_is_sound_they_stay_and_the_run_does_not_begin_anew(tmp_path):
    for step in (1, 2):
        flip_a_bit(save(tmp_path, step, 1) / checkpoint.MODEL)
    with pytest.raises(BadData, match="none of the 2"):
        checkpoint.restore_newest(tmp_path, *state(9))
    assert checkpoint.list_steps(tmp_path) == [2, 1]


def test_checkpoints_that_are_lost_one_after_another_do_not_begin_the_run_anew_either(tmp_path):
    save(tmp_path, 1, 1)
    flip_a_bit(save(tmp_path, 2, 1) / checkpoint.MODEL)
    found, said = checkpoint.restore_newest(tmp_path, *state(9))
    assert found is not None and found["step"] == 1 and "set aside" in said[0]
    flip_a_bit(checkpoint.folder_of(tmp_path, 1) / checkpoint.MODEL)
    with pytest.raises(BadData, match="none of the 2"):
        checkpoint.restore_newest(tmp_path, *state(9))
    assert checkpoint.list_steps(tmp_path) == [1]


def test_a_copy_under_another_number_is_not_that_checkpoint(tmp_path):
    newest = save(tmp_path, 1, 1)
    shutil.copytree(newest, checkpoint.folder_of(tmp_path, 7))
    assert "is a copy" in checkpoint.rotate(tmp_path, 2, 0, {1: True})[0]
    found, said = checkpoint.restore_newest(tmp_path, *state(9))
    assert found is not None and found["step"] == 1 and "copy" in said[0]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        folder = save(tmp_path, 1, 1)
    finally:
        os.umask(before)
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask


def test_without_room_nothing_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1, 1)
    written: list[object] = []
    monkeypatch.setattr(checkpoint.pieces.tensors, "write", lambda *a: written.append(a))
    monkeypatch.setattr("llmtrain.storage.disk.free_bytes", lambda folder: 1 << 20)
    with pytest.raises(StorageFailure, match=r"a checkpoint takes 1.* MB, 1.05 MB are free"):
        save(tmp_path, 2, 2)
    assert not written and [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_strays_in_the_folder_disturb_nothing(tmp_path):
    save(tmp_path, 5, 1)
    folder = tmp_path / "checkpoints"
    strays = ["step-00000008.corrupt", "step-9", "notes", "step-00000002.bak", ".step-00000003.swp"]
    for stray in [*strays, "step-00000009.partial", "step-00000004.partial", ".step-00000002.77.trash"]:
        (folder / stray).mkdir()
        (folder / stray / checkpoint.MODEL).write_bytes(b"half")
    shutil.copytree(folder / "step-00000005", folder / "step-00000005 (copy)")
    (folder / "step-00000099").write_text("a file")
    (folder / "step-00000098").symlink_to("nowhere")
    assert checkpoint.list_steps(tmp_path) == [5]
    assert checkpoint.restore_newest(tmp_path, *state(9))[1] == []
    save(tmp_path, 9, 2)
    assert checkpoint.rotate(tmp_path, 2, 0, {}) == []
    mine = {"step-00000005", "step-00000009"}
    others = {*strays, "step-00000005 (copy)", "step-00000099", "step-00000098"}
    assert {p.name for p in folder.iterdir()} == mine | others
    assert checkpoint.list_steps(tmp_path) == [9, 5]


def test_a_failed_save_leaves_the_checkpoints_that_were_there_and_no_partial_one(tmp_path, monkeypatch):
    save(tmp_path, 1, 1)

    def full(*args, **kwargs):
        raise StorageFailure("the disk is full")

    monkeypatch.setattr(checkpoint.atomic, "write_json", full)
    with pytest.raises(StorageFailure):
        save(tmp_path, 2, 2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_model_comes_back_for_inference(tmp_path):
    folder = save(tmp_path, 1, 1)
    model, config, _ = checkpoint.load_model(folder, "cpu", "fp32")
    assert config == CONFIG
    assert torch.equal(model.embedding.weight, state(1)[0].parameters["embedding.weight"])
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(InputMissing):
        checkpoint.load_model(tmp_path / "none")


def test_the_tensors_of_another_shape_are_refused(tmp_path):
    folder = save(tmp_path, 1, 1)
    with pytest.raises(BadData, match="not this model's"):
        checkpoint.load(folder, *state(1, replace(CONFIG, d_model=64)))
