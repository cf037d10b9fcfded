"""What a real `systemd --user` does with a run and a run with it: the long form of tests/faults/test_systemd.py.

    sudo .venv/bin/python scripts/faults/systemd.py [--output docs/data/systemd.json]

Needs root (for namespaces of its own) and systemd. Each fault has a run of its own, with the unit that
`llmtrain service` writes; whatever was done to it, it must end in the bits of a run that nobody disturbed.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from llmtrain.storage import atomic  # noqa: E402
from llmtrain.training.unit import STAYS_DOWN  # noqa: E402
from tests.faults.user_systemd import UserSystemd, user_systemd, why_not  # noqa: E402
from tests.training.conftest import write_corpus  # noqa: E402

STEPS = 900
OPTIONS = [
    "--d-model", "64", "--n-layers", "2", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "16", "--d-ff", "96",
    "--seq-len", "32", "--batch-size", "4", "--accumulate", "2", "--total-steps", str(STEPS), "--warmup-steps", "20",
    "--device", "cpu", "--precision", "fp32", "--checkpoint-every", "50", "--val-every", "120", "--val-windows", "16",
    "--tokens", "corpus.u16", "--val-tokens", "held=val.u16",
]  # fmt: skip


class Trial:
    """One run under the manager."""

    def __init__(self, systemd: UserSystemd, here: Path, name: str, *more: str, settings: tuple[str, ...] = ()) -> None:
        self.systemd, self.here, self.name, self.unit = systemd, here, name, f"llmtrain-{name}.service"
        llmtrain(systemd, here, "service", "--run-dir", name, *OPTIONS, *more)
        ends = f'ExecStopPost=/bin/sh -c "echo $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS >> {here}/{name}.ends"'
        systemd.drop_in(self.unit, "RestartSec=200ms", ends, *settings)

    def start(self) -> None:
        self.systemd.ctl("start", self.unit)

    def stop(self) -> None:
        self.systemd.ctl("stop", self.unit)

    def kill(self, number: signal.Signals) -> None:
        self.systemd.ctl("kill", "--kill-who=main", "--signal", number.name, self.unit)

    def ends(self) -> list[str]:
        path = self.here / f"{self.name}.ends"
        return path.read_text().splitlines() if path.exists() else []

    def at(self, steps: int) -> None:
        """Until so many steps were done since the last look."""
        log = self.here / self.name / "metrics.jsonl"
        began, end = self.step(log), time.monotonic() + 120
        while self.step(log) < began + steps:
            assert time.monotonic() < end, self.systemd.journal()
            time.sleep(0.02)

    @staticmethod
    def step(log: Path) -> int:
        text = log.read_text() if log.exists() else ""
        trained = [json.loads(line) for line in text.splitlines() if '"kind": "train"' in line]
        return trained[-1]["step"] if trained else 0

    def status(self) -> dict:
        return json.loads((self.here / self.name / "status.json").read_text())

    def finish(self) -> None:
        """Goes on until the run's end, and asserts that it lost no bit."""
        if self.status()["state"] != "finished":
            self.systemd.ctl("start", self.unit)
            end = time.monotonic() + 120
            while self.status()["state"] != "finished":
                assert time.monotonic() < end, self.systemd.journal()
                time.sleep(0.1)
        assert result(self.here, self.name) == result(self.here, "whole"), f"{self.name}: other bits"


def llmtrain(systemd: UserSystemd, here: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(systemd.config)}
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", *arguments], cwd=here, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def result(here: Path, run: str) -> tuple:
    folder = here / run / f"checkpoints/step-{STEPS:08d}"
    tensors = [(folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    lines = [json.loads(line) for line in (here / run / "metrics.jsonl").read_text().splitlines()]
    # Every attempt adds a train line for its first step; those at the interval are in all.
    trained = [(x["step"], x["lm_loss"]) for x in lines if x["kind"] == "train" and x["step"] % 10 == 0]
    return tensors, trained, [(x["step"], x["val_loss"]) for x in lines if x["kind"] == "eval"]


def frozen(systemd: UserSystemd, here: Path) -> str:
    (here / "freeze").write_text("500")
    trial = Trial(systemd, here, "frozen", "--watchdog", "3", "--setenv", f"FREEZE={here}/freeze")
    trial.start()
    systemd.wait(trial.unit, "NRestarts", "1", 120)
    assert trial.ends()[0] == "watchdog killed ABRT", trial.ends()
    journal = systemd.journal()
    assert "Fatal Python error: Aborted" in journal and "llmtrain/training/run.py" in journal and "in frozen" in journal
    trial.finish()
    return "SIGABRT by the watchdog, the stack in the journal, restarted"


def stopped_process(systemd: UserSystemd, here: Path) -> str:
    trial = Trial(systemd, here, "sigstop", "--watchdog", "3")
    trial.start()
    trial.at(100)
    trial.kill(signal.SIGSTOP)
    systemd.wait(trial.unit, "NRestarts", "1", 120)
    assert trial.ends()[0] == "watchdog killed ABRT", trial.ends()
    trial.finish()
    return "SIGABRT by the watchdog, restarted"


def killed(systemd: UserSystemd, here: Path) -> str:
    trial = Trial(systemd, here, "killed")
    trial.start()
    for times in range(1, 5):
        trial.at(60)
        trial.kill(signal.SIGKILL)
        systemd.wait(trial.unit, "NRestarts", str(times), 120)
        systemd.wait(trial.unit, "ActiveState", "active", 120)
    trial.finish()
    return "restarted each time"


def slow_save(systemd: UserSystemd, here: Path) -> str:
    trial = Trial(systemd, here, "slow", "--setenv", "SLOW_SAVE=6", settings=("TimeoutStopSec=2",))
    trial.start()
    trial.at(120)
    since = time.monotonic()
    trial.stop()
    seconds = time.monotonic() - since
    assert seconds > 5 and trial.ends() == ["success exited 75"], (seconds, trial.ends())
    assert trial.status()["state"] == "stopped" and trial.status()["step"] > 100
    systemd.drop_in(trial.unit, "RestartSec=200ms", "Environment=SLOW_SAVE=")
    trial.finish()
    return f"saved in {seconds:.1f} s and exit 75, with TimeoutStopSec=2"


def slow_save_unheard(systemd: UserSystemd, here: Path) -> str:
    """The control: what happens to the same run without the protocol."""
    settings = ("TimeoutStopSec=2", "Type=exec", "NotifyAccess=none", "WatchdogSec=0")
    trial = Trial(systemd, here, "unheard", "--setenv", "SLOW_SAVE=6", settings=settings)
    trial.start()
    trial.at(120)
    trial.stop()
    assert trial.ends() == ["timeout killed KILL"], trial.ends()
    systemd.drop_in(trial.unit, "RestartSec=200ms", "Environment=SLOW_SAVE=")
    trial.finish()
    return "killed with nothing saved since the last checkpoint"


def signals(systemd: UserSystemd, here: Path) -> str:
    trial = Trial(systemd, here, "signals")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        trial.start()
        trial.at(30)
        trial.kill(number)
        systemd.wait(trial.unit, "ActiveState", "inactive", 120)
        assert trial.ends()[-1] == "success exited 75", (number, trial.ends())
    time.sleep(1)
    assert len(trial.ends()) == 5, trial.ends()
    trial.finish()
    return "saved and exit 75 each time, none restarted"


def codes(systemd: UserSystemd, here: Path) -> str:
    for code in STAYS_DOWN:
        trial = Trial(systemd, here, f"code-{code}", settings=("ExecStart=", f"ExecStart=/bin/sh -c 'exit {code}'"))
        systemd.ctl("start", trial.unit, check=False)
        time.sleep(1)
        assert systemd.show(trial.unit, "ActiveState") == "failed" and len(trial.ends()) == 1, (code, trial.ends())
    for code in (70, 73, 74, 1):
        trial = Trial(systemd, here, f"code-{code}", settings=("ExecStart=", f"ExecStart=/bin/sh -c 'exit {code}'"))
        systemd.ctl("start", trial.unit, "--no-block")
        end = time.monotonic() + 30
        while len(trial.ends()) < 8:  # more often than systemd's own limit of five
            assert time.monotonic() < end, (code, trial.ends())
            time.sleep(0.1)
        trial.stop()
    (here / "corpus.u16").rename(here / "away.u16")
    trial = Trial(systemd, here, "missing")
    systemd.ctl("start", trial.unit, check=False)
    time.sleep(1)
    (here / "away.u16").rename(here / "corpus.u16")
    assert trial.ends() == ["exit-code exited 66"], trial.ends()
    return f"{', '.join(map(str, STAYS_DOWN))} stay down; 70, 73, 74, 1 are restarted without end"


def finished(systemd: UserSystemd, here: Path) -> str:
    trial = Trial(systemd, here, "whole")
    trial.start()
    systemd.wait(trial.unit, "ActiveState", "inactive", 60)
    assert trial.ends() == ["success exited 0"], trial.ends()
    return "exit 0 and no restart"


CASES: dict[str, Callable[[UserSystemd, Path], str]] = {
    "the training loop freezes": frozen,
    "the process is stopped (SIGSTOP)": stopped_process,
    "kill -9, four times": killed,
    "a stop, and a save longer than TimeoutStopSec": slow_save,
    "the same without the notify protocol (control)": slow_save_unheard,
    "TERM, INT, HUP, USR1, USR2 from outside": signals,
    "exit codes": codes,
    "a finished run is started": finished,
}


def reboot(folder: Path, here: Path) -> str:
    """The manager ends without a word and another one starts, as after a power cut: an enabled unit goes on."""
    with user_systemd(folder) as systemd:
        trial = Trial(systemd, here, "reboot")
        systemd.ctl("enable", "--now", trial.unit)
        trial.at(120)
    with user_systemd(folder, target="default.target") as systemd:
        trial.systemd = systemd
        end = time.monotonic() + 120
        while trial.status()["state"] != "finished":
            assert time.monotonic() < end, systemd.journal()
            time.sleep(0.1)
        trial.finish()
    return "went on by itself"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs/data/systemd.json")
    output = parser.parse_args().output
    if reason := why_not():
        sys.exit(f"no systemd --user can be had here: {reason}")
    found = []
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder, here = Path(name), Path(name) / "runs"
        here.mkdir()
        write_corpus(here / "corpus.u16", 20000)
        write_corpus(here / "val.u16", 2000, seed=3)
        with user_systemd(folder) as systemd:
            version = systemd.run("systemctl", "--version").split()[1]
            llmtrain(systemd, here, "train", "--run-dir", "whole", *OPTIONS)
            for fault, case in CASES.items():
                since = time.monotonic()
                outcome = case(systemd, here)
                found.append({"fault": fault, "outcome": outcome, "seconds": round(time.monotonic() - since, 1)})
                print(f"{fault}: {outcome}", flush=True)
        since = time.monotonic()
        outcome = reboot(folder, here)
        found.append({"fault": "reboot", "outcome": outcome, "seconds": round(time.monotonic() - since, 1)})
        print(f"reboot: {outcome}")
    machine = {"systemd": int(version), "kernel": platform.release(), "python": platform.python_version()}
    made = {"script": "scripts/faults/systemd.py", "machine": machine, "steps": STEPS, "faults": found}
    atomic.write_json(output, made)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
