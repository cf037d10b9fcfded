"""`llmtrain service` under the real thing: systemd's check of units, and `systemd --user` where root can make one."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.cli.main import run as run_cli
from llmtrain.training.unit import ServiceConfig, unit_text
from tests.faults.user_systemd import ROOT, user_systemd, why_not
from tests.training.conftest import write_corpus

ODD = [" two  words ", "100%", "%h", "$HOME", "${HOME}", "a\"b'c", "back\\slash", "ü", "a\nb", "c\t", ";", "", "-"]

OPTIONS = [
    "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8", "--d-ff", "48",
    "--seq-len", "16", "--batch-size", "2", "--total-steps", "100000", "--warmup-steps", "4", "--device", "cpu",
    "--precision", "fp32", "--checkpoint-every", "10", "--tokens", "corpus.u16",
]  # fmt: skip


def verify(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "verify", "--recursive-errors=no", *map(str, arguments)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["plain", "a b 100% $HOME \"'\\x", "ü\n"])
@pytest.mark.parametrize("scope", ["--user", "--system"])
def test_systemd_has_nothing_to_say_of_a_unit(name, scope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["service", scope, "--output", "u.service", "--run-dir", name, "--tokens", f"{name}.u16", *OPTIONS[:-2]]
    assert run_cli([*asked, "--setenv", f"ODD={name}"]) == 0
    done = verify(*([scope] if scope == "--user" else []), tmp_path / "u.service", folder=tmp_path)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd-analyze is older than --recursive-errors")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    broken = tmp_path / "broken.service"
    broken.write_text((tmp_path / "u.service").read_text().replace("KillMode=", "KillMood="))
    assert verify(broken, folder=tmp_path).returncode == 1


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_frozen_run_is_started_again_with_its_stack_in_the_journal_and_a_stop_saves(tmp_path, monkeypatch):
    folder = tmp_path / "a folder, 100%"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_corpus(folder / "corpus.u16", 3000)
    (folder / "freeze").write_text("30")
    with user_systemd(tmp_path) as systemd:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(systemd.config))
        asked = ["--run-dir", "my run", "--watchdog", "2", "--setenv", f"FREEZE={folder / 'freeze'}", *OPTIONS]
        assert run_cli(["service", *asked]) == 0
        unit = "llmtrain-my-run.service"
        ends = f'ExecStopPost=/bin/sh -c "echo $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS >> {tmp_path}/ends"'
        systemd.drop_in(unit, "RestartSec=100ms", ends)
        systemd.ctl("enable", "--now", unit)
        assert systemd.show(unit, "ActiveState") == "active"  # the first step is done
        systemd.wait(unit, "NRestarts", "1")
        systemd.wait(unit, "ActiveState", "active")
        time.sleep(0.3)
        status = systemd.show(unit, "StatusText")
        systemd.ctl("stop", unit)
        assert systemd.show(unit, "ActiveState") == "inactive"  # not failed
        assert (tmp_path / "ends").read_text() == "watchdog killed ABRT\nsuccess exited 75\n"
        journal = systemd.journal()
        state = json.loads((folder / "my run/status.json").read_text())

        # Without a unit, as the docs show it; it goes on with the run.
        shown = (ROOT / "docs/service.md").read_text().partition("    systemd-run ")[2].partition("\n    journalctl")[0]
        words = shlex.split(shown.replace("\\\n", " "))
        program = words.index(".venv/bin/llmtrain")
        train = [*words[program + 1 : words.index("--run-dir")], "--run-dir", "my run"]
        start = ["systemd-run", *words[:program], sys.executable, "-m", "llmtrain", *train]
        systemd.run("env", "-C", str(folder), *start)
        assert systemd.show("try", "ActiveState") == "active" and systemd.show("try", "Restart") == "on-failure"
        systemd.ctl("stop", "try")
        goes_on = json.loads((folder / "my run/status.json").read_text())

        # What systemd makes of odd words.
        look = "import json, os, sys\njson.dump([sys.argv, os.environ['ODD']], open('odd', 'w'))"
        (folder / "odd.py").write_text(look)
        odd = ServiceConfig(setenv=(f"ODD={''.join(ODD)}",))
        text = unit_text(odd, [sys.executable, str(folder / "odd.py"), *ODD], folder, folder, None)
        (systemd.units / "odd.service").write_text(text.replace("=notify", "=oneshot"))
        systemd.ctl("daemon-reload")
        systemd.ctl("start", "odd")
        assert json.loads((folder / "odd").read_text()) == [[str(folder / "odd.py"), *ODD], "".join(ODD)]
    assert " loss " in status and " tok/s " in status and " eta " in status and "/100000" in status
    assert "Fatal Python error: Aborted" in journal and "in frozen" in journal and "llmtrain/training/run.py" in journal
    assert (state["state"], state["exit_code"]) == ("stopped", 75) and goes_on["step"] > state["step"] > 20
    events = [json.loads(line) for line in (folder / "my run/metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e.get("event") == "start"] == [0, 20, state["step"]]
    assert (folder / f"my run/checkpoints/step-{goes_on['step']:08d}/MANIFEST.json").exists()
