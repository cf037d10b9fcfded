import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.corpus.choices import Choices, Question
from llmtrain.corpus.order import SampleOrder
from llmtrain.model.flops import flops_per_token, parameter_counts
from llmtrain.model.memory import MemoryPlan
from llmtrain.storage.errors import UsageError
from llmtrain.storage.units import in_bytes, in_flops
from llmtrain.training.fit import Room
from llmtrain.training.plan import SourceUse, checkpoint_bytes
from llmtrain.training.plan_words import corpus_lines, disk_line, memory_lines, schedule_line, source_line
from llmtrain.training.run import train
from llmtrain.training.run_corpus import open_sources
from llmtrain.training.validate import what_is_read
from tests.training.conftest import config, write_corpus

GIB = 2**30
QUESTION = Question((([5, 6], 1), ([5, 7], 1)), (1, 1), 0)
PLAN = MemoryPlan(
    fixed={"weights": 3 * GIB, "operands": 0},
    activations={"stream": 5 * GIB, "qkv": 2 * GIB},
    passing={"head": GIB // 2, "feed-forward's backward": GIB},
)


def test_the_parts_of_the_memory_line_add_up_to_its_peak():
    for plan, peak in ((PLAN, 11), (replace(PLAN, evaluation=2 * GIB), 13)):
        first, second = memory_lines(plan, Room(80 * GIB, 70 * GIB), on_card=True)
        assert f"{peak}.00 GiB at the peak" in first and "feed-forward's backward 1.00" in first
        assert first.endswith("; of the card's 80.00, 70.00 are free")
        parts = first.partition(": ")[2].partition(";")[0]
        assert sum(map(float, re.findall(r" (\d+\.\d+)(?:,|$)", f" {parts}"))) == peak
    assert second == "activations 7.00 GiB: stream 5.00, qkv 2.00"
    assert "machine's 80.00" in memory_lines(PLAN, Room(80 * GIB, 70 * GIB), on_card=False)[0]


def test_what_will_not_fit_is_said_before_it_does_not():
    assert "10.00 are free, which is TOO LITTLE: lower" in memory_lines(PLAN, Room(80 * GIB, 10 * GIB), True)[0]


def test_the_memory_of_a_small_model_is_said_in_mib():
    fixed = {"weights": 4 << 20, "tables": 1000}
    small = MemoryPlan(fixed, activations={"qkv": 3 << 19}, passing={"head": 1 << 19})
    assert memory_lines(small, Room(80 * GIB, 80 * GIB), on_card=True) == [
        "memory      6.0 MiB at the peak: weights 4.0, activations 1.5, head 0.5; of the card's 81,920.0, 81,920.0 "
        "are free",
        "activations 1.5 MiB: qkv 1.5",
    ]
    tiny = replace(small, activations={"qkv": 1 << 15, "gate": 1 << 14})
    assert memory_lines(tiny, Room(80 * GIB, 80 * GIB), on_card=True)[1] == "activations 0.0 MiB"


def test_a_source_of_which_little_is_taken_has_a_share_of_an_epoch():
    def epochs(number: float) -> str:
        return source_line(SourceUse("a", Path("a.u16"), 1000, 10, 1.0, number, None), 16).split(", ")[1]

    assert [epochs(e).split()[0] for e in (0.00123, 0.25, 1.0, 1234.5)] == ["0.0012", "0.25", "1.00", "1,234.50"]


def test_what_an_evaluation_reads_is_one_question_or_several(tmp_path):
    settings = config(tmp_path / "c.u16", tmp_path / "run")
    for count, said in ((1, "1 question"), (1200, "1,200 questions")):
        assert what_is_read(Choices("arc", (QUESTION,) * count, 0), settings) == said


def test_the_schedule_says_what_the_learning_rate_comes_to(tmp_path):
    settings = config(tmp_path / "c.u16", tmp_path / "run", warmup_steps=5)
    # 1e-2; the update before the end is 6/7 through the cosine from 1e-2 to 1e-3: 1e-3 + 9e-3 * 0.0495.
    assert schedule_line(settings, 12) == "schedule    cosine: lr rises to 1.00e-02 over 5 steps and ends at 1.45e-03"
    assert schedule_line(settings, 5) == "schedule    cosine: lr rises to 1.00e-02 over 5 steps and stays"
    wsd = config(tmp_path / "c.u16", tmp_path / "run", warmup_steps=5, schedule="wsd", decay_share=0.5)
    # Update 15 of those from 10 on: 1 - sqrt(9 / 10) of the way from floor to peak.
    assert schedule_line(wsd, 20) == (
        "schedule    wsd: lr rises to 1.00e-02 over 5 steps, stays until step 10 and ends at 1.46e-03"
    )


def test_a_run_that_ends_in_its_warmup_is_told_so(tmp_path):
    line = schedule_line(config(tmp_path / "c.u16", tmp_path / "run", warmup_steps=2000), 5)
    assert "rises to 2.50e-05" in line and "1.00e-02 is reached at step 2,000: lower --warmup-steps" in line


def test_the_plan_adds_up(corpus, tmp_path, capsys):
    train(config(corpus, tmp_path / "run", total_steps=3), resume=False)
    out = capsys.readouterr().out
    # 3 steps of 6 windows of 16; the corpus has 37 windows. The model of 96 x 32 and 2 blocks.
    counts = parameter_counts(replace(config(corpus, tmp_path).model, vocab_size=96))
    flops = flops_per_token(replace(config(corpus, tmp_path).model, vocab_size=96), 16)
    assert "step        6 sequences x 16 = 96 tokens, in 2 micro-batches of 4\n" in out
    assert f"run         3 steps, 288 tokens, {288 / counts.total:.2g} a parameter; 6.2 steps an epoch\n" in out
    assert "corpus      corpus: 597 tokens, 0.49 epochs" in out
    assert "optimizer   AdamW, betas 0.9 and 0.95; decay 0.01, clip 1\n" in out
    one = in_bytes(12 * counts.total)
    assert f"disk        {one} a checkpoint, {one} for the 1 that is kept, " in out
    assert f"{in_flops(288 * flops)} in all\n" in out


def test_the_plan_and_the_log_count_what_windows_let_attend(corpus, tmp_path, capsys):
    asked = config(corpus, tmp_path / "run", total_steps=1)
    asked = replace(asked, model=replace(asked.model, window=4, global_every=2))
    train(asked, resume=False)
    out = capsys.readouterr().out
    full, windowed = 16 * 17 // 2, 16 * 4 - 6
    share = (full + windowed) / 2 / full
    assert f"; 1 of 2 layers within 4 tokens, {share:.0%} of the pairs of whole rows\n" in out
    flops = flops_per_token(replace(asked.model, vocab_size=96), 16)
    assert f"{in_flops(96 * flops)} in all\n" in out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    environment = next(line["environment"] for line in lines if "environment" in line)
    assert environment["attention"] == "reference, reference within windows"


def test_the_disk_line_counts_those_kept_and_the_one_in_work_and_says_where_they_do_not_fit(tmp_path):
    asked = {"checkpoint_every": 2, "keep_checkpoints": 2, "keep_every": 4}
    settings = config(tmp_path / "c.u16", tmp_path / "run", run=asked)
    settings = replace(settings, model=replace(settings.model, vocab_size=96))
    one = checkpoint_bytes(settings)
    line = disk_line(settings, 20, 0, 8 * one)  # 10 saves: 2 newest, 5 for good, 1 in work
    assert f"{in_bytes(7 * one)} for the 7 that are kept and {in_bytes(one)} for one in work" in line
    assert "FIT" not in line
    assert "WILL NOT FIT" in disk_line(settings, 20, 0, 8 * one - 1)
    assert "FIT" not in disk_line(settings, 20, 3, 5 * one)
    assert "free" not in disk_line(settings, 20, 0, None)


def test_tokens_asked_of_each_source_are_the_run_and_its_epochs(tmp_path, capsys):
    paths = [write_corpus(tmp_path / f"{name}.u16", tokens) for name, tokens in (("code", 4001), ("math", 401))]
    asked = config(paths[0], tmp_path / "run", total_steps=None)
    data = replace(asked.data, tokens=(f"code={paths[0]}:2.4K", f"math={paths[1]}:.8K"))
    train(replace(asked, data=data), resume=False)
    out = capsys.readouterr().out
    # 3,200 tokens are 200 windows of 16; a step has 6.
    assert "run         34 steps, 3,200 tokens" in out
    code, math = (line for line in out.splitlines() if line.startswith("corpus "))
    drawn = SampleOrder(open_sources(data.tokens, 0, None), 16, 0).drawn(200)
    assert f"code: 4,001 tokens, {drawn[0] / 250:.2f} epochs, {drawn[0] / 200:.1%} of the run" in code
    assert f"math: 401 tokens, {drawn[1] / 25:.2f} epochs" in math
    with pytest.raises(UsageError, match="--epochs 2.0: --tokens says already how many"):
        train(replace(asked, data=data, schedule=replace(asked.schedule, epochs=2.0)), resume=True)


def test_a_source_that_is_repeated_too_often_or_gets_another_share_is_named(tmp_path):
    paths = [write_corpus(tmp_path / f"{name}.u16", tokens) for name, tokens in (("code", 16001), ("math", 161))]
    order = SampleOrder(open_sources((f"code={paths[0]}:15976K", f"math={paths[1]}:24K"), 0, None), 16, 0)
    code, math = corpus_lines(order, 1_000_000)
    # 24 of 16,000 are 1.5 thousandths, of which the mixture makes 1.
    assert "100.00 epochs, 0.1% of the run, 16,000 OF 24,000 TOKENS ASKED, MORE THAN 4" in math
    assert "ASKED" not in code and "MORE THAN 4" in code
    assert "MORE" not in corpus_lines(order, 3_000)[0]
