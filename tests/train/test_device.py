"""A step where the model is not on the CPU. CI has no GPU; the meta device refuses to meet CPU tensors as well."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from zero2all.model import document_starts, z2all
from zero2all.parallel import Layout, Sizes, Spread
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.train.channels import Channels

META = torch.device("meta")


def test_a_step_leaves_nothing_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # The meta device knows neither random numbers nor autocast.
    monkeypatch.setattr(z2all, "_fill", lambda values, std, name: values.zero_())
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    config = ModelConfig(
        hidden_size=32, intermediate_size=64, n_layers=2, n_heads=4, n_kv_heads=2, context=16, vocab_size=64
    )
    spread = Spread(config, ParallelRecipe(), Layout(Sizes(), META), seed=1, micro_samples=2)
    channels = Channels(["en", "zh"], text_bytes=[1] * 64, device=META)
    tokens, sources = torch.zeros(4, 17, dtype=torch.int64), ["en", "zh", "en", ""]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]  # as a loader gives them, on the CPU
    losses = spread.backward(inputs, targets, 48, document_starts(inputs, 0))
    assert spread.clip(1.0).device == META
    assert spread.total(channels.sums(losses, spread.own(targets), sources), wish=True).device == META
    with pytest.raises(RuntimeError, match="cpu"):
        channels.sums(losses, targets, sources)
