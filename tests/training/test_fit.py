"""What fits: the search, what auto makes of it, and the line for what does not."""

import os
import resource
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.kernels.attention import CUDNN
from llmtrain.model.config import ModelConfig
from llmtrain.model.memory import training_memory
from llmtrain.storage.errors import MemoryTaken, UsageError
from llmtrain.training import fit
from llmtrain.training.config import TrainConfig
from llmtrain.training.fit import GIB, Room
from tests.artifacts import measured_steps
from tests.training.conftest import config as small_config

CARD, CPU = torch.device("cuda"), torch.device("cpu")
MODEL = ModelConfig(32000, 768, 16, 12, 4, 64, 1408, 1024)


def asked(**run) -> TrainConfig:
    """The 102M model at 1024 tokens."""
    settings = {"batch_size": 64, "global_batch_size": None, "precision": "bf16", **run}
    base = small_config(Path("c.u16"), Path("run"), run=settings)
    return replace(base, model=MODEL, data=replace(base.data, seq_len=1024))


@given(limit=st.integers(0, 5000), highest=st.integers(0, 5000))
def test_the_search_finds_the_last_that_fits(limit: int, highest: int):
    asked_for: list[int] = []

    def fits(n: int) -> bool:
        asked_for.append(n)
        return n <= limit

    assert fit.largest(fits, highest) == min(limit, highest)
    assert all(1 <= n <= highest for n in asked_for) and len(asked_for) <= 13


@given(sequences=st.integers(1, 3000), most=st.integers(1, 3000))
def test_a_step_is_split_into_as_few_and_as_even_micro_batches_as_can_be(sequences: int, most: int):
    size = fit.even(sequences, most)
    micro_batches = -(-sequences // size)
    assert 1 <= size <= most and micro_batches == -(-sequences // most)
    assert micro_batches * (size - 1) < sequences  # smaller ones would be one more


@given(gib=st.integers(5, 200), sequences=st.integers(1, 600), held_out=st.booleans())
def test_auto_takes_what_is_predicted_to_fit_and_keeps_the_step(gib: int, sequences: int, held_out: bool):
    config = asked(batch_size="auto", global_batch_size=sequences)
    config = replace(config, model=replace(MODEL, vocab_size=512))  # a small head, whose chunks are no part of the sum
    if held_out:
        config = replace(config, data=replace(config.data, val_tokens=("v.u16",)))
    there = Room(200 * GIB, gib * GIB)
    chosen = fit.with_batch_size(config, fit.auto_size(config, CUDNN, CARD, there))
    size = chosen.run.micro_batch_size
    assert chosen.run.sequences_per_step == sequences
    assert fit.needs(fit.memory_of(config, size, CUDNN, CARD), CARD) <= there.free
    one_less = -(-sequences // size) - 1  # micro-batches
    if one_less:
        larger = fit.memory_of(config, -(-sequences // one_less), CUDNN, CARD)
        assert fit.needs(larger, CARD) > there.free - GIB / 10


def test_auto_begins_with_one_sequence_where_none_is_predicted_to_fit():
    assert fit.auto_size(asked(batch_size="auto"), CUDNN, CARD, Room(GIB, GIB)) == 1


def test_auto_takes_no_more_than_a_cpu_has_use_for():
    config = asked(batch_size="auto", accumulate=100)
    assert config.run.sequences_per_step == 800
    assert fit.auto_size(config, "reference", CPU, Room(10**15, 10**15)) == 8192 // 1024
    long = replace(config, data=replace(config.data, seq_len=10**5))
    assert fit.auto_size(long, "reference", CPU, Room(10**15, 10**15)) == 1


def test_an_evaluation_comes_on_top_of_what_captured_graphs_hold():
    config = asked()
    with_held_out = replace(config, data=replace(config.data, val_tokens=("v.u16",)))
    alone, beside = (fit.memory_of(c, 64, CUDNN, CARD) for c in (config, with_held_out))
    assert alone.evaluation == 0 < beside.evaluation < alone.peak
    assert fit.memory_of(with_held_out, 64, "reference", CPU).evaluation == 0


def test_the_margin_covers_what_the_allocator_came_to_hold():
    for step in measured_steps():
        memory = training_memory(step.model, step.batch_size, step.seq_len, attention=step.attention)
        assert step.reserved * GIB <= fit.needs(memory, CARD) <= 1.2 * step.reserved * GIB + GIB, step.name


@pytest.mark.parametrize(
    "run",
    [{"batch_size": 512}, {"batch_size": 509}, {"batch_size": 128, "accumulate": 6},
     {"batch_size": 300, "global_batch_size": 512}],
    ids=str,
)  # fmt: skip
def test_what_a_refusal_suggests_fits_and_is_the_same_step(run: dict):
    config, there = asked(**run), Room(30 * GIB, 28 * GIB)
    error = fit.refusal(config, CUDNN, CARD, there)
    assert isinstance(error, UsageError) and error.exit_code == 2 and "\n" not in str(error)
    text = str(error)
    assert f"--batch-size {run['batch_size']} x --seq-len 1024 does not fit" in text
    assert "of the card's 30.00 GiB 28.00 GiB are free" in text and "activations" in text
    options = shlex.split(text.partition("give ")[2].partition(" or --batch-size auto")[0])
    names = [name.lstrip("-").replace("-", "_") for name in options[::2]]
    changed = replace(config.run, **dict(zip(names, map(int, options[1::2]), strict=True)))
    assert changed.sequences_per_step == config.run.sequences_per_step
    assert fit.needs(fit.memory_of(config, changed.micro_batch_size, CUDNN, CARD), CARD) <= there.free
    # The margin leaves out less than the tenth that the step would be larger by.
    assert changed.micro_batch_size > 30


def test_the_parts_of_a_refusal_add_up():
    config = asked(batch_size=512)
    config = replace(config, data=replace(config.data, val_tokens=("v.u16",)))
    memory = fit.memory_of(config, 512, CUDNN, CARD)
    assert sum(fit.by_part(memory).values()) == memory.held
    text = str(fit.refusal(config, CUDNN, CARD, Room(30 * GIB, 28 * GIB)))
    parts = text.partition("(")[2].partition(")")[0]
    total = float(text.partition("about ")[2].split()[0])
    assert sum(float(part.rsplit(" ", 1)[1]) for part in parts.split(", ")) == pytest.approx(total, abs=0.05)


def test_a_refusal_names_the_checkpointing_that_would_do():
    text = str(fit.refusal(asked(), CUDNN, CARD, Room(24 * GIB, 22 * GIB)))
    assert "or keep it with --checkpoint-activations selective" in text
    text = str(fit.refusal(asked(), CUDNN, CARD, Room(12 * GIB, 12 * GIB)))
    assert "or keep it with --checkpoint-activations full" in text


def test_where_not_one_sequence_fits_the_model_has_to_be_smaller():
    text = str(fit.refusal(asked(batch_size=1), CUDNN, CARD, Room(GIB, GIB)))
    assert "make the model or --seq-len smaller" in text and "--batch-size auto" not in text


def test_memory_that_others_hold_may_come_free():
    error = fit.refusal(asked(), CUDNN, CARD, Room(80 * GIB, 10 * GIB))
    assert isinstance(error, MemoryTaken) and error.exit_code == 74
    assert "other processes hold the rest: wait for them" in str(error) and "--batch-size" in str(error)


def test_the_context_of_this_process_is_no_other_process():
    needed = fit.needs(fit.memory_of(asked(), 64, CUDNN, CARD), CARD)
    total = needed + GIB // 4
    error = fit.refusal(asked(), CUDNN, CARD, Room(total, total - GIB // 2))
    assert isinstance(error, UsageError) and "other processes" not in str(error)


def test_a_card_that_ran_out_after_it_had_been_tried_is_no_mistake_of_the_command_line():
    error = fit.ran_out(asked(), CUDNN, CARD, Room(80 * GIB, 79 * GIB), 5000)
    assert error.exit_code == 74 and "after step 5000" in str(error) and "--resume" in str(error)
    assert fit.ran_out(asked(), CUDNN, CPU, Room(GIB, GIB), 0).exit_code == 2


def test_a_want_of_memory_is_known_behind_the_error_of_a_capture():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert fit.out_of_memory(error)
    assert not fit.out_of_memory(RuntimeError("operation not permitted during capture"))


def test_a_machine_has_the_memory_that_its_limits_leave():
    there = fit.room(CPU)
    assert 0 < there.free <= there.total <= 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, before[1]))
    try:
        assert 0 < fit.room(CPU).free <= GIB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_control_group_and_those_above_it_limit_the_memory(tmp_path, monkeypatch):
    root = tmp_path / "cgroup"
    box = "box.slice", str(8 * GIB), 6 * GIB
    for folder, limit, used in (("", "max", 9 * GIB), box, ("box.slice/run", "max", 1)):
        (root / folder).mkdir()
        (root / folder / "memory.max").write_text(f"{limit}\n")
        (root / folder / "memory.current").write_text(f"{used}\n")
        (root / folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    named = tmp_path / "self"
    named.write_text("4:memory:/old\n0::/box.slice/run\n")
    monkeypatch.setattr(fit, "CGROUPS", root)
    monkeypatch.setattr(fit, "OWN_CGROUP", named)
    assert list(fit._limits()) == [Room(8 * GIB, 3 * GIB)]
