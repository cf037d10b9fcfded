import errno
import os
import random
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain.storage import atomic
from llmtrain.storage.errors import CannotCreate, StorageFailure
from tests.storage.processes import in_child, killed_at_each_line, killed_while_it_writes, small_disk

OLD, NEW = b"old" * 100, b"new" * 50_000


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_written_file_is_whole_and_alone(tmp_path: Path):
    path = tmp_path / "status.json"
    atomic.write_bytes(path, OLD)
    atomic.write_bytes(path, NEW)
    assert path.read_bytes() == NEW
    assert names(tmp_path) == ["status.json"]


def test_the_file_has_its_name_only_after_the_block(tmp_path: Path):
    path = tmp_path / "corpus.u16"
    with atomic.atomic_file(path) as file:
        file.write(NEW)
        file.flush()
        assert names(tmp_path) == [f".corpus.u16.{os.getpid()}.partial"]
    assert names(tmp_path) == ["corpus.u16"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_the_previous_file_and_nothing_else(tmp_path: Path, error: type[BaseException]):
    path = tmp_path / "status.json"
    atomic.write_bytes(path, OLD)
    with pytest.raises(error):
        with atomic.atomic_file(path) as file:
            file.write(NEW)
            raise error
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["status.json"]


def test_a_writer_killed_anywhere_leaves_the_previous_file_or_the_new_one(in_memory: Path):
    path = in_memory / "state.json"
    atomic.write_bytes(path, OLD)
    seen = set()
    for _ in killed_at_each_line(lambda: atomic.write_bytes(path, NEW)):
        seen.add(path.read_bytes())
        assert len(names(in_memory)) <= 2, "a dead writer's temporary was not removed by the next"
        atomic.write_bytes(path, OLD)
        assert names(in_memory) == ["state.json"]
    assert seen == {OLD, NEW}


def test_a_killed_first_writer_leaves_no_file_or_the_whole_one(in_memory: Path):
    path = in_memory / "state.json"
    for _ in killed_at_each_line(lambda: atomic.write_bytes(path, NEW)):
        assert not path.exists() or path.read_bytes() == NEW
        path.unlink(missing_ok=True)


WRITER = """
import sys
from llmtrain.storage.atomic import atomic_file
for n in range(10**9):
    with atomic_file(sys.argv[1]) as file:
        for _ in range(64):
            file.write(bytes([n % 256]) * 65536)
"""


def test_readers_never_see_a_half_written_file_and_a_kill_at_any_time_keeps_it_whole(tmp_path: Path):
    path = tmp_path / "model.bin"

    def look() -> int:
        data = path.read_bytes()
        assert len(data) == 64 * 65536 and data == data[:1] * len(data)
        return data[0]

    dice = random.Random(0)
    for _ in range(6):
        killed_while_it_writes(WRITER, path, look, dice)
        look()
        assert len(names(tmp_path)) <= 2


def test_the_temporary_of_a_live_writer_is_left_alone(tmp_path: Path):
    path = tmp_path / "x"
    with atomic.atomic_file(path) as first:
        first.write(b"first")
        assert in_child(lambda: atomic.write_bytes(path, b"second")) == 0
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["x"]


def test_threads_that_write_one_path_each_write_it_whole(tmp_path: Path):
    path = tmp_path / "status.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: atomic.write_bytes(path, bytes([n]) * 5000), range(100)))
    data = path.read_bytes()
    assert data == data[:1] * 5000
    assert names(tmp_path) == ["status.json"]


def test_the_umask_makes_the_mode(tmp_path: Path):
    before = os.umask(0o027)
    try:
        atomic.write_bytes(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_a_storage_failure_and_leaves_nothing_behind(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        atomic.write_bytes(disk / "x", OLD)
        with pytest.raises(StorageFailure, match=r"disk/x: cannot be written: the disk is full: free space"):
            atomic.write_bytes(disk / "x", bytes(2 << 20))
        assert names(disk) == ["x"] and (disk / "x").read_bytes() == OLD
        atomic.write_bytes(disk / "x", NEW)  # what the failure took of the disk is free again
        assert (disk / "x").read_bytes() == NEW


def test_a_write_beyond_the_limit_of_file_size_leaves_nothing_behind(tmp_path: Path):
    atomic.write_bytes(tmp_path / "x", OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageFailure, match="ulimit"):
            atomic.write_bytes(tmp_path / "x", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == OLD


def test_an_error_of_the_disk_at_fsync_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    atomic.write_bytes(tmp_path / "x", OLD)

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(StorageFailure, match="x: cannot be written: the disk reports an I/O error"):
            atomic.write_bytes(tmp_path / "x", NEW)
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == OLD


def test_a_read_only_file_system_cannot_take_a_file(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        atomic.write_bytes(disk / "x", OLD)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for work in (
            lambda: atomic.write_bytes(disk / "x", NEW),
            lambda: atomic.write_bytes(disk / "y", NEW),
            lambda: atomic.remove_tree(disk / "x"),
        ):
            with pytest.raises(CannotCreate, match="read-only"):
                work()
        assert names(disk) == ["x"] and (disk / "x").read_bytes() == OLD


def test_places_that_take_no_file_are_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path / "missing" / "x", "folder does not exist"),
        (tmp_path / "file" / "x", "is a file"),
        (tmp_path / "folder", "a folder has this name"),
        (tmp_path / "pipe", "a device or pipe"),
        (tmp_path / ("x" * 300), "too long"),
    ]:
        with pytest.raises(CannotCreate, match=reason) as caught:
            atomic.write_bytes(path, NEW)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert names(tmp_path) == ["file", "folder", "pipe"]


def test_a_folder_without_permission_takes_no_file(tmp_path: Path):
    def work() -> None:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        with pytest.raises(CannotCreate, match="permission denied"):
            atomic.write_bytes(tmp_path / "x", NEW)

    tmp_path.chmod(0o500)
    assert in_child(work) == 0
    tmp_path.chmod(0o700)
    assert names(tmp_path) == []


def test_json_that_is_written_is_json_for_every_reader(tmp_path: Path):
    atomic.write_json(tmp_path / "x.json", {"loss": float("nan"), "norms": [1.5, float("inf")], "n": 3, "é": None})
    assert (tmp_path / "x.json").read_text().replace("\n", "").replace(" ", "") == (
        '{"loss":null,"norms":[1.5,null],"n":3,"\\u00e9":null}'
    )


def make_checkpoint(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(NEW)
    (folder / "sub" / "state.json").write_bytes(OLD)


def is_whole(folder: Path) -> bool:
    return (folder / "model.safetensors").read_bytes() == NEW and (folder / "sub" / "state.json").read_bytes() == OLD


def test_a_publisher_killed_anywhere_leaves_a_whole_folder_under_one_of_its_names(in_memory: Path):
    work, final = in_memory / "step-1.partial", in_memory / "step-1"
    make_checkpoint(work)
    published = 0
    for _ in killed_at_each_line(lambda: atomic.publish_folder(work, final)):
        assert len(names(in_memory)) == 1
        if final.exists():
            assert is_whole(final)
            final.rename(work)
            published += 1
        assert is_whole(work)
    assert published > 0
    assert names(in_memory) == ["step-1"] and is_whole(final)


def test_a_folder_is_not_published_over_another(tmp_path: Path):
    work, final = tmp_path / "step-1.partial", tmp_path / "step-1"
    make_checkpoint(work)
    make_checkpoint(final)
    with pytest.raises(CannotCreate, match="step-1: "):
        atomic.publish_folder(work, final)
    assert is_whole(work) and is_whole(final)


def test_a_remover_killed_anywhere_leaves_the_whole_folder_or_no_name(in_memory: Path):
    path = in_memory / "step-1"
    make_checkpoint(path)
    gone = 0
    for _ in killed_at_each_line(lambda: atomic.remove_tree(path)):
        if path.exists():
            assert is_whole(path)
        else:
            gone += 1
            make_checkpoint(path)
            atomic.remove_tree(path)
            assert names(in_memory) == [], "what a killed remover left was not removed by the next"
            make_checkpoint(path)
    assert gone > 0
    assert names(in_memory) == []


def test_removing_takes_files_and_folders_and_what_is_not_there(tmp_path: Path):
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "kept").write_bytes(OLD)
    atomic.remove_tree(tmp_path / "file")
    atomic.remove_tree(tmp_path / "nothing")
    assert names(tmp_path) == ["kept"]


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path):
    make_checkpoint(tmp_path / "kept")
    (tmp_path / "link").symlink_to("kept")
    atomic.remove_tree(tmp_path / "link")
    assert names(tmp_path) == ["kept"] and is_whole(tmp_path / "kept")


def test_storage_needs_neither_torch_nor_numpy():
    code = "import sys\n"
    for module in ("errors", "atomic", "manifest", "tensors", "lock", "journal"):
        code += f"import llmtrain.storage.{module}\n"
    code += "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_link_to_a_device_keeps_its_place(tmp_path: Path):
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "out").symlink_to("/proc/self/fd/1")  # as /dev/stdout is, which may be a plain file
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-folder").symlink_to("folder")
    for name in ("null", "out", "to-folder"):
        with pytest.raises(CannotCreate, match="cannot be created"):
            atomic.write_bytes(tmp_path / name, b"x")
        assert (tmp_path / name).is_symlink()
    (tmp_path / "dangling").symlink_to("nothing")
    atomic.write_bytes(tmp_path / "dangling", b"x")
    assert (tmp_path / "dangling").read_bytes() == b"x"
