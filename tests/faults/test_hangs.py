"""Real processes under a watchdog that does what systemd's does."""

import os
import signal
import threading
import time

from tests.faults.conftest import DWELL, OPTIONS, result
from tests.training.test_notify import Ear, ear

__all__ = ["ear"]  # a fixture


class Watchdog(threading.Thread):
    """Does to a process what systemd does: SIGABRT when a word does not come in the time that was last agreed on."""

    def __init__(self, ear: Ear, pid: int, watchdog: float) -> None:
        super().__init__()
        self.ear, self.pid, self.heard = ear, pid, []
        self.within, self.watchdog, self.ready, self.barked = 60.0, watchdog, False, False

    def run(self) -> None:
        due = time.monotonic() + self.within
        while "STOPPING=1" not in self.heard and time.monotonic() < due:
            for message in self.ear.heard(0.02):
                self.heard.append(message)
                fields = dict(line.split("=", 1) for line in message.splitlines())
                if "READY" in fields:
                    self.within, due = self.watchdog, time.monotonic() + self.watchdog
                self.within = int(fields.get("WATCHDOG_USEC", self.within * 1e6)) / 1e6
                if "WATCHDOG" in fields:
                    due = time.monotonic() + self.within
                if "EXTEND_TIMEOUT_USEC" in fields:
                    due = max(due, time.monotonic() + int(fields["EXTEND_TIMEOUT_USEC"]) / 1e6)
        if "STOPPING=1" not in self.heard:
            self.barked = True
            os.kill(self.pid, signal.SIGABRT)


def test_a_compile_an_evaluation_and_a_save_are_no_hang_and_a_frozen_loop_is_one(here, forks, undisturbed, ear):
    slow = "dwell(step.TrainStep, 'micro_step', 1, 0.9)\ndwell(atomic, 'publish_folder', 1, 1.8)\n"
    slow += "dwell(step.TrainStep, 'evaluate', 2, 1.8)\ndwell(step.TrainStep, 'micro_step', 18, 1000)"
    asked = (*OPTIONS, "--run-dir", "hung")
    environment = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "600000"}
    process = forks.start(here, "hung", *asked, before=DWELL + slow, **environment)
    watchdog = Watchdog(ear, process.pid, 0.6)
    watchdog.start()
    assert process.end() == -signal.SIGABRT
    watchdog.join()
    assert watchdog.barked and process.out.count("HERE") == 4, (process.out, watchdog.heard)
    assert "in slow" in process.err and "llmtrain/training/run.py" in process.err and "Thread" in process.err
    process = forks.start(here, "hung", *asked, **environment)
    watchdog = Watchdog(ear, process.pid, 0.6)
    watchdog.start()
    assert process.end() == 0, process.err
    watchdog.join()
    assert result(here / "hung") == undisturbed


def test_a_save_that_takes_longer_than_a_stop_may_asks_for_more_time(here, forks, ear):
    dwells = "dwell(atomic, 'publish_folder', 1, 3.5)"
    process = forks.start(here, "save", *OPTIONS, "--run-dir", "save", before=DWELL + dwells, NOTIFY_SOCKET=ear.address)
    process.says("HERE")
    ear.heard()
    process.send(signal.SIGTERM)
    assert process.end() == 75
    heard = ear.heard()
    assert heard.count("EXTEND_TIMEOUT_USEC=10000000") >= 3 and heard[-1] == "STOPPING=1"
