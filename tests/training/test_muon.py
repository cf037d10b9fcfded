import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.config import ModelConfig
from llmtrain.model.matrices import hidden_shapes
from llmtrain.training import muon
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters
from llmtrain.training.muon import Muon, Stack, batches, stacks
from llmtrain.training.step import TrainStep

MODEL = ModelConfig(
    vocab_size=64, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=32,
    tie_embeddings=False,
)  # fmt: skip
B, T = 4, 16


def build(precision: str = "fp32", model: ModelConfig = MODEL, **options) -> TrainStep:
    config = OptimizerConfig(**{"optimizer": "muon", "learning_rate": 1e-3, "weight_decay": 0.1, **options})
    return TrainStep.build(model, config, batch_size=B, seq_len=T, precision=precision)


def step(train: TrainStep, seed: int = 0, lr: float = 1e-3) -> None:
    g = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, 64, (2, B, T), generator=g)
    train.micro_step(ids, targets, first=True)
    train.optimizer_step(lr)


def parts(name: str, matrix: Tensor) -> list[Tensor]:
    """As they are multiplied: q, k and v; gate and up."""
    if name.endswith("qkv.weight"):
        return list(matrix.split([32, 16, 16]))
    return list(matrix.split(48)) if name.endswith("gate_up.weight") else [matrix]


def polar(x: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


def hidden(train: TrainStep) -> list[str]:
    return [n for n in train.flat.spans if n.startswith("layers.") and train.flat.spans[n].shape.numel() > 32]


def test_every_matrix_moves_by_its_own_rate_in_all_its_directions_and_the_rest_as_by_adamw():
    train, plain = build("fp64"), build("fp64", optimizer="adamw")
    before = {name: p.detach().clone() for name, p in train.flat.parameters.items()}
    step(train)
    step(plain)
    names = hidden(train)
    assert len(names) == 3 * 4
    for name, parameter in train.flat.parameters.items():
        if name not in names:
            assert torch.equal(parameter, plain.flat.parameters[name]), name
            continue
        moved = before[name] * (1 - 0.02 * 0.1) - parameter.detach()
        for part, (rows, columns) in ((p, p.shape) for p in parts(name, moved)):
            values = torch.linalg.svdvals(part) / (0.02 * math.sqrt(max(1, rows / columns)))
            large = values[: max(1, len(values) // 2)]  # a gradient of 64 tokens has few directions
            assert 0.8 < large.min() and values.max() < 1.14, name
            assert torch.sum(part * polar(part)) > 0


def test_momentum_is_nesterovs(monkeypatch):
    train = build("fp64", weight_decay=0.0, grad_clip=0.0)
    seen = []
    monkeypatch.setattr(muon, "orthogonalise", lambda x: seen.append(x.clone()) or torch.zeros_like(x))
    name = "layers.1.attention.out.weight"  # (32, 32)
    gradients = []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        ids, targets = torch.randint(0, 64, (2, B, T), generator=g)
        train.micro_step(ids, targets, first=True)
        gradients.append(train.flat.view(train.flat.grad, name).clone() / (B * T))
        train.optimizer_step(1e-3)
    momentum = torch.zeros(32, 32, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
    expected = 0.05 * gradients[-1] + 0.95 * momentum
    last = [x for x in seen if x.shape[1:] == (32, 32)][-1]
    assert any(torch.allclose(x, expected, rtol=1e-12) for x in last)


def test_the_rate_of_the_matrices_follows_the_schedule():
    whole, half = build("fp64", weight_decay=0.0), build("fp64", weight_decay=0.0)
    name = "layers.0.feed_forward.down.weight"
    before = whole.flat.parameters[name].detach().clone()
    step(whole, lr=1e-3)
    step(half, lr=0.5e-3)
    assert torch.allclose(
        2 * (half.flat.parameters[name] - before), whole.flat.parameters[name] - before, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_moves_nothing(precision: str):
    train = build(precision)
    step(train)
    state = [s.buffer.clone() for s in train.optimizer.large.values()]
    ids = torch.randint(0, 64, (B, T))
    train.micro_step(ids, torch.full_like(ids, IGNORED), first=True)  # no target: the mean is 0 / 0
    for name in ("layers.1.attention.out.weight", "norm.weight"):
        train.flat.view(train.flat.grad, name).fill_(math.nan)
    train.optimizer_step(1e-3)
    assert train.metrics()["skipped"] == 1
    for stretch, before in zip(train.optimizer.large.values(), state, strict=True):
        assert torch.equal(stretch.buffer, before)
    step(train, seed=1)
    assert torch.isfinite(train.flat.master).all() and not torch.equal(train.flat.master, state[0])


def test_narrow_copies_follow_the_masters():
    train = build("bf16")
    step(train)
    assert torch.equal(train.flat.narrow, train.flat.master.bfloat16())


def test_stacks_hold_every_hidden_matrix_once_and_few_stacks_do():
    train = build()
    found = stacks(train.flat.spans, train.flat.n_hidden, MODEL)
    assert len(found) == 7  # q, k, v, out, gate, up and down, of all layers at once
    assert Counter(s.sides for s in found for _ in range(s.count)) == hidden_shapes(MODEL)
    marks = torch.zeros_like(train.flat.master)
    for stack in found:
        stack.of(marks).add_(1)
    for name in train.flat.spans:
        assert (train.flat.view(marks, name) == (1 if name in hidden(train) else 0)).all()
    assert train.flat.n_hidden < train.flat.n_decayed < len(marks)
    q = next(s for s in found if s.begin == train.flat.spans["layers.0.attention.qkv.weight"].begin)
    layer_1 = train.flat.parameters["layers.1.attention.qkv.weight"][:32]
    assert torch.equal(q.of(train.flat.master)[1], layer_1)


def test_batches_are_cut_to_their_size_and_give_the_same_update(monkeypatch):
    whole = build()
    step(whole)
    monkeypatch.setattr(muon, "batch_size", lambda *sides: 2)
    cut = build()
    assert all(sum(s.count for s in batch) <= 2 for batch in cut.optimizer.batches)
    assert sum(s.count for batch in cut.optimizer.batches for s in batch) == 7 * 3
    step(cut)
    assert torch.allclose(whole.flat.master, cut.flat.master, rtol=1e-4, atol=1e-6)


def test_experts_are_matrices_of_their_own():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(5, 12, 8))

    class Model(torch.nn.Module):
        config, cos, sin, compute_dtype = MODEL, None, None, None

        def __init__(self):
            super().__init__()
            layer = {"gate_up": Experts(), "router": torch.nn.Linear(8, 5, bias=False)}
            self.layers = torch.nn.ModuleDict({str(i): torch.nn.ModuleDict(layer) for i in range(1)})

    flat = FlatParameters(Model(), "cpu", torch.float32)
    assert flat.n_hidden < flat.n_decayed  # the router, whose rows are scores, is AdamW's
    found = stacks(flat.spans, flat.n_hidden, MODEL)
    assert found == [Stack(0, 96, 5, 6, 8), Stack(48, 96, 5, 6, 8)]
    flat.grad.normal_()
    optimizer = Muon(flat, OptimizerConfig(optimizer="muon"), MODEL)
    optimizer.lr.fill_(4e-4)
    optimizer.update(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))
    gate = flat.parameters["layers.0.gate_up.weight"][3, :6]
    values = torch.linalg.svdvals(gate.detach()) / 0.02
    assert 0.8 < values.min() and values.max() < 1.15


def test_two_moments_are_there_only_for_what_adamw_updates():
    train = build()
    sizes = {name: len(s.buffer) for name, s in train.optimizer.large.items()}
    n, h = len(train.flat.master), train.flat.n_hidden
    assert sizes == {"weight": n, "momentum": h, "exp_avg": n - h, "exp_avg_sq": n - h}


def test_list_of_batches_is_that_of_the_stacks():
    a, b = Stack(0, 10, 3, 2, 4), Stack(100, 10, 2, 4, 2)
    assert [[s.count for s in batch] for batch in batches([a, b])] == [[3, 2]]
