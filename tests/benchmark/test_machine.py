import os
import stat
from pathlib import Path

import pytest

from llmtrain.benchmark import machine

SMI = """#!/bin/sh
case "$*" in
  *query-gpu*) echo "NVIDIA H200, GPU-1, 580.1, 143771, {used}, {busy}, 30, 700.00, 345, 3201, 1980, [N/A]" ;;
  *compute-apps*) {apps} ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch):
    """Puts an nvidia-smi on the PATH that answers as told."""

    def install(used: object = 1, busy: object = 0, apps: str = "true") -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(SMI.format(used=used, busy=busy, apps=apps))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_an_idle_card_is_not_contended(smi):
    smi()
    card = machine.card_state()
    assert card is not None
    assert (card["name"], card["driver"], card["memory_total_mib"]) == ("NVIDIA H200", "580.1", 143771)
    assert card["clocks_mhz"] == {"sm": 345, "memory": 3201, "max_sm": 1980, "max_memory": None}
    assert machine.contention(card) == []


def test_another_process_on_the_card_is_contention_and_our_own_is_not(smi):
    smi(used=5755, apps="echo '77, /somebodys/bin/python, 5754'")
    seen = machine.card_state()
    assert seen is not None and seen["processes"][0]["name"] == "python", "paths stay on their machine"
    assert machine.contention(seen) == ["1 other processes on the card holding 5754 MiB"]
    card = machine.card_state(ours=[77])
    assert card is not None and card["processes"] == []


def test_memory_held_by_unlisted_processes_is_contention(smi):
    smi(used=5755)
    assert machine.contention(machine.card_state()) == ["5755 MiB of the card held by others"]


def test_a_busy_card_and_a_busy_cpu_are_contention(smi):
    smi(busy=90)
    assert machine.contention(machine.card_state(), cpu_busy=0.9) == ["card 90% busy", "CPU 90% busy"]
    assert machine.contention(None, cpu_busy=0.01) == []


def test_a_card_that_is_busy_with_what_just_ended_is_not_contended(smi, monkeypatch):
    smi(busy=90)
    monkeypatch.setattr(machine.time, "sleep", lambda _: smi(busy=0))
    assert machine.describe(on_card=True)["contended"] == []
    smi(busy=90)
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    assert machine.describe(on_card=True)["contended"] == ["card 90% busy"]


def test_without_a_card_the_machine_is_still_described(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.card_state() is None
    described = machine.describe(on_card=True)
    assert described["card"] is None and described["cores"] >= 1 and described["versions"]["torch"]
    assert described["cpu"] in machine.headline(described)


def test_a_broken_nvidia_smi_counts_as_no_card(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.card_state() is None


def test_the_headline_names_card_driver_and_contention(smi):
    smi(used=5755)
    line = machine.headline(machine.describe(on_card=True))
    assert "NVIDIA H200, driver 580.1" in line and "**Contended**: 5755 MiB" in line


def test_what_the_card_does_not_say_is_unknown(smi):
    smi(used="[N/A]", busy="[N/A]")
    card = machine.card_state()
    assert machine.contention(card) == []
    line = machine.headline(machine.describe(on_card=True))
    assert "unknown of its memory held" in line
