import shutil

import pytest

from llmtrain.corpus.packing import build
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import docs_path, manifest_path
from llmtrain.training import checkpoint
from tests.cli.test_inspect import make_run, outcome
from tests.corpus.files import some_documents, write_documents, write_ids
from tests.corpus.test_token_file import flip


def test_a_sound_token_file_passes_and_a_flipped_bit_is_named(tmp_path, capsys):
    path = write_documents(tmp_path / "a.u16", some_documents(50))
    code, out = outcome(capsys, "verify", path)
    assert code == 0 and "ids, manifest and document index are sound" in out and "50 documents" in out
    for damaged, offset in ((path, 200), (docs_path(path), 80), (manifest_path(path), 30)):
        flip(damaged, offset)
        code, out = outcome(capsys, "verify", path)
        assert code == 65 and f"error: {damaged}" in out
        flip(damaged, offset)
    assert outcome(capsys, "verify", path)[0] == 0
    packed = build(TokenFile.open(path), 32)
    assert "a.u16.pack-32: the packed windows are sound" in outcome(capsys, "verify", path)[1]
    flip(packed, 4097)
    code, out = outcome(capsys, "verify", path)
    assert code == 65 and f"error: {packed}" in out


def test_a_flat_file_has_nothing_to_verify_against(tmp_path, capsys):
    code, out = outcome(capsys, "verify", write_ids(tmp_path / "a.u16", [1, 2, 3]))
    assert code == 66 and "a.u16: has no manifest (a.u16.json)" in out


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"])
def test_a_flipped_bit_in_a_checkpoint_is_named(tmp_path, capsys, name):
    run_dir = make_run(tmp_path / "run")
    folder = run_dir / "checkpoints" / "step-00000005"
    assert outcome(capsys, "verify", folder)[0] == 0
    flip(folder / name, (folder / name).stat().st_size // 2)
    code, out = outcome(capsys, "verify", folder)
    assert code == 65 and str(folder / name) in out


def test_a_run_is_verified_checkpoint_by_checkpoint(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run")
    code, out = outcome(capsys, "verify", run_dir)
    assert code == 0 and out.count("is sound") == 2
    folders = [run_dir / "checkpoints" / f"step-{step:08d}" for step in (10, 5)]
    flip(folders[0] / "model.safetensors", 1000)
    code, out = outcome(capsys, "verify", run_dir)
    assert code == 65 and str(folders[0] / "model.safetensors") in out and "more of" not in out
    (folders[1] / "optimizer.safetensors").unlink()
    code, out = outcome(capsys, "verify", run_dir)
    assert code == 65 and str(folders[0] / "model.safetensors") in out and "(and 1 more of 2 checkpoints)" in out
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()
    code, out = outcome(capsys, "verify", run_dir)
    assert code == 66 and "holds no checkpoint" in out


def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged(tmp_path, capsys, monkeypatch):
    run_dir = make_run(tmp_path / "run")
    read = checkpoint.read_manifest

    def vanishing(folder):
        if folder.name == "step-00000005":
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(checkpoint, "read_manifest", vanishing)
    code, out = outcome(capsys, "verify", run_dir)
    assert code == 0 and "step-00000005: was removed meanwhile" in out and out.count("is sound") == 1
    shutil.rmtree(run_dir)
    code, out = outcome(capsys, "inspect", make_run(run_dir))
    assert code == 0 and "step-00000005" not in out and "step-00000010 " in out
