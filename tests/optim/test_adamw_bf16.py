"""AdamW in bf16: rounding, what plain bf16 loses, and training beside AdamW in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.helpers import make_model, small_config
from zero2all.model import ModelInputs
from zero2all.model.cost.model_size import weight_dtype
from zero2all.optim import adamw_bf16
from zero2all.optim.adamw_bf16 import AdamWBF16, _signed, mix, noise_key, random_bits, round_nearest, round_stochastic
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.parallel import ParallelModel
from zero2all.recipe import MoeConfig, OptimizerRecipe

Rounding = Literal["stochastic", "kahan"]
ROUNDINGS: list[Rounding] = ["stochastic", "kahan"]
ALL_BITS = torch.arange(2**16, dtype=torch.int32)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, -1e-30, 2**-7 + 2**-20, 1e-41])
def test_the_mean_over_all_random_bits_is_the_value(value: float) -> None:
    values = torch.full((2**16,), value)
    rounded = round_stochastic(values, ALL_BITS).double()
    assert len(rounded.unique()) == 2
    assert rounded.mean().item() == pytest.approx(values[0].double().item(), rel=1e-12)


def test_what_bf16_represents_is_not_rounded() -> None:
    exact = torch.randn(2**16).bfloat16().float()
    assert torch.equal(round_stochastic(exact, ALL_BITS).float(), exact)
    # The NaN that CUDA computes has all bits set: one more would make it a zero.
    special = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    special = torch.cat([special, -special, torch.zeros(1)])
    for bits in (0, 1, 0xFFFF):
        rounded = round_stochastic(special, torch.full((7,), bits, dtype=torch.int32)).float()
        torch.testing.assert_close(rounded, special, equal_nan=True, rtol=0, atol=0)


def test_nearest_is_what_a_cast_gives() -> None:
    ties = (torch.arange(2**16, dtype=torch.int32) * 2**16 + 2**15).view(torch.float32)
    values = torch.cat([torch.randn(2**16), ties, torch.tensor([0.0, math.inf, -math.inf, 3.4e38])])
    values = values[~values.isnan()]
    assert torch.equal(round_nearest(values), values.bfloat16().float())
    assert round_nearest(torch.tensor([math.nan])).isnan().all()


def bits_of(shape: tuple[int, ...], key: int) -> Tensor:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    coordinates = [(torch.arange(n) * stride).to(torch.int32) for n, stride in zip(shape, strides, strict=True)]
    return random_bits(coordinates, torch.tensor(_signed(key), dtype=torch.int32))


def test_random_bits_are_a_hash_of_the_number_of_an_element() -> None:
    expected = [_signed(mix((0xFFFFFF00 + number) % 2**32)) for number in range(2 * 3 * 100)]  # it wraps around
    assert bits_of((2, 3, 100), 0xFFFFFF00).flatten().tolist() == expected


def test_random_bits_are_even_and_do_not_repeat_from_step_to_step() -> None:
    keys = [mix(noise_key(0, "layers.0.self_attn.q_proj.weight") ^ mix(step)) for step in range(1, 65)]
    bits = torch.stack([bits_of((64, 256), key) for key in keys])
    sets = [bits & 0xFFFF, (bits >> 16) & 0xFFFF, (bits ^ (bits >> 8)) & 0xFFFF]  # of both moments and the weight
    assert torch.corrcoef(torch.stack(sets).flatten(1).double()).triu(1).abs().max() < 0.005
    for half in sets:
        uniform = (half.double() + 0.5) / 2**16
        # Standard errors of a million draws: 0.0003 of the mean, 0.001 of a correlation.
        assert uniform.mean().item() == pytest.approx(0.5, abs=0.0015)
        assert uniform.var().item() == pytest.approx(1 / 12, rel=0.01)
        assert uniform.mean(0).var().item() == pytest.approx(1 / 12 / 64, rel=0.05), "of an element over steps"
        for other in (uniform.roll(1, 0), uniform.roll(1, 1), uniform.roll(1, 2)):
            assert torch.corrcoef(torch.stack([uniform.flatten(), other.flatten()]))[0, 1].abs() < 0.005
    assert noise_key(0, "a") != noise_key(1, "a")


def stepped(
    optimizer_of: Callable[[nn.Parameter], Any], dtype: torch.dtype, gradients: list[float], size: int = 4096
) -> tuple[nn.Parameter, dict[str, Tensor]]:
    """A vector of ones, after a step with each of the gradients."""
    weight = nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = optimizer_of(weight)
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    return weight, optimizer.state[weight]


def ours(rounding: Rounding, **settings: Any) -> Callable[[nn.Parameter], AdamWBF16]:
    return lambda weight: AdamWBF16([{"params": [weight], **settings}], {weight: 1}, rounding)


def theirs(**settings: Any) -> Callable[[nn.Parameter], torch.optim.AdamW]:
    return lambda weight: torch.optim.AdamW([weight], **{"weight_decay": 0.0, "betas": (0.9, 0.95), **settings})


def test_updates_below_the_last_bit_are_not_lost() -> None:
    """Steps of 1e-4 from 1, where bf16 has 0.996 next. Plain bf16 stays; both methods follow fp32."""
    steps = [1.0] * 300
    exact, _ = stepped(theirs(lr=1e-4), torch.float32, steps)
    assert exact[0].item() == pytest.approx(0.97, abs=1e-4)
    plain, _ = stepped(theirs(lr=1e-4), torch.bfloat16, steps)
    assert plain.unique().tolist() == [1.0]
    stochastic, _ = stepped(ours("stochastic", lr=1e-4), torch.bfloat16, steps)
    # A weight is off by the root of 300 steps of 1e-4 in units of 2^-8: 0.01. The mean of 4096 by 1.7e-4.
    assert stochastic.double().mean().item() == pytest.approx(exact[0].item(), abs=6e-4)
    assert stochastic.double().std().item() < 0.015
    kahan, state = stepped(ours("kahan", lr=1e-4), torch.bfloat16, steps)
    torch.testing.assert_close(kahan.double() + state["compensation"].double(), exact.double(), rtol=0, atol=4e-4)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_second_moment_shrinks_with_a_slow_decay(rounding: Rounding) -> None:
    """0.999 of a number in bf16 is rounded to that number."""
    settings: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999)}
    gradients = [1.0, *[1e-3] * 200]
    _, plain = stepped(theirs(**settings), torch.bfloat16, gradients)
    _, exact = stepped(theirs(**settings), torch.float32, gradients)
    _, state = stepped(ours(rounding, **settings), torch.bfloat16, gradients)
    wanted = exact["exp_avg_sq"].mean().item()
    assert plain["exp_avg_sq"].float().mean().item() > 1.15 * wanted
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(wanted, rel=0.005)


def test_parameters_in_fp32_are_updated_as_by_adamw() -> None:
    torch.manual_seed(0)
    one, other = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.empty(7, 5))
    other.data.copy_(one.data)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    optimizers = [AdamWBF16([{"params": [one], **settings}], {one: 0}), torch.optim.AdamW([other], **settings)]
    for _ in range(5):
        one.grad = torch.randn(7, 5)
        other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert {value.dtype for value in optimizers[0].state[one].values()} == {torch.float32}


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_parts_are_updated_as_the_whole(rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(*shape).bfloat16()) for shape in ((33, 7), (4, 9, 5), (11,))]
        group = {"params": weights, "lr": 0.1, "weight_decay": 0.1}
        optimizer = AdamWBF16([group], {w: n for n, w in enumerate(weights)}, rounding)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape).bfloat16()
            optimizer.step()
        return [value for weight in weights for value in (weight.detach(), *optimizer.state[weight].values())]

    whole = run()
    monkeypatch.setattr(adamw_bf16, "CPU_PART_ELEMENTS", 20)
    assert all(map(torch.equal, run(), whole))


MOE = MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, load_balancing="bias")


def small_model(recipe: OptimizerRecipe, float8: Literal["tensorwise"] | None = None, **changes: Any) -> ParallelModel:
    config = small_config(hidden_size=64, intermediate_size=128, **changes)
    return make_model({}, config, dtype=torch.bfloat16, weight_dtype=weight_dtype(recipe), float8=float8)


def losses_of(
    recipe: OptimizerRecipe, steps: int, float8: Literal["tensorwise"] | None = None, **changes: Any
) -> list[float]:
    """Sequences that count up, other ones in each step."""
    model = small_model(recipe, float8, num_hidden_layers=1, **changes)
    optimizers = build_optimizers(model.model, recipe, model.param_groups)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        first, stride = (torch.randint(1, high, (8, 1), generator=generator) for high in (32, 3))
        tokens = (first + stride * torch.arange(17)) % 32
        losses.append(model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=8 * 16).mean().item())
        model.clip_grad_norm_(1.0)
        set_learning_rate(optimizers, recipe, lr_multiplier=1 - step / steps)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_the_loss_is_that_of_adamw_in_fp32() -> None:
    """Both compute in bf16. Within 0.02 of a loss that falls from 4.2 below 1, in the mean of 10 steps after 30."""
    wanted = losses_of(OptimizerRecipe(name="adamw", lr=1e-2), 40)
    assert sum(wanted[-10:]) / 10 < 1
    for name in ("adamw-bf16", "adamw-bf16-kahan"):
        losses = losses_of(OptimizerRecipe(name=name, lr=1e-2), 40)  # type: ignore[arg-type]
        assert sum(losses[-10:]) / 10 == pytest.approx(sum(wanted[-10:]) / 10, abs=0.02), name


def test_adapters_are_trained_too() -> None:
    lora = {"rank": 4, "alpha": 16}
    losses = losses_of(OptimizerRecipe(name="adamw-bf16", lr=1e-2), 6, lora=lora)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.long
def test_float8_products_of_weights_in_bf16() -> None:
    pytest.importorskip("torchao", reason="needs pip install 'zero2all[quant]'")
    recipe = OptimizerRecipe(name="adamw-bf16", lr=1e-2)
    assert losses_of(recipe, 6, "tensorwise") == pytest.approx(losses_of(recipe, 6), abs=0.2)


@pytest.mark.parametrize("changes", [{}, {"moe": MOE}, {"tie_word_embeddings": True}], ids=["dense", "moe", "tied"])
def test_weights_begin_as_those_in_fp32_rounded(changes: dict[str, Any]) -> None:
    stored, full = (small_model(OptimizerRecipe(name=name), **changes).model for name in ("adamw-bf16", "adamw"))
    for (name, ours), theirs in zip(stored.named_parameters(), full.parameters(), strict=True):
        assert ours.dtype == (torch.float32 if name.endswith("gate.weight") else torch.bfloat16), name
        assert torch.equal(ours, theirs.to(ours.dtype)), name
    assert (stored.lm_head.weight is stored.embed_tokens.weight) == ("tie_word_embeddings" in changes)


@pytest.mark.long
def test_the_compiled_update_is_the_same() -> None:
    """For several shapes, with two compilations. The compiler may fuse products and sums, so to the last bit of fp32
    before rounding: a weight in a thousand is rounded to the other side."""
    torch.manual_seed(0)
    shapes = [(8, 16), (24, 48), (40, 80), (56, 16)]
    for rounding in ROUNDINGS:
        sets = []
        for compile in (False, True):
            torch.manual_seed(0)
            weights = [nn.Parameter(torch.randn(*shape).bfloat16()) for shape in shapes]
            keys = {weight: number for number, weight in enumerate(weights)}
            optimizer = AdamWBF16([{"params": weights, "lr": 0.01}], keys, rounding, compile=compile)
            gradients = [[torch.randn(shape).bfloat16() for shape in shapes] for _ in range(3)]
            for step in gradients:
                for weight, gradient in zip(weights, step, strict=True):
                    weight.grad = gradient
                optimizer.step()
            if rounding == "kahan":
                assert all(optimizer.state[weight]["compensation"].count_nonzero() for weight in weights)
            sets.append(torch.cat([weight.detach().flatten() for weight in weights]).float())
        assert (sets[0] != sets[1]).float().mean() < 0.005
        torch.testing.assert_close(*sets, rtol=2**-7, atol=1e-3)
