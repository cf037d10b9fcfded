"""Models that transformers wrote: taken over with the same logits, trained on, and given back with the same bits."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.cli.main import run as llmtrain
from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.inference import hf
from llmtrain.model.flops import parameter_counts
from llmtrain.storage.errors import ConfigMismatch
from llmtrain.storage.manifest import read_json
from llmtrain.training.checkpoint import folder_of, load_model
from tests.corpus.files import write_flat
from tests.inference.conftest import SHAPES
from tests.inference.runs import TEXT

transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
    max_position_embeddings=64, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    initializer_range=0.1, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2)
PEERS = {
    "llama": ("Llama", dict(intermediate_size=48, tie_word_embeddings=False)),
    "qwen3": ("Qwen3", dict(intermediate_size=48)),
    "mixtral": ("Mixtral", dict(intermediate_size=16, num_local_experts=4, **EXPERTS)),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(intermediate_size=48, moe_intermediate_size=16, num_experts=4, norm_topk_prob=True, mlp_only_layers=[0],
             **EXPERTS),
    ),
}  # fmt: skip


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = llmtrain([str(arg) for arg in args])
    return code, *capsys.readouterr()


def peer(kind: str, **changes: object) -> torch.nn.Module:
    """A model of theirs with weights that are drawn, norms among them."""
    name, fields = PEERS[kind]
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SMALL, **fields, **changes})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model.float().eval()


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(tokenizers.train([TEXT], 300))
    return path


@pytest.fixture()
def saved(tmp_path: Path, tokenizer_file: Path):
    """Saves a model as they do, with a tokenizer: its folder."""

    def save(model: torch.nn.Module, **options: object) -> Path:
        folder = tmp_path / "theirs"
        model.save_pretrained(folder, **options)
        shutil.copy(tokenizer_file, folder)
        return folder

    return save


@torch.no_grad()
@pytest.mark.parametrize("kind", PEERS)
def test_logits_are_those_of_transformers(kind, saved, tmp_path, capsys):
    theirs = peer(kind)
    code, text, said = command(capsys, "import", saved(theirs), "--run-dir", tmp_path / "run")
    assert (code, said) == (0, "") and text.startswith(f"{tmp_path}/run: ")
    ours, config, state = load_model(folder_of(tmp_path / "run", 0))
    assert parameter_counts(config).total == sum(p.numel() for p in theirs.parameters())
    assert (state["step"], state["imported"]["model_type"]) == (0, kind)
    ids = torch.randint(0, 320, (2, 48), generator=torch.Generator().manual_seed(2))
    wanted = theirs(ids).logits
    assert wanted.std() > 0.3, "logits too flat to tell anything"
    assert (ours.logits(ours(ids)) - wanted).abs().max().item() <= 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_several_files_in_bf16_are_the_same_weights(tied, saved, tmp_path, capsys):
    theirs = peer("qwen3", tie_word_embeddings=tied).bfloat16()
    folder = saved(theirs, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    assert command(capsys, "import", folder, "--run-dir", tmp_path / "run")[0] == 0
    ours, config, _ = load_model(folder_of(tmp_path / "run", 0))
    assert config.tie_embeddings is tied
    wanted = theirs.state_dict()
    for name, piece in hf.pieces(config).items():
        assert torch.equal(piece.of(dict(ours.named_parameters())), wanted[name].float()), name
    # And given back in the type that they came in.
    assert command(capsys, "export", tmp_path / "run", "--output", tmp_path / "back")[0] == 0
    back = load_file(tmp_path / "back/model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, wanted[name]) for name, tensor in back.items())
    assert "nothing was trained" in (tmp_path / "back/README.md").read_text()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_export_wrote_comes_back_to_the_bit(shape, runs, tmp_path, capsys):
    for of, to in ((runs[shape], "one"), (tmp_path / "run", "two")):
        if to == "two":
            assert command(capsys, "import", tmp_path / "one", "--run-dir", tmp_path / "run")[0] == 0
        assert command(capsys, "export", of, "--output", tmp_path / to, "--dtype", "fp32")[0] == 0
    assert (tmp_path / "two/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    one, two = (read_json(tmp_path / name / "config.json") for name in ("one", "two"))
    loads = {"router_aux_loss_coef"}  # of training, and nothing that the weights' meaning rests on
    assert {k: v for k, v in one.items() if k not in loads} == {k: v for k, v in two.items() if k not in loads}
    before, after = (load_model(folder_of(run, step)) for run, step in ((runs[shape], 8), (tmp_path / "run", 0)))
    for (name, parameter), other in zip(before[0].named_parameters(), after[0].parameters(), strict=True):
        assert torch.equal(parameter, other), name
    # Token files know their tokenizer by the hash of its file.
    tokenizers = [(run / "tokenizer.json").read_bytes() for run in (runs[shape], tmp_path / "one", tmp_path / "run")]
    assert tokenizers[0] == tokenizers[1] == tokenizers[2]


def test_training_goes_on_with_it_and_no_shape_has_to_be_said(saved, tmp_path, capsys):
    run = tmp_path / "run"
    assert command(capsys, "import", saved(peer("qwen3")), "--run-dir", run)[0] == 0
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text(TEXT)
    tokenize = ("tokenize-corpus", "--tokenizer", run / "tokenizer.json", "--input", tmp_path / "text")
    assert command(capsys, *tokenize, "--output", tmp_path / "c.u16", "--holdout", 0)[0] == 0
    held = command(capsys, "evaluate", "--run-dir", run, "--tokens", tmp_path / "c.u16", "--seq-len", 32, "--json")[1]
    train = ("train", "--init-from", run, "--tokens", tmp_path / "c.u16", "--val-tokens", f"v={tmp_path}/c.u16",
             "--seq-len", 32, "--total-steps", 2, "--precision", "fp32", "--device", "cpu",
             "--val-windows", 0)  # fmt: skip
    code, text, said = command(capsys, *train, "--run-dir", tmp_path / "more")
    assert (code, said) == (0, ""), said
    first = next(line for line in map(json.loads, (tmp_path / "more/metrics.jsonl").open()) if line["kind"] == "eval")
    assert first["step"] == 0 and first["val_loss"] == pytest.approx(json.loads(held)["val_loss"], rel=1e-5)
    config = load_model(folder_of(tmp_path / "more", 2))[1]
    assert (config.qk_norm, config.rope_theta, config.vocab_size, config.max_seq_len) == (True, 1e6, 320, 64)

    code, _, said = command(capsys, *train, "--run-dir", tmp_path / "other", "--d-ff", 64)
    assert code == 78 and "d_ff 48" in said
    for resume in ((), ("--resume",)):
        code, _, said = command(capsys, *train, "--run-dir", run, *resume)
        assert code == 78 and "holds an imported model" in said and said.count("\n") == 1
    code, _, said = command(capsys, "train", "--branch-from", f"{run}:0", *train[3:], "--run-dir", tmp_path / "other",
                            "--config", tmp_path / "more/config.toml")  # fmt: skip
    assert code in (2, 78) and said.count("\n") == 1
    other = write_flat(tmp_path / "other.u16", np.arange(1, 300), vocab_size=300)
    code, _, said = command(capsys, *train, "--run-dir", tmp_path / "other", "--tokens", other)
    assert code == 78 and "tokenizer" in said
    for name in ("inspect", "verify"):
        assert command(capsys, name, run)[0] == 0
    assert command(capsys, "generate", "--run-dir", run, "--prompt", "def ", "--max-new-tokens", 4)[0] == 0


def test_the_shape_of_qwen3_0_6b():
    """Its config.json: what is built of it has the parameters that its makers count, 0.6B, 0.44B without embeddings."""
    said = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    config = hf.model_config(said, "config.json")
    counts = parameter_counts(config)
    assert counts.total == 596_049_920
    assert counts.total - config.vocab_size * config.d_model == 440_467_456
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**said))
    assert sum(p.numel() for p in theirs.parameters()) == counts.total
    assert {n: p.shape for n, p in theirs.named_parameters()}.keys() == hf.pieces(config).keys()
    assert hf.config_json(config, "bf16", 0)["rope_theta"] == 1e6


@pytest.mark.parametrize(
    "words, kind, change",
    [
        ("rope_scaling has rope_type 'yarn'", "qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("rope_scaling has type 'linear'", "llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("rope_parameters has", "llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}),
        ("attention_bias is True", "qwen3", {"attention_bias": True}),
        ("mlp_bias is True", "llama", {"mlp_bias": True}),
        ("model_type is 'gpt2'", "llama", {"model_type": "gpt2"}),
        ("hidden_act is 'gelu'", "llama", {"hidden_act": "gelu"}),
        ("use_sliding_window is True", "qwen3", {"use_sliding_window": True}),
        ("layer_types has full_attention, sliding_attention", "qwen3",
         {"layer_types": ["full_attention", "sliding_attention"]}),
        ("layer_types has 5", "qwen3", {"layer_types": 5}),
        ("layer_types has None, [1]", "qwen3", {"layer_types": [[1], None]}),
        ("model_type is []", "llama", {"model_type": []}),
        ("vocab_size is 0, not above 0", "llama", {"vocab_size": 0}),
        ("max_position_embeddings is 0, not above 0", "llama", {"max_position_embeddings": 0}),
        ("d_model must be at most", "llama", {"hidden_size": 10**30}),
        ("int too large", "llama", {"rms_norm_eps": 10**400}),
        ("sliding_window is 4096", "mixtral", {"sliding_window": 4096}),
        ("norm_topk_prob is False", "qwen3_moe", {"norm_topk_prob": False}),
        ("mlp_only_layers is [1]", "qwen3_moe", {"mlp_only_layers": [1]}),
        ("quantization_config is", "llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("hidden_size is None", "llama", {"hidden_size": None}),
        ("hidden_size is 32.5", "llama", {"hidden_size": 32.5}),
        ("rope_theta is 'big'", "llama", {"rope_theta": "big", "rope_parameters": None}),
        ("n_heads 4 is no multiple of n_kv_heads 3", "llama", {"num_key_value_heads": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_our_model_cannot_be_is_refused_by_name(words, kind, change):
    said = peer(kind).config.to_dict() | change
    with pytest.raises(ConfigMismatch) as refused:
        hf.model_config(said, "config.json")
    assert words in str(refused.value) and "\n" not in str(refused.value)


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 10)


def pickled(folder: Path) -> None:
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")


def with_bias(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, folder / "model.safetensors")


def changed(name: str, value: torch.Tensor | None):
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors") | ({} if value is None else {name: value})
        save_file({k: v for k, v in tensors.items() if value is not None or k != name}, folder / "model.safetensors")

    return change


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "code, words, damage",
    [
        (66, "no such folder: download", lambda folder: shutil.rmtree(folder)),
        (66, "config.json", lambda folder: (folder / "config.json").unlink()),
        (65, "config.json: is no JSON", lambda folder: (folder / "config.json").write_text("{")),
        (66, "tokenizer.json", lambda folder: (folder / "tokenizer.json").unlink()),
        (66, "holds no model.safetensors", lambda folder: (folder / "model.safetensors").unlink()),
        (65, "pytorch_model.bin: is a pickle, which can run code", pickled),
        (65, "model.safetensors", lambda folder: cut(folder / "model.safetensors")),
        (78, "q_proj.bias, a bias", with_bias),
        (65, "lack model.norm.weight, which", changed(NORM, None)),
        (65, "has shape (31,), (32,) is what", changed(NORM, torch.ones(31))),
        (65, "holds a number that is not finite", changed(NORM, torch.full((32,), float("nan")))),
        (78, "is I64, known are F32", changed(NORM, torch.ones(32, dtype=torch.int64))),
        (78, "lm_head.weight is not the embedding", changed("lm_head.weight", torch.ones(320, 32))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_or_damaged_is_one_line_and_leaves_nothing(code, words, damage, saved, tmp_path, capsys):
    folder = saved(peer("qwen3"))
    damage(folder)
    got, text, said = command(capsys, "import", folder, "--run-dir", tmp_path / "run")
    assert (got, text) == (code, "") and said.count("\n") == 1 and words in said, said
    assert set(os.listdir(tmp_path)) <= {"theirs"}


def test_a_missing_part_and_names_outside_the_folder_are_refused(saved, tmp_path, capsys):
    folder = saved(peer("llama"), max_shard_size="20KB")
    index = read_json(folder / "model.safetensors.index.json")
    part = sorted(folder.glob("model-*.safetensors"))[1]
    kept = part.read_bytes()
    part.unlink()
    code, _, said = command(capsys, "import", folder, "--run-dir", tmp_path / "run")
    assert code == 66 and part.name in said
    part.write_bytes(kept)
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code, _, said = command(capsys, "import", folder, "--run-dir", tmp_path / "run")
    assert code == 65 and "weight_map" in said


def test_a_tied_head_that_is_written_too_and_old_buffers_are_taken(saved, tmp_path, capsys):
    folder = saved(peer("qwen3"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, folder / "model.safetensors")
    assert command(capsys, "import", folder, "--run-dir", tmp_path / "run")[0] == 0


def test_a_tokenizer_beyond_the_vocabulary_and_a_place_that_is_taken_are_refused(saved, tmp_path, capsys):
    folder = saved(peer("llama"))
    (tmp_path / "large.json").write_bytes(tokenizers.train([TEXT], 400))
    args = ("import", folder, "--run-dir", tmp_path / "run")
    code, _, said = command(capsys, *args, "--tokenizer", tmp_path / "large.json")
    assert code == 78 and "large.json: has 400 tokens, the model's vocab_size is 320" in said
    (tmp_path / "run").mkdir()
    code, _, said = command(capsys, *args)
    assert code == 73 and "is there already" in said


def test_a_gate_on_shared_experts_is_refused(runs, tmp_path, capsys):
    assert command(capsys, "export", runs["qwen2_moe"], "--output", tmp_path / "theirs", "--dtype", "fp32")[0] == 0
    name = "model.layers.1.mlp.shared_expert_gate.weight"
    changed(name, torch.ones(1, SHAPES["qwen2_moe"].d_model))(tmp_path / "theirs")
    code, _, said = command(capsys, "import", tmp_path / "theirs", "--run-dir", tmp_path / "run")
    assert code == 78 and "has no gate" in said


def test_every_field_of_a_model_that_shapes_rest_on_comes_through():
    for shape in SHAPES.values():
        config = dataclasses.replace(shape, vocab_size=300)
        back = hf.model_config(hf.config_json(config, "fp32", 0), "config.json")
        for field in dataclasses.fields(config):
            same = getattr(back, field.name) == getattr(config, field.name)
            unused = field.name == "d_ff" and config.n_routed == config.n_layers
            assert same or unused or field.name in hf.OF_TRAINING, field.name
