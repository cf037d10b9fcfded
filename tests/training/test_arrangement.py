import pytest
import torch

from llmtrain.kernels.attention import CUDNN
from llmtrain.kernels.weight import deliver_gradient, deliver_product
from llmtrain.model.flops import parameter_counts
from llmtrain.model.memory import matrices_gathered, state_bytes
from llmtrain.storage.errors import UsageError
from llmtrain.training.arrangement import ALONE, arrange
from llmtrain.training.config import TrainConfig, for_ranks
from llmtrain.training.fit import Room, memory_of, needs, smaller_ways
from llmtrain.training.grid import Grid
from llmtrain.training.stages import stages_of
from tests.training.test_fit import CARD, MODEL, asked


def arranged(free: int, ranks: int = 4, least=lambda number: number, **run) -> tuple[str, Grid, str]:
    found = arrange(asked(**run), CUDNN, CARD, Room(free, free), ranks, least)
    return found.mode, found.grid, found.line() if found.mode else ""


def needed(config: TrainConfig, shards: int = 1) -> int:
    return needs(memory_of(config, config.run.micro_batch_size, CUDNN, CARD, shards), CARD)


def test_auto_is_ddp_where_that_fits_every_rank_and_else_fsdp():
    takes = needed(asked())
    assert arrange(asked(), CUDNN, CARD, Room(takes, takes), 1) == ALONE
    mode, grid, line = arranged(takes)
    assert (mode, grid) == ("ddp", Grid(copies=4)) and "4 ranks with the whole model each: it takes" in line
    mode, grid, line = arranged(takes - 1)
    assert (mode, grid) == ("fsdp", Grid(shards=4)) and "which do not fit into" in line
    mode, grid, line = arranged(takes, least=lambda number: 0)  # another rank has less
    assert mode == "fsdp" and line.endswith("more than is free on all")
    assert arranged(takes, parallel="fsdp", shard_ranks=2)[1] == Grid(copies=2, shards=2)
    assert arranged(takes - 1, parallel="ddp")[:2] == ("ddp", Grid(copies=4))


def test_weights_that_are_kept_until_the_update_are_in_the_plan():
    keeps = {"parallel": "fsdp", "reshard_after_forward": False}
    assert "fsdp, 4 ranks share out the weights, gathered once a step, without" in arranged(1, **keeps)[2]
    assert "gathered once" not in arranged(1, parallel="fsdp")[2]
    freed, kept = (memory_of(asked(**run), 64, CUDNN, CARD, 4) for run in ({"parallel": "fsdp"}, keeps))
    root, block, vectors = matrices_gathered(MODEL)
    blocks = parameter_counts(MODEL).total - root - vectors
    assert blocks == MODEL.n_layers * block
    assert kept.peak - freed.peak == 2 * (blocks - 2 * block) == kept.fixed["gathered"] - freed.fixed["gathered"]
    whole = memory_of(asked(reshard_after_forward=False), 64, CUDNN, CARD)  # nothing is shared out
    assert whole == memory_of(asked(), 64, CUDNN, CARD)

    stages = {"parallel": "pipeline", "pipeline_ranks": 2, "shard_ranks": 4, "batch_size": 1, "accumulate": 16}
    _, _, line = arranged(1, 8, **stages, reshard_after_forward=False)
    assert "4 share out the weights of each stage, gathered once a step, without" in line
    freed, kept = (
        memory_of(asked(**stages, reshard_after_forward=reshard), 1, CUDNN, CARD, 4, 8).fixed["gathered"]
        for reshard in (True, False)
    )
    most = max(len(stage.layers) for stage in stages_of(asked(**stages), 2))
    assert kept - freed == 2 * (most - 2) * block


def test_what_does_not_fit_with_weights_that_are_kept_is_told_that_it_would_without():
    config = asked(parallel="fsdp", reshard_after_forward=False)
    frees = asked(parallel="fsdp")
    free = needed(frees, 4)
    assert "keep it with --reshard-after-forward" in smaller_ways(config, CUDNN, CARD, Room(free, free, 4))
    assert not [way for way in smaller_ways(frees, CUDNN, CARD, Room(free - 1, free - 1, 4)) if "reshard" in way]


def test_what_shards_cannot_do_stays_with_ddp_or_is_refused():
    mode, _, line = arranged(1, precision="fp8")
    assert mode == "ddp" and "not --precision fp8" in line
    with pytest.raises(UsageError, match="--precision mxfp8"):
        arranged(1, precision="mxfp8", parallel="fsdp")
    with pytest.raises(UsageError, match="--shard-ranks 3 does not divide the 4 ranks"):
        arranged(1, parallel="fsdp", shard_ranks=3)


def test_a_pipeline_shares_out_the_weights_of_its_stages_where_that_is_asked_for():
    def pipeline(ranks, **run):
        return arranged(1, ranks, parallel="pipeline", batch_size=1, accumulate=16, **run)

    assert pipeline(8)[1] == Grid(stages=8)  # nothing is shared out unasked
    assert pipeline(8, pipeline_ranks=4, shard_ranks=1)[1] == Grid(stages=4, copies=2)
    mode, grid, line = pipeline(16, pipeline_ranks=4, shard_ranks=2)
    assert (mode, grid) == ("pipeline", Grid(stages=4, copies=2, shards=2))
    assert "4 ranks have the layers, 2 share out the weights of each stage, 2 such copies" in line
    config = for_ranks(asked(parallel="pipeline", shard_ranks=2, batch_size=1, accumulate=8), 8)
    assert config.run.sequences_per_step == 16  # of two pipelines
    assert pipeline(8, shard_ranks=2, pipeline_schedule="interleaved")[1] == Grid(stages=4, shards=2)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"shard_ranks": 3}, "--shard-ranks 3 does not divide the 8 ranks into pipelines"),
        ({"shard_ranks": 8}, "--shard-ranks 8 does not divide the 8 ranks into pipelines of two or more"),
        ({"shard_ranks": 4, "pipeline_ranks": 4}, "--pipeline-ranks 4 with --shard-ranks 4 does not divide the 8"),
        ({"precision": "fp8"}, "--shard-ranks 2: it gathers .* not --precision fp8: use bf16 or --shard-ranks 0"),
        ({"pipeline_schedule": "zero-bubble"}, "put off come too late for --shard-ranks 2.*: use interleaved or"),
    ],
)
def test_a_pipeline_of_shards_that_cannot_be_is_refused(run, words):
    settings = {"parallel": "pipeline", "batch_size": 1, "accumulate": 8, "shard_ranks": 2, **run}
    with pytest.raises(UsageError, match=words):
        arranged(1, 8, **settings)


def test_a_stage_that_is_shared_out_takes_less_memory_the_more_ranks_there_are():
    def parts(shards: int) -> dict[str, int]:
        config = asked(parallel="pipeline", pipeline_ranks=4, shard_ranks=shards, batch_size=1, global_batch_size=64)
        return memory_of(config, 1, CUDNN, CARD, shards, 4 * shards).fixed

    whole, halves, eighths = parts(1), parts(2), parts(8)
    assert whole["weights"] <= 2 * halves["weights"] < 1.01 * whole["weights"]
    assert "gathered" not in whole and halves["operands"] == 0 < whole["operands"]
    # Of the embedding or the head, which are half of what a whole model gathers outside of its blocks.
    of_model = memory_of(asked(batch_size=1), 1, CUDNN, CARD, 2).fixed["gathered"]
    assert 0 < halves["gathered"] == eighths["gathered"] <= of_model


def test_places_in_a_grid_are_all_different_and_shards_are_neighbours():
    grid = Grid(stages=2, copies=3, shards=4)
    places = [grid.place(rank) for rank in range(grid.ranks)]
    assert len(set(places)) == 24 and grid.parts == 8
    assert places[:5] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0)]


def test_a_shard_takes_its_part_of_what_is_saved_and_less_memory_the_more_there_are():
    config = asked(batch_size=1)
    whole, parts = (sum(state_bytes(config.model, shards=n).values()) for n in (1, 8))
    assert whole <= 8 * parts < 1.01 * whole
    taken = [needed(config, shards) for shards in (1, 2, 8, 64)]
    assert taken == sorted(taken, reverse=True) and taken[-1] < taken[0]


def test_a_narrow_weight_gets_a_wide_gradient_where_it_asks_for_one():
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    dy, x = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 4, dtype=torch.bfloat16)
    assert deliver_product(weight, dy, x).dtype == torch.bfloat16
    weight.grad_dtype = torch.float32
    assert deliver_product(weight, dy, x).dtype == torch.float32
    exact = torch.full((3, 4), 1 + 2**-20)
    assert torch.equal(deliver_gradient(weight, exact), exact)
