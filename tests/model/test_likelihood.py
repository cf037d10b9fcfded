"""Likelihoods of the ends of texts: those of the logits, whatever shares the batch."""

import pytest
import torch

from llmtrain.model import likelihood
from llmtrain.model.config import ModelConfig
from llmtrain.model.likelihood import Row, likelihoods
from llmtrain.model.transformer import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(ModelConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
                                    max_seq_len=70, init_std=0.2))  # fmt: skip
    model.init_weights(3)
    return model


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    random = torch.Generator().manual_seed(0)
    sizes = [(2, 1), (71, 70), (9, 3), (40, 1), (33, 32), (12, 11)]
    return [Row(torch.randint(0, 50, (n,), generator=random).tolist(), targets) for n, targets in sizes]


@torch.no_grad()
def by_hand(model: Transformer, row: Row) -> tuple[float, bool]:
    logits = model.logits(model(torch.tensor([row.ids[:-1]])))[0].double()[-row.n_targets :]
    targets = torch.tensor(row.ids[-row.n_targets :])
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats, bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("tokens_at_once, logits", [(1, 1 << 26), (100, 150), (4096, 50)])
def test_they_are_those_of_the_logits_whatever_the_batch(model, rows, tokens_at_once, logits, monkeypatch):
    monkeypatch.setattr(likelihood, "LOGITS", logits)
    best = model.logits(model(torch.tensor([rows[2].ids[:-1]])))[0].argmax(-1).tolist()
    greedy = Row([*rows[2].ids[:-1], best[-1]], 1)
    found = likelihoods(model, [*rows, greedy], tokens_at_once)
    wanted = [by_hand(model, row) for row in [*rows, greedy]]
    assert found.nats == pytest.approx([nats for nats, _ in wanted], rel=1e-5)
    assert found.greedy == [greedy for _, greedy in wanted] and found.greedy[-1]


def test_with_others_who_have_more_batches_the_model_runs_as_often_as_theirs_and_the_results_are_the_same(model, rows):
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    alone = likelihoods(model, rows, 1)
    needed = len(calls)
    assert likelihoods(model, rows, 1, turns=lambda batches: batches + 2) == alone
    assert likelihoods(model, [], 1, turns=lambda batches: batches + 1) == ([], [])
    handle.remove()
    assert len(calls) == needed + (needed + 2) + 1


def test_it_touches_nothing_and_stops_where_it_is_told_to(model, rows):
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    asked = []
    assert likelihoods(model, rows, 1, lambda: asked.append(1) or len(asked) < 3) is None
    assert len(asked) == 3
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="72 tokens is longer than the model's max_seq_len of 70"):
        likelihoods(model, [Row([1] * 73, 1)], 1)
