import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from llmtrain.storage.errors import StorageFailure
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.units import duration
from llmtrain.training.metrics import RunLog
from tests.storage.processes import small_disk

# 100 steps of 4 sequences of 256 tokens.
PLAN = SimpleNamespace(
    total_samples=400, total_steps=100, samples=lambda step: 4 * step, peak_flops=None
)
FIGURES = {"lm_loss": 6.5, "aux_loss": 0.0, "grad_norm": 1.25, "skipped": 0}


def shown(run_dir: Path, **console) -> str:
    run_dir.mkdir()
    out = io.StringIO()
    log = RunLog(run_dir, 1, PLAN, Console(file=out, highlight=False, **console))
    log.event(0, 0, "start", "starts", total_steps=100, total_tokens=100 * 1024)
    log.train(25, 25 * 1024, 0.5, FIGURES, 3e-4, rate=1024.0, flops=(2e6, 0.0))
    log.close()
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_has_a_dashboard_of_its_width(width, tmp_path):
    text = shown(tmp_path / "run", force_terminal=True, width=width, height=30, color_system=None)
    assert "25 of 100" in text and "1,024 tok/s" in text and "25.0%" in text and "step 25/100" not in text
    assert "step 0: starts\n" in text


def test_a_terminal_too_small_for_a_dashboard_has_lines_only(tmp_path):
    text = shown(tmp_path / "run", force_terminal=True, width=39, height=30, color_system=None)
    assert "step 0: starts" in text and "╭" not in text


def test_a_dashboard_that_cannot_be_drawn_leaves_the_lines(tmp_path, monkeypatch):
    def broken(*arguments, **named):
        raise KeyError("loss")

    monkeypatch.setattr("llmtrain.training.metrics.frame", broken)
    out = io.StringIO()
    (tmp_path / "run").mkdir()
    log = RunLog(tmp_path / "run", 1, PLAN, Console(file=out, force_terminal=True, width=200, color_system=None))
    end = time.monotonic() + 30
    while "cannot be drawn (KeyError: 'loss')" not in out.getvalue():
        assert time.monotonic() < end
        time.sleep(0.01)
    log.train(25, 25 * 1024, 0.5, FIGURES, 3e-4, rate=1024.0, flops=(2e6, 0.0))
    log.close()
    assert "epoch 0.50 step 25/100" in out.getvalue()


def test_elsewhere_a_line_is_plain_and_whole(tmp_path):
    text = shown(tmp_path / "run", force_terminal=False, width=40)
    assert text == (
        "step 0: starts\n"
        "epoch 0.50 step 25/100 loss 6.5000 ppl 665.14 lr 3.00e-04 grad 1.25 tok/s 1,024 0.00205 TFLOP/s "
        "eta 1m15s\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FIGURES, "aux_loss", 0.0125)
        assert " ppl 665.14 aux 0.0125 lr 3.00e-04 " in shown(tmp_path / "moe", force_terminal=False, width=40)
    _, line = JsonLines.read(tmp_path / "run/metrics.jsonl")
    assert (line["tok_per_s"], line["tflops"], line["mfu"]) == (1024.0, 1024 * 2e6 / 1e12, None)


def test_lines_that_a_full_disk_does_not_take_are_held_until_it_does(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        out = io.StringIO()
        log = RunLog(disk, 1, PLAN, Console(file=out))
        filler = disk / "filler"
        with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for step in range(300):  # beyond what is left of the last page
            log.train(step, 1024 * step, 0.5, FIGURES, 3e-4, rate=1024.0, flops=(2e6, 0.0))
        with pytest.raises(StorageFailure):
            log.sync()
        assert out.getvalue().count("the disk is full: free space; lines are held") == 1
        filler.unlink()
        log.event(300, 0, "note", "there is room")
        log.sync()
        steps = [line["step"] for line in JsonLines.read(disk / "metrics.jsonl")]
        log.close()
    assert steps == list(range(301))


def test_lengths_of_time():
    assert [duration(s) for s in (0.4, 59.6, 750, 11100, 187200)] == ["0s", "1m00s", "12m30s", "3h05m", "2d04h"]
