import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.benchmark.peers_table import CaseView, peers_markdown

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "bench"


@pytest.fixture(scope="module")
def peers():
    sys.path.insert(0, str(SCRIPTS))
    import peers

    yield peers
    sys.path.remove(str(SCRIPTS))


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """peers.py in `folder`, where no card is seen."""
    command, blind = [sys.executable, str(SCRIPTS / "peers.py"), *words], os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=blind, timeout=300)


def test_the_arms_run_and_agree_on_a_tiny_model_and_docs_stay_as_they_are(tmp_path):
    output = tmp_path / "build" / "docs" / "peers.md"
    done = call(tmp_path, "--smoke", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "docs").exists()
    (case,) = json.loads((output.parent / "data" / "peers.json").read_text())["cases"]
    rows = {(row["arm"], row["shape"]["accumulate"]): row for row in case["rows"]}
    ours = rows["llmtrain", 1]
    others = ["llmtrain (copy)", "plain"] + ["transformers"] * (rows["transformers", 1]["status"] != "absent")
    for row in [ours, rows["llmtrain", 2], *(rows[name, 1] for name in others)]:
        assert row["status"] == "ok", row
        assert len(row["bursts"]) == 2 and all(b["wall_s"] > 0 for b in row["bursts"])
        assert row["losses"][-1] < row["losses"][0] - 0.1
        # FP32, the same weights and data: only the copy, moved within bf16's rounding, may differ visibly.
        near = 1e-3 if row["arm"] == "llmtrain (copy)" else 2e-5
        assert row["losses"] == pytest.approx(ours["losses"], abs=near), row["arm"]
    assert rows["llmtrain (copy)", 1]["losses"] != ours["losses"]
    assert "| llmtrain | 4 x 32 |" in output.read_text()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--case", "102m-4x1024"], "there is no card here; --smoke runs a tiny model on the CPU"),
        (["--smoke", "--seconds", "nan"], "--seconds must be more than 0, not nan"),
        (["--smoke", "--output", "torn.md"], "--output torn.md: Expecting value"),
        (["--smoke", "--output", "file/x.md"], "file/x.md: cannot be created"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_measured(tmp_path, words, error):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "torn.json").write_text("torn")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    done = call(tmp_path, *words)
    assert done.returncode == 2 and error in done.stderr.splitlines()[-1], done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_budget_that_is_over_starts_nothing(tmp_path):
    done = call(tmp_path, "--smoke", "--budget", "-1")
    assert (done.returncode, done.stdout) == (0, "smoke: not started, -1 s are over\n"), done.stderr


class FakeArms:
    """Stands in for ArmProcess: answers as `answers` says for an arm, each a list of events."""

    def __init__(self, answers: dict[str, list[dict]], log: list[str]) -> None:
        self.answers, self.log = answers, log
        self.alive: set[str] = set()

    def __call__(self, arm, shape, steps, settings):
        fakes = self

        class Process:
            def tell(self, line: str) -> None:
                fakes.log.append(f"{arm}: {line}")

            def answer(self) -> dict:
                told = fakes.answers[arm]
                return dict(told.pop(0) if len(told) > 1 else told[0])

            def stop(self) -> None:
                fakes.alive.discard(arm)

        self.alive.add(arm)
        self.log.append(f"{arm}: start")
        return Process()


GOOD = {
    "event": "ready", "losses": [2.0, 1.0], "first_step_s": 3.0, "device_name": "NVIDIA H200", "not_captured": None,
    "versions": {"transformers": "5.17.0"}, "allocated_gib": 1.0, "reserved_gib": 2.0, "steps": 4, "wall_s": 0.4,
    "device_s": 0.4,
}  # fmt: skip
FULL = {"event": "oom", "reason": "CUDA out of memory"}


def run(peers, monkeypatch, answers, *, free=1e15, arms=("llmtrain", "llmtrain (copy)", "plain")):
    log: list[str] = []
    fakes = FakeArms(answers, log)
    monkeypatch.setattr(peers, "ArmProcess", fakes)
    monkeypatch.setattr(peers, "free_bytes", free if callable(free) else lambda: free)
    case = peers.alike("case", peers.Shape(peers.TINY, 4, 32), *arms)
    settings = peers.Settings(0.1, 3, "cpu", "fp32", Path("unused"))
    result = peers.run_cases([case], settings)[0] | {"seconds": 0.1, "precision": "fp32"}
    assert not fakes.alive
    return result, log


def test_arms_take_turns_and_the_copy_starts_after_its_original(peers, monkeypatch):
    good = {arm: [GOOD] for arm in ("llmtrain", "llmtrain (copy)", "plain")}
    result, log = run(peers, monkeypatch, good)
    starts, bursts = log[:3], log[3:]
    assert starts == ["llmtrain: start", "plain: start", "llmtrain (copy): start"]
    assert [entry.split(":")[0] for entry in bursts[::3]] == ["llmtrain", "llmtrain (copy)", "plain"]
    assert all(len(row["bursts"]) == 3 for row in result["rows"])
    text = peers_markdown({"cases": [result]}, "x.json")
    assert "llmtrain's share" in text and "Peers: transformers 5.17.0." in text


def test_an_arm_without_room_beside_the_others_is_measured_in_a_group_with_ours(peers, monkeypatch):
    answers = {"llmtrain": [GOOD], "llmtrain (copy)": [GOOD], "plain": [FULL, GOOD]}
    result, _ = run(peers, monkeypatch, answers)
    groups = [(row["arm"], row["group"], row["status"]) for row in result["rows"]]
    assert groups == [
        ("llmtrain", 0, "ok"), ("llmtrain", 1, "ok"), ("llmtrain (copy)", 0, "ok"), ("plain", 1, "ok"),
    ]  # fmt: skip
    assert CaseView(result).share(result["rows"][-1]) == "1.00="


def test_an_arm_that_never_fits_is_recorded_as_out_of_memory(peers, monkeypatch):
    answers = {"llmtrain": [GOOD], "llmtrain (copy)": [GOOD], "plain": [FULL]}
    result, _ = run(peers, monkeypatch, answers)
    assert result["rows"][-1]["status"] == "oom"
    assert "out of memory" in peers_markdown({"cases": [result]}, "x.json")


def test_arms_start_side_by_side_as_far_as_there_is_room(peers, monkeypatch):
    """With room for two at a time, the third starts when the first is ready; who is ready holds little."""
    arms = ("llmtrain", "plain, compiled", "transformers, compiled", "plain, compiled, CUDA graphs")
    entries = [peers.Entry(arm, peers.Shape(peers.TINY, 4, 32)) for arm in arms]
    two = sum(map(peers.expected_bytes, entries[1:3]))
    result, log = run(peers, monkeypatch, {arm: [GOOD] for arm in arms}, free=1.01 * two, arms=arms)
    assert [line for line in log if line.endswith("start")] == [f"{arm}: start" for arm in arms]
    assert [row["started_beside"] for row in result["rows"]] == [1, 1, 1, 1]


def test_an_arm_starts_after_the_one_whose_caches_it_finds(peers, monkeypatch):
    arms = ("llmtrain", "plain, compiled, CUDA graphs", "plain, compiled", "transformers")
    _, log = run(peers, monkeypatch, {arm: [GOOD] for arm in arms}, arms=arms)
    starts = [line.removesuffix(": start") for line in log if line.endswith("start")]
    assert starts == ["llmtrain", "plain, compiled", "transformers", "plain, compiled, CUDA graphs"]


def test_an_arm_that_would_not_fit_beside_the_others_waits_for_another_group(peers, monkeypatch):
    answers = {arm: [GOOD] for arm in ("llmtrain", "llmtrain (copy)", "plain")}
    one = peers.expected_bytes(peers.Entry("plain", peers.Shape(peers.TINY, 4, 32)))
    # asked: before plain beside ours, before the copy and plain with ours ready; in the second group before plain
    room = iter([0.5 * one, 1.5 * one, 0.5 * one, 0.5 * one, 9 * one])
    result, log = run(peers, monkeypatch, answers, free=lambda: next(room))
    assert log[:2] == ["llmtrain: start", "llmtrain (copy): start"]
    assert [row["group"] for row in result["rows"]] == [0, 1, 0, 1]


def together(peers, monkeypatch, free):
    """Two cases of small shapes in one go: their results and what was told to the arms."""
    log: list[str] = []
    arms = ("llmtrain", "plain")
    fakes = FakeArms({arm: [GOOD] for arm in arms}, log)
    monkeypatch.setattr(peers, "ArmProcess", fakes)
    monkeypatch.setattr(peers, "free_bytes", free)
    monkeypatch.setattr(peers.os, "cpu_count", lambda: 16)
    cases = [peers.alike(f"case-{b}", peers.Shape(peers.TINY, b, 32), *arms) for b in (1, 2)]
    return peers.run_cases(cases, peers.Settings(0.1, 2, "cpu", "fp32", Path("unused"))), log


def test_cases_together_start_side_by_side_and_take_their_turns_one_after_the_other(peers, monkeypatch):
    results, log = together(peers, monkeypatch, lambda: 1e15)
    assert [line for line in log if line.endswith("start")] == log[:4]
    assert log[4:] == 2 * ["llmtrain: burst", "plain: burst", "plain: burst", "llmtrain: burst"]
    assert [[row["group"] for row in case["rows"]] for case in results] == [[0, 0], [0, 0]]
    assert {row["started_beside"] for case in results for row in case["rows"]} == {3}


def test_of_cases_together_one_whose_measure_has_no_room_is_measured_again_as_a_whole(peers, monkeypatch):
    # Asked before the first case's plain, then before the second case's arms, and again as each of three is ready.
    room = iter([1e15, 0.0, 1e15, 0.0, 0.0, 0.0])
    results, _ = together(peers, monkeypatch, lambda: next(room, 1e15))
    assert [[row["group"] for row in case["rows"]] for case in results] == [[0, 0], [1, 1]]


def main(peers, monkeypatch, *words: str) -> int:
    monkeypatch.setattr(peers.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "describe", lambda cuda: {**MACHINE, "taken": "now"})
    monkeypatch.setattr(sys, "argv", ["peers.py", *words])
    return peers.main()


MACHINE = {"card": None, "cpu": "a", "cores": 1, "versions": {}, "system": "b", "contended": [], "taken": "before"}


def test_a_case_of_which_no_arm_runs_stays_as_it_was_measured(peers, monkeypatch, tmp_path, capsys):
    output, words = tmp_path / "peers.md", ("--arm", "plain, compiled", "--case", "102m-1x512", "--case", "102m-4x512")
    monkeypatch.setattr(peers, "ArmProcess", FakeArms({"llmtrain": [GOOD], "plain, compiled": [GOOD]}, []))
    assert main(peers, monkeypatch, *words, "--output", str(output)) == 0
    before = output.read_text()
    assert "| llmtrain | 1 x 512 |" in before and "| llmtrain | 4 x 512 |" in before

    class Broken:
        def __init__(self, arm, shape, steps, settings):
            self.ends = shape.batch_size == 1
            self.fake = FakeArms({arm: [GOOD | {"losses": [3.0, 2.5]}]}, [])(arm, shape, steps, settings)
            self.tell, self.stop = self.fake.tell, self.fake.stop

        def answer(self) -> dict:
            if self.ends:
                raise peers.ArmEnded("exit code 1: no card is left")
            return self.fake.answer()

    monkeypatch.setattr(peers, "ArmProcess", Broken)
    assert main(peers, monkeypatch, *words, "--together", "--output", str(output)) == 1
    assert "102m-1x512: no arm ran: exit code 1: no card is left" in capsys.readouterr().out
    cases = {case["name"]: case["rows"] for case in json.loads((tmp_path / "data" / "peers.json").read_text())["cases"]}
    assert [row["losses"] for row in cases["102m-1x512"]] == 2 * [[2.0, 1.0]]
    assert [row["losses"] for row in cases["102m-4x512"]] == 2 * [[3.0, 2.5]]


def test_cases_that_share_an_arm_and_a_shape_are_not_held_together(peers, monkeypatch, tmp_path, capsys):
    words = ("--together", "--case", "102m-64x1024", "--case", "102m-deterministic")
    with pytest.raises(SystemExit):
        main(peers, monkeypatch, *words, "--output", str(tmp_path / "x.md"))
    assert "2 of these cases have llmtrain at 64 x 1024: name others by --case" in capsys.readouterr().err


def test_an_arm_that_is_not_installed_is_said_to(peers, monkeypatch):
    monkeypatch.setitem(peers.NEEDS, "plain", "no_such_package")
    answers = {"llmtrain": [GOOD], "llmtrain (copy)": [GOOD]}
    result, _ = run(peers, monkeypatch, answers)
    text = peers_markdown({"cases": [result]}, "x.json")
    assert "- plain: no_such_package is not installed." in text


def test_an_arm_that_breaks_leaves_its_last_words(peers, tmp_path):
    settings = peers.Settings(1, 2, "cpu", "fp32", tmp_path)
    process = peers.ArmProcess("no such arm", peers.Shape(peers.TINY, 1, 8), 1, settings)
    with pytest.raises(peers.ArmEnded, match="exit code 1: KeyError: 'no such arm'"):
        process.answer()


def case_of(*rows: dict) -> dict:
    common = {
        "status": "ok", "group": 0, "tokens_per_step": 10, "losses": [2.0, 1.0], "flops_per_token": 1e6,
        "shape": {"batch_size": 1},
    }  # fmt: skip
    return {"rows": [common | row for row in rows]}


def bursts(*seconds: float) -> list[dict]:
    return [{"steps": 2, "wall_s": s} for s in seconds]


def test_a_share_is_a_win_only_beyond_the_copys_floor():
    view = CaseView(
        case_of(
            {"arm": "llmtrain", "bursts": bursts(1.0, 1.0)},
            {"arm": "llmtrain (copy)", "bursts": bursts(1.0, 1.04)},
            {"arm": "slower", "bursts": bursts(1.5, 1.5)},
            {"arm": "near", "bursts": bursts(1.03, 1.05)},
            {"arm": "faster", "bursts": bursts(0.9, 0.9)},
        )
    )
    assert view.floor == pytest.approx(0.04)
    assert [view.share(row) for row in view.case["rows"]] == ["", "1.02=", "1.50+", "1.04=", "0.90-"]


def test_losses_are_held_against_the_copys_scatter_on_equal_data_only():
    view = CaseView(
        case_of(
            {"arm": "llmtrain", "bursts": bursts(1, 1)},
            {"arm": "llmtrain (copy)", "bursts": bursts(1, 1), "losses": [2.0, 1.001]},
            {"arm": "same", "bursts": bursts(1, 1), "losses": [2.002, 1.0]},
            {"arm": "wrong", "bursts": bursts(1, 1), "losses": [2.0, 1.01]},
            {"arm": "other data", "bursts": bursts(1, 1), "losses": [5.0, 4.0], "tokens_per_step": 20},
        )
    )
    assert [view.difference(row) for row in view.case["rows"]] == ["", "1.0e-03", "2.0e-03", "1.0e-02!", ""]


def test_the_measure_in_another_group_is_a_replicate_too():
    view = CaseView(
        case_of(
            {"arm": "llmtrain", "bursts": bursts(1, 1)},
            {"arm": "llmtrain", "bursts": bursts(1, 1), "group": 1, "losses": [2.0, 1.02]},
            {"arm": "llmtrain (copy)", "bursts": bursts(1, 1), "losses": [2.0, 1.001]},
            {"arm": "near", "bursts": bursts(1, 1), "losses": [2.0, 1.05]},
            {"arm": "far", "bursts": bursts(1, 1), "losses": [2.0, 1.07]},
            {"arm": "of the other group", "bursts": bursts(1, 1), "group": 1, "losses": [2.0, 1.02]},
        )
    )
    assert view.scatter == pytest.approx(0.02)
    found = [view.difference(row) for row in view.case["rows"]]
    assert found == ["", "2.0e-02", "1.0e-03", "5.0e-02", "7.0e-02!", "0.0e+00"]
