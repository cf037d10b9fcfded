import json
import sys
from pathlib import Path

import pytest

from llmtrain.cli.main import run
from tests.report.runs import falling, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    made = {"a": {}, "a2": {"seed": 1}, "b": {"optimizer": "muon", "step_ms": 110.0}}
    return [
        str(write_run(tmp_path / name, falling(1000, i, offset=-0.3 * (name == "b")), **options))
        for i, (name, options) in enumerate(made.items())
    ]


def test_it_says_better_and_what_that_rests_on(runs: list[str], capsys: pytest.CaptureFixture, tmp_path: Path):
    assert run(["compare", *runs]) == 0
    out = capsys.readouterr().out
    assert "verdict     better: B has the lower loss" in out
    assert "optimizer.name: adamw in A, muon in B" in out
    assert "times the floor of" in out and "times fewer tokens" in out
    assert run(["compare", runs[1], runs[0], runs[1]]) == 0
    assert "cannot tell: give another run of A with --replicate" in capsys.readouterr().out


def test_json_holds_all_of_it_and_the_held_out_loss_can_be_compared(runs: list[str], capsys: pytest.CaptureFixture):
    more = ["--metric", "val_loss", "--blocks", "4", "--tail", "0.5", "--json"]
    assert run(["compare", *runs, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "better" and result["metric"] == "val_loss" and result["tail"]["blocks"] == 4
    assert result["changed_settings"] == {"optimizer.name": ["adamw", "muon"]}
    assert result["same_loss"]["seconds_ratio"] == pytest.approx(result["same_loss"]["tokens_ratio"] / 1.1)


def test_the_picture_is_drawn_where_matplotlib_is(runs: list[str], tmp_path: Path, capsys, monkeypatch):
    image = tmp_path / "picture.svg"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["compare", *runs, "--plot", str(image)]) == 2
    assert "matplotlib is missing: pip install 'llmtrain[plot]'" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert run(["compare", *runs, "--plot", str(image)]) == 0
    assert image.read_text().startswith("<?xml")


def test_what_cannot_be_compared_is_one_line(runs: list[str], capsys: pytest.CaptureFixture):
    assert run(["compare", runs[0], runs[2], runs[1]]) == 78
    assert "is no replicate of" in capsys.readouterr().err
    assert run(["compare", *runs, "--tail", "2"]) == 2
    assert "tail must be above 0" in capsys.readouterr().err
    assert run(["compare", *runs[:2], "nowhere"]) == 66
    assert run(["compare", *runs, "--plot", "x.txt"]) == 2


def test_a_run_is_no_replicate_of_itself(runs: list[str], capsys: pytest.CaptureFixture):
    for args in ([runs[0], runs[0] + "/", runs[2]], [*runs, "--replicate", runs[1]]):
        assert run(["compare", *args]) == 2
        assert "is named twice as a run of A" in capsys.readouterr().err


def test_settings_that_json_has_no_word_for_are_text_or_null(runs: list[str], capsys: pytest.CaptureFixture):
    (Path(runs[2]) / "config.toml").write_text("[optimizer]\nbeta1 = nan\nbegun = 2026-01-02T03:04:05Z\n")
    assert run(["compare", *runs, "--json"]) == 0
    changed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["changed_settings"]
    assert changed["optimizer.beta1"] == [None, None]
    assert changed["optimizer.begun"] == [None, "2026-01-02 03:04:05+00:00"]
    (Path(runs[2]) / "config.toml").write_text("optimizer = 5\n")
    assert run(["compare", *runs]) == 65
    assert "config.toml: optimizer is no table" in capsys.readouterr().err


def test_a_run_may_be_called_anything_in_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("matplotlib")
    names = ["cost$5_^$", "_private", "\u65e5\u672c \udcff\n"]
    made = [write_run(tmp_path / f"{i}", falling(400, i), seed=i).rename(tmp_path / names[i]) for i in range(3)]
    sys.stdout.reconfigure(errors="backslashreplace")  # as the console script does
    assert run(["compare", *map(str, made), "--plot", str(tmp_path / "picture.svg")]) == 0
    assert capsys.readouterr().err == ""
    picture = (tmp_path / "picture.svg").read_text()
    assert "cost$5_^$" in picture and "_private" in picture
