import pytest

from llmtrain.training.config import OptimizerConfig, ScheduleConfig
from llmtrain.training.schedule import learning_rate

PEAK = OptimizerConfig(learning_rate=4e-4)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 4e-6),
        (1, 8e-6),
        (99, 4e-4),
        (100, 4e-4),
        (600, 2.2e-4),  # half-way down: the mean of peak and floor
        (1099, 4.0000888e-05),
        (1100, 4e-5),
        (5000, 4e-5),
    ],
)
def test_warmup_then_cosine_down_to_the_floor(step: int, expected: float):
    schedule = ScheduleConfig(warmup_steps=100, min_lr_ratio=0.1)
    assert learning_rate(step, 1100, PEAK, schedule) == pytest.approx(expected, rel=1e-6)


def test_a_run_that_ends_within_its_warmup_never_decays():
    schedule = ScheduleConfig(warmup_steps=100)
    assert [learning_rate(s, 50, PEAK, schedule) for s in (0, 1, 49, 50)] == pytest.approx(
        [4e-6, 8e-6, 2e-4, 2.04e-4]
    )
    assert learning_rate(100, 100, PEAK, schedule) == 4e-4


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(0, 10, PEAK, ScheduleConfig(warmup_steps=0)) == 4e-4


# Peak 1, floor 0.1, 100 steps of warmup, 1,100 in all: p = 0.25 at step 350, 0.64 at 740.
LINEAR = {0: 0.01, 49: 0.5, 99: 1.0, 100: 1.0, 350: 0.775, 600: 0.55, 740: 0.424, 1099: 0.1009, 1100: 0.1, 5000: 0.1}
# The same with a fifth of decay: it begins at 880, and p = 0.25 at 935, 0.49 at 987.8, 0.64 at 1020.8.
WSD = {0: 0.01, 99: 1.0, 100: 1.0, 600: 1.0, 880: 1.0, 935: 0.55, 1100: 0.1, 5000: 0.1}


@pytest.mark.parametrize(("name", "table"), [("linear", LINEAR), ("wsd", WSD)])
def test_linear_and_wsd_are_those_of_the_table(name: str, table: dict[int, float]):
    schedule = ScheduleConfig(schedule=name, warmup_steps=100, min_lr_ratio=0.1, decay_share=0.2)
    rates = {step: learning_rate(step, 1100, OptimizerConfig(learning_rate=1.0), schedule) for step in table}
    assert rates == pytest.approx(table, rel=1e-9)


def test_the_decay_of_wsd_never_reaches_into_the_warmup_and_may_be_none_or_all():
    one = OptimizerConfig(learning_rate=1.0)

    def rates(share: float, warmup: int) -> list[float]:
        schedule = ScheduleConfig(schedule="wsd", warmup_steps=warmup, min_lr_ratio=0.0, decay_share=share)
        return [learning_rate(s, 10, one, schedule) for s in range(10)]

    assert rates(0.0, 2) == [0.5] + [1.0] * 9
    assert rates(1.0, 0)[0] == 1.0 and rates(1.0, 0)[-1] == pytest.approx(1 - 0.9**0.5)
    assert rates(0.9, 5) == rates(0.5, 5) and rates(0.5, 5)[4:6] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_branch_at_the_end_of_the_stable_phase_repeats_no_rate_and_skips_none(name: str):
    """What a stable run of any length does up to a step is what the run that decays from there does up to it."""
    stable = ScheduleConfig(schedule="wsd", warmup_steps=10, decay_share=0.0)
    decays = ScheduleConfig(schedule="wsd", warmup_steps=10, decay_share=0.25)
    before = [learning_rate(s, 10_000, PEAK, stable) for s in range(300)]
    assert before == [learning_rate(s, 400, PEAK, decays) for s in range(300)]
    falling = [learning_rate(s, 400, PEAK, ScheduleConfig(schedule=name, warmup_steps=10)) for s in range(10, 400)]
    assert falling == sorted(falling, reverse=True)
