from __future__ import annotations

import pytest
import torch

from tests.model.helpers import EXPERTS, SMALL, make, some_tokens
from zero2all.model import KVCache, ModelInputs, Z2all
from zero2all.recipe import PRESETS, ModelConfig

VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "bias": {"qkv_bias": True},
    "qk-norm": {"qk_norm": True},
    "qk-norm, bias, tied": {"qk_norm": True, "qkv_bias": True, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "window": {"sliding_window": 7, "full_attention_interval": 2},
    "experts": {"moe": EXPERTS},
    "soft-cap": {"final_logit_softcapping": 5.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[40], [39, 1], [1] * 40, [10, 7, 1, 22]])
def test_cache_gives_the_logits_of_the_full_sequence(variant: str, chunks: list[int]) -> None:
    model, tokens = make(**VARIANTS[variant]), some_tokens()
    cache = KVCache(rows=2, max_length=40, device=torch.device("cpu"))
    parts = []
    with torch.inference_mode():
        for chunk in tokens.split(chunks, dim=1):
            parts.append(model(chunk, cache=cache))
            cache.advance(chunk.shape[1])
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_rows_of_different_lengths_have_the_logits_of_each_alone(variant: str) -> None:
    """Row 1 is shorter and joins later; then row 0 ends and row 1 takes its place."""
    model, tokens = make(**VARIANTS[variant]), some_tokens()
    cache = KVCache(rows=2, max_length=40, device=torch.device("cpu"))
    counts = torch.tensor([20, 9])

    def next_logits(tokens_BS: torch.Tensor, counts_B: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = model(ModelInputs(tokens_BS, cache=cache, counts_B=counts_B))[:, 0]
        cache.advance(tokens_BS.shape[1], counts_B)
        return logits

    def check(logits: torch.Tensor, row: int, length: int) -> None:
        torch.testing.assert_close(logits, model(tokens[row : row + 1, :length])[0, -1], atol=2e-5, rtol=1e-4)

    with torch.inference_mode():
        logits = next_logits(tokens[:, :20], counts)
        check(logits[0], row=0, length=20)
        check(logits[1], row=1, length=9)
        for step in range(3):
            logits = next_logits(torch.stack([tokens[0, 20 + step], tokens[1, 9 + step]])[:, None])
            check(logits[0], row=0, length=21 + step)
            check(logits[1], row=1, length=10 + step)
        cache.move(1, 0)
        cache.select(0, 1)
        assert cache.longest == 12
        check(next_logits(tokens[1:, 12:13])[0], row=1, length=13)


def test_a_fresh_model_knows_nothing() -> None:
    """The first loss is near ln V: a sign that nothing is scaled wrongly."""
    model = Z2all(ModelConfig.model_validate(SMALL)).init_weights(0)
    tokens = some_tokens(rows=8, length=41)
    loss = model(tokens[:, :-1], targets_BS=tokens[:, 1:]).mean()
    assert loss.item() == pytest.approx(torch.tensor(320.0).log().item(), rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_seed_decides_the_weights_and_meta_build_gives_the_same(tied: bool) -> None:
    config = ModelConfig.model_validate({**SMALL, "tie_word_embeddings": tied})
    with torch.device("meta"):
        empty = Z2all(config)
    filled = empty.to_empty(device="cpu").init_weights(3)
    plain, other = Z2all(config).init_weights(3), Z2all(config).init_weights(4)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, filled.state_dict()[name])
    assert torch.equal(plain.rotary_2SE, filled.rotary_2SE)
    assert len(list(plain.parameters())) == len(list(filled.parameters()))
    assert not torch.equal(plain.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("fp32", [True, False])
def test_residual_stream_has_the_precision_asked_for(fp32: bool) -> None:
    model = make(residual_fp32=fp32)
    seen: list[torch.dtype] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output[0].dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        model(some_tokens())
    assert set(seen) == {torch.float32 if fp32 else torch.bfloat16}
    with torch.inference_mode():  # weights in bf16, no autocast
        half = model.to(torch.bfloat16)(some_tokens())
    assert half.dtype == torch.bfloat16
    assert seen[-1] == (torch.float32 if fp32 else torch.bfloat16)


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [
        ("z2all-3m", 2.5e6, 3.5e6),
        ("z2all-10m", 9e6, 13e6),
        ("z2all-25m", 22e6, 28e6),
        ("z2all-85m", 75e6, 95e6),
        ("z2all-300m", 270e6, 330e6),
        ("z2all-1.1b", 1.05e9, 1.15e9),
    ],
)
def test_presets_have_the_size_in_their_name(preset: str, low: float, high: float) -> None:
    assert len([name for name in PRESETS if name.startswith("z2all-")]) == 6
    vocab_size = PRESETS[preset].get("vocab_size", 4096)
    with torch.device("meta"):
        model = Z2all(ModelConfig(preset=preset, vocab_size=vocab_size))
    count = sum(parameter.numel() for parameter in model.parameters())
    tables = model.embed_tokens.weight.numel() * (1 if model.config.tie_word_embeddings else 2)
    if preset == "z2all-1.1b":
        assert count == 1_255_499_776
        tables //= 2
    count -= tables
    assert low <= count <= high


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="context of 64"):
        make()(some_tokens(length=65))
