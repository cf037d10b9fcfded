"""The page as a file; `test_page_in_chromium.py` opens it."""

import json
import re
import sys
from pathlib import Path

import pytest

from llmtrain.cli.main import run
from llmtrain.report.page import as_script
from llmtrain.report.runs import names_of, read_run
from tests.report.logged import event, train_lines, write_log, write_run


def data_of(page: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])


def report(capsys: pytest.CaptureFixture, *args: object) -> str:
    assert run(["report", *map(str, args)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_one_page_holds_everything_and_names_no_address(tmp_path, capsys):
    page = tmp_path / "report.html"
    out = report(capsys, write_run(tmp_path / "run"), "--output", page)
    assert out == f"{page}: 12 charts of run\n"
    text = page.read_text()
    assert not re.search(r"(src|href)=[\"'](?!data:)|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text
    data = data_of(page)
    assert [chart["key"] for chart in data["charts"]][:2] == ["lm_loss", "val_loss web"]
    (one,) = data["runs"]
    assert len(one["train"]["step"]) == len(one["train"]["curves"]["lm_loss"]["y"]) == 202
    assert one["evals"]["web"]["step"] == list(range(0, 2001, 250))


def test_figures_settings_samples_events_and_the_machine_are_there(tmp_path, capsys):
    page = tmp_path / "report.html"
    report(capsys, write_run(tmp_path / "run"), "--output", page)
    text = page.read_text()
    for said in (
        "Training loss", "131M", "46.2%", "in 2 attempts", "learning_rate = 0.0006", "def read(", "the disk is full",
        "starts at step 1000 of 2000", "NVIDIA H200", "2.11.0, then 2.12.0",
        '<th>deterministic</th><td class="name">no<', '<th>nvml</th><td class="name">none<', 'class="state finished"',
    ):  # fmt: skip
        assert said in text, said


def test_what_differs_between_runs_stands_in_a_table(tmp_path, capsys):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", optimizer="muon", seed=3)]
    report(capsys, *runs, "--output", tmp_path / "two.html")
    text = (tmp_path / "two.html").read_text()
    table = text[text.index("Settings that differ") : text.index("Configurations")]
    assert "optimizer.optimizer" in table and "muon" in table and "run.seed" in table and "run_dir" not in table
    report(capsys, runs[0], runs[0], "--output", tmp_path / "same.html")
    assert "they are equal" in (tmp_path / "same.html").read_text()


def test_a_run_of_very_many_lines_is_drawn_in_few_and_says_so(tmp_path, capsys):
    lines = list(train_lines(60_000, every=1))
    lines[30_000]["lm_loss"] = 77.0
    page = tmp_path / "report.html"
    report(capsys, write_log(tmp_path / "run", lines), "--output", page, "--points", "500")
    assert "60,000 log lines, drawn as 500 stretches" in page.read_text()
    assert page.stat().st_size < 400_000
    curve = data_of(page)["runs"][0]["train"]["curves"]["lm_loss"]
    assert len(curve["y"]) == 500 and max(curve["hi"]) == 77.0


def test_losses_that_are_not_finite_and_runs_without_any_are_drawn_all_the_same(tmp_path, capsys):
    lines = list(train_lines(100))
    for line in lines[5:]:
        line["lm_loss"] = None
    page = tmp_path / "report.html"
    nothing = write_log(tmp_path / "nothing", [event(0, "start", "starts")])
    (nothing / "config.toml").write_text("not toml [")
    (nothing / "status.json").write_text("{")
    report(capsys, write_log(tmp_path / "nan", lines), nothing, "--output", page)
    first, second = data_of(page)["runs"]
    assert first["train"]["curves"]["lm_loss"]["y"][5:] == [None] * (len(lines) - 5)
    assert sum(mark[0] == "failure" for mark in first["marks"]) == len(lines) - 5
    assert second["train"]["step"] == [] and "unknown" in page.read_text()
    report(capsys, nothing, "--output", page)
    assert "there is nothing to draw" in page.read_text()


def test_a_failed_run_ends_in_a_mark_with_its_reason(tmp_path, capsys):
    folder = write_run(tmp_path / "run", state="failed")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "reason": "training diverged at step 1990"}))
    report(capsys, folder, "--output", tmp_path / "report.html")
    kind, step, *_, text = data_of(tmp_path / "report.html")["runs"][0]["marks"][-1]
    assert (kind, step, text) == ("failure", 2000, "failed: training diverged at step 1990")


def test_what_a_run_is_called_ends_no_element(tmp_path, capsys):
    evil = "<img src=x onerror=alert(1)>"
    folder = write_run(tmp_path / evil, sources=("</script><script>alert(2)</script>",))
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "text": "<b>&amp;</b>", "prompt": "<i>"}) + "\n")
    page = tmp_path / "report.html"
    report(capsys, folder, "--output", page)
    text = page.read_text()
    assert "<img" not in text and "alert(2)</script>" not in text and "<b>" not in text and "<i>" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text and "&lt;b&gt;&amp;amp;&lt;/b&gt;" in text
    assert data_of(page)["runs"][0]["name"] == evil
    assert "<" not in as_script(["</script>", "<!--"]) and json.loads(as_script("</a>&")) == "</a>&"


def test_runs_of_one_name_are_told_apart_and_a_checkpoint_says_the_size(tmp_path):
    runs = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
    assert names_of(runs) == list(map(str, runs)) and names_of([runs[0], tmp_path / "other"]) == ["run", "other"]
    folder = write_run(runs[0]) / "checkpoints" / "step-00002000"
    folder.mkdir(parents=True)
    manifest = {"tensors": {"model": {"a": [{"shape": [3, 4]}], "b": [{"shape": [5]}]}}, "files": {"f": {"bytes": 99}}}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    found = read_run(runs[0], "run")
    assert (found.parameters, found.checkpoint_bytes, found.total_steps) == (17, 99, 2000)
    (folder / "MANIFEST.json").write_text('{"tensors": 3}')
    assert read_run(runs[0], "run").parameters is None


def test_pictures_are_written_for_papers(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "run", 300)
    asked = [folder, "--output", tmp_path / "report.html", "--png", tmp_path / "figures"]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", None)
        assert run(["report", *map(str, asked)]) == 2
        assert "--png: matplotlib is missing: pip install 'llmtrain[plot]'" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    out = report(capsys, *asked, "--png-axis", "tokens")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"lm_loss.png", "val_loss-web.png", "lr.png", "mfu.png"} <= names and "lm_loss.png" in out
    assert all((tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_what_cannot_be_is_one_line(tmp_path, capsys):
    assert run(["report", str(tmp_path / "nowhere")]) == 66
    assert "name a run directory" in capsys.readouterr().err
    folder = write_run(tmp_path / "run", 100)
    for more, code in ((["--output", "x.txt"], 2), (["--points", "5"], 2), (["--output", "/proc/x/y.html"], 73)):
        assert run(["report", str(folder), *more]) == code
        assert capsys.readouterr().err.count("\n") == 1
    assert run(["report"]) == 2


def test_what_no_utf_8_holds_and_samples_that_are_none_end_no_report(tmp_path, capsys):
    folder = write_run(tmp_path / "run", 100, sources=("a\ud800",)).rename(tmp_path / "run\udcff")
    (folder / "samples.jsonl").unlink()
    (folder / "samples.jsonl").mkdir()
    page = tmp_path / "report.html"
    sys.stdout.reconfigure(errors="backslashreplace")  # as the console script does
    report(capsys, folder, folder, "--output", page)
    assert "run\\udcff" in page.read_text(encoding="utf-8")
