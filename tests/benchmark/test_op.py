import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from llmtrain.benchmark import op
from llmtrain.benchmark.ceilings import Ceilings
from llmtrain.benchmark.op import Arm, Budget, Case, Judgement, Timed, judge, measure_cases, measure_row
from llmtrain.benchmark.op_tables import op_lines
from llmtrain.benchmark.timing import Method, Work
from llmtrain.storage.atomic import json_bytes

CPU = torch.device("cpu")
METHOD = Method(sessions=2, rounds=2, samples=3, warmup=1)


def arm(milliseconds: float, **fields) -> Arm:
    return Arm(lambda: Work(lambda: time.sleep(milliseconds / 1e3), (torch.ones(1),)), **fields)


def row_of(arms: dict[str, Arm], **fields) -> dict:
    return measure_row(Timed("forward", arms, 10**6, **fields), device=CPU, method=METHOD, ceilings=Ceilings(1e9, 1e12))


def tables(*rows: dict) -> str:
    return "\n".join(op_lines([{"op": "nap", "shape": {"T": 8}} | row for row in rows]))


def test_an_error_is_counted_in_tolerances():
    exact = torch.tensor([1.0, -100.0], dtype=torch.float64)
    budget = Budget(atol=0.01, rtol=0.01)
    assert budget.excess(torch.tensor([1.0, -100.0]), exact) == 0
    assert budget.excess(torch.tensor([1.01, -100.0]), exact) == pytest.approx(0.5, rel=1e-4)
    assert budget.excess(torch.tensor([1.0, -102.02]), exact) == pytest.approx(2.0, rel=1e-4)
    assert budget.excess(torch.tensor([1.0, float("nan")]), exact) == float("inf")
    assert Budget(relative_l2=1e-2).excess(torch.tensor([1.0, -101.0]), exact) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(ValueError, match="got"):
        budget.excess(torch.ones(3), exact)


def test_missing_outputs_and_other_dtypes_do_not_compete():
    exact = {"dx": torch.ones(2, dtype=torch.float64), "dw": torch.ones(2, dtype=torch.float64)}
    budget = {"dx": Budget(atol=0.1), "dw": Budget(atol=0.1, dtype=torch.float32)}
    ones = torch.ones(2)
    assert judge({"dx": ones, "dw": ones}, exact, budget).competes
    assert judge({"dx": ones}, exact, budget).lacks == ("no dw",)
    assert judge({"dx": ones, "dw": ones.bfloat16()}, exact, budget).lacks == ("dw in bfloat16",)
    worse = Judgement({"dx": 0.5, "dw": 2.0}) | Judgement({"dx": 0.7})
    assert worse.errors == {"dx": 0.7, "dw": 2.0} and not worse.competes


def test_the_best_peer_is_the_fastest_inside_the_budget():
    row = row_of({
        "ours": arm(12, ours=True),
        "ours, other": arm(2, ours=True),
        "wrong": arm(4, judgement=Judgement({"dw": 1.5})),
        "lacking": arm(4, judgement=Judgement({"dx": 0.1}, ("no dw",))),
        "right": arm(24, judgement=Judgement({"dw": 0.9})),
        "slow": arm(40),
    })  # fmt: skip
    assert row["best"] == "right" and row["best_in_budget"]
    right = next(a for a in row["arms"] if a["name"] == "right")
    assert 1.4 < right["ratio"] < 2.6
    text = tables(row)
    assert "(1.5)" in text and "lacking: forward: no dw" in text and "| right |" in text


def test_a_judgement_of_some_outputs_knows_nothing_of_the_others():
    whole = Judgement({"y": 0.5, "dw": 30.0}, ("dw in bfloat16", "no dx", "computes on padding"))
    assert whole.of("y") == Judgement({"y": 0.5}, ("computes on padding",)) and not whole.of("dw").competes
    assert whole.of("dw", "dx").lacks == whole.lacks
    assert Judgement({"y": 0.5, "dw": 30.0}).of("y", "h").competes


def test_where_no_peer_is_in_budget_the_fastest_that_matches_is_shown_with_its_error():
    row = row_of({
        "ours": arm(2, ours=True),
        "lacking": arm(1, judgement=Judgement({}, ("no dw",))),
        "wrong": arm(10, judgement=Judgement({"dw": 3.25})),
        "worse": arm(20, judgement=Judgement({"dw": 1.1})),
    })  # fmt: skip
    assert row["best"] == "wrong" and not row["best_in_budget"]
    assert "! (3.2)" in tables(row) and "No row has a peer inside the budget." in tables(row)


def test_an_arm_that_fails_or_is_absent_is_shown_and_the_others_are_timed():
    def breaks() -> Work:
        raise RuntimeError("no kernel image\nand more")

    row = row_of({"ours": arm(1), "broken": Arm(breaks), "gone": arm(1, absent="needs a wheel")})
    text = tables(row)
    assert "- broken: failed: RuntimeError: no kernel image." in text and "- gone: absent: needs a wheel." in text
    assert row["best"] is None and "| n/a |" in text
    with pytest.raises(RuntimeError, match="ours failed: RuntimeError: no kernel image"):
        row_of({"ours": Arm(breaks), "other": arm(1)})


def test_bytes_and_flops_are_shares_of_the_ceilings():
    row = row_of({"ours": arm(10)}, flops=10**9)
    assert 0.05 < row["arms"][0]["bytes_share"] <= 0.1  # 1 MB in 10 ms of 1 GB/s
    assert 0.05 < row["arms"][0]["flops_share"] <= 0.1
    assert "of copy | of matmul" in tables(row)


def test_a_backward_by_itself_finds_what_was_prepared():
    x = torch.randn(4, requires_grad=True)

    def run(y: torch.Tensor) -> object:
        return torch.autograd.grad(y, x, torch.ones(4), retain_graph=True)

    row = row_of({"ours": Arm(lambda: Work(run, (x,), prepare=lambda: x * x))})
    assert row["arms"][0]["ms"] > 0


SMALL_FIRST = """
import torch
from llmtrain.benchmark.op import Arm, Case, Timed, measure_cases
from llmtrain.benchmark.timing import Method, Work

def rows(compiled):
    x = torch.randn(64)
    arms = {"ours": Arm(lambda: Work(lambda: x * 2, (x,)))}
    if compiled:
        f = torch.compile(lambda x: x * 2, backend=BACKEND)
        arms["compiled"] = Arm(lambda: Work(lambda: f(x), (x,)), compiled=True)
    return [Timed("forward", arms, 512)]

import sys, types
def BACKEND(graph, inputs):
    sys.modules.setdefault("torch._inductor.compile_fx", types.ModuleType("stand-in"))
    return graph.forward

cases = [Case("double", {"T": 1}, rows, small=True), Case("double", {"T": 64}, rows)]
for row in measure_cases(cases, device=torch.device("cpu"), method=Method(2, 1, 2, warmup=1)):
    print(row["shape"]["T"], len(row["arms"]), row["compiler_in_process"])
"""


def test_small_rows_are_first_taken_before_the_compiler_is_in_the_process():
    done = subprocess.run([sys.executable, "-c", SMALL_FIRST], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:3] == ["1 1 False", "1 2 True", "64 2 True"]


def test_long_calls_have_fewer_samples_but_never_few(monkeypatch):
    now = [0.0]  # a clock that only the calls move, by what they take
    monkeypatch.setattr("llmtrain.benchmark.timing.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def nap(milliseconds: float) -> Arm:
        return Arm(lambda: Work(lambda: now.__setitem__(0, now[0] + milliseconds / 1e3), (torch.ones(1),)))

    method = Method(sessions=2, rounds=1, samples=60, warmup=1, turn_seconds=0.02)
    taken = {}
    for ms in (0.1, 0.5, 4):
        case = Case("nap", {"ms": ms}, lambda _, ms=ms: [Timed("forward", {"ours": nap(ms)}, 1)])
        (row,) = measure_cases([case], device=CPU, method=method)
        taken[ms] = row["arms"][0]["samples"]
    assert taken == {0.1: 2 * 60, 0.5: 2 * 40, 4: 2 * 11}
    with pytest.raises(ValueError, match="turn_seconds"):
        Method(turn_seconds=0)


def test_an_arm_whose_error_is_infinite_is_shown_when_its_json_is_read_back():
    endless = Judgement({"dx": float("inf"), "dw": 0.5})
    row = row_of({"ours": arm(1, ours=True), "wrong": arm(2, judgement=endless)})
    text = tables(json.loads(json_bytes(row)))
    assert "(inf)" in text and "| wrong | inf | 0.5 |" in text


def test_what_there_is_after_each_case_is_kept_with_the_number_that_is_to_come():
    kept = []
    cases = [Case("nap", {"T": t}, lambda compiled: [Timed("forward", {"ours": arm(1)}, 1)]) for t in (1, 2)]
    rows = measure_cases(
        cases, device=CPU, method=METHOD, compiled=False, keep=lambda rows, left: kept.append((len(rows), left))
    )
    assert kept == [(1, 1), (2, 0)] and len(rows) == 2


def test_an_arm_that_waits_for_the_device_is_not_captured_but_timed_as_it_is(monkeypatch):
    """A card's part in it is played here: its errors are those of torch."""
    mode, graphs = ["default"], []

    def waits() -> None:
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def fails() -> None:
        if mode[0] == "error":
            raise RuntimeError("something else")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda now: mode.append(mode.pop() and now))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(op, "captured", lambda work, device: graphs.append(work.run) or work.run)
    card = torch.device("cuda")
    for run, expected in ((waits, ("", False)), (fails, ("RuntimeError: something else", True)), (int, ("", True))):
        assert op.trial(Arm(lambda run=run: Work(run)), card, True) == expected
        assert mode == ["default"]
    assert graphs == [int]
    row = row_of({"ours": arm(1), "waits": arm(2)})
    row["arms"][1]["captured"] = False
    assert "e |" in tables(row).splitlines()[4]
