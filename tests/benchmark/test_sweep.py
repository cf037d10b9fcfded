import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmtrain.benchmark import row as row_process
from llmtrain.benchmark import sweep
from llmtrain.benchmark.config import Shape, SweepConfig, SweepRow, TimingConfig
from llmtrain.benchmark.tables import data_path, sweep_cells, sweep_markdown, write_table
from llmtrain.cli.bench import what_to_run
from llmtrain.cli.sweep import command, rows_from
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import parameter_counts
from llmtrain.storage.errors import BadData, InputMissing, InternalError, UsageError

TINY = ModelConfig(vocab_size=64, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32, max_seq_len=16)
SHAPE = Shape(TINY, batch_size=2, seq_len=8)
TIMING = TimingConfig(seconds=0.02, bursts=2, warmup=1, precision="fp32", device="cpu")

MEASURED = {
    "status": "ok", "tok_per_s": 1234.5, "spread": 0.01, "step_ms": 8.0, "tflops": 0.5, "classic_tflops": 0.6,
    "mfu": 0.25, "classic_mfu": 0.3, "allocated_gib": 1.0, "device_used_gib": 3.0, "host_rss_gib": 0.5,
    "first_step_s": 1.5,
}  # fmt: skip

CONFIG = """
[timing]
seconds = 0.1
bursts = 2
warmup = 1
precision = "fp32"
device = "cpu"
[sweep]
replicate = false
[model]
vocab_size = 64
d_model = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
head_dim = 8
d_ff = 32
[[rows]]
name = "beyond any memory"
batch_size = 2
seq_len = 8
model = { vocab_size = 1048576, d_model = 16777216 }
[[rows]]
name = "small"
batch_size = 2
seq_len = 8
accumulate = 2
[rows.model]
d_model = 256
n_heads = 8
n_kv_heads = 4
head_dim = 32
d_ff = 512
moe = true
n_experts = 4
n_shared_experts = 0
"""


@pytest.fixture
def results(monkeypatch):
    """Runs a sweep whose rows give prepared results instead of measuring."""

    def go(*prepared: dict, rows=None, config=None) -> list[dict]:
        answers, told = list(prepared), []
        monkeypatch.setattr(sweep, "run_row", lambda *_: dict(answers.pop(0)))
        rows = rows or [SweepRow(f"row {i}", SHAPE) for i in range(len(prepared))]
        sweep.run_sweep(rows, config or SweepConfig(), TIMING, False, lambda d: told.append(json.loads(json.dumps(d))))
        assert not answers
        return told

    return go


def test_a_sweep_writes_its_table_and_goes_on_after_a_row_that_does_not_fit(tmp_path: Path):
    config, output = tmp_path / "sweep.toml", tmp_path / "docs" / "table.md"
    config.write_text(CONFIG)
    done = CliRunner().invoke(
        command, ["--config", str(config), "--output", str(output)], catch_exceptions=False, standalone_mode=False
    )
    assert done.exception is None, done.output
    assert done.stdout.startswith("2 rows, each given up after ") and "~: its bursts spread over 5%" in done.stdout
    data = json.loads((tmp_path / "docs" / "data" / "table.json").read_text())
    big, small = data["rows"]
    assert big["status"] == "oom" and "allocate memory" in big["reason"]
    assert small["status"] == "ok" and small["tokens_per_step"] == 32
    assert small["tok_per_s"] == pytest.approx(32 / small["step_ms"] * 1e3)
    assert small["tflops"] == pytest.approx(small["tok_per_s"] * small["flops_per_token"] / 1e12)
    assert small["mfu"] is None and small["last_loss"] < small["first_loss"]
    expert, router = 3 * 256 * 128, 4 * 256
    block = 256 * (256 + 2 * 128) + 256 * 256 + router + 2 * expert
    assert small["active_parameters"] == 64 * 256 + block + 3 * 256
    assert small["parameters"] - small["active_parameters"] == 2 * expert
    text = output.read_text()
    assert "out of memory" in text and f"{small['tok_per_s']:,.0f}" in text


def test_a_row_that_fails_is_recorded_with_its_last_words(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'ValueError: no' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    result = sweep.run_row(SweepRow("x", SHAPE), TIMING, 20)
    assert result == {"status": "failed", "reason": "exit code 3: Traceback | ValueError: no"}
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    assert sweep.run_row(SweepRow("x", SHAPE), TIMING, 20)["status"] == "oom"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    assert "gave up after 0.2 s" in sweep.run_row(SweepRow("x", SHAPE), TIMING, 0.2)["reason"]


def test_only_running_out_of_memory_counts_as_it():
    assert row_process.out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not row_process.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not row_process.out_of_memory(ValueError("can't allocate memory"))


def test_the_first_measured_row_is_taken_again_at_the_end(results):
    told = results(
        {"status": "oom", "reason": "full"}, MEASURED, MEASURED, MEASURED | {"tok_per_s": 1300.0},
        rows=[SweepRow(name, SHAPE) for name in "abc"],
    )  # fmt: skip
    assert [len(data["rows"]) for data in told] == [1, 2, 3, 3]
    assert told[-1]["replicate"]["name"] == "b"
    assert "Floor: b, taken again at the end, gave 1,300 tok/s, 5.3% from" in sweep_markdown(told[-1], "x.json")
    assert "**Unfinished**: 1 of 3" in sweep_markdown(told[0], "x.json")


def test_a_routed_row_is_compared_with_the_dense_row_of_its_shape(results):
    routed, other = replace(TINY, moe=True, n_experts=4), replace(TINY, d_ff=48, moe=True)
    rows = [SweepRow(name, replace(SHAPE, model=model)) for name, model in (("d", TINY), ("r", routed), ("o", other))]
    told = results(MEASURED, MEASURED | {"tok_per_s": 1000.0}, MEASURED, rows=rows, config=SweepConfig(replicate=False))
    text = sweep_markdown(told[-1], "x.json")
    assert "d over r is 1,234 / 1,000 = 1.234, with 0.00M against" in text and " over o " not in text


def test_rows_differ_in_what_they_make_again_and_a_table_says_what_it_costs(monkeypatch):
    asked, rates = [], {"none": (1000.0, 4.0), "selective": (900.0, 3.0), "full": (750.0, 1.0)}

    def measured(command, input, **_):
        mode = json.loads(input)["timing"]["checkpoint_activations"]
        asked.append(mode)
        tok_per_s, peak = rates[mode]
        answer = MEASURED | {"tok_per_s": tok_per_s, "allocated_gib": peak, "predicted_gib": peak / 1.01}
        Path(command[-1]).write_text(json.dumps(answer))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sweep.subprocess, "run", measured)
    rows = [SweepRow("as the timing", SHAPE), *(SweepRow(mode, SHAPE, mode) for mode in ("selective", "full"))]
    rows.append(SweepRow("another shape", replace(SHAPE, batch_size=4)))
    data = sweep.run_sweep(rows, SweepConfig(replicate=False), TIMING, False, lambda _: None)
    assert asked == ["none", "selective", "full", "none"]
    text = sweep_markdown(json.loads(json.dumps(data)), "x.json")
    assert "| as the timing | none | 1,000 | 1.000 | 4.00 | 1.000 | 3.96 | +1.0% |" in text
    assert "| full | full | 750 | 0.750 | 1.00 | 0.250 | 0.99 | +1.0% |" in text
    assert "| another shape | none |" not in text and text.startswith("# Activations")
    assert sweep_markdown(data | {"rows": data["rows"][:1]}, "x.json").startswith("# Training throughput")


def test_a_contended_or_scattered_row_is_marked(results):
    told = results(MEASURED | {"spread": 0.06}, config=SweepConfig(replicate=False))
    row = told[-1]["rows"][0]
    row["contended"] = []
    assert sweep_cells(row)[-1] == "~"
    row["contended"] = ["CPU 50% busy"]
    assert sweep_cells(row)[-1] == "~c"
    assert "contended: CPU 50% busy" in sweep_markdown(told[-1], "x.json")


def test_memory_that_others_held_before_a_row_is_not_the_rows(results, monkeypatch):
    card = {"memory_used_mib": 1024.0, "processes": [], "utilization": 0}
    monkeypatch.setattr(sweep, "card_before_a_run", lambda: card)
    monkeypatch.setattr(sweep, "run_row", lambda *_: dict(MEASURED))
    data = sweep.run_sweep([SweepRow("a", SHAPE)], SweepConfig(replicate=False), TIMING, True, lambda _: None)
    assert data["rows"][0]["device_peak_gib"] == 2.0


@pytest.mark.parametrize(
    "text, words",
    [
        ("[[rows]]\nname='a'\nbatch_size=1\n", "row 1: seq_len is missing"),
        ("[[rows]]\nname='a'\nbatch_size=1\nseq_len=8\nwidth=3\n", "row 1: unknown key 'width'"),
        ("[[rows]]\nname='a'\nbatch_size=1\nseq_len=8\nmodel={d_mode=3}\n", "unknown key 'd_mode'"),
        ("[[rows]]\nname='a'\nbatch_size=0\nseq_len=8\nmodel={vocab_size=9}\n", "batch_size must be above 0, not 0"),
        ("[[rows]]\nname='a'\nbatch_size=1\nseq_len=8\n", "vocab_size"),
        (
            "[[rows]]\nname='a'\nbatch_size=1\nseq_len=8\nmodel={vocab_size=9}\ncheckpoint_activations='some'\n",
            "row 1: checkpoint_activations must be one of none, selective, full, not 'some'",
        ),
        ("[sweep]\n", "has no \\[\\[rows\\]\\]"),
        ("[swep]\n", "unknown table 'swep'"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(tmp_path, text, words):
    config = tmp_path / "s.toml"
    config.write_text(text)
    with pytest.raises(UsageError, match=words):
        command.main(["--config", str(config)], standalone_mode=False)


def test_a_missing_or_torn_configuration_and_a_failed_row_have_their_codes(tmp_path, monkeypatch):
    with pytest.raises(InputMissing):
        command.main(["--config", str(tmp_path / "none.toml")], standalone_mode=False)
    config = tmp_path / "s.toml"
    config.write_text("[sweep\n")
    with pytest.raises(BadData, match="is not TOML"):
        command.main(["--config", str(config)], standalone_mode=False)
    config.write_text(CONFIG)
    monkeypatch.setattr(sweep, "run_row", lambda *_: {"status": "failed", "reason": "exit code 1: boom"})
    with pytest.raises(InternalError, match="2 of 2 rows failed; beyond any memory: exit code 1: boom"):
        command.main(["--config", str(config), "--output", str(tmp_path / "t.md")], standalone_mode=False)
    assert "| small | failed |" in (tmp_path / "t.md").read_text()


def test_the_table_of_a_path_has_its_json_in_data_beside_it(tmp_path):
    assert data_path(Path("docs/baseline-cpu.md")) == Path("docs/data/baseline-cpu.json")
    write_table(tmp_path / "t.md", {"a": 1}, "text\n")
    assert json.loads((tmp_path / "data" / "t.json").read_text()) == {"a": 1}


def test_the_presets_of_the_sweep_have_the_shapes_they_name():
    import tomllib

    path = Path(__file__).parents[2] / "configs" / "sweep.toml"
    rows = rows_from(tomllib.loads(path.read_text()), path)
    assert len(rows) == 8 and sum(row.shape.model.moe for row in rows) == 3
    assert parameter_counts(rows[0].shape.model).total == 55_181_824
    assert {(r.shape.batch_size, r.shape.seq_len) for r in rows} == {(16, 512), (32, 512), (16, 1024), (128, 128)}
    assert replace(rows[6].shape.model, d_model=512, n_layers=8) != rows[2].shape.model
    cpu = path.with_name("sweep-cpu.toml")
    assert len(rows_from(tomllib.loads(cpu.read_text()), cpu)) == 6
    path = path.with_name("sweep-activations.toml")
    rows = rows_from(tomllib.loads(path.read_text()), path)
    assert [row.checkpoint_activations for row in rows] == ["none", "selective", "full"] * 2
    for row, preset in ((rows[0], "102m"), (rows[3], "1b")):
        shape = what_to_run({}, preset, row.shape.batch_size, None, 1)[0]
        assert row.shape == shape, "the preset's, at its own micro-batch"
