"""Dropout of attention weights and of the residual stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.helpers import SMALL
from zero2all.model import ModelInputs, Z2all, document_starts
from zero2all.model.hf_config import from_hf_config, hf_config
from zero2all.model.kv_cache import KVCache
from zero2all.model.ops.attention import KERNELS, MaskInputs
from zero2all.recipe import ModelConfig
from zero2all.recipe.parallel import ParallelRecipe, parallel_mistakes
from zero2all.recipe.training import TrainRecipe

SHAPE: dict[str, Any] = {**SMALL, "num_hidden_layers": 2, "vocab_size": 64}
BOTH = {"attention_dropout": 0.2, "residual_dropout": 0.3}
TOKENS = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))
SEED = torch.tensor([7])


def build(**changes: Any) -> Z2all:
    return Z2all(ModelConfig.model_validate({**SHAPE, **changes})).init_weights(0)


def losses(model: Z2all, seed: Tensor | None = SEED) -> Tensor:
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    found: Tensor = model(ModelInputs(inputs, targets_BS=targets, dropout_seeds_M=seed))
    return found.detach()


def test_the_share_and_the_scale_of_what_is_kept() -> None:
    block = build(residual_dropout=0.3).layers[0]
    x = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0))
    keep = block._draw_keep(x)
    dropped = block._drop(x, keep)
    count = keep.numel()
    assert abs(keep.float().mean() - 0.7) < 4 * (0.3 * 0.7 / count) ** 0.5, "within four standard deviations"
    assert torch.equal(dropped != 0, keep & (x != 0))
    torch.testing.assert_close(dropped[keep], x[keep] / 0.7)
    by_token = keep.float().mean(-1)
    assert by_token.std() < 2 * (0.3 * 0.7 / 64) ** 0.5, "elements, not whole tokens"


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("case", ["causal", "window", "documents"])
def test_attention_weights_are_dropped(kernel: str, case: str) -> None:
    """With values that are one-hot by position the output is the weights themselves."""
    length, p = 64, 0.25
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, heads, length, 64, generator=generator) for heads in (2, 1))
    v = torch.eye(length).expand(4, 1, length, length)
    ends = torch.randint(0, 9, (4, length), generator=generator) == 3
    starts = document_starts(ends) if case == "documents" else None
    backend = KERNELS[kernel].load()
    mask = backend.mask_for(MaskInputs(starts, length, 16 if case == "window" else None, torch.device("cpu")))
    weights = backend.attend(q, k, v, mask)
    dropped = backend.attend_with_dropout(q, k, v, mask, p)
    seen = weights > 0
    kept = dropped[seen] > 0
    assert abs(kept.float().mean() - (1 - p)) < 4 * (p * (1 - p) / kept.numel()) ** 0.5
    torch.testing.assert_close(dropped[seen][kept], weights[seen][kept] / (1 - p))
    assert not dropped[~seen].any()
    assert torch.equal(backend.attend_with_dropout(q, k, v, mask, 0.0) > 0, seen)


def test_masks_are_a_function_of_the_seed_and_the_layer() -> None:
    model = build(**BOTH)
    torch.manual_seed(1)
    first = losses(model)
    torch.manual_seed(2)
    assert torch.equal(losses(model), first), "whatever the state of the global generator"
    assert not torch.equal(losses(model, torch.tensor([8])), first)
    masks: list[Tensor] = []
    for block in model.layers:
        draw = block._draw_keep
        block._draw_keep = lambda x, draw=draw: masks.append(draw(x)) or masks[-1]
    losses(model)
    assert len(masks) == 4
    assert len({mask.numpy().tobytes() for mask in masks}) == 4, "every layer, attention and feed-forward, its own"


def test_dropout_is_off_outside_of_training() -> None:
    plain, model = build(), build(**BOTH)
    assert not torch.allclose(losses(model), losses(plain))
    with torch.no_grad():
        cached, expected = (one(TOKENS[:, :8], cache=KVCache(2, 16, torch.device("cpu"))) for one in (model, plain))
    assert torch.equal(cached, expected), "generation, also in training mode"
    assert torch.equal(losses(model.eval(), None), losses(plain.eval(), None))


def test_zero_draws_no_numbers() -> None:
    model, state = build(), torch.random.get_rng_state()
    losses(model, None)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_kernel_without_dropout_and_a_probability_of_one_are_refused() -> None:
    config = ModelConfig.model_construct(**{**ModelConfig(**SHAPE).__dict__, **BOTH})
    assert KERNELS["flash"].unavailable_reason(torch.device("cuda"), config) is not None
    with pytest.raises(ValueError, match=r"flash has no dropout: set ops.attention=auto"):
        ModelConfig.model_validate({**SHAPE, **BOTH, "ops": {"attention": "flash"}})
    ModelConfig.model_validate({**SHAPE, "residual_dropout": 0.1, "ops": {"attention": "flash"}})
    with pytest.raises(ValueError, match="residual_dropout"):
        ModelConfig.model_validate({**SHAPE, "residual_dropout": 1.0})


def test_layouts_without_dropout_are_refused() -> None:
    config, train = ModelConfig(**SHAPE, **BOTH), TrainRecipe(steps=1, seq_len=32)

    def messages(**sizes: Any) -> str:
        return " ".join(mistake.message for mistake in parallel_mistakes(config, train, ParallelRecipe(**sizes)))

    assert "set model.attention_dropout=0 or parallel.cp=1" in messages(cp=2)
    assert "set parallel.sp=true" in messages(tp=2, sp=False)
    assert not messages(tp=2, pp=2)


def test_the_probability_is_exported() -> None:
    config = ModelConfig.model_validate({**SHAPE, "attention_dropout": 0.1})
    values = hf_config(config)
    assert values["attention_dropout"] == 0.1
    assert from_hf_config(values).attention_dropout == 0.1
    assert from_hf_config({**values, "attention_dropout": None}).attention_dropout == 0.0
