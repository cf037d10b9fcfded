"""`llmtrain doctor`: what it finds right and wrong, each in a machine that a test has made so."""

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.benchmark import doctor
from llmtrain.benchmark.doctor import NOTE, OK, WRONG, Finding
from llmtrain.cli.main import run as run_cli
from llmtrain.storage.errors import CannotCreate, StorageFailure
from tests.storage.processes import small_disk


def only(findings, name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name]


def test_this_machine_is_sound_and_everything_was_tried(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    options = ["--device", "cpu", "--run-dir", str(tmp_path / "a/run"), "--json"]
    command = [sys.executable, "-m", "llmtrain", "doctor", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    names = {finding["name"] for finding in found["findings"]}
    assert found["sound"] and names >= {
        "python", "torch", "processor", "memory", "driver", "triton", "tokenizers", "compiler", "extras", "disk",
        "limits", "systemd", "clock",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_what_would_stop_a_run_is_the_exit_code_and_one_line(monkeypatch: pytest.MonkeyPatch, capfd):
    found = [
        doctor.ok("torch", "is there"),
        doctor.note("clock", "runs ahead", "set it"),
        doctor.wrong("disk", "is full", "free space", 74),
        doctor.wrong("card", "is not there", "see nvidia-smi"),
    ]
    monkeypatch.setattr("llmtrain.cli.doctor.examine", lambda config: iter(found))
    assert run_cli(["doctor"]) == 74
    out, err = capfd.readouterr()
    assert "-> set it" in out and "WRONG disk" in out and err.count("\n") == 1
    assert "2 things would stop a run: disk: is full: free space; card: is not there" in err
    found[2:] = []
    assert run_cli(["doctor"]) == 0


def trials_of(monkeypatch: pytest.MonkeyPatch, body: str, seconds: float = 60.0) -> list[Finding]:
    monkeypatch.setattr(doctor, "python_module", lambda *arguments: ([sys.executable, "-c", body], dict(os.environ)))
    monkeypatch.setattr(doctor, "TRIALS_TAKE", seconds)
    return list(doctor.trials("auto"))


def test_a_crash_and_a_hang_of_a_driver_are_findings(monkeypatch: pytest.MonkeyPatch):
    head = 'import json, os, signal, time\nprint(json.dumps({"tries": "graphs"}), flush=True)\n'
    (crash,) = trials_of(monkeypatch, head + "os.kill(os.getpid(), signal.SIGSEGV)")
    assert (crash.name, crash.verdict, crash.exit_code) == ("graphs", WRONG, 70) and "-11" in crash.text
    (hang,) = trials_of(monkeypatch, head + "time.sleep(1000)", seconds=2.0)
    assert hang.verdict == WRONG and "did not come to an end within 2 s" in hang.text


def test_a_place_that_takes_no_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (found,) = only(doctor.disk(tmp_path / "file/run"), "disk")
    assert (found.verdict, found.exit_code) == (WRONG, CannotCreate.exit_code) and found.advice


def test_a_disk_without_room_and_one_that_a_reboot_empties(tmp_path: Path):
    with small_disk(tmp_path / "disk", "8m") as disk:
        found = list(doctor.disk(disk / "run"))
        assert list(disk.iterdir()) == []
    room = next(finding for finding in found if "are free" in finding.text)
    assert (room.verdict, room.exit_code) == (WRONG, StorageFailure.exit_code)
    assert any("tmpfs: a reboot empties it" in f.text and f.verdict == NOTE for f in found)


LIMITED = """
import json, resource
from llmtrain.benchmark import doctor
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
print(json.dumps([(f.verdict, f.text) for f in doctor.limits(on_card=False)]))
"""


def test_limits_that_are_in_the_way_are_named():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, env=environment)
    (files, many) = json.loads(done.stdout)
    assert files[0] == WRONG and "ulimit -f" in files[1] and many[0] == NOTE and "ulimit -n" in many[1]


@pytest.mark.parametrize(
    ("compiles", "said"),
    [("exit 0", "compiles against"), ("echo 'Python.h: no such file' >&2; exit 1", "headers are missing"),
     ("echo broken >&2; exit 1", "compiles nothing: broken")],
)  # fmt: skip
def test_a_compiler_is_tried(compiles: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{compiles}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    for on_card, verdict in ((True, WRONG), (False, NOTE)):
        (found,) = doctor.compiler(on_card)
        assert said in found.text and found.verdict == (OK if compiles == "exit 0" else verdict)


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (found,) = doctor.compiler(on_card=True)
    assert found.verdict == WRONG and "gcc" in found.advice


def test_a_check_that_fails_itself_is_a_finding():
    def check():
        raise KeyError("x")
        yield

    (found,) = doctor.guarded("disk", check)
    assert found.verdict == NOTE and "KeyError" in found.text


def test_the_limit_of_a_process_is_not_changed_by_looking():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    list(doctor.limits(on_card=False))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
