"""The sums of an evaluation, and what is divided out of them."""

import math

import pytest
import torch

from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.config import ModelConfig
from llmtrain.model.evaluation import EvaluationSums, evaluate
from llmtrain.model.transformer import Transformer


def test_sums_add_up_over_batches_and_leave_ignored_targets_out():
    config = ModelConfig(vocab_size=10, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16,
                         max_seq_len=8)  # fmt: skip
    model = Transformer(config)
    model.init_weights(0)
    ids = torch.arange(12).reshape(2, 6) % 10
    targets = (ids + 1) % 10
    targets[0, 2:] = IGNORED
    table = torch.arange(1, 11)  # id 0 too, which an ignored target must not be taken for
    sums = evaluate(model, [(ids[:1], targets[:1], None), (ids[1:], targets[1:], None)], table)
    with torch.no_grad():
        logits = model.logits(model(ids)).double()
    kept = targets != IGNORED
    nats = torch.nn.functional.cross_entropy(logits[kept], targets[kept], reduction="sum").item()
    assert (sums.targets, sums.bytes) == (8, int((targets[kept] + 1).sum()))
    assert sums.nats == pytest.approx(nats, rel=1e-6)
    assert evaluate(model, [(ids, targets, None)]).bytes == 0


def test_figures_are_means_of_the_sums():
    sums = EvaluationSums(nats=8 * math.log(2), targets=4, bytes=2)
    assert sums.loss == pytest.approx(2 * math.log(2)) and sums.ppl == pytest.approx(4)
    assert sums.bits_per_byte == pytest.approx(4)
    assert EvaluationSums(nats=1.0, targets=1, bytes=0).bits_per_byte is None
    assert math.isfinite(EvaluationSums(nats=1e6, targets=1, bytes=0).ppl)
