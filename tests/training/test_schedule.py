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
