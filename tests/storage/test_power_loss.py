"""Power cuts: what a copy of a mounted disk's image holds is what the disk had when the power went."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtrain.storage import atomic, tensors
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.manifest import sha256_file


def run(*command: object) -> bool:
    return subprocess.run([str(part) for part in command], capture_output=True).returncode == 0


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    if not run("mount", "-o", "loop", image, folder):
        pytest.skip("mounting a disk image needs root and a loop device")
    try:
        yield folder
    finally:
        run("umount", "-l", folder)


@pytest.fixture
def after_power_loss(tmp_path: Path) -> Iterator[Callable[[Callable[[Path], object]], Path]]:
    """Runs work on a disk, cuts the power at its end, and gives the disk as it is after the next start."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    image = tmp_path / "disk.img"
    with open(image, "wb") as file:
        file.truncate(24 << 20)
    assert run("mkfs.ext4", "-q", image)
    with mounted(image, tmp_path / "before") as disk:
        os.sync()

        def cut(work: Callable[[Path], object]) -> Path:
            work(disk)
            shutil.copyfile(image, tmp_path / "after.img")
            after.append(mounted(tmp_path / "after.img", tmp_path / "after"))
            return after[0].__enter__()

        after: list = []
        yield cut
        for mount in after:
            mount.__exit__(None, None, None)


def test_a_plain_rename_loses_the_file_so_this_method_can_see_a_loss(after_power_loss, tmp_path: Path):
    def careless(disk: Path) -> None:
        (disk / "x.partial").write_bytes(b"data" * 1000)
        os.rename(disk / "x.partial", disk / "x")

    disk = after_power_loss(careless)
    assert not (disk / "x").exists() or (disk / "x").read_bytes() != b"data" * 1000


def test_a_written_file_is_there_after_a_power_cut(after_power_loss):
    disk = after_power_loss(lambda disk: atomic.write_bytes(disk / "x", b"data" * 1000))
    assert (disk / "x").read_bytes() == b"data" * 1000


def test_a_published_checkpoint_is_there_after_a_power_cut(after_power_loss):
    digests = []

    def save(disk: Path) -> None:
        work = disk / "step-1.partial"
        work.mkdir()
        entries = {"w": tensors.TensorEntry("U8", (1 << 20,), bytes(range(256)) * 4096)}
        digests.append(tensors.write(work / "model.safetensors", entries)[1])
        (work / "extra").write_bytes(b"written without any care")
        atomic.publish_folder(work, disk / "step-1")

    disk = after_power_loss(save)
    assert sha256_file(disk / "step-1" / "model.safetensors") == digests[0]
    assert (disk / "step-1" / "extra").read_bytes() == b"written without any care"
    assert not (disk / "step-1.partial").exists()


def test_a_folder_whose_removal_began_has_lost_its_name_after_a_power_cut(after_power_loss, monkeypatch):
    def work(disk: Path) -> None:
        (disk / "step-1").mkdir()
        (disk / "step-1" / "model.safetensors").write_bytes(b"x" * 5000)
        os.sync()
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "_delete", lambda path: None)  # the power goes before the first file is deleted
            atomic.remove_tree(disk / "step-1")

    assert not (after_power_loss(work) / "step-1").exists()


def test_the_lines_of_a_journal_that_was_synced_are_there_after_a_power_cut(after_power_loss):
    def work(disk: Path) -> None:
        with JsonLines(disk / "metrics.jsonl") as journal:
            for step in range(300):
                journal.append({"step": step})
            journal.sync()
            journal.append({"step": 300})

    steps = [line["step"] for line in JsonLines.read(after_power_loss(work) / "metrics.jsonl")]
    assert steps[:300] == list(range(300)) and len(steps) in (300, 301)
