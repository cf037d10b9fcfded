"""What `plan` reckons, held to what `train` says and to arithmetic."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmtrain.cli.train import configuration
from llmtrain.model.flops import parameter_counts
from llmtrain.storage.errors import UsageError
from llmtrain.training import advice, fit
from llmtrain.training.config import TrainConfig
from llmtrain.training.forecast import Forecast, figures, forecast, lines
from llmtrain.training.plan_config import PlanConfig
from llmtrain.training.run import train
from tests.training.conftest import config, write_corpus

CONFIGS = Path(__file__).parents[2] / "configs"


def preset(name: str, **given) -> TrainConfig:
    return configuration({"run_dir": Path("nowhere"), **given}, CONFIGS / f"{name}.toml", resume=False)


def planned(name: str, card: str | None = "H200", *, asked: dict | None = None, **given) -> Forecast:
    return forecast(preset(name, **given), PlanConfig(card=card, **(asked or {})))


def test_it_says_what_train_says_before_its_first_step(corpus, tmp_path, capsys):
    asked = config(corpus, tmp_path / "run", total_steps=3)
    told = list(lines(forecast(asked, PlanConfig()), everything=True))
    train(asked, resume=False)
    of_train = [line for line in capsys.readouterr().out.splitlines() if line[:12].strip()]
    first_step = next(i for i, line in enumerate(of_train) if line.startswith("step 0"))
    changing = ("memory", "disk")  # what is free
    kept = [line for line in of_train[:first_step] if not line.startswith(changing)]
    assert len(kept) > 8 and all(line in told for line in kept)
    for label in changing:
        mine, theirs = ([x for x in some if x.startswith(label)] for some in (told, of_train))
        assert mine[0].split(";")[0].split(", ")[0] == theirs[0].split(";")[0].split(", ")[0]
    assert not list(tmp_path.glob("run/*.partial"))


def test_nothing_is_written(corpus, tmp_path):
    before = sorted(corpus.parent.iterdir())
    forecast(replace(config(corpus, tmp_path / "run")), PlanConfig())
    assert not (tmp_path / "run").exists() and sorted(corpus.parent.iterdir()) == before


def test_a_run_is_reckoned_without_its_token_files_and_says_what_it_assumed():
    found = planned("31m", vocab_size=0)
    counts = parameter_counts(found.config.model)
    assert found.config.model.vocab_size == 16_384 and counts.total == 30_941_696
    assert 0 <= found.tokens - 20 * counts.active < found.plan.sequences_per_step * 1024
    text = "\n".join(lines(found))
    assert "assumed     a vocabulary of 16,384" in text and "20 tokens a parameter" in text
    assert "NOT THERE YET" in text and "are to come, 2 bytes a token" in text


def test_a_number_of_tokens_is_the_length_of_the_run():
    found = planned("102m", asked={"total_tokens": "2.5B"})
    assert found.plan.total_steps == math.ceil(2.5e9 / 65_536) and not found.assumed
    for asked, said in (("much", "is no number of tokens"), ("0.1X", "is no number")):
        with pytest.raises(UsageError, match=said):
            planned("102m", asked={"total_tokens": asked})
    with pytest.raises(UsageError, match="--total-steps 10 says it too"):
        planned("102m", asked={"total_tokens": "1B"}, total_steps=10)


def test_some_token_files_may_be_there_and_others_not(tmp_path):
    there = write_corpus(tmp_path / "a.u16", 4001)
    asked = config(there, tmp_path / "run", total_steps=100)
    data = replace(asked.data, tokens=(f"a={there}:3", f"b={tmp_path}/b.u16:1"))
    found = forecast(replace(asked, data=data), PlanConfig())
    a, b = found.uses
    assert (a.tokens, b.tokens, a.share) == (4001, None, 0.75)
    assert a.epochs == pytest.approx(0.75 * 100 * 6 * 16 / 4001)
    text = "\n".join(lines(found))
    assert f"corpus      a: 4,001 tokens, {a.epochs:.2f} epochs, 75.0% of the run" in text
    assert "corpus      b: NOT THERE YET, 2,400 tokens are taken of it, 25.0% of the run" in text


def test_the_largest_batch_is_the_largest_that_the_memory_plan_lets_in():
    found = planned("102m", "4090")
    cuda = torch.device("cuda")
    for mode, largest in found.largest.items():
        run = replace(found.config.run, checkpoint_activations=mode)
        needs = [
            fit.needs(fit.memory_of(replace(found.config, run=run), n, found.plan.attention.name, cuda), cuda)
            for n in (largest, largest + 1)
        ]
        assert needs[0] <= found.plan.room.free < needs[1]
    assert found.largest["none"] < found.largest["selective"] < found.largest["full"]
    text = "\n".join(lines(found))
    assert f"up to {found.largest['none']} sequences of 1024" in text and "TOO LITTLE" in text
    assert ": give --batch-size 32 --accumulate 2 or --batch-size auto" in text
    assert "TOO LITTLE: lower" not in text  # what to do is said once, with what fits
    assert not planned("102m", "H200").smaller_ways


def test_a_model_of_which_nothing_fits_is_told_to_share_it():
    text = "\n".join(lines(planned("1.5b", "4090")))
    assert "not one sequence of 2048 in a micro-batch, whatever --checkpoint-activations is: make the model" in text
    assert "or share it among more cards with --ranks 2 --parallel fsdp (docs/parallel.md)" in text


def test_without_a_rate_on_record_a_measured_one_is_asked_for(corpus, tmp_path):
    text = "\n".join(lines(forecast(config(corpus, tmp_path / "run"), PlanConfig())))
    assert "known from the first log line on" in text and " --measured takes that of a run" in text


def test_the_largest_batch_of_a_pipeline_is_what_fits_a_rank_of_it():
    asked = {"parallel": "pipeline", "pipeline_ranks": 4, "batch_size": 4}
    whole = planned("500m").largest
    stage = planned("500m", asked={"ranks": 4}, **asked).largest
    shard = planned("500m", asked={"ranks": 8}, **asked, shard_ranks=2).largest
    assert all(2 * whole[mode] < stage[mode] < shard[mode] for mode in ("none", "selective"))
    assert whole["full"] < stage["full"] < shard["full"]  # a step's exchange takes as much, however it is split


def test_batch_size_auto_is_what_fits_the_named_card():
    sizes = [
        planned("102m", card, batch_size="auto", global_batch_size=512).config.run.batch_size
        for card in ("3060", "4090", "A100-80", "H200")
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_a_card_that_is_not_here_decides_what_can_be():
    assert planned("102m", "H200").plan.attention.name == "cudnn"
    ada = planned("102m", "4090").plan
    assert ada.attention.name == "flash" and ada.card.name == "4090" and "NOT MEASURED HERE" in ada.pace.why
    with pytest.raises(UsageError, match="A100-80 has no 8-bit matmuls"):
        planned("102m", "A100", precision="fp8")
    assert planned("102m", "H100", precision="fp8").plan.pace is not None
    with pytest.raises(UsageError, match="--card: card 'H300' is not known; known are"):
        planned("102m", "H300")


def test_several_cards_share_the_time_and_draw_the_same_energy():
    one, eight = (figures(planned("1b", asked={"ranks": n, "mfu": 0.5, "total_tokens": "20B"})) for n in (1, 8))
    # for_ranks makes a step of each rank's sequences, as torchrun does.
    assert eight["step"]["sequences"] == 8 * one["step"]["sequences"]
    assert eight["time"]["seconds"] == pytest.approx(one["time"]["seconds"] / 8, rel=1e-3)
    assert eight["energy"]["joules"] == pytest.approx(one["energy"]["joules"], rel=1e-3)
    assert one["time"]["seconds"] == pytest.approx(one["flops"]["total"] / (0.5 * 989e12))


def test_an_mfu_of_a_device_without_a_peak_is_refused(corpus, tmp_path):
    with pytest.raises(UsageError, match="--mfu 0.4: the peak of this device is not known"):
        forecast(config(corpus, tmp_path / "run"), PlanConfig(mfu=0.4))


def test_all_presets_can_be_planned_and_are_json():
    for path in sorted(CONFIGS.glob("*.toml")):
        if "sweep" not in path.name and path.stem != "demo":
            found = planned(path.stem)
            assert json.loads(json.dumps(figures(found)))["memory"]["fits"] is not bool(found.smaller_ways)


# --- suggestions ------------------------------------------------------------------------------------------------------


def options(found: Forecast) -> dict[str, advice.Suggestion]:
    return {one.option: one for one in found.suggestions}


def test_a_sensible_run_is_told_next_to_nothing():
    law = {"learning_rate": 2e-3, "global_batch_size": 128, "val_tokens": ("held.u16",)}
    assert not options(planned("102m", asked={"total_tokens": "2B"}, warmup_steps=300, checkpoint_every=500, **law))


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("--learning-rate", {"learning_rate": 1e-5}, "learns slowly"),
        ("--learning-rate", {"learning_rate": 0.5}, "diverges"),
        ("--warmup-steps", {"warmup_steps": 8000}, "% of the run passes below the peak rate"),
        ("--warmup-steps", {"warmup_steps": 10**6}, ": all of the run passes below the peak rate"),
        ("--warmup-steps", {"warmup_steps": 3}, "after 2 / (1 - beta2) = 40 steps"),
        ("--global-batch-size", {"batch_size": 1}, "in place of 1,024"),
        ("--global-batch-size", {"batch_size": 64, "accumulate": 64}, "updates"),
        ("--batch-size", {"batch_size": 2, "global_batch_size": 128}, "too few to fill a card"),
        ("--checkpoint-activations", {"checkpoint_activations": "full"}, "without running anything again"),
        ("--tie-embeddings", {"tie_embeddings": False}, "hold 39%"),
        ("--vocab-size", {"vocab_size": 65536, "d_model": 512, "n_layers": 4}, "are embedding"),
        ("--head-dim", {"n_layers": 32, "seq_len": 4096, "batch_size": 16}, "1.3 times as fast"),
        ("--head-dim", {"head_dim": 72, "n_heads": 12, "attention": "auto"}, None),
        ("--head-dim", {"head_dim": 60}, "no heads of 60"),
        ("--seq-len", {"seq_len": 1000}, "1024 in place of 1000"),
        ("--d-ff", {"d_ff": 1365}, "1344 in place of 1365"),
        ("--checkpoint-every", {"checkpoint_every": 1_000_000, "n_layers": 96}, "a crash costs"),
        ("--val-tokens", {}, "learnt by heart"),
    ],
)
def test_what_is_off_is_named_with_its_reason(option: str, given: dict, says: str | None):
    found = planned("102m", asked={"total_tokens": "2B"}, **given)
    if says is None:
        assert option not in options(found)
        return
    one = options(found)[option]
    assert says in f"{one.text}: {one.why}" and one.source


def test_rows_of_no_token_are_named(corpus, tmp_path):
    asked = config(corpus, tmp_path / "run")
    for rows, of_32 in ((1000, "29k"), (100, None), (0, None)):
        found = options(forecast(replace(asked, model=replace(asked.model, vocab_size=rows)), PlanConfig()))
        if of_32 is None:
            assert "--vocab-size" not in found
        else:
            one = found["--vocab-size"]
            assert one.text.startswith("96 in place of 1000") and f"embedding, {of_32} parameters" in one.why


def test_a_held_out_file_beside_the_tokens_is_named(tmp_path):
    corpus, held = write_corpus(tmp_path / "c.u16", 600), write_corpus(tmp_path / "c.val.u16", 100)
    found = forecast(config(corpus, tmp_path / "run"), PlanConfig())
    assert options(found)["--val-tokens"].text == f"{held}, with --val-every"


def test_a_model_that_sees_too_few_tokens_is_told_the_size_for_its_flops():
    one = options(planned("1b", asked={"total_tokens": "1B"}))["--d-model"]
    # sqrt(N D / 20) parameters, for 6 N D FLOPs.
    assert "about 230M parameters on 4.6B tokens" in one.text and "arXiv 2203.15556" in one.source


def test_the_laws_are_those_of_the_paper():
    # 1.07B parameters on 100B tokens: the optimum that Li et al. found by search lies within a factor of 1.5.
    assert advice.good_learning_rate(109e6, 1.024e9) == pytest.approx(1.94e-3, rel=0.01)
    assert advice.good_batch(1.024e9) == pytest.approx(80_900, rel=0.01)


def test_the_speed_of_heads_of_128_is_what_the_artifact_says():
    groups = json.loads((CONFIGS.parent / "docs" / "data" / "attention.json").read_text())["groups"]
    timed = [row for row in groups["times"]["records"] if row["op"] == "time"]
    timed = [row for row in timed if row["backend"] == "cudnn" and row["v"] == "strided"]
    at_64, at_128 = timed[0], timed[-1]
    assert at_64["forward_ms"] + at_64["backward_ms"] == pytest.approx(1.3 * at_128["both_ms"], rel=0.01)
