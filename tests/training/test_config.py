import tomllib
from pathlib import Path

import pytest

from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import ConfigMismatch
from llmtrain.training.config import (
    DataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    for_ranks,
)
from llmtrain.training.tables import tables_for_resume, to_tables, to_toml
from tests.training.conftest import config


def test_a_configuration_survives_its_toml(tmp_path):
    one = config(Path('odd "name" \\ ü\n.u16'), tmp_path, epochs=0.5)
    tables = tomllib.loads(to_toml(one))
    assert tables["data"]["tokens"] == ['odd "name" \\ ü\n.u16']
    given = {"total_steps": 12, "epochs": 0.5, "warmup_steps": 5, "min_lr_ratio": 0.1}
    assert tables["schedule"] == given | {"schedule": "cosine", "decay_share": 0.2}
    assert tables["optimizer"]["adam_eps"] == 1e-8
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in to_tables(one)["data"].items()} == tables["data"]


def tables() -> dict:
    return to_tables(config(Path("c.u16"), Path("run")))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("model", "d_model", 64),
        ("data", "seq_len", 32),
        ("optimizer", "learning_rate", 1e-3),
        ("schedule", "total_steps", 13),
        ("schedule", "warmup_steps", 6),
        ("run", "seed", 1),
        ("run", "precision", "bf16"),
    ],
)
def test_what_would_make_another_run_is_refused_by_name(section: str, name: str, value):
    with pytest.raises(ConfigMismatch, match=name):
        tables_for_resume(tables(), {section: {name: value}})
    assert tables_for_resume(tables(), {section: {name: tables()[section][name]}}) == tables()


def test_what_does_not_change_the_run_may_change():
    asked = {"run": {"log_every": 7, "checkpoint_every": 9}, "data": {"val_tokens": ["v"]}}
    merged = tables_for_resume(tables(), asked)
    assert (merged["run"]["log_every"], merged["run"]["checkpoint_every"]) == (7, 9)
    assert merged["data"]["val_tokens"] == ["v"]


def test_the_split_into_micro_batches_may_change_and_the_sequences_of_a_step_may_not():
    merged = RunConfig(**tables_for_resume(tables(), {"run": {"batch_size": 2}})["run"])
    assert (merged.batch_size, merged.sequences_per_step) == (2, 6)
    merged = RunConfig(**tables_for_resume(tables(), {"run": {"batch_size": 3, "accumulate": 2}})["run"])
    assert (merged.batch_size, merged.sequences_per_step) == (3, 6)
    with pytest.raises(ConfigMismatch, match="6 sequences"):
        tables_for_resume(tables(), {"run": {"batch_size": 4, "accumulate": 2}})


def test_a_model_file_that_leaves_the_vocabulary_open_fits_any():
    saved = tables()
    saved["model"]["vocab_size"] = 96
    assert tables_for_resume(saved, {"model": {"vocab_size": 0}})["model"]["vocab_size"] == 96


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: RunConfig(batch_size=0), "batch_size .*0"),
        (lambda: RunConfig(keep_checkpoints=1), "keep_checkpoints .*1"),
        (lambda: RunConfig(accumulate=2, global_batch_size=8), "accumulate 2"),
        (lambda: ScheduleConfig(min_lr_ratio=2), "min_lr_ratio .*2"),
        (lambda: ScheduleConfig(epochs=0), "epochs .*0"),
        (lambda: OptimizerConfig(beta2=1.0), "beta2 .*1.0"),
        (lambda: OptimizerConfig(adam_eps=0), "adam_eps must be 1e-15 or more, not 0"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "learning_rate .*nan"),
    ],
)
def test_a_value_out_of_range_is_named(make, names: str):
    with pytest.raises(ValueError, match=names):
        make()


@pytest.mark.parametrize(
    ("saved", "asked", "batch_size", "refused"),
    [
        ({"batch_size": 2, "accumulate": 3}, {"global_batch_size": 6}, 2, False),
        ({"batch_size": 2, "accumulate": 3}, {"global_batch_size": 6, "accumulate": 1}, 2, False),
        ({"batch_size": 2, "accumulate": 3}, {"global_batch_size": 6, "batch_size": 4}, 4, False),
        ({"batch_size": 2, "accumulate": 3}, {"global_batch_size": 5}, 0, True),
        ({"batch_size": 2, "accumulate": 3}, {"accumulate": 1}, 0, True),
        ({"batch_size": 2, "accumulate": 3}, {"accumulate": 1, "batch_size": 6}, 6, False),
        ({"batch_size": 2, "accumulate": 3}, {"batch_size": 100}, 100, False),
        ({"batch_size": 4, "global_batch_size": 6, "accumulate": 1}, {"accumulate": 2}, 0, True),
        ({"batch_size": 4, "global_batch_size": 6, "accumulate": 1}, {"accumulate": 2, "batch_size": 3}, 3, False),
        ({"batch_size": 4, "global_batch_size": 6, "accumulate": 1}, {"batch_size": 1}, 1, False),
        ({"batch_size": 4, "global_batch_size": 6, "accumulate": 1}, {"global_batch_size": 4}, 0, True),
    ],
)
def test_however_a_resume_says_the_sequences_of_a_step_they_stay_or_it_is_refused(saved, asked, batch_size, refused):
    if refused:
        with pytest.raises(ConfigMismatch, match="a step of this run has 6 sequences"):
            tables_for_resume({"run": saved}, {"run": asked})
        return
    merged = RunConfig(**tables_for_resume({"run": saved}, {"run": asked})["run"])
    assert (merged.sequences_per_step, merged.batch_size) == (6, batch_size)


@pytest.mark.parametrize("value", [2**63, float("inf"), 10**40])
def test_a_number_that_no_counter_holds_is_refused(value):
    with pytest.raises(ValueError, match="below 2\\^63"):
        RunConfig(batch_size=value)
    with pytest.raises(ValueError, match="epochs"):
        ScheduleConfig(epochs=float("inf"))


def test_keep_every_is_a_multiple_of_checkpoint_every():
    assert RunConfig(checkpoint_every=10, keep_every=30).keep_every == 30
    with pytest.raises(ValueError, match="keep_every 15 must be a multiple of checkpoint_every, 10"):
        RunConfig(checkpoint_every=10, keep_every=15)


@pytest.mark.parametrize(
    "how",
    [{"parallel": "ddp"}, {"parallel": "pipeline"}, {"parallel": "pipeline", "shard_ranks": 1}],
    ids=str,
)
def test_weights_are_kept_gathered_only_where_they_are_shared_out(how: dict):
    with pytest.raises(ValueError, match="reshard_after_forward is off, .* with parallel .* none are: give --resh"):
        RunConfig(reshard_after_forward=False, **how)
    assert RunConfig(**how).reshard_after_forward
    for shared_out in ({}, {"parallel": "fsdp"}, {"parallel": "pipeline", "shard_ranks": 2}):
        assert not RunConfig(reshard_after_forward=False, **shared_out).reshard_after_forward


def test_of_several_ranks_a_step_has_the_batches_of_all_and_keeps_them_on_any_other_number():
    run = {"batch_size": 4, "accumulate": 3}
    config = TrainConfig(ModelConfig(), DataConfig(), OptimizerConfig(), ScheduleConfig(), RunConfig(**run))
    assert for_ranks(config, 1) is config
    on_two = for_ranks(config, 2)
    assert (on_two.run.sequences_per_step, on_two.run.accumulate, on_two.run.batch_size) == (24, 1, 4)
    assert for_ranks(on_two, 8) is on_two

    def resumed(saved: dict, ranks: int, **asked) -> RunConfig:
        return RunConfig(**tables_for_resume({"run": saved}, {"run": asked}, ranks)["run"])

    alone = {"batch_size": 4, "accumulate": 6}
    for ranks, saved in ((1, alone), (2, alone), (4, alone), (1, {"batch_size": 4, "global_batch_size": 24})):
        assert resumed(saved, ranks).sequences_per_step == 24
        assert resumed(saved, ranks, batch_size=3).sequences_per_step == 24
    assert resumed(alone, 2, accumulate=3).sequences_per_step == 24
    with pytest.raises(ConfigMismatch, match="has 24 sequences, asked were 48"):
        resumed(alone, 2, accumulate=6)
