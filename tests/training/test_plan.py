import re

from llmtrain.model.memory import MemoryPlan
from llmtrain.training.plan import memory_lines

GIB = 2**30
PLAN = MemoryPlan(
    fixed={"weights": 3 * GIB, "operands": 0},
    activations={"stream": 5 * GIB, "qkv": 2 * GIB},
    passing={"head": GIB // 2, "feed-forward's backward": GIB},
)


def test_the_parts_of_the_memory_line_add_up_to_its_peak():
    first, second = memory_lines(PLAN, 80 * GIB)
    assert "11.00 GiB at the peak of the card's 80.0" in first and "feed-forward's backward 1.00" in first
    assert sum(map(float, re.findall(r" (\d+\.\d+)(?:,|$)", first.partition(": ")[2]))) == 11
    assert second == "activations 7.00 GiB: stream 5.00, qkv 2.00"
    assert "FIT" not in first and "card" not in memory_lines(PLAN, None)[0]


def test_what_will_not_fit_is_said_before_it_does_not():
    assert "WILL NOT FIT: lower --batch-size" in memory_lines(PLAN, 10 * GIB)[0]
