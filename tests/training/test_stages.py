import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import UsageError
from llmtrain.training.stages import (
    STAGES_A_RANK,
    check_micro_batches,
    costs,
    cut,
    in_flight,
    layers_alike,
    of_rank,
    words,
)

MODEL = ModelConfig(vocab_size=32000, d_model=768, n_layers=16, n_heads=12, n_kv_heads=4, d_ff=1408, max_seq_len=1024)


def dearest(borders, embedding, blocks, head):
    stages = [sum(blocks[a:b]) for a, b in itertools.pairwise(borders)]
    stages[0] += embedding
    stages[-1] += head
    return max(stages)


@given(st.integers(1, 7), st.integers(2, 4), st.sampled_from([97, 8000, 65536]), st.booleans())
def test_no_other_cut_has_a_cheaper_dearest_stage_but_for_a_little(layers, count, vocab_size, moe):
    model = ModelConfig(vocab_size=vocab_size, d_model=64, n_layers=layers, n_heads=2, n_kv_heads=1, head_dim=32,
                        d_ff=128, max_seq_len=64, moe=moe)  # fmt: skip
    if count > layers + 1:
        with pytest.raises(UsageError, match="more than the model's"):
            cut(model, 64, "none", count)
        return
    of_model = costs(model, 64)
    stages = cut(model, 64, "none", count)
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert all(stage.layers for stage in stages[:-1])
    assert sum(stage.cost for stage in stages) == pytest.approx(1)
    found = dearest([0, *itertools.accumulate(len(stage.layers) for stage in stages)], *of_model)
    others = [
        dearest([0, *borders, layers], *of_model)
        for borders in itertools.combinations_with_replacement(range(1, layers + 1), count - 1)
        if len(set(borders)) == count - 1
    ]
    assert found <= 1.06 * min(others)


def test_the_head_and_what_runs_again_count():
    embedding, blocks, head = costs(MODEL, 1024)
    assert len(set(blocks)) == 1 and 2 < head / blocks[0] < 4  # measured: 3.0
    assert 0 < embedding < 0.2 * blocks[0]
    *_, again = costs(MODEL, 1024, "full")[1]
    assert 1.2 < again / blocks[0] < 4 / 3
    sizes = [len(stage.layers) for stage in cut(MODEL, 1024, "none", 4)]
    assert sizes[-1] < min(sizes[:-1]) and sum(sizes) == 16
    windowed = dataclasses.replace(MODEL, window=64, global_every=4)
    assert costs(windowed, 1024)[1][2] < costs(windowed, 1024)[1][3] == blocks[0]


@pytest.mark.parametrize("schedule", STAGES_A_RANK)
def test_ranks_share_the_stages_and_the_plan_says_how(schedule):
    ranks = 4
    stages = cut(MODEL, 1024, "none", ranks * STAGES_A_RANK[schedule])
    found = [of_rank(stages, rank, ranks, schedule) for rank in range(ranks)]
    assert sorted(stage.index for own in found for stage in own) == list(range(len(stages)))
    assert {len(own) for own in found} == {STAGES_A_RANK[schedule]}
    with_head = [rank for rank, own in enumerate(found) if own[-1].last]
    assert with_head == [0 if schedule == "zero-bubble" else 3]
    line = words(stages, ranks, schedule)
    assert line.startswith("rank 0 embedding + layers 0-") and line.count("%") == ranks + 1 and "head" in line
    most = [in_flight(rank, ranks, 16, schedule) for rank in range(ranks)]
    assert most == {"1f1b": [4, 3, 2, 1], "interleaved": [5.5, 4.5, 3.5, 2.5], "zero-bubble": [4] * 4}[schedule]


def test_what_a_schedule_cannot_run_is_refused_with_advice():
    for count, schedule in ((4, "1f1b"), (3, "zero-bubble"), (3, "interleaved"), (10, "interleaved")):
        check_micro_batches(count, 4, schedule)
    with pytest.raises(UsageError, match="1f1b: a step of 3 micro-batches does not fill 4 stages"):
        check_micro_batches(3, 4, "1f1b")
    with pytest.raises(UsageError, match="interleaved: a step of 9 micro-batches .* 8 would be"):
        check_micro_batches(9, 4, "interleaved")


def test_layers_that_are_alike_are_those_of_the_commonest_kind():
    assert layers_alike(MODEL) == list(range(16))
    assert layers_alike(dataclasses.replace(MODEL, n_layers=5, window=128, global_every=3)) == [0, 1, 3, 4]
    routed = dataclasses.replace(MODEL, n_layers=5, moe=True, moe_layers=3)
    assert layers_alike(routed) == [2, 3, 4]
