"""The table of what fits, and how its script reads a refusal; `--smoke` of the script runs the rest on a CPU."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from llmtrain.benchmark.machine import describe
from llmtrain.training import fit
from tests.training.conftest import config

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    import memory_limit

    yield memory_limit
    sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(("asked", "says"), [(900, 3), (907, 5)])
def test_the_options_of_a_refusal_are_read_out_of_it(asked: int, says: int, script):
    of_run = config(Path("c.u16"), Path("run"), run={"batch_size": asked, "global_batch_size": None})
    of_run = replace(of_run, model=replace(of_run.model, vocab_size=96, max_seq_len=16))
    there = fit.Room(1 << 30, fit.MARGIN["cpu"][1] + (20 << 20))
    error = fit.refusal(of_run, "reference", torch.device("cpu"), there)
    options = script.suggested(script.Outcome("too large", [], 2, 1.0, error=str(error)))
    assert options[0] == "--batch-size" and len(options) == says + 1
    sizes = dict(zip(options[::2], map(int, options[1::2]), strict=True))
    assert sizes.get("--global-batch-size", sizes["--batch-size"] * sizes["--accumulate"]) == asked


def test_the_table_says_what_was_predicted_and_what_came(script):
    trial = {"tried": [50, 40], "seconds": 3.21, "planned_bytes": 100 << 30, "peak_bytes": 103 << 30}
    ran = script.Outcome("auto", ["--batch-size", "auto"], 0, 44.0, 40, 8192, trial | {"held_bytes": 110 << 30})
    refused = script.Outcome("too large", ["--batch-size", "900"], 2, 9.5, error="llmtrain: error: does not fit")
    case = {
        "name": "102m", "sequences": 900, "seq_len": 1024, "machine": describe(False),
        "outcomes": [asdict(ran), asdict(refused)], "checks": {"auto runs": True, "within 60 s": False},
    }  # fmt: skip
    text = script.markdown({"cases": [case]}, "data/memory.json")
    assert "| auto | 0 | 40 | 50, 40 | 100.00 | 103.00 | +3.0% | 110.00 | 3.2 | 44.0 |" in text
    assert "- too large: `llmtrain: error: does not fit`" in text
    assert "- holds: auto runs\n- **does not hold**: within 60 s" in text
    assert script.miss(ran) == pytest.approx(0.03)
