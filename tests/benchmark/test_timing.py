import time

import pytest
import torch

from llmtrain.benchmark.statistics import compare
from llmtrain.benchmark.timing import Method, Work, burst, measure, require_data, steps_for

CPU = torch.device("cpu")


def sleeper(milliseconds: float, log: list[str], name: str):
    def build() -> Work:
        log.append(f"build {name}")

        def run() -> None:
            log.append(name)
            time.sleep(milliseconds / 1e3)

        return Work(run, (torch.ones(1),))

    return build


def test_an_arm_that_takes_twice_as_long_is_seen_to():
    log: list[str] = []
    # Long against the milliseconds that a sleeper may wait for a busy core.
    arms = {"short": sleeper(20, log, "short"), "long": sleeper(40, log, "long")}
    method = Method(sessions=2, rounds=2, samples=3, warmup=1)
    measured, floor = measure(arms, device=CPU, replicate=["short"], method=method)
    assert set(measured) == {"short", "long", "short (copy)"}
    assert 20 <= measured["short"].times.pooled < 30
    assert len(measured["short"].times.blocks) == 2 and len(measured["short"].times.samples) == 12
    assert measured["short"].device is None and not measured["short"].host_bound
    comparison = compare(measured["short"].times, measured["long"].times, floor)
    assert 1.6 < comparison.ratio < 2.4


def test_arms_take_turns_in_rotating_order_and_are_built_anew_in_each_session():
    log: list[str] = []
    arms = {name: sleeper(0.1, log, name) for name in "ab"}
    measure(arms, device=CPU, replicate=["a"], method=Method(sessions=2, rounds=3, samples=1, warmup=1))
    builds = [i for i, entry in enumerate(log) if entry.startswith("build")]
    assert [log[i] for i in builds] == ["build a", "build b", "build a"] * 2
    # each turn is one untimed and one timed call; the copy of a runs as "a" too
    first = log[builds[2] + 2 : builds[3]]
    assert "".join(first[::2]) == "aba" + "baa" + "aab"
    second = log[builds[5] + 2 :]
    assert "".join(second[::2]) == "aba" + "aab" + "baa"


def test_one_session_is_compared_round_by_round():
    log: list[str] = []
    method = Method(sessions=1, rounds=3, samples=2, warmup=1)
    measured, _ = measure({"a": sleeper(1, log, "a")}, device=CPU, replicate=["a"], method=method)
    assert [len(block) for block in measured["a"].times.blocks] == [2, 2, 2]


def test_zeros_are_never_timed():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
        zeros = torch.zeros(4, 4).to(dtype)
        with pytest.raises(ValueError, match="all zeros"):
            require_data("arm", [zeros])
        require_data("arm", [torch.ones(4, 4).to(dtype).t()])
    with pytest.raises(ValueError, match="'lazy'.*all zeros"):
        measure({"lazy": lambda: Work(lambda: None, (torch.zeros(3),))}, device=CPU, replicate=["lazy"])


@pytest.mark.parametrize("replicate", [[], ["nobody"]])
def test_a_measurement_without_a_replicate_is_refused(replicate):
    with pytest.raises(ValueError, match="replicate"):
        measure({"a": sleeper(1, [], "a")}, device=CPU, replicate=replicate)


@pytest.mark.parametrize("field", ["sessions", "rounds", "samples", "warmup"])
def test_a_method_that_measures_nothing_is_refused(field):
    with pytest.raises(ValueError, match=field):
        Method(**{field: 0})


def test_a_burst_counts_whole_steps():
    taken = burst(lambda: time.sleep(0.01), 5, CPU)
    assert taken.steps == 5 and 0.05 <= taken.wall_s < 0.1
    assert taken.device_s is None


def test_the_number_of_steps_fills_the_time_asked_for():
    assert 6 <= steps_for(lambda: time.sleep(0.01), 0.1, CPU) <= 10
    assert steps_for(lambda: time.sleep(0.01), 0.001, CPU) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("graph", [True, False])
def test_device_time_follows_the_bytes_moved(graph):
    device = torch.device("cuda")

    def copy(megabytes: int):
        def build() -> Work:
            source = torch.randn(megabytes << 18, device=device)
            target = torch.empty_like(source)
            return Work(lambda: target.copy_(source), (source,))

        return build

    arms = {"small": copy(256), "large": copy(1024)}
    method = Method(sessions=2, rounds=2, samples=10, graph=graph)
    measured, floor = measure(arms, device=device, replicate=["small"], method=method)
    assert 3.5 < compare(measured["small"].times, measured["large"].times, floor).ratio < 4.5
    assert floor < 0.2 and not measured["large"].host_bound
