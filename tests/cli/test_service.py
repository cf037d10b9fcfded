"""`llmtrain service`: what it writes and what it refuses. What systemd makes of it: tests/faults/test_systemd.py."""

import sys
from pathlib import Path

import pytest

from llmtrain.cli.main import run as run_cli


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def failure(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capfd.readouterr()
    code = run_cli(["service", *arguments])
    error = capfd.readouterr().err
    assert error.startswith("llmtrain: error:") and error.count("\n") == 1, error
    return code, error


def start_line(unit: Path) -> str:
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    return line


def test_a_unit_lies_where_systemd_looks_and_has_the_options_of_train_with_absolute_paths(here, capfd):
    (here / "mine.toml").write_text("[run]\nseed = 4\n")
    asked = ["--config", "mine.toml", "--tokens", "web=a.u16:2", "--tokens", "b.u16", "--val-tokens", "v.u16"]
    assert run_cli(["service", "--run-dir", "runs/a", *asked, "--deterministic", "--learning-rate", "1e-3"]) == 0
    unit = here / "config/systemd/user/llmtrain-a.service"
    assert start_line(unit) == (
        f"ExecStart=:{sys.executable} -P -m llmtrain train --resume --run-dir {here}/runs/a --config={here}/mine.toml "
        f"--tokens=web={here}/a.u16:2.0 --tokens=b={here}/b.u16 --val-tokens=v={here}/v.u16 --learning-rate=0.001 "
        "--deterministic"
    )
    text = unit.read_text()
    assert f"WorkingDirectory={here}\n" in text and "WantedBy=default.target" in text and "User=" not in text
    out = capfd.readouterr().out.splitlines()
    assert out[0] == f"wrote {unit}"
    assert [line.split("   ")[1].strip() for line in out[2:]] == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now llmtrain-a.service",
        "systemctl --user status llmtrain-a.service",
        "journalctl --user -u llmtrain-a.service -f",
        "systemctl --user stop llmtrain-a.service",
        "loginctl enable-linger",
    ]


def test_token_files_that_are_not_there_are_named(here, capfd):
    Path("b.1-of-1.u16").touch()
    asked = ["--run-dir", "runs/a", "--tokens", "b.u16", "--tokens", "web=a.u16:2", "--val-tokens", "v.u16"]
    assert run_cli(["service", *asked]) == 0
    assert capfd.readouterr().err == "note: the run cannot start before there is a.u16 and v.u16\n"
    for name in ("a.u16", "v.u16"):
        Path(name).touch()
    assert run_cli(["service", *asked]) == 0 and capfd.readouterr().err == ""


def test_a_unit_elsewhere_is_linked_and_a_system_unit_has_a_user_and_waits_for_its_disks(here, capfd):
    asked = ["--system", "--output", "u.service", "--run-dir", "r", "--tokens", "/data/c.u16", "--watchdog", "0"]
    assert run_cli(["service", *asked]) == 0
    text = (here / "u.service").read_text()
    assert "\nUser=" in text and f"RequiresMountsFor={here}/r /data/c.u16\n" in text
    assert "WantedBy=multi-user.target" in text and "WatchdogSec" not in text
    out = capfd.readouterr().out
    assert f"    systemctl link {here}/u.service\n" in out and "--user" not in out and "linger" not in out


def test_a_unit_is_renewed_by_its_own_run_and_kept_from_another(here, capfd):
    assert run_cli(["service", "--run-dir", "one/run"]) == 0
    unit = here / "config/systemd/user/llmtrain-run.service"
    assert run_cli(["service", "--run-dir", "one/run", "--seed", "3"]) == 0
    kept = unit.read_text()
    assert "--seed=3" in kept
    code, error = failure(capfd, "--run-dir", "two/run")
    assert code == 78 and str(unit) in error and "--output" in error
    (here / "mine.service").write_text("[Service]\nExecStart=/bin/true\n")
    assert failure(capfd, "--run-dir", "one/run", "--output", "mine.service")[0] == 78
    assert unit.read_text() == kept and "/bin/true" in (here / "mine.service").read_text()


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        (["--output", "unit.txt"], 2, "ends in .service"),
        (["--output", "a b.service"], 2, "a b.service"),
        (["--output", "mine.toml/u.service"], 73, "mine.toml"),
        (["--setenv", "A B=1"], 2, "NAME=VALUE"),
        (["--watchdog", "-1"], 2, "watchdog"),
        (["--warmup-steps", "-1"], 2, "warmup_steps"),
        (["--config", "none.toml"], 66, "none.toml"),
        (["--tokens", "a.u16:0"], 2, "a.u16"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(asked, code, says, here, capfd):
    (here / "mine.toml").write_text("")
    got, error = failure(capfd, "--run-dir", "run", *asked)
    assert (got, says in error) == (code, True), error
    assert not (here / "config").exists() and [p.name for p in here.iterdir()] == ["mine.toml"]


def test_options_that_do_not_fit_a_run_that_is_there_are_refused_now_and_not_by_the_service(here, capfd):
    (here / "run").mkdir()
    (here / "run/config.toml").write_text("[model]\nd_model = 64\n")
    code, error = failure(capfd, "--run-dir", "run", "--d-model", "32")
    assert code == 78 and "d_model is 64" in error
    assert run_cli(["service", "--run-dir", "run"]) == 0
    assert start_line(here / "config/systemd/user/llmtrain-run.service").endswith(f"--resume --run-dir {here}/run")


def test_a_folder_that_systemd_cannot_name_is_refused(here, capfd, monkeypatch):
    (here / "odd\n").mkdir()
    monkeypatch.chdir(here / "odd\n")
    code, error = failure(capfd, "--run-dir", "run")
    assert code == 2 and "odd" in error
