"""What a supervisor hears, over real sockets, and what it then does to a run that hangs."""

import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.storage.errors import Diverged, StopRequested
from llmtrain.training import notify, run
from llmtrain.training.lifecycle import StopFlag
from llmtrain.training.notify import LONG, Supervisor
from tests.training.conftest import config, write_corpus


class Ear:
    """The supervisor's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.queue: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen(self) -> None:
        # All the time: the kernel holds only a few messages that nobody reads.
        while message := self.socket.recv(65536).decode():
            self.queue.put(message)

    def heard(self, seconds: float = 0.05) -> list[str]:
        """The messages that have come, and that come within so many seconds."""
        found, end = [], time.monotonic() + seconds
        while True:
            try:
                found.append(self.queue.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                return found


@contextmanager
def listening(address: str) -> Iterator[Ear]:
    ear = Ear(address)
    thread = threading.Thread(target=ear.listen)
    thread.start()
    try:
        yield ear
    finally:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ear.socket.getsockname())
        thread.join()
        ear.socket.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    with listening(str(tmp_path / "s")) as ear:
        yield ear


def test_without_a_supervisor_nothing_is_said_and_nothing_fails():
    for environment in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}, {"WATCHDOG_USEC": "7"}):
        with Supervisor.of(environment) as supervisor:
            supervisor.watch(StopFlag())
            supervisor.alive()
            supervisor.ready(1.0)
            supervisor.status("fine")
        assert environment == {}


def test_a_supervisor_that_left_or_does_not_read_holds_up_nothing(tmp_path):
    with Supervisor(str(tmp_path / "gone")) as supervisor:
        supervisor.ready(1.0)
    ear = Ear(str(tmp_path / "deaf"))
    began = time.monotonic()
    with Supervisor(ear.address) as supervisor:
        while time.monotonic() < began + 0.5:
            supervisor.status("x" * 1000)
    assert time.monotonic() < began + 3
    ear.socket.close()


@pytest.mark.parametrize("pid", [None, "mine", "1"])
def test_the_names_of_the_environment_are_taken_and_a_watchdog_for_another_process_is_none(pid, tmp_path):
    address = f"@llmtrain-{os.getpid()}-{pid}"
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000", "HOME": "/"}
    if pid:
        environment["WATCHDOG_PID"] = str(os.getpid()) if pid == "mine" else pid
    with listening(address) as ear:
        supervisor = Supervisor.of(environment)
        assert environment == {"HOME": "/"}
        supervisor.ready(0.1)
        watched = ["WATCHDOG=1"] if pid != "1" else []
        assert ear.heard() == ["READY=1", *watched]


def test_a_word_is_sent_only_as_often_as_is_needed_and_a_longer_silence_is_announced(ear):
    supervisor = Supervisor(ear.address, watchdog=0.4)
    for _ in range(1000):
        supervisor.alive()
    assert ear.heard() == [f"EXTEND_TIMEOUT_USEC={round(LONG * 1e6)}"]
    supervisor.ready(0.05)
    for _ in range(1000):
        supervisor.alive()
    assert ear.heard() == ["READY=1", "WATCHDOG_USEC=400000\nWATCHDOG=1"]
    end = time.monotonic() + 0.35
    while time.monotonic() < end:
        supervisor.alive()
    assert ear.heard() in (["WATCHDOG=1"] * 3, ["WATCHDOG=1"] * 4)  # a quarter of the time each, and some passed before
    supervisor.alive(LONG)
    supervisor.alive(LONG)
    supervisor.alive()
    assert ear.heard() == [f"WATCHDOG_USEC={round(LONG * 1e6)}\nWATCHDOG=1", "WATCHDOG_USEC=400000\nWATCHDOG=1"]


def test_a_model_that_is_slower_than_the_watchdog_gets_a_longer_one(ear):
    supervisor = Supervisor(ear.address, watchdog=1.0)
    supervisor.ready(30.0)
    assert ear.heard() == ["READY=1", "WATCHDOG_USEC=120000000\nWATCHDOG=1"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, ["READY=1", "STOPPING=1"]),
        (StopRequested("stopped at step 3"), ["STATUS=stopped at step 3", "READY=1", "STOPPING=1"]),
        (KeyboardInterrupt(), ["READY=1", "STOPPING=1"]),
        (Diverged("lm_loss is nan:\nlower it"), ["STATUS=lm_loss is nan: lower it"]),
        (ValueError("a bug"), []),
    ],
)
def test_an_end_that_is_no_failure_is_none_before_the_first_step_either(error, says, ear):
    try:
        with Supervisor(ear.address):
            ear.heard()
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    assert ear.heard() == says


def test_a_stop_is_extended_for_as_long_as_the_run_is_not_overdue(ear, monkeypatch):
    monkeypatch.setattr(notify, "EXTENDS_EVERY", 0.05)
    with StopFlag() as stop, Supervisor(ear.address, watchdog=0.5) as supervisor:
        supervisor.watch(stop)
        supervisor.ready(0.01)
        assert not any("EXTEND" in message for message in ear.heard(0.2)[1:])
        os.kill(os.getpid(), signal.SIGUSR2)
        supervisor.alive()
        heard = ear.heard(1.0)
        extended = heard.count("EXTEND_TIMEOUT_USEC=10000000")
        assert 5 <= extended <= 11  # for half a second of the second
        assert "STOPPING=1" in heard and "STATUS=SIGUSR2: saves and stops" in heard
        supervisor.alive(LONG)  # it saves
        assert "EXTEND_TIMEOUT_USEC=10000000" in ear.heard(0.2)
    ear.heard()
    assert not ear.heard(0.2)


def test_a_run_says_when_it_is_ready_how_it_is_and_that_it_stops(corpus, tmp_path, ear):
    held_out = write_corpus(tmp_path / "val.u16", 200, seed=1)
    asked = config(corpus, tmp_path / "run", run={"checkpoint_every": 4, "val_every": 6, "log_every": 2})
    asked = replace(asked, data=replace(asked.data, val_tokens=(str(held_out),)))
    with Supervisor(ear.address, watchdog=50) as supervisor:
        run.train(asked, resume=False, supervisor=supervisor)
    heard = ear.heard()
    first = heard.index("READY=1")
    long, short = (f"WATCHDOG_USEC={us}\nWATCHDOG=1" for us in (1800000000, 50000000))
    assert heard[0] == "EXTEND_TIMEOUT_USEC=1800000000\nSTATUS=starts"
    assert all(message.startswith("EXTEND_TIMEOUT_USEC=") for message in heard[:first])
    steps = [int(m[1]) for m in re.finditer(r"STATUS=epoch \S+ step (\d+)/12 loss .* tok/s .* eta ", "\n".join(heard))]
    assert steps == [1, 2, 4, 6, 8, 10, 12]
    # Ready; saves at 4; evaluates at 6; saves at 8 and 12 and evaluates.
    words = [message for message in heard[first:] if not message.startswith("STATUS=")]
    assert words == ["READY=1", short, long, short, long, short, long, short, long, "READY=1", "STOPPING=1"]
    with Supervisor(ear.address) as supervisor:  # there is nothing to do, and that is no failure
        run.train(asked, resume=True, supervisor=supervisor)
    assert ear.heard()[-2:] == ["READY=1", "STOPPING=1"]
