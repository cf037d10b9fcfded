"""The scripts that measure experts, eight bits and half-precision sums: what they do without a card."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.model.config import ModelConfig

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"
CONFIGS = Path(__file__).parents[2] / "configs"
MACHINE = {"card": None, "cpu": "a", "cores": 1, "versions": {}, "system": "b", "contended": [], "taken": "now"}
SHAPE = Shape(ModelConfig(vocab_size=64, max_seq_len=16), batch_size=8, seq_len=16)


def script(name: str) -> ModuleType:
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["kernel_ladder", "half_accumulate"])
def test_a_script_smokes_and_leaves_docs_alone(name, tmp_path, monkeypatch, capsys):
    """docs/ has figures of a card, and card.py takes what lies there for measured."""
    output = tmp_path / "build" / "docs" / "experts.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    assert script(name).main() == 0, capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    source = output.parent / "data" / ("experts.json" if name == "kernel_ladder" else "half-accumulate.json")
    data = json.loads(source.read_text())
    if name == "kernel_ladder":
        assert [r["status"] for r in data["rungs"]] == ["ok"] * 5 and not [r for r in data["products"] if "reason" in r]
        assert all((r["relative_error"] > 0.01) == r["eight_bit"] for r in data["rungs"])
        assert all((min(r["gradients"].values()) > 0.01) == r["eight_bit"] for r in data["rungs"])
        text = output.read_text()
        assert "times grouped and fused, bf16" in text and text.count("times loop over experts, bf16") == 1
    else:
        errors = {(r["dtype"], r["sums"], r["parts"]): r["error"] for r in data["rows"]}
        halves = [errors["float16", "fp16, Triton", parts] for parts in (8, 4, 1)]
        assert errors["float16", "FP32, Triton", 1] < halves[0] < halves[1] < halves[2], "the longer the sum, the worse"


def test_half_sums_that_are_cut_short_are_in_the_file_with_what_is_missing(monkeypatch, tmp_path):
    half, output = script("half_accumulate"), tmp_path / "half.json"
    monkeypatch.setattr(sys, "argv", ["half_accumulate", "--smoke", "--output", str(output)])
    made = half.products

    def ended(a, b, sums, *more):
        if sums == half.HALF:
            raise KeyboardInterrupt
        return made(a, b, half.CUBLAS, *more)

    monkeypatch.setattr(half, "products", ended)
    with pytest.raises(KeyboardInterrupt):
        half.main()
    data = json.loads(output.read_text())
    assert [r["sums"] for r in data["rows"]] == [half.CUBLAS, half.CUBLAS, half.FULL] and len(data["missing"]) == 3


def test_a_models_update_is_measured_with_the_workspace_of_its_own_run(monkeypatch, tmp_path):
    newton, seen = script("newton_schulz"), []
    monkeypatch.setattr(newton.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(newton.torch._C, "_cuda_clearCublasWorkspaces", lambda: seen.append("cleared"), raising=False)

    def measure(*_):
        seen.append(os.environ.get(newton.WORKSPACE))
        os.environ.setdefault(newton.WORKSPACE, ":0:0")  # as `spare_workspace` does
        return {}

    monkeypatch.setattr(newton, "measure", measure)
    words = [word for name in ("102m", "1b") for word in ("--config", f"{CONFIGS}/{name}.toml", "--batch-size", "4")]
    monkeypatch.setattr(sys, "argv", ["newton_schulz", *words, "--output", str(tmp_path / "x.json")])
    for given in (None, ":4096:8"):
        if given is None:
            monkeypatch.delenv(newton.WORKSPACE, raising=False)
        else:
            monkeypatch.setenv(newton.WORKSPACE, given)
        seen.clear()
        newton.main()
        assert seen == [given, "cleared"] * 2 and os.environ.get(newton.WORKSPACE) == given


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_singular_values_by_the_gram_matrix_are_those_of_the_svd(shape):
    newton = script("newton_schulz")
    x = newton.torch.randn(shape, generator=newton.torch.Generator().manual_seed(0))
    expected = newton.torch.linalg.svdvals(x.double()).flip(0)
    newton.torch.testing.assert_close(newton.singular_values(x), expected, rtol=1e-9, atol=1e-9)


def test_the_check_of_eight_bits_smokes_and_sees_a_scale_in_the_wrong_place(monkeypatch, capsys, tmp_path):
    check, output = script("check_fp8"), tmp_path / "build" / "docs" / "data" / "fp8-check.json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_fp8", "--smoke"])
    assert check.main() == 0 and capsys.readouterr().out.count('"wrong": []') == 4
    assert list(json.loads(output.read_text())["groups"]) == ["small", "4 experts"]
    right = check.FineWeight.multiply
    turned = lambda own, x, dtype: right(own, (x[0], x[1].roll(1, -1).contiguous()), dtype)  # noqa: E731
    monkeypatch.setattr(check.FineWeight, "multiply", turned)
    assert check.main() == 1
    assert "WRONG: small, block: y, off by" in capsys.readouterr().out


@pytest.fixture
def ladder(monkeypatch):
    """kernel_ladder.py, whose steps are taken but not timed."""
    module = script("kernel_ladder")
    monkeypatch.setattr(module, "milliseconds", lambda run, *_, **__: 1.0)
    return module


def wrong_rungs(ladder) -> list[tuple[str, str]]:
    inputs = ladder.Inputs(ladder.Layer(96, 64, 32, 2, 2), 4, ladder.torch.device("cpu"))
    return [(r["rung"], what.split(" off")[0]) for r in ladder.rung_records(inputs, 4, 1) for what in ladder.faults(r)]


@pytest.mark.parametrize("wrong", ["dx", "d router", "d gate and up", "d down"])
@pytest.mark.parametrize("eight_bit", [False, True], ids=["bf16", "eight bits"])
def test_a_rung_whose_gradient_lacks_a_sequence_or_an_expert_is_named(ladder, monkeypatch, eight_bit, wrong):
    right = ladder.Inputs.step
    of_rung = ladder.RUNGS[2 if eight_bit else 1]

    def step(inputs, rung):
        right(inputs, rung)
        if rung is of_rung:
            dict(zip(ladder.GRADIENTS, (inputs.x, *inputs.weights), strict=True))[wrong].grad[-1] = 0

    assert wrong_rungs(ladder) == []
    monkeypatch.setattr(ladder.Inputs, "step", step)
    assert wrong_rungs(ladder) == [(of_rung.name, wrong)]


def test_gradients_that_an_earlier_rung_left_do_not_count(ladder, monkeypatch):
    right = ladder.Inputs.step

    def delivers_nothing(inputs, rung):
        if rung is ladder.RUNGS[1]:
            inputs.x.grad = ladder.torch.zeros_like(inputs.x)
        else:
            right(inputs, rung)

    monkeypatch.setattr(ladder.Inputs, "step", delivers_nothing)
    assert {rung for rung, _ in wrong_rungs(ladder)} == {ladder.GROUPED} and len(wrong_rungs(ladder)) == 4


def test_an_output_in_eight_bits_that_is_far_off_is_named(ladder, monkeypatch):
    right = ladder.Inputs.forward
    doubled = lambda own, rung, into: right(own, rung, into) * (1 + rung.eight_bit)  # noqa: E731
    monkeypatch.setattr(ladder.Inputs, "forward", doubled)
    assert {rung for rung, what in wrong_rungs(ladder) if what == "output"} == {ladder.GROUPED_FP8, ladder.FUSED_FP8}


def test_the_gradient_of_every_expert_counts_in_the_products(ladder, monkeypatch):
    right = ladder.deliver_grouped_product

    def lacks_the_last(weight, *given, **more):
        right(weight, *given, **more)
        weight.grad[-1] = 0

    inputs = ladder.Inputs(ladder.Layer(96, 64, 32, 2, 2), 4, ladder.torch.device("cpu"))
    inputs.step(ladder.RUNGS[0])
    assert not [what for r in ladder.product_records(inputs, 4, 1) for what in ladder.faults(r)]
    monkeypatch.setattr(ladder, "deliver_grouped_product", lacks_the_last)
    assert [what for r in ladder.product_records(inputs, 4, 1) for what in ladder.faults(r)] == ["dW off by 1"]


@pytest.mark.parametrize("lost", [slice(64, None), slice(127, 128)], ids=["the second half", "the last row"])
@pytest.mark.parametrize("method, product", [("multiply", "y"), ("input_gradient", "dX"), ("weight_gradient", "dW")])
def test_rows_that_a_product_in_eight_bits_lacks_are_seen_wherever_they_are(monkeypatch, method, product, lost):
    check = script("check_fp8")
    right = getattr(check.FineWeight, method)

    def lacks(own, *operands):
        y = right(own, *operands)
        y[lost] = 0
        return y

    monkeypatch.setattr(check.FineWeight, method, lacks)
    record = check.linear_record("small", "rowwise", (128, 128, 128), check.torch.device("cpu"), 1)
    assert [words.split(",")[0] for words in record["wrong"]] == [product]


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_any_expert_that_a_product_lacks_are_seen(monkeypatch, transposed):
    check = script("check_fp8")
    size = check.torch.device("cpu"), 64, 32, 48, 4
    assert check.experts_record(*size)["wrong"] == []
    right = check.Fp8Experts.multiply

    def lacks(own, x, inverse, ends, transposed_now):
        y = right(own, x, inverse, ends, transposed_now)
        if transposed_now == transposed:
            y[ends[0] - 1 :][:1] = 0  # at a border; where the first expert has none, the last row of all
        return y

    monkeypatch.setattr(check.Fp8Experts, "multiply", lambda *given, transposed: lacks(*given, transposed))
    wrong, way = check.experts_record(*size)["wrong"], ", transposed" if transposed else ""
    assert [words.split(", off")[0] for words in wrong] == [f"spread{way}", f"all on one{way}"]


def test_each_arm_climbs_to_its_own_best_micro_batch():
    precision = script("precision")
    rates = {1: 5, 2: 10, 4: 20, 8: 30, 16: 25, 32: 99}

    def measured(fits: int):
        def take(size):
            if size > fits:
                return {"status": "oom", "batch_size": size}
            return {"status": "ok", "tok_per_s": rates[size], "batch_size": size}

        return take

    for fits, sizes, best in ((64, [8, 16, 4], 8), (2, [8, 4, 2, 1], 2), (0, [8, 4, 2, 1], None)):
        records = precision.climb(8, measured(fits), quick=False)
        assert [r["batch_size"] for r in records] == sizes
        found = precision.best(records)
        assert (found and found["batch_size"]) == best
        assert precision.climb(8, measured(fits), quick=True) == records[:1]


@pytest.mark.parametrize(
    "preset, fits, modes",
    [("none", 8, {"none"}), ("none", 4, {"none", "selective", "full"}), ("full", 8, {"none", "selective", "full"})],
)
def test_activations_run_again_where_that_is_needed(monkeypatch, tmp_path, preset, fits, modes):
    precision, kept = script("precision"), []

    def run_row(row, timing, timeout):
        assert (timing.precision, timing.fp8_scaling) == ("fp8", "rowwise")
        if row.shape.batch_size > fits and timing.checkpoint_activations == "none":
            return {"status": "oom", "reason": "full"}
        return {"status": "ok", "tok_per_s": 1, "allocated_gib": 1.0}

    monkeypatch.setattr(precision, "run_row", run_row)
    timing, (arm,) = TimingConfig(checkpoint_activations=preset), [a for a in precision.ARMS if a.name == "fp8 rowwise"]
    precision.run_rung("1b", arm, SHAPE, timing, tmp_path, False, kept.append)
    assert {r["checkpoint_activations"] for r in kept} == modes


def runs_of(name: str, arm: str, tok_per_s: float, batch_size: int = 16, **other) -> dict:
    return {
        "name": name, "arm": arm, "status": "ok", "tok_per_s": tok_per_s, "batch_size": batch_size, "seq_len": 2048,
        "checkpoint_activations": "none", "parameters": 2e9, "active": 1e9 if "moe" in name else 2e9, "contended": [],
        "allocated_gib": 1.0, "mfu": 0.4, "flops_per_token": 1e9, "precision": "fp8" if "fp8" in arm else "bf16",
        "machine": MACHINE, **other,
    }  # fmt: skip


def test_the_page_holds_what_was_measured_against_the_bar_and_says_what_was_not():
    page = script("precision_page")
    runs = [
        runs_of("1b", "bf16", 90_000), runs_of("1b", "bf16", 95_000, batch_size=32), runs_of("1b", "fp8", 121_500),
        runs_of("moe-1b", "bf16", 300_000), runs_of("200m", "bf16", 400_000, checkpoint_activations="full"),
        {**runs_of("1b", "torchao tensorwise", 0), "status": "absent", "reason": "torchao is not installed"},
    ]  # fmt: skip
    data = {"arms": ["bf16", "fp8", "torchao tensorwise"], "runs": runs}
    text = page.page(data, None, "x.json")
    assert "| FP8 against our bf16, 1.04B, 16 x 2048 | 1.22 times | 1.3 times | 1.350 times: 121,500" in text
    assert "| 120,000 tok/s | 121,500 tok/s | goal reached |" in text
    assert "| 1.279 |" in text, "the table's speed-up is of each at its best, 121,500 over 95,000"
    assert "| 1.1 times | 1.2 times | not measured |  |" in text and "torchao is not installed" in text
    assert "| absent |" in text
    (dense, moe3) = page.experts_bar(runs)
    assert dense.cells()[3:] == ["0.750 times: 300,000 against 400,000 tok/s", "DOES NOT HOLD"]
    assert moe3.cells()[3:] == ["not measured", ""]
    found = {"arms": {"b": "fp8"}, "difference": 0.006, "floor": 0.004, "floors": 1.5}
    gap = page.precision_bar(runs, {"comparisons": [found]})[-1]
    assert gap.cells()[3:] == ["+0.0060 nats, 1.50 floors of 0.0040", "holds"]
    assert "not measured yet" in page.page(None, None, "x.json")


def test_the_pages_in_docs_are_those_of_their_json():
    docs = SCRIPTS.parents[1] / "docs"
    of_precision, of_experts = script("precision_page"), script("experts_page")
    data = {name: of_precision.read(docs / "data" / f"{name}.json") for name in ("precision", "experts")}
    loss = of_precision.read(SCRIPTS.parent / "experiments" / "fp8-102m" / "result.json")
    pictures = {name: f"{name}.png" if (docs / f"{name}.png").exists() else None for name in data}
    texts = {
        "precision": of_precision.page(data["precision"], loss, "data/precision.json", pictures["precision"]),
        "experts": of_experts.page(data["experts"], data["precision"], "data/experts.json", pictures["experts"]),
    }
    for name, text in texts.items():
        assert (docs / f"{name}.md").read_text() == text, f"scripts/bench writes docs/{name}.md: --page does it anew"


def test_the_experts_page_counts_a_loops_launches_where_they_count():
    page = script("experts_page")
    products = [
        {"tokens": tokens, "experts": 64, "product": page.BOTH, "by": by, "ms": ms}
        for tokens, by, ms in ((2048, page.BY_LOOP, 5.0), (2048, page.BY_OURS, 0.25), (32768, page.BY_LOOP, 8.0),
                               (32768, page.BY_OURS, 4.0))
    ]  # fmt: skip
    lines = page.loop_bar(products)
    assert lines[1].cells()[3:] == ["20.0 times at 2,048 tokens; 2.0 times at 32,768 tokens", "holds"]
    assert lines[0].cells()[3:] == ["not measured", ""]
    assert "not measured yet" in page.page(None, None, "x.json")
