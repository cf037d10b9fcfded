"""The model: where it starts, what a stage is, what it refuses, and that sums do not care how a batch is cut."""

from dataclasses import replace

import pytest
import torch

from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import KVCache, Transformer

CONFIG = ModelConfig(
    vocab_size=61, d_model=48, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=72, max_seq_len=32, z_loss=1e-3
)
VARIANTS = {
    "tied": CONFIG,
    "untied": replace(CONFIG, tie_embeddings=False),
    "qk_norm": replace(CONFIG, qk_norm=True),
    "routed": replace(CONFIG, moe=True, n_experts=6, balance_loss=0.1),
}
BY_VARIANT = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def build(config: ModelConfig, dtype: torch.dtype = torch.float32, **stage) -> Transformer:
    model = Transformer(config, **stage)
    model.init_weights(seed=7)
    # Norms of exactly 1 would hide a mistake in their use.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model = model.to(dtype)
    model.compute_dtype = dtype
    return model


def batch(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and targets (rows, columns), a fifth of the targets ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CONFIG.vocab_size, (rows, columns + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    return ids[:, :-1], targets


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


# --- initial values ---------------------------------------------------------------------------------------------------


def test_initial_values_have_the_declared_spread():
    config = ModelConfig(vocab_size=512, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=256,
                         max_seq_len=8, tie_embeddings=False, qk_norm=True, init_std=0.05)  # fmt: skip
    model = Transformer(config)
    model.init_weights(seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter.data, torch.ones_like(parameter)), name
            continue
        into_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        std = 0.05 / 2.0 if into_residual else 0.05  # sqrt(2 * 2 layers) = 2
        spread = parameter.numel() ** -0.5
        assert parameter.std().item() == pytest.approx(std, rel=4 * spread), name
        assert abs(parameter.mean().item()) < 5 * std * spread, name


def test_initial_values_follow_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = Transformer(CONFIG), Transformer(CONFIG), Transformer(CONFIG)
    one.init_weights(1)
    same.init_weights(1)
    other.init_weights(2)
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)
    first, second = one.layers["0"], one.layers["1"]
    assert not torch.equal(first.attention.qkv.weight, second.attention.qkv.weight)


# --- stages -----------------------------------------------------------------------------------------------------------


@BY_VARIANT
@pytest.mark.parametrize("cuts", [(2,), (0,), (4,), (1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_stages_compose_to_the_whole_model_bit_for_bit(config, cuts, dtype):
    borders = [0, *cuts, config.n_layers]
    ranges = [range(a, b) for a, b in zip(borders, borders[1:], strict=False)]
    whole = build(config)
    stages = [
        build(config, layers=layers, embedding=i == 0, head=i == len(ranges) - 1) for i, layers in enumerate(ranges)
    ]
    parameters = dict(whole.named_parameters())
    seen = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, parameters[name]), name
            seen.add(name)
    assert seen == set(parameters)
    for model in (whole, *stages):
        model.compute_dtype = dtype
        for parameter in model.parameters():
            parameter.operand_cache = parameter.detach().to(dtype)

    ids, targets = batch(3, 12)
    doc_start = (torch.arange(12) // 5 * 5).expand(3, 12)
    loss = whole.loss(ids, targets, doc_start)
    (loss.lm + loss.aux).backward()
    x, balance, losses = ids, whole.balance(targets), []
    for stage in stages[:-1]:
        x = stage(x, doc_start=doc_start, balance=balance, losses=losses)
    staged = stages[-1].loss(x, targets, doc_start)
    (staged.lm + staged.aux).backward()
    assert loss.lm.item() == staged.lm.item()
    assert loss.aux.item() == pytest.approx(staged.aux.item() + sum(x.item() for x in losses), rel=1e-6)
    with torch.no_grad():
        x = ids
        for stage in stages:
            x = stage(x)
        assert torch.equal(whole.logits(whole(ids)), stages[-1].logits(x))
    # A tied matrix has a copy at either end, whose gradients add up to the whole's. The whole rounds the gradient that
    # crosses a border once less.
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    for name, parameter in parameters.items():
        copies = [dict(s.named_parameters())[name].grad for s in stages if name in dict(s.named_parameters())]
        copies = [grad for grad in copies if grad is not None]
        assert relative_error(sum(copies), parameter.grad) <= bound, name


# --- gradients of a batch, however it is cut --------------------------------------------------------------------------


def gradients(model: Transformer, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The gradients of these micro-batches, each tensor's buffer being overwritten by the first and added to then."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
        parameter.grad_stale = True
    for ids, targets in rows:
        sums = model.loss(ids, targets)
        (sums.lm + sums.aux).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@torch.no_grad()
def count(model: Transformer, ids: torch.Tensor, targets: torch.Tensor) -> int:
    return int(model.loss(ids, targets).n_targets)


@BY_VARIANT
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 10])
def test_gradients_of_a_batch_do_not_depend_on_how_it_is_cut(config, dtype, bound, size):
    model = build(config, dtype)
    ids, targets = batch(10, 16)
    whole = {name: gradient.clone() for name, gradient in gradients(model, [(ids, targets)]).items()}
    counted = count(model, ids, targets)
    assert counted == int((targets != IGNORED).sum()) < targets.numel()

    parts, n_targets = [], 0
    for begin in range(0, 10, size):
        part_ids, part_targets = ids[begin : begin + size], targets[begin : begin + size]
        if len(part_ids) < size:
            # The last group is uneven: missing samples are rows whose targets are all ignored.
            missing = size - len(part_ids)
            part_ids = torch.cat([part_ids, part_ids.new_zeros(missing, 16)])
            part_targets = torch.cat([part_targets, part_targets.new_full((missing, 16), IGNORED)])
        parts.append((part_ids, part_targets))
        n_targets += count(model, part_ids, part_targets)
    assert n_targets == counted
    for name, gradient in gradients(model, parts).items():
        assert relative_error(gradient, whole[name]) <= bound, name


def test_gradients_delivered_in_place_equal_those_of_autograd():
    ids, targets = batch(4, 16)
    plain, buffered = build(CONFIG, torch.float64), build(CONFIG, torch.float64)
    sums = plain.loss(ids, targets)
    (sums.lm + sums.aux).backward()
    for name, gradient in gradients(buffered, [(ids, targets)]).items():
        assert torch.allclose(gradient, dict(plain.named_parameters())[name].grad, rtol=1e-12, atol=1e-14), name


def test_the_loss_is_the_sum_of_cross_entropies_and_z_losses():
    model = build(CONFIG, torch.float64)
    ids, targets = batch(3, 8)
    sums = model.loss(ids, targets)
    logits = model.logits(model(ids))
    kept = targets != IGNORED
    lm = torch.nn.functional.cross_entropy(logits[kept], targets[kept], reduction="sum")
    assert sums.lm.item() == pytest.approx(lm.item(), rel=1e-12)
    assert sums.aux.item() == pytest.approx(1e-3 * logits.logsumexp(-1)[kept].square().sum().item(), rel=1e-12)


# --- positions, documents, caches -------------------------------------------------------------------------------------


@BY_VARIANT
def test_a_token_does_not_see_what_comes_after_it(config):
    model, (ids, _) = build(config), batch(2, 20)
    changed = ids.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % config.vocab_size
    with torch.no_grad():
        one, other = model(ids), model(changed)
    assert torch.equal(one[:, :11], other[:, :11])
    assert not torch.equal(one[:, 11:], other[:, 11:])


def test_a_packed_document_reads_as_it_does_alone():
    """Rotary positions are relative, so a document's place in its window changes rounding and nothing else."""
    model, (ids, _) = build(CONFIG, torch.float64), batch(1, 20)
    doc_start = torch.tensor([[0] * 7 + [7] * 9 + [16] * 4], dtype=torch.int32)
    with torch.no_grad():
        packed = model(ids, doc_start=doc_start)
        alone = torch.cat([model(ids[:, a:b]) for a, b in ((0, 7), (7, 16), (16, 20))], 1)
        unmasked = model(ids)
    # The tables are FP32, which is what the angles of the two places differ by.
    assert torch.allclose(packed, alone, rtol=0, atol=1e-5)
    assert not torch.allclose(packed, unmasked, rtol=0, atol=1e-2)


@BY_VARIANT
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 5, 7], [19, 1]], ids=str)
def test_cached_chunks_equal_the_full_forward(config, chunks):
    model, (ids, _) = build(config), batch(2, 20)
    cache = KVCache(config, 2, 20, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        full = model(ids)
        parts = [model(part, cache=cache) for part in ids.split(chunks, 1)]
    assert cache.length == 20
    assert torch.allclose(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)


def test_a_context_beyond_max_seq_len_is_refused_with_both_numbers():
    model, (ids, _) = build(CONFIG), batch(1, 33)
    with torch.no_grad():
        assert model(ids[:, :32]).shape == (1, 32, 48)
        with pytest.raises(ValueError, match="33 positions.* 32"):
            model(ids)
        cache = KVCache(CONFIG, 1, 40, torch.float32, torch.device("cpu"))
        model(ids[:, :30], cache=cache)
        with pytest.raises(ValueError, match="33 positions.* 32"):
            model(ids[:, 30:], cache=cache)
