"""The outer optimizer and what islands send: equal to plain implementations, and nothing is lost by rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zero2all.base.errors import Z2aError
from zero2all.recipe.sync import SyncRecipe
from zero2all.train.diloco.outer_optimizer import (
    BLOCK,
    ExchangeDtype,
    OuterOptimizer,
    ReplicaShare,
    decode,
    encode,
    encoded_bytes,
    fragment_due,
    split_fragments,
)

PLAIN = {"exchange_dtype": "fp32", "outer_lr": 1.0, "outer_momentum": 0.0}


class TinyModel(nn.Module):
    def __init__(self, seed: int, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(layers))
        self.norm = nn.LayerNorm(5)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_a_little(model: nn.Module, seed: int, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def exchange(outers: list[OuterOptimizer]) -> None:
    parts = [outer.encode(0, outer.start_exchange(0)) for outer in outers]
    for outer in outers:
        outer.update(0, parts)
        outer.merge(0)


def outer_of(model: nn.Module, **options: object) -> OuterOptimizer:
    return OuterOptimizer(model, 3, SyncRecipe(islands=2, **options))


@settings(max_examples=30)
@given(st.integers(0, 3 * BLOCK + 1), st.floats(-20, 20), st.integers(0, 99))
def test_int8_is_off_by_at_most_half_a_step_of_its_block(count: int, exponent: float, seed: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    sent = encode(values, "int8")
    assert len(sent) == encoded_bytes(count, "int8")
    received = decode(sent, count, "int8")
    for begin in range(0, count, BLOCK):
        block, other = values[begin : begin + BLOCK], received[begin : begin + BLOCK]
        assert (block - other).abs().max() <= block.abs().max() / 127 * 0.5001
    assert torch.equal(decode(encode(-values, "int8"), count, "int8"), -received)  # no bias


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_what_is_not_finite_is_neither_sent_nor_accepted(dtype: ExchangeDtype) -> None:
    bad = torch.ones(BLOCK + 3)
    bad[5] = torch.inf
    with pytest.raises(Z2aError, match="not sent"):
        encode(bad, dtype)
    with pytest.raises(Z2aError, match="not finite"):
        decode(torch.full((encoded_bytes(BLOCK + 3, dtype),), 0xFF, dtype=torch.uint8), BLOCK + 3, dtype)
    with pytest.raises(Z2aError, match="has sent 7 bytes, which are not 259 values"):
        decode(torch.zeros(7, dtype=torch.uint8), BLOCK + 3, dtype)


def test_what_rounding_leaves_out_is_sent_later() -> None:
    """The sum of what was sent is the sum of the progress, up to one rounding, not one for each exchange."""
    model = TinyModel(0)
    expected = flat(model).clone()
    outer = outer_of(model, exchange_dtype="int8", outer_lr=1.0, outer_momentum=0.0)
    [fragment] = outer.fragments
    assert fragment.residual is not None
    for number in range(40):
        before = flat(model).clone()
        train_a_little(model, number, size=0.01)
        expected += flat(model) - before
        exchange([outer])
        assert fragment.residual.abs().max() <= 0.05 / 127  # half a step of the largest change
        assert torch.allclose(flat(model) - fragment.residual, expected, atol=1e-5)


def test_without_momentum_and_with_lr_1_it_is_the_average_of_the_weights() -> None:
    models = [TinyModel(0), TinyModel(0), TinyModel(0)]
    outers = [outer_of(model, **PLAIN) for model in models]
    for step in range(5):
        for number, model in enumerate(models):
            train_a_little(model, 10 * step + number)
        mean = torch.stack([flat(model) for model in models]).mean(dim=0)
        exchange(outers)
        for model in models:
            assert torch.allclose(flat(model), mean, atol=1e-6, rtol=0)
            assert torch.equal(flat(model), flat(models[0]))


def test_the_outer_step_is_nesterov_sgd_of_torch() -> None:
    models = [TinyModel(0), TinyModel(0)]
    outers = [outer_of(model, exchange_dtype="fp32", outer_lr=0.7, outer_momentum=0.9) for model in models]
    expected = flat(models[0]).clone().requires_grad_()
    optimizer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(6):
        for number, model in enumerate(models):
            train_a_little(model, 10 * step + number)
        expected.grad = expected.detach() - torch.stack([flat(model) for model in models]).mean(dim=0)
        optimizer.step()
        exchange(outers)
        assert torch.allclose(flat(models[1]), expected.detach(), atol=1e-5)


def test_progress_during_an_exchange_is_kept() -> None:
    models = [TinyModel(0), TinyModel(0)]
    outers = [outer_of(model, **PLAIN, overlap=2) for model in models]
    for number, model in enumerate(models):
        train_a_little(model, number)
    at_begin = [flat(model).clone() for model in models]
    parts = [outer.encode(0, outer.start_exchange(0)) for outer in outers]
    for number, model in enumerate(models):
        train_a_little(model, 20 + number)
    meanwhile = [flat(model) - begin for model, begin in zip(models, at_begin, strict=True)]
    for model, outer, progress in zip(models, outers, meanwhile, strict=True):
        outer.update(0, parts)
        outer.merge(0)
        expected = torch.stack(at_begin).mean(dim=0) + progress
        assert torch.allclose(flat(model), expected, atol=1e-6)
        assert torch.equal(outer.fragments[0].outer, outers[0].fragments[0].outer)


def test_every_weight_is_in_one_fragment_and_each_has_its_turn() -> None:
    tensors = dict(TinyModel(0, layers=7).named_parameters())
    for count in (1, 2, 3, 7):
        found = split_fragments(tensors, 7, count)
        assert sorted(name for part in found for name in part) == sorted(tensors)
        assert all(found), count
        recipe = SyncRecipe(islands=2, every=14, fragments=count)
        due = [fragment_due(done, recipe) for done in range(1, 29)]
        assert {number: due.count(number) for number in range(count)} == dict.fromkeys(range(count), 2)
    assert fragment_due(0, recipe) is None


def test_replicas_that_each_exchange_a_part_do_what_one_that_exchanges_all_does() -> None:
    models = [TinyModel(0) for _ in range(5)]
    options = {"exchange_dtype": "int8", "outer_lr": 0.7}
    whole = [outer_of(model, **options) for model in models[:2]]
    sums, barrier = [torch.zeros(whole[0].fragments[0].size) for _ in range(3)], threading.Barrier(3)

    def add_up(number: int) -> Callable[[Tensor], Tensor]:
        def sum_of_all(own: Tensor) -> Tensor:
            sums[number] = own
            barrier.wait(10)
            return torch.stack(sums).sum(dim=0)

        return sum_of_all

    recipe = whole[0].recipe
    replicas = [OuterOptimizer(models[2 + n], 3, recipe, ReplicaShare(n, 3, add_up(n))) for n in range(3)]
    for step in range(3):
        for number, model in enumerate(models):
            train_a_little(model, 10 * step + min(number, 1))  # the second island, once whole and once as replicas
        one, other = (outer.encode(0, outer.start_exchange(0)) for outer in whole)
        parts = [outer.encode(0, outer.start_exchange(0)) for outer in replicas]
        assert sum(map(len, parts)) == len(other)
        theirs = [encode_part(one, len(sums[0]), outer.share) for outer in replicas]
        threads = [
            threading.Thread(target=outer.update, args=(0, [their, part]))
            for outer, their, part in zip(replicas, theirs, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for outer in whole:
            outer.update(0, [one, other])
        for outer in (*whole, *replicas):
            outer.merge(0)
            assert torch.equal(outer.fragments[0].outer, whole[0].fragments[0].outer)


def encode_part(encoded: Tensor, size: int, share: ReplicaShare) -> Tensor:
    return encode(decode(encoded, size, "int8")[share.part(size)], "int8")  # codes of rounded values are the same


def test_weights_in_bf16_do_not_take_their_rounding_for_progress() -> None:
    model = TinyModel(0).to(torch.bfloat16)
    outer = outer_of(model, exchange_dtype="fp32")
    fragment = outer.fragments[0]
    fragment.outer += 1e-4  # less than bf16 can hold
    outer.merge(0)
    assert not decode(outer.encode(0, outer.start_exchange(0)), fragment.size, "fp32").any()
