"""A real `systemd --user` and a journal, in namespaces of their own, so that they end with the block and whatever runs
on the machine sees nothing of them. Needs root, and no systemd as process 1."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
MANAGER = Path("/usr/lib/systemd/systemd")

# Read by every Python that the manager starts, before llmtrain: makes a run freeze in its loop, once, at the micro-step
# that the file $FREEZE says, and every save take as many seconds as $SLOW_SAVE says.
SITE = """
import os, time
freeze, slow_save = os.environ.get("FREEZE", ""), os.environ.get("SLOW_SAVE", "")
if os.path.exists(freeze):
    from llmtrain.training.step import TrainStep
    left, micro_step = [int(open(freeze).read())], TrainStep.micro_step
    def frozen(self, *arguments, **named):
        left[0] -= 1
        if left[0] == 0:
            os.unlink(freeze)
            time.sleep(1000)
        return micro_step(self, *arguments, **named)
    TrainStep.micro_step = frozen
if slow_save:
    from llmtrain.storage import atomic
    publish = atomic.publish_folder
    def slowly(*arguments):
        time.sleep(float(slow_save))
        return publish(*arguments)
    atomic.publish_folder = slowly
"""

BOOT = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/log/journal "$XDG_RUNTIME_DIR"
/usr/lib/systemd/systemd-journald &
while [ ! -S /run/systemd/journal/stdout ]; do sleep 0.02; done
/usr/lib/systemd/systemd --user --unit="$TARGET" &
wait $!
"""


def why_not() -> str:
    """Why there can be no such manager here; empty where there can."""
    if os.geteuid() != 0:
        return "needs root, for a mount namespace"
    if not MANAGER.exists() or not all(map(shutil.which, ("unshare", "nsenter", "systemctl", "journalctl"))):
        return "systemd is not installed"
    probe = subprocess.run(["unshare", "-m", "-p", "-f", "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True)
    return "this machine gives no namespaces" if probe.returncode else ""


class UserSystemd:
    """What stands in `folder`: config/ is XDG_CONFIG_HOME."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.config, self.pid = folder / "config", pid
        self.units = self.config / "systemd/user"

    def run(self, *command: str, check: bool = True) -> str:
        """What a command says, run as from a login shell of the manager's user."""
        inside = ["nsenter", "-t", str(self.pid), "-m", "-p", "env", *_environment(self.config), *command]
        done = subprocess.run(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        assert not check or done.returncode == 0, (command, done.returncode, done.stdout, self.journal())
        return done.stdout

    def ctl(self, *words: str, check: bool = True) -> str:
        return self.run("systemctl", "--user", *words, check=check)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.ctl("show", unit, "--property", name, "--value").strip()

    def wait(self, unit: str, name: str, value: str, seconds: float = 60) -> None:
        """Until a property has the value."""
        end = time.monotonic() + seconds
        while (now := self.show(unit, name)) != value:
            assert time.monotonic() < end, (name, now, value, self.journal())
            time.sleep(0.05)

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", check=False)

    def drop_in(self, unit: str, *lines: str) -> None:
        """Lays settings of [Service] over a unit's own, as `systemctl edit` does."""
        folder = self.units / f"{unit}.d"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "override.conf").write_text("\n".join(["[Service]", *lines, ""]))
        self.ctl("daemon-reload")


def _environment(config: Path) -> list[str]:
    return ["XDG_RUNTIME_DIR=/run/user/0", f"XDG_CONFIG_HOME={config}", f"HOME={config.parent}"]


@contextmanager
def user_systemd(folder: Path, target: str = "basic.target") -> Iterator[UserSystemd]:
    """The manager, with files in `folder`; every process that it started is gone at the end."""
    (folder / "config/systemd/user").mkdir(parents=True, exist_ok=True)
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site/sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'site'}:{ROOT}", "TARGET": target}
    environment |= dict(pair.split("=", 1) for pair in _environment(folder / "config"))
    for name in ("NOTIFY_SOCKET", "DBUS_SESSION_BUS_ADDRESS", "INVOCATION_ID"):
        environment.pop(name, None)
    with open(folder / "manager.log", "ab") as log:
        outer = subprocess.Popen(
            ["unshare", "-m", "-p", "--fork", "--kill-child", "--mount-proc", "bash", "-c", BOOT],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        end = time.monotonic() + 30
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        while True:
            assert time.monotonic() < end and outer.poll() is None, (folder / "manager.log").read_text()
            if pid := children.read_text().strip():
                manager = UserSystemd(folder, int(pid))
                if manager.ctl("is-system-running", check=False).strip() in ("running", "degraded"):
                    break
            time.sleep(0.05)
        yield manager
    finally:
        outer.send_signal(signal.SIGKILL)
        outer.wait()
