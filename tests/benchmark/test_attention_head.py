"""The benchmarks of attention and of the head: arms agree with FP64, wrong ones are found, bars are counted."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

from llmtrain.benchmark import attention, head
from llmtrain.benchmark.attention import Shape, borders, in_layout, operands, pad, unpad
from llmtrain.benchmark.op import measure_cases
from llmtrain.benchmark.timing import Method
from llmtrain.model.flops import attention_flops
from tests.model.test_windows import CONFIG

CPU = torch.device("cpu")
METHOD = Method(sessions=1, rounds=2, samples=2, warmup=1)
SHAPE = Shape("three", (20, 5, 31), 4, 2, 16, window=9, slots=6)
SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


def script(name: str, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)  # as where it is run
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_an_arm_of_attention_is_judged_and_timed():
    rows = measure_cases([attention.make_case(SHAPE, CPU)], device=CPU, method=METHOD, compiled=False)
    assert [row["what"] for row in rows] == ["forward", "forward + backward"]
    ours = rows[1]["arms"][0]
    assert ours["name"] == "packed_attention" and ours["status"] == "ok"
    assert set(ours["errors"]) == {"out", "dq", "dk", "dv"} and max(ours["errors"].values()) < 1e-3
    assert rows[0]["shape"]["padding"] == f"{1 - 56 / 93:.2f}"


def test_a_wrong_arm_is_outside_the_budget(monkeypatch):
    real = attention.implementations

    def with_a_wrong_one(*args, **kwargs):
        arms = real(*args, **kwargs)
        right = arms["packed_attention"].function
        return arms | {"wrong": attention.Implementation(lambda q, k, v: right(q, k, v) * 1.01)}

    monkeypatch.setattr(attention, "implementations", with_a_wrong_one)
    found = attention.judged(SHAPE, CPU)
    assert found["packed_attention"].competes
    assert not found["wrong"].competes and found["wrong"].errors["out"] > 1


def test_dense_arms_on_padded_rows_compute_the_same(monkeypatch):
    monkeypatch.setattr(attention, "sdpa_kernel", lambda _: nullcontext())
    for window in (None, 9):
        shape = Shape("three", (20, 5, 31), 4, 2, 16, window=window, padded=40)
        q, k, v, _ = operands(shape, CPU, 0)
        ours = attention.implementations(shape, CPU, False)["packed_attention"].function(q, k, v)
        rows = attention.dense(None, window, *(pad(x, shape) for x in (q, k, v)))
        torch.testing.assert_close(unpad(rows, shape), ours, rtol=1e-4, atol=1e-5)


def test_padding_and_unpadding_give_the_tokens_back():
    given = operands(SHAPE, CPU, 0)
    arm = attention.Implementation(lambda q, k, v: q, attention.PADDED)
    laid = in_layout(arm, SHAPE, given)
    assert laid[0].shape == (3, 31, 4, 16) and laid[0].requires_grad
    assert all(torch.equal(unpad(x, SHAPE), y) for x, y in zip(laid, given, strict=True))
    assert borders(SHAPE, CPU).tolist() == [0, 20, 25, 56, 56, 56, 56]


def test_flops_of_attention_are_those_of_the_model():
    shape = Shape("one", (20,), CONFIG.n_heads, CONFIG.n_kv_heads, CONFIG.head_dim, window=5)
    of_model = attention_flops(CONFIG, [20], [5])
    # The model counts a backward of two products a product, attention's own makes the scores again: 7 to 6.
    assert shape.flops(True) * 6 == of_model * 7


def test_mxfp8_emulated_is_off_by_what_three_bits_are():
    x = torch.randn(50, 2, 64, requires_grad=True)
    rounded = attention.eight_bit(x)
    error = ((rounded - x).norm() / x.norm()).item()
    assert 1e-2 < error < 5e-2
    rounded.sum().backward()
    assert (x.grad == 1).all()


def test_the_head_is_judged_against_fp64_and_its_arms_named(monkeypatch):
    shape = head.Shape(50, 16, 90)
    given = head.inputs(shape, CPU, 0)
    truth = head.exact(given)
    x, weight = (t.detach().double().requires_grad_() for t in given[:2])
    loss = F.cross_entropy(x @ weight.T, given[2])
    for ours, theirs in zip(truth.values(), (loss, *torch.autograd.grad(loss, (x, weight))), strict=True):
        torch.testing.assert_close(ours, theirs.detach())
    (row,) = measure_cases([head.make_case(shape, CPU)], device=CPU, method=METHOD, compiled=False)
    arms = {arm["name"]: arm for arm in row["arms"]}
    assert max(arms["linear_cross_entropy"]["errors"].values()) < 1
    assert arms["materialised"]["status"] == "ok"
    assert arms["Liger"]["status"] in ("ok", "absent", "failed")


def fake_row(documents, heads, window, peer, ratio):
    arms = [{"name": peer, "status": "ok", "ratio": ratio}]
    shape = {"documents": documents, "heads": heads, "window": window}
    return {"shape": shape, "what": "forward + backward", "arms": arms}


def test_bars_of_attention_are_counted_and_all_of_them_are_measured(monkeypatch):
    backends = script("attention_backends", monkeypatch)
    rows = [fake_row("256 of 256", "12+4 of 64", "none", "varlen_attn", 1.29),
            fake_row("4 of 16384", "16+16 of 128", 512, "ours without the window", 8.1)]  # fmt: skip
    assert [row[-1] for row in backends.bar_rows(rows)] == ["NO", "yes"]
    shapes = [shape.columns() for group in backends.shapes().values() for shape in group]
    named = {(shape["documents"], shape["heads"], shape["window"]) for shape in shapes}
    assert {bar[:3] for bar in backends.BARS} <= named
    shares = {shape["documents"]: shape["padding"] for shape in shapes}
    for share in ("0.65", "0.69", "0.82"):
        assert shares[f"200 of 50 to 600, padding {share}"] == share
    assert set(backends.HEADINGS) == set(backends.shapes())
