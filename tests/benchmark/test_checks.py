"""The scripts that check kernels on a card: what they write, what makes them fail, and the page of it."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(name).name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    monkeypatch.syspath_prepend(SCRIPTS / "bench")
    return load


@pytest.fixture
def run(script, monkeypatch, capsys):
    """Runs a script; its exit code, its lines, and the groups it wrote."""

    def go(name: str, output: Path, *words: str, module: ModuleType | None = None) -> tuple[int, list[str], dict]:
        monkeypatch.setattr(sys, "argv", [name, *words, "--output", str(output)])
        code = (module or script(f"bench/{name}")).main()
        return code or 0, capsys.readouterr().out.splitlines(), json.loads(output.read_text())["groups"]

    return go


def read(output: Path) -> dict:
    return json.loads(output.read_text())["groups"] if output.exists() else {}


def test_groups_of_other_turns_stay_each_with_its_machine(script, tmp_path, capsys):
    checks, output = script("bench/checks"), tmp_path / "data" / "x.json"
    for machine, groups in (("first", ("a", "b")), ("second", ("b",))):
        report = checks.Report({"cpu": machine}, output)
        for group in groups:
            report.begin(group)
            report.check("holds", True, of=group)
            assert set(groups[: groups.index(group)]) <= set(read(output)), "those before it are there already"
        assert report.end() == 0
    found = json.loads(output.read_text())["groups"]
    assert {name: group["machine"]["cpu"] for name, group in found.items()} == {"a": "first", "b": "second"}
    capsys.readouterr()
    report.check("one", False, error=2.0)
    report.check("other", True)
    assert report.end() == 1
    assert capsys.readouterr().out.splitlines() == ["one: error=2 verdict=WRONG", "other: verdict=ok", "WRONG: one"]


def test_attention_is_checked_and_another_backend_than_the_rules_is_named(script, run, tmp_path, monkeypatch):
    check, docs = script("bench/check_attention"), Path("docs/data/attention.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_attention", "--smoke"])
    assert check.main() == 0 and read("build" / docs) and not docs.exists(), "figures of a card stay"
    code, lines, groups = run("check_attention", tmp_path / "a.json", "--smoke", module=check)
    assert code == 0 and lines[-1] == "all within tolerance" and set(groups) == {"results"}
    assert {r["op"] for r in groups["results"]["records"]} == {
        "against FP64", "the backend that has to run", "the same bits twice",
    }  # fmt: skip
    rule = check.training_backend
    monkeypatch.setattr(check, "training_backend", lambda *case: rule(*case)._replace(name="flash"))
    code, lines, _ = run("check_attention", tmp_path / "a.json", "--smoke", module=check)
    assert code == 1 and lines[-1] == "WRONG: the backend that has to run"
    assert any("ran=reference expected=flash" in line and line.endswith("WRONG") for line in lines)


@pytest.mark.parametrize("frontend, expected", [(True, "cudnn-graph"), (False, "flash")])
def test_what_has_to_run_deterministically_follows_what_is_installed(monkeypatch, frontend, expected):
    import torch

    from llmtrain.kernels import attention

    monkeypatch.setattr(attention.cudnn_attention, "unavailable", lambda: None if frontend else "needs the frontend")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    case = "auto", torch.bfloat16, 64, 1024, torch.device("cpu"), False, False, (9, 0)
    assert attention.training_backend(*case).name == expected


def test_kernels_are_checked_op_by_op_and_a_way_around_the_kernel_is_named(script, run, tmp_path):
    check, output = script("bench/check_kernels"), tmp_path / "kernels.json"
    run("check_kernels", output, "--cpu", "--only", "swiglu", module=check)
    code, _, groups = run("check_kernels", output, "--cpu", "--only", "embedding", module=check)
    assert code == 0 and set(groups) == {"swiglu", "embedding"}
    bench = check.Bench(check.Report({}, None), check.torch.device("cpu"), False)
    bench.report.begin("embedding")
    check.choice.ran["embedding"] = check.choice.REFERENCE
    bench.check_ran("embedding", "3x4")
    assert bench.report.wrong == ["embedding by its kernel"]


def test_the_page_holds_each_group_with_its_machine_and_says_what_is_not_there(script, run, tmp_path):
    pages, data = script("docs_kernels"), tmp_path / "data"
    assert pages.page(data).count("Not measured yet.") == len(pages.SECTIONS)
    run("check_attention", data / "attention.json", "--smoke")
    run("check_fp8", data / "fp8-check.json", "--smoke")
    words = ("--config", str(SCRIPTS.parent / "configs/demo.toml"), "--batch-size", "1", "--seq-len", "32")
    run("newton_schulz", data / "newton-schulz.json", *words, "--vocab-size", "64", "--rounds", "1")
    rows = [
        {"kernel": "dq", "blocks": "(64, 64)", "ms": 2.0, "chosen": True, "faster": False},
        {"kernel": "dq", "blocks": "(32, 64)", "ms": 1.0, "chosen": False, "faster": True},
        {"kernel": "dq", "blocks": "(256, 256)", "failed": "out of shared memory"},
    ]
    script("bench/checks").add_groups(data / "attention-blocks.json", {"64-long": {"machine": None, "rows": rows}})
    text = pages.page(data)
    assert text.count("Not measured yet.") == len(pages.SECTIONS) - 4 and "state was not kept" in text
    assert "| dq | (64, 64) | 2.0000 | (32, 64), 1.0000 | 2 | 1 |" in text
    assert "| the same bits twice | 2 | yes |" in text and "| tensorwise | dW |" in text
    assert "All as it should be." in text and "### demo" in text
    groups = json.loads((data / "attention.json").read_text())["groups"]
    groups["results"]["records"][0]["verdict"] = "WRONG"
    assert "| **1 not** |" in "\n".join(pages.of_report(groups["results"]))


def test_the_page_of_experiments_has_verdicts_runs_and_what_is_not_done(script, tmp_path):
    pages, folder = script("docs_experiments"), tmp_path / "some"
    folder.mkdir()
    (folder / "experiment.toml").write_text('question = "Is it better?"\n')
    assert "Not measured yet (`python scripts/experiments/run.py scripts/experiments/some`)" in pages.page(tmp_path)
    machine = {"card": None, "cpu": "a", "cores": 1, "versions": {}, "system": "b", "contended": [], "taken": "now"}
    run = {
        "seconds": 12.3, "machine": machine, "val_loss": {"tokens": [10, 2_000_000], "loss": [3.0, 2.5]},
        "evaluations": {"--weightsema": [{"loss": 2.4}]},
    }  # fmt: skip
    verdict = {
        "name": "b against a", "arms": {"a": "a", "a2": "a2", "b": "b"}, "difference": -0.02, "floors": 3.0,
        "verdict": "better",
    }  # fmt: skip
    result = {"missing": ["a2"], "runs": {"a": run, "b": run}, "comparisons": [verdict]}
    (folder / "result.json").write_text(json.dumps(result))
    text = pages.page(tmp_path)
    assert "| b against a | b | a | -0.0200 | 3.0 | better |" in text and "Not done yet: a2." in text
    assert "| a | 2.0M | 2.5000 | weightsema: 2.4000 | 12 |" in text and "- a, b: a, 1 cores; " in text
