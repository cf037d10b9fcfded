"""Exported models are loaded by those they are for, and give the logits and the text that they give here."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmtrain.cli.main import run as llmtrain
from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.inference import hf
from llmtrain.inference.config import SamplingConfig
from llmtrain.inference.export import export
from llmtrain.inference.generate import generate
from llmtrain.inference.model_card import Card
from llmtrain.model.config import ModelConfig
from llmtrain.storage import atomic
from llmtrain.storage.errors import ConfigMismatch
from llmtrain.training.checkpoint import folder_of, load_model
from tests.inference.conftest import SHAPES

transformers = pytest.importorskip("transformers")

PROMPT = "def insort_right(a, x"


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = llmtrain([str(arg) for arg in args])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module", params=SHAPES)
def exported(request, runs, tmp_path_factory) -> tuple[Path, Path]:
    """(run directory, exported folder) of each shape."""
    output = tmp_path_factory.mktemp("export") / "deep" / "small-model"
    assert llmtrain(["export", str(runs[request.param]), "--output", str(output)]) == 0
    return runs[request.param], output


@torch.no_grad()
def test_transformers_gives_the_same_logits_and_the_same_text(exported):
    run_dir, folder = exported
    ours, config, _ = load_model(folder_of(run_dir, 8))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    assert theirs.dtype == torch.float32 and len(tokenizer) <= config.vocab_size
    assert theirs.config.model_type == run_dir.name.split(",")[0].replace("untied", "llama")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    wanted = ours.logits(ours(ids))
    assert wanted.std() > 0.1, "logits too flat to tell anything"
    assert (theirs(ids).logits - wanted).abs().max().item() <= 1e-5
    eos = tokenizer.eos_token_id
    more = generate(ours, ids.tolist(), SamplingConfig(max_new_tokens=24, temperature=0), eos)[0]
    text = theirs.generate(ids, do_sample=False, max_new_tokens=24, temperature=None, top_k=None)[0]
    assert [i for i in text.tolist() if i != eos] == ids[0].tolist() + more
    assert tokenizer.bos_token_id == theirs.generation_config.bos_token_id == eos == 0
    assert tokenizer.decode(ids[0]) == PROMPT


def test_gguf_is_the_same_model_to_a_reader_of_it(exported, tmp_path, capsys):
    pytest.importorskip("gguf")
    run_dir, _ = exported
    code, _, said = command(capsys, "export", run_dir, "--output", tmp_path / "small", "--format", "gguf")
    if SHAPES[run_dir.name].moe:
        assert code == 78 and "experts" in said and not (tmp_path / "small").exists()
        return
    assert (code, said) == (0, "")
    model, _, _ = load_model(folder_of(run_dir, 8))
    at = {"pretrained_model_name_or_path": tmp_path / "small", "gguf_file": "small.gguf"}
    config = transformers.AutoConfig.from_pretrained(**at)
    config.head_dim = model.config.head_dim  # the one key that transformers does not read of a Qwen3 in a GGUF file
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**at, config=config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**at)
    ids = transformers.AutoTokenizer.from_pretrained(exported[1])(PROMPT, return_tensors="pt").input_ids
    assert tokenizer(PROMPT).input_ids == ids[0].tolist()
    with torch.no_grad():
        wanted = model.logits(model(ids))
        assert (theirs(ids).logits - wanted).abs().max().item() <= 1e-5


def test_a_folder_named_as_its_file_has_the_name_once(runs, tmp_path, capsys):
    pytest.importorskip("gguf")
    code, out, _ = command(capsys, "export", runs["qwen3"], "--output", tmp_path / "m.gguf", "--format", "gguf")
    assert code == 0 and (tmp_path / "m.gguf/m.gguf").is_file() and f"{tmp_path}/m.gguf/m.gguf: " in out
    assert "llama-cli -m m.gguf " in (tmp_path / "m.gguf/README.md").read_text()


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_bf16_weights_are_the_masters_rounded(runs, tmp_path, capsys, form):
    args = ("export", runs["qwen3"], "--output", tmp_path / "half", "--dtype", "bf16", "--format", form)
    if form == "gguf":
        gguf = pytest.importorskip("gguf")
    assert command(capsys, *args)[0] == 0
    model, _, _ = load_model(folder_of(runs["qwen3"], 8))
    want = model.layers["1"].attention.out.weight.detach().bfloat16()
    if form == "hf":
        from safetensors.torch import load_file

        found = load_file(tmp_path / "half/model.safetensors")
        assert torch.equal(found["model.layers.1.self_attn.o_proj.weight"], want)
    else:
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "half/half.gguf").tensors}
        got = torch.from_numpy(found["blk.1.attn_output.weight"].data.copy()).view(torch.bfloat16).view(want.shape)
        assert torch.equal(got, want)


def test_the_card_says_data_recipe_curves_and_evaluation_with_its_artifact(exported):
    run_dir, folder = exported
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    state = json.loads((folder_of(run_dir, 8) / "state.json").read_text())
    for words in ("| text |", state["corpus"][0]["sha256"][:16], "learning_rate | 0.01 |", "curves.svg", "| held | 8"):
        assert words in text, words
    tied = "yes" if state["config"]["model"]["tie_embeddings"] else "no"
    assert f"| tied head | {tied} |" in text and "attention crosses documents." in text
    assert state["config"]["optimizer"]["optimizer"] == "adamw" and "| muon_lr |" not in text
    evals = json.loads((folder / "evaluation.json").read_text())
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert evals == [line for line in lines if line["kind"] == "eval"] and len(evals) == 2
    assert (folder / "curves.svg").read_text().count("<polyline") == 2


def test_a_checkpoint_can_be_exported_and_one_without_a_tokenizer_too(runs, tmp_path, capsys):
    lone = tmp_path / "lone" / "checkpoints" / "step-00000008"
    shutil.copytree(folder_of(runs["llama"], 8), lone)
    code, _, said = command(capsys, "export", lone, "--output", tmp_path / "a")
    assert code == 0 and "--tokenizer" in said
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "a")) == files
    given = ("--tokenizer", runs["llama"] / "tokenizer.json")
    assert command(capsys, "export", lone, "--output", tmp_path / "b", *given)[0] == 0
    assert (tmp_path / "b" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "code, words, args",
    [
        (73, "is there already", ["{run}", "--output", "{tmp}"]),
        (66, "nowhere", ["{tmp}/nowhere", "--output", "{tmp}/x"]),
        (2, "--output", ["{run}"]),
        (2, "tokenizer", ["{bare}", "--output", "{tmp}/x", "--format", "gguf"]),
    ],
)
def test_mistakes_are_one_line(runs, tmp_path, capsys, code, words, args):
    bare = tmp_path / "bare"
    (bare / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder_of(runs["llama"], 8), bare / "checkpoints/step-00000008")
    got, text, said = command(capsys, "export", *(a.format(run=runs["llama"], tmp=tmp_path, bare=bare) for a in args))
    assert (got, text) == (code, "") and said.count("\n") == 1 and words in said
    assert os.listdir(tmp_path) == ["bare"]


def test_a_setting_without_a_word_for_it_is_refused_by_name(monkeypatch):
    hf.config_json(replace(SHAPES["llama"], vocab_size=300, z_loss=1e-4), "fp32", 0)
    with pytest.raises(ConfigMismatch, match="n_shared_experts 1 and qk_norm"):
        hf.config_json(ModelConfig(vocab_size=300, qk_norm=True, moe=True), "fp32", 0)
    monkeypatch.setattr(hf, "SAID", hf.SAID - {"qk_norm"})  # as a field of a later version
    with pytest.raises(ConfigMismatch, match="qk_norm True"):
        hf.config_json(ModelConfig(vocab_size=300, qk_norm=True), "fp32", 0)


def test_a_killed_export_leaves_no_folder_and_the_next_one_clears_up(runs, tmp_path, monkeypatch):
    """Killed at the rename, the last call before the folder has its name."""
    args = ["export", str(runs["llama"]), "--output", str(tmp_path / "out")]
    if (child := os.fork()) == 0:
        monkeypatch.setattr(atomic, "publish_folder", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        llmtrain(args)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".out.") and left.endswith(".partial")
    assert llmtrain(args) == 0
    assert os.listdir(tmp_path) == ["out"]


def test_a_run_with_skipped_steps_and_lines_of_others_is_exported(runs, tmp_path, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(runs["llama"], run_dir)
    with open(run_dir / "metrics.jsonl", "a") as file:
        at = {"step": 4, "tokens": 512}
        for line in (
            {"kind": "train", **at, "lm_loss": None}, {"kind": "train", "step": 4}, {"step": True},
            {"kind": "eval", **at, "source": ["x"], "val_loss": 10**400}, {"kind": "eval", **at, "source": "\ud800"},
        ):  # fmt: skip
            file.write(json.dumps(line) + "\n")
    output = tmp_path / "\udcff"  # a name that is not UTF-8
    sys.stdout.reconfigure(errors="backslashreplace")  # as the console script does
    assert command(capsys, "export", run_dir, "--output", output)[0] == 0
    assert (output / "curves.svg").read_text().count("<polyline") == 2
    assert "\\ud800" in (output / "README.md").read_text()


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_a_weight_beyond_fp16_is_refused_and_not_made_infinite(form, runs, tmp_path):
    model, config, state = load_model(folder_of(runs["llama"], 8))
    with torch.no_grad():
        model.norm.weight[3] = 7e4
    card = Card.of(state, 1, "fp16", tmp_path / "none")
    known = tokenizers.load(runs["llama"] / "tokenizer.json")
    with pytest.raises(ConfigMismatch, match="--dtype fp16: model.norm.weight has a number beyond 65,504"):
        export(model, known, tmp_path / "x", form, "fp16", card)
    assert not (tmp_path / "x").exists()
