"""Sliding windows: what layers see, what it costs, what generation keeps of it."""

from dataclasses import replace

import pytest
import torch

from llmtrain.inference.config import SamplingConfig
from llmtrain.inference.generate import stream
from llmtrain.kernels import choice
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import attention_flops, flops_per_token, layer_pairs
from llmtrain.model.memory import training_memory
from llmtrain.model.transformer import KVCache, Transformer

CONFIG = ModelConfig(
    vocab_size=50, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=48, max_seq_len=64, window=5,
    global_every=3,
)  # fmt: skip


def model(config: ModelConfig) -> Transformer:
    made = Transformer(config)
    made.init_weights(0)
    return made


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3))


def test_every_nth_layer_sees_everything():
    assert CONFIG.windows == (5, 5, None, 5)
    assert replace(CONFIG, global_every=0).windows == (5,) * 4
    assert ModelConfig(n_layers=3).windows == (None,) * 3


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"window": 0}, "give window too"), ({"global_every": 1}, "leaves no layer"), ({"window": -1}, "window must be")],
)
def test_what_makes_no_sense_is_refused(changed, why):
    with pytest.raises(ValueError, match=why):
        replace(CONFIG, **changed)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_token_is_reached_from_as_far_as_the_windows_of_all_layers_allow(implementation):
    """Through windows alone of 5, two layers reach 8 tokens back and not 9."""
    net = model(replace(CONFIG, n_layers=2, global_every=0))
    before = ids(1, 20)
    after = before.clone()
    after[0, 3] = (after[0, 3] + 1) % 50
    with choice.forced(implementation), torch.no_grad():
        changed = (net(before) != net(after)).any(-1)[0]
    assert changed[3] and changed[11]
    assert not changed[:3].any() and not changed[12:].any()


def test_a_window_that_hides_nothing_is_none():
    x = ids(2, 12)
    with torch.no_grad():
        wide = model(replace(CONFIG, window=12))(x)
        assert torch.equal(wide, model(replace(CONFIG, window=0, global_every=0))(x))
        assert not torch.equal(wide, model(CONFIG)(x))


def test_documents_and_windows_hide_together():
    """A document behind another in a row is as it is by itself."""
    net = model(CONFIG)
    row = ids(1, 24)
    start = torch.zeros(1, 24, dtype=torch.int32)
    start[:, 9:] = 9
    with torch.no_grad():
        together = net(row, positions=torch.cat([torch.arange(9), torch.arange(15)]), doc_start=start)
        torch.testing.assert_close(together[:, 9:], net(row[:, 9:]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuts", [(30,), (1,) * 30, (7, 1, 1, 12, 9), (3, 27)])
def test_a_cache_gives_what_the_whole_row_gives_and_holds_a_window(cuts):
    net = model(CONFIG)
    row = ids(2, 30)
    cache = KVCache(CONFIG, 2, 30, torch.float32, torch.device("cpu"))
    assert [held.shape[2] for held in cache.layers] == [4, 4, 30, 4]
    with torch.no_grad():
        whole = net(row)
        parts = [net(part, cache=cache) for part in row.split(list(cuts), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)


def test_prompts_of_unlike_lengths_are_generated_as_each_by_itself():
    net = model(CONFIG)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 4]]
    greedy = SamplingConfig(max_new_tokens=20, temperature=0.0)
    together = list(stream(net, prompts, greedy))
    for row, prompt in enumerate(prompts):
        assert [tokens[row] for tokens in together] == [tokens[0] for tokens in stream(net, [prompt], greedy)]


def test_flops_count_what_windows_let_attend():
    pairs = {None: 20 * 21 // 2, 5: 20 * 5 - 10}
    assert layer_pairs(CONFIG, 20) == (3 * pairs[5] + pairs[None]) / 4
    assert attention_flops(CONFIG, [20]) == 12 * 4 * 16 * (3 * pairs[5] + pairs[None])
    full = replace(CONFIG, window=0, global_every=0)
    less = 12 * 4 * 16 * 3 * (pairs[None] - pairs[5]) / 20
    assert flops_per_token(full, 20) - flops_per_token(CONFIG, 20) == pytest.approx(less)


def test_the_plan_of_memory_knows_of_windows():
    plain = training_memory(replace(CONFIG, window=0, global_every=0), 2, 32, attention="triton", document_mask=True)
    windowed = training_memory(CONFIG, 2, 32, attention="triton", document_mask=True)
    # The first key each query sees, int32, is the batch's own until a window moves it.
    assert windowed.activations["statistics"] - plain.activations["statistics"] == 3 * 4 * 64
