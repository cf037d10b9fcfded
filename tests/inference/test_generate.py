"""Generation: what the cache, the padding and the batch must not change, and what sampling must not choose."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.inference.config import PromptConfig, SamplingConfig
from llmtrain.inference.generate import choose, generate, stream
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer

GREEDY = SamplingConfig(max_new_tokens=12, temperature=0.0)
SAMPLED = SamplingConfig(max_new_tokens=12, temperature=1.5, top_k=0)
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9], [30, 2, 17, 4]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    """In FP64, so that another order of additions cannot turn a choice."""
    config = ModelConfig(vocab_size=41, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
                         max_seq_len=24, init_std=0.2)  # fmt: skip
    model = Transformer(config)
    model.init_weights(3)
    model.compute_dtype = torch.float64
    return model.double()


@torch.no_grad()
def likeliest_without_a_cache(model: Transformer, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model.logits(model(torch.tensor([ids])))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_cached_decoding_equals_the_full_forward(model, prompt):
    assert generate(model, [prompt], GREEDY) == [likeliest_without_a_cache(model, prompt, 12)]


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_of_a_padded_batch_is_what_it_is_alone(model, config):
    together = generate(model, PROMPTS, config)
    # Row r of a batch draws from a stream of its own, which a row r of another batch shares.
    for r, prompt in enumerate(PROMPTS):
        others = [[7, 8, 9]] * r
        assert generate(model, [*others, prompt], config)[r] == together[r]
    if config is GREEDY:
        assert together == [likeliest_without_a_cache(model, prompt, 12) for prompt in PROMPTS]
    assert generate(model, [[5]] * 3, SAMPLED)[1] != generate(model, [[5]] * 3, SAMPLED)[2]


def test_every_token_sees_one_at_least_padding_too(model, monkeypatch):
    """A softmax over nothing is NaN in some backends, and a NaN in the cache survives every mask."""
    seen, forward = [], model.forward

    def watched(ids, *, doc_start, cache, **rest):
        columns = torch.arange(cache.length, cache.length + ids.shape[1])
        seen.append(bool((doc_start <= columns).all()))
        return forward(ids, doc_start=doc_start, cache=cache, **rest)

    monkeypatch.setattr(model, "forward", watched)
    generate(model, PROMPTS, GREEDY)
    assert len(seen) == 12 and all(seen)


def test_the_seed_decides_the_text_and_no_other_generator_is_touched(model):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one = generate(model, PROMPTS, SAMPLED)
    torch.rand(5)
    assert one == generate(model, PROMPTS, SAMPLED)
    other = SamplingConfig(max_new_tokens=12, temperature=1.5, top_k=0, seed=1)
    assert all(a != b for a, b in zip(one, generate(model, PROMPTS, other), strict=True))
    torch.set_rng_state(before[0])
    generate(model, PROMPTS, SAMPLED)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


def test_a_shorter_text_begins_a_longer_one(model):
    short = SamplingConfig(max_new_tokens=5, temperature=1.5, top_k=0)
    assert [row[:5] for row in generate(model, [[5], [6, 7]], SAMPLED)] == generate(model, [[5], [6, 7]], short)


def test_a_row_ends_at_its_eos_and_the_others_go_on(model):
    free = generate(model, PROMPTS, GREEDY)
    eos = free[1][4]
    stopped = generate(model, PROMPTS, GREEDY, eos)
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(eos)] if eos in before else before)
    assert len(stopped[1]) <= 4
    assert any(len(row) == 12 for row in stopped), "every row ended, so nothing shows that the others go on"
    steps = list(stream(model, PROMPTS, GREEDY, eos))
    assert len(steps) == 12 and steps[-1][1] is None


def test_the_stream_ends_when_the_last_row_does(model):
    token = likeliest_without_a_cache(model, [5], 1)[0]
    assert list(stream(model, [[5]], GREEDY, token)) == []


@pytest.mark.parametrize("length", [1, 20, 24])
def test_a_text_ends_where_the_model_s_context_does(model, length):
    prompt = [1 + i % 40 for i in range(length)]
    config = SamplingConfig(max_new_tokens=100, temperature=0.0)
    # The last token is only given out, never read.
    assert len(generate(model, [prompt], config)[0]) == 24 - length + 1


def test_prompts_that_cannot_be_continued_are_refused(model):
    with pytest.raises(ValueError, match="25 tokens.* 24"):
        generate(model, [[1], [1] * 25], GREEDY)
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one token"):
            generate(model, prompts, GREEDY)


def test_bf16_decodes_with_a_bf16_cache():
    config = ModelConfig(vocab_size=41, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
                         max_seq_len=24)  # fmt: skip
    model = Transformer(config)
    model.init_weights(3)
    model.compute_dtype = torch.bfloat16
    for parameter in model.parameters():
        parameter.operand_cache = parameter.detach().bfloat16()  # type: ignore[attr-defined]
    assert [len(row) for row in generate(model, PROMPTS, SAMPLED)] == [12] * 4


# --- the choice of one token ------------------------------------------------------------------------------------------

LOGITS = st.lists(st.floats(-30, 30), min_size=2, max_size=20)
UNIFORM = st.floats(0, 1, exclude_max=True, width=32)


def chosen(logits: list[float], config: SamplingConfig, uniform: float) -> int:
    row = torch.tensor([logits], dtype=torch.float32)
    return int(choose(row, config, torch.tensor([uniform], dtype=torch.float32)))


@given(
    logits=LOGITS, uniform=UNIFORM, top_k=st.integers(1, 25), top_p=st.floats(0.01, 1), temperature=st.floats(0.1, 9)
)
@settings(deadline=None)
def test_what_is_chosen_is_among_the_top_k_and_in_the_nucleus(logits, uniform, top_k, top_p, temperature):
    token = chosen(logits, SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p), uniform)
    wide = np.asarray(logits, np.float32).astype(np.float64)
    assert (wide > wide[token]).sum() < top_k
    kept = np.sort(wide)[::-1][:top_k]
    weights = np.exp((kept - kept[0]) / temperature)
    likelier = weights[kept > wide[token]].sum() / weights.sum()
    # Whatever is likelier than the chosen one does not yet reach top_p by itself.
    assert likelier < top_p + 1e-9
    assert np.exp((wide[token] - kept[0]) / temperature) > 0


@given(logits=LOGITS, uniform=UNIFORM)
@settings(deadline=None)
def test_temperature_zero_one_candidate_and_a_tiny_nucleus_take_the_likeliest(logits, uniform):
    likeliest = max(np.asarray(logits, np.float32))
    for config in (
        SamplingConfig(temperature=0.0),
        SamplingConfig(top_k=1),
        SamplingConfig(top_k=0, top_p=1e-9),
        SamplingConfig(temperature=1e-300, top_k=0),
    ):
        assert np.float32(logits[chosen(logits, config, uniform)]) == likeliest


@pytest.mark.parametrize("top_k", [0, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_each_token_is_chosen_as_often_as_its_probability_says(top_k, top_p):
    """Over evenly spread uniform numbers the counts are exact but for one at either border."""
    n = 4000
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, -4.0, 1.9, 0.0])
    config = SamplingConfig(temperature=0.9, top_k=top_k, top_p=top_p)
    weights = torch.exp(logits.double() / 0.9)
    order = weights.argsort(descending=True)
    kept = order[: top_k or None]
    shares = weights[kept] / weights[kept].sum()
    within = int(((shares.cumsum(0) - shares) < top_p).sum())
    want = torch.zeros(7, dtype=torch.float64)
    want[kept[:within]] = shares[:within] / shares[:within].sum()
    uniform = (torch.arange(n) + 0.5) / n
    counts = torch.bincount(choose(logits.expand(n, -1), config, uniform), minlength=7)
    assert (counts - want * n).abs().max() <= 1.01
    assert (counts[want == 0] == 0).all()


def test_an_impossible_token_is_never_chosen_not_even_by_zero():
    logits = [float("-inf"), 1.0, float("-inf")]
    for uniform in (0.0, 0.5, 1 - 2**-24):
        assert chosen(logits, SamplingConfig(temperature=1.0, top_k=0), uniform) == 1


@pytest.mark.parametrize(
    "fields",
    [{"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.1}, {"seed": -1}],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name_and_value(fields):
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=name) as refused:
        SamplingConfig(**fields)
    assert str(value) in str(refused.value)


def test_a_prompt_comes_from_one_place():
    with pytest.raises(ValueError, match="prompt_file"):
        PromptConfig(prompt=("a",), prompt_file="b")  # type: ignore[arg-type]
