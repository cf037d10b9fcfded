"""The single numbers of an update, of both implementations, against the rule in Python's own FP64."""

import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

from llmtrain.kernels import choice
from llmtrain.kernels.update_scalars import update_scalars

BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
LR = 3e-4 / 7
OPTIONS = {"grad_clip": 0.7, "max_bad_steps": 2, "beta1": 0.9, "beta2": 0.95}
NAN, INF = math.nan, math.inf


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Run:
    """Steps one after another, whose counts stay."""

    def __init__(self, implementation: str, **options: float) -> None:
        self.implementation, self.options = implementation, OPTIONS | options
        self.tally, self.bad = torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.float64)

    def step(self, *sums: float, norm: float, **more):
        """(figures, scalars) as lists."""
        given = (torch.zeros(8), f64(*sums), f64(norm)[0], self.tally, self.bad, f64(LR)[0])
        with choice.forced(self.implementation):
            figures, scalars = update_scalars(*given, **self.options, **more)
        assert "veto" in more or choice.ran["update_scalars"] == self.implementation
        return figures.tolist(), scalars.tolist()


@BOTH
@pytest.mark.parametrize("clip", [0.0, 0.7, 1e9])
def test_figures_and_scalars_are_those_of_fp64(implementation: str, clip: float):
    run = Run(implementation, grad_clip=clip)
    for t in range(1, 5):
        figures, scalars = run.step(17.5 * t, 0.25, 3.0, norm=11.0 / t)
        assert figures == [17.5 * t / 3, 0.25 / 3, 11.0 / t / 3, 3.0]
        scale = min(1.0, clip / (11.0 / t / 3 + 1e-6)) / 3 if clip else 1 / 3
        assert scalars == pytest.approx([LR, scale, 1 - 0.9**t, 1 - 0.95**t, 1.0], rel=1e-14, abs=0)
    assert run.tally.tolist() == [4, 0, 0] and run.bad.tolist() == [0.0] * 4


@BOTH
@pytest.mark.parametrize("beta", [0.0, 0.999999])
def test_bias_corrections_keep_their_digits_at_both_ends_of_the_betas(implementation: str, beta: float):
    _, scalars = Run(implementation, beta1=beta, beta2=beta).step(1.0, 0.0, 1.0, norm=1.0)
    assert scalars[2] == scalars[3] == pytest.approx(1 - beta, rel=1e-9, abs=0)


@BOTH
@pytest.mark.parametrize(
    ("sums", "norm"),
    [((NAN, 0.0, 4.0), 1.0), ((1.0, -INF, 4.0), 1.0), ((1.0, 0.0, 4.0), NAN), ((1.0, 0.0, 4.0), INF),
     ((1.0, 0.0, 0.0), 1.0), ((0.0, 0.0, 0.0), 0.0)],
)  # fmt: skip
def test_what_is_not_finite_is_not_applied_and_counted(implementation: str, sums: tuple, norm: float):
    run = Run(implementation)
    run.step(1.0, 0.0, 4.0, norm=1.0)
    figures, scalars = run.step(*sums, norm=norm)
    assert scalars[4] == 0.0 and run.tally.tolist() == [1, 1, 1]
    assert run.bad.tolist() == pytest.approx([2.0, *figures[:3]], nan_ok=True)
    _, scalars = run.step(1.0, 0.0, 4.0, norm=1.0)
    assert scalars[2:] == pytest.approx([1 - 0.9**2, 1 - 0.95**2, 1.0]) and run.tally.tolist() == [2, 1, 0]


@BOTH
def test_the_first_of_a_row_is_remembered_and_after_too_many_nothing_is_applied(implementation: str):
    run = Run(implementation)
    for step in range(1, 4):
        run.step(NAN, float(step), 1.0, norm=1.0)
    assert run.tally.tolist() == [0, 3, 3] and run.bad.tolist()[0::2] == [1.0, 1.0]
    _, scalars = run.step(1.0, 0.0, 1.0, norm=1.0)  # sound, but the row is over its bound
    assert scalars[4] == 0.0 and run.tally.tolist() == [0, 4, 4]


@BOTH
def test_a_row_whose_beginning_another_process_saw_begins_at_the_first_step_that_is_seen(implementation: str):
    run = Run(implementation)
    run.tally.copy_(torch.tensor([5, 2, 1]))
    run.step(NAN, 0.5, 1.0, norm=1.0)
    assert run.tally.tolist() == [5, 3, 2] and run.bad.tolist()[0::2] == [8.0, 0.5]


def test_a_veto_is_asked_for_what_may_be_applied_and_decides():
    asked = []

    def veto(values: torch.Tensor, may_apply: torch.Tensor) -> torch.Tensor:
        asked.append((values.tolist(), bool(may_apply)))
        return may_apply & (values[0] < 2)

    run = Run("triton")
    applied = [run.step(loss, 0.5, 2.0, norm=3.0, veto=veto)[1][4] for loss in (2.0, 6.0)]
    assert asked == [([1.0, 1.5], True), ([3.0, 1.5], True)] and applied == [1.0, 0.0]
    assert run.tally.tolist() == [1, 1, 1] and run.bad.tolist() == [2.0, 3.0, 0.25, 1.5]
