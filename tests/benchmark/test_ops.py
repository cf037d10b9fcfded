"""The ops' benchmarks as a person runs them, and the page of their tables."""

import itertools
import json
import runpy
from pathlib import Path

import pytest
import torch

from llmtrain.benchmark import ops, profile, rmsnorm, step, sweep
from llmtrain.benchmark.config import (
    GemmShapesConfig,
    HeadShapesConfig,
    NormShapesConfig,
    OpTimingConfig,
    SwiGLUShapesConfig,
)
from llmtrain.benchmark.op import Case, judge, ulp_error
from llmtrain.benchmark.tables import make_places
from llmtrain.cli.bench_ops import COMMANDS
from llmtrain.cli.main import run
from llmtrain.cli.options import of_cpu
from llmtrain.storage.errors import UsageError
from llmtrain.training import devices

ROOT = Path(__file__).parents[2]
SHORT = ["--device", "cpu", "--sessions", "1", "--rounds", "2", "--samples", "2", "--no-compile"]


@pytest.mark.parametrize(
    ("op", "shapes", "rows"),
    [
        ("rmsnorm", ["--tokens", "9", "--width", "32"], 2 * 3),  # few rows: twice
        ("rmsnorm", ["--tokens", "700", "--width", "16", "--heads", "2"], 3),
        ("swiglu", ["--tokens", "16", "--d-ff", "24", "--n-heads", "2", "--n-kv-heads", "1", "--head-dim", "8"], 4),
        ("gemm", ["--tokens", "32", "--inputs", "16", "--outputs", "24"], 3),
    ],
)
def test_an_op_is_timed_and_written(tmp_path, capsys, op, shapes, rows):
    assert run(["bench", op, *SHORT, *shapes, "--output", str(tmp_path / "op.md")]) == 0
    out, told = capsys.readouterr()
    assert out == (tmp_path / "op.md").read_text() and out.startswith(f"# {op}\n")
    data = json.loads((tmp_path / "data" / "op.json").read_text())
    assert len(data["rows"]) == len(told.splitlines()) == (3 if op == "rmsnorm" else rows)
    for row in data["rows"]:
        ours = row["arms"][0]
        assert ours["name"] == "ours" and ours["status"] == "ok" and ours["ms"] > 0
        assert max(ours["errors"].values()) <= 1
    if op == "rmsnorm":
        assert "- Transformer Engine: absent" in out


ON_CPU = {
    "rmsnorm": [{"T": 256, "H": 256, "form": "plain"}, {"T": 4096, "H": 256, "form": "plain"}],
    "swiglu": [
        {"T": 256, "d_ff": 256}, {"T": 2048, "d_ff": 256},
        {"T": 256, "heads": "4+2 of 32"}, {"T": 2048, "heads": "4+2 of 32"},
    ],
    "attention": [
        {"documents": "8 of 64", "tokens": 512, "heads": "4+2 of 16", "cache B/token": 128, "window": "none",
         "padding": "0.00"},
    ],
    "head": [{"tokens": 256, "width": 64, "vocabulary": 1024}],
    "gemm": [{"tokens": 256, "k": 64, "n": 256}, {"tokens": 256, "k": 256, "n": 1024}],
}  # fmt: skip
"""Op -> the shapes that it is timed at on a CPU where none is given."""


@pytest.mark.parametrize("op", ON_CPU)
def test_on_a_cpu_shapes_are_small_where_none_is_given(tmp_path, op):
    assert set(ON_CPU) == {command.name for command in COMMANDS}
    assert run(["bench", op, *SHORT, "--output", str(tmp_path / "op.md")]) == 0
    rows = json.loads((tmp_path / "data" / "op.json").read_text())["rows"]
    assert [shape for shape, _ in itertools.groupby(row["shape"] for row in rows)] == ON_CPU[op]


@pytest.mark.parametrize(
    ("device", "arguments", "taken"),
    [
        ("cpu", [], HeadShapesConfig((256,), 64, 1024)),
        ("cpu", ["--tokens", "7", "--vocabulary", "99"], HeadShapesConfig((7,), 64, 99)),
        ("cuda", [], HeadShapesConfig()),
        ("cuda", ["--width", "2048"], HeadShapesConfig(width=2048)),
    ],
)
def test_the_device_decides_what_is_not_given(monkeypatch, device, arguments, taken):
    seen = []

    def cases(shapes, on):
        seen.append((shapes, on.type))
        raise UsageError("seen")

    monkeypatch.setattr(devices, "pick_device", lambda _: torch.device(device))
    monkeypatch.setattr(ops, "head_cases", cases)
    assert run(["bench", "head", *arguments]) == 2
    assert seen == [(taken, device)]


def test_the_help_says_both(capsys):
    assert run(["bench", "head", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Width of a row. On a CPU the default is 64. [default: 1280]" in said
    assert "Rows; may be repeated. On a CPU the default is 256. [default: 16384]" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["rmsnorm", "--tokens", "0"], "tokens"),
        (["rmsnorm", "--heads", "2", "--residual"], "residual"),
        (["rmsnorm", "--sessions", "1", "--rounds", "1"], "rounds"),
        (["swiglu", "--head-dim", "7"], "head_dim"),
        (["gemm", "--inputs", "16", "--outputs", "16", "--outputs", "17"], "outputs"),
    ],
)
def test_what_cannot_be_measured_is_named(capsys, arguments, named):
    assert run(["bench", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_the_defaults_are_shapes():
    for config in (OpTimingConfig, NormShapesConfig, SwiGLUShapesConfig, GemmShapesConfig):
        config()


@pytest.mark.parametrize("family", rmsnorm.FAMILIES)
@pytest.mark.parametrize(
    "shape",
    [rmsnorm.Shape(20, 48), rmsnorm.Shape(20, 48, residual=True), rmsnorm.Shape(5, 16, heads=3, strided=True)],
    ids=str,
)
def test_the_exact_results_are_those_of_autograd_in_fp64(shape, family):
    given = rmsnorm.make_inputs(shape, torch.device("cpu"), 1, family)
    exact = rmsnorm.exact(given)
    h = given.x.detach() if given.residual is None else given.x.detach() + given.residual
    h, w = h.double().requires_grad_(), given.weight.detach().double().requires_grad_()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + rmsnorm.EPS) * w
    y.backward(given.dy.double())
    dx = h.grad if given.dh is None else h.grad + given.dh.double()
    for name, truth in {"y": y.detach(), "dx": dx, "dw": w.grad}.items():
        assert torch.allclose(exact[name], truth, rtol=1e-12, atol=1e-12)
    assert judge(rmsnorm.outputs(rmsnorm.eager, given), exact, rmsnorm.BUDGET).competes


def test_a_strided_view_is_one():
    given = rmsnorm.make_inputs(rmsnorm.Shape(5, 16, heads=3, strided=True), torch.device("cpu"))
    assert given.x.shape == (5, 3, 16) and not given.x.is_contiguous()


def test_errors_in_ulps():
    exact = torch.tensor([1.0, -300.0], dtype=torch.float64)
    assert ulp_error(exact.bfloat16(), exact) == 0
    assert ulp_error(torch.tensor([1 + 2.0**-7, -300.0]).bfloat16(), exact) == 1
    assert ulp_error(torch.tensor([1.0, -301.0]), exact) == 2.0**15  # FP32 has a finer last place


def test_the_page_says_what_is_not_measured(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "docs_ops.py"))
    assert script["page"](tmp_path).count("Not measured yet") == 1 + len(script["SECTIONS"])


def test_the_page_holds_the_tables_of_what_was_measured(tmp_path):
    shapes = ["--tokens", "32", "--inputs", "16", "--outputs", "24"]
    assert run(["bench", "gemm", *SHORT, *shapes, "--output", str(tmp_path / "gemm.md")]) == 0
    (tmp_path / "data" / "gemm.json").rename(tmp_path / "ops-gemm.json")
    script = runpy.run_path(str(ROOT / "scripts" / "docs_ops.py"))
    assert "**gemm, dW**" in script["page"](tmp_path)


def test_the_script_times_every_part(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")  # as where it is run
    script = runpy.run_path(str(ROOT / "scripts" / "bench" / "ops.py"))
    cases = {part: make(torch.device("cpu"), False) for part, make in script["PARTS"].items()}
    assert {part: len(made) for part, made in cases.items()} == {"rmsnorm": 19, "crossover": 13, "swiglu": 6, "gemm": 8}
    assert all(case.small == (case.shape["T"] < 1024) for case in cases["rmsnorm"])


def test_a_case_that_cannot_be_compiled_ahead_is_left_to_the_process_that_measures(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    script = runpy.run_path(str(ROOT / "scripts" / "bench" / "ops.py"))

    def rows(compiled: bool):
        raise MemoryError("no room")

    script["PARTS"]["one"] = lambda device, quick: [Case("one", {}, rows)]
    script["compile_case"]("one", 0, True, "cpu")
    assert "one, case 0: not compiled ahead, MemoryError: no room" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["head", "--vocabulary", "1"], "vocabulary must be 2 or more, not 1"),
        (["head", "--tokens", str(1 << 63)], "tokens must be below 2^63"),
        (["gemm", "--tokens", str(1 << 63)], "tokens must be below 2^63"),
    ],
)
def test_a_shape_that_cannot_be_is_wrong_usage(capsys, arguments, says):
    assert run(["bench", *arguments, *SHORT]) == 2
    assert says in capsys.readouterr().err


def test_the_smallest_head_is_timed(capsys):
    assert run(["bench", "head", "--vocabulary", "2", "--tokens", "1", "--width", "8", *SHORT]) == 0


@pytest.mark.parametrize(
    "command", [*(f"bench {one.name}" for one in COMMANDS), "bench step", "bench profile", "sweep --config sweep-cpu"]
)
@pytest.mark.parametrize("taken", ["op.md", "data/op.json", "data"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, command, taken
):
    for module, name in ((ops, "measure_op"), (step, "measure_step"), (profile, "profile_step"), (sweep, "run_sweep")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("measured"))
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    if taken == "data":
        (tmp_path / taken).write_text("a file where a folder has to be")
    else:
        (tmp_path / taken).mkdir()
    assert run([*command.split(), "--device", "cpu", "--output", str(tmp_path / "op.md")]) == 73
    error = capsys.readouterr().err
    assert error.startswith("llmtrain: error:") and error.count("\n") == 1 and taken in error


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "op.md").write_text("before")
    make_places(tmp_path / "op.md")
    assert (tmp_path / "op.md").read_text() == "before" and not list((tmp_path / "data").iterdir())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data", "op.md"]


@pytest.mark.parametrize("op", ON_CPU)
def test_the_page_of_a_cpu_tells_of_host_time_and_of_the_dtype(capsys, op):
    assert run(["bench", op, *SHORT]) == 0
    page = capsys.readouterr().out
    assert "Milliseconds of host time" in page
    for of_card in ("device time", "L2", "CUDA graph", "device copy", "`h`", "`e`"):
        assert of_card not in page
    assert f"Measured in {'bf16' if op in ('rmsnorm', 'swiglu') else 'fp32'}." in page


def test_the_dtype_that_a_page_names_is_that_of_what_is_timed():
    cpu = torch.device("cpu")
    for command in COMMANDS:
        shapes = command.callback.configs[1]
        for case in getattr(ops, f"{command.name}_cases")(shapes(**of_cpu(shapes)), cpu):
            for timed in case.rows(False):
                first = next(iter(timed.arms.values())).build().inputs[0]
                assert first.dtype == ops.dtype_of(case.op, cpu)


def test_help_says_how_few_sessions_and_rounds_there_may_be(capsys):
    assert run(["bench", "head", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "A single one needs 2 rounds or more." in said and "2 or more where there is a single session" in said
