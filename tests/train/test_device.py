"""A step with the model off the CPU. CI has no GPU; the meta device refuses to mix with CPU tensors as well."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from zero2all.model import document_starts, z2all
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.train.source_losses import SourceLosses

META = torch.device("meta")


def test_a_step_leaves_nothing_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # The meta device has neither random numbers nor autocast.
    monkeypatch.setattr(z2all, "_init_normal", lambda values, std, name: values.zero_())
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    config = ModelConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        vocab_size=64,
    )
    parallel_model = ParallelModel(config, ParallelRecipe(), ParallelMesh(ParallelDims(), META), seed=1)
    source_losses = SourceLosses(["en", "zh"], token_byte_lengths=[1] * 64, device=META)
    tokens, sources = torch.zeros(4, 17, dtype=torch.int64), ["en", "zh", "en", ""]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]  # as a loader gives them, on the CPU
    losses = parallel_model.forward_backward(inputs, targets, 48, document_starts(inputs, 0), micro_batch_size=2)
    assert parallel_model.clip_grad_norm_(1.0).device == META
    assert (
        parallel_model.all_reduce_sum(
            source_losses.sums(losses, parallel_model.local_targets(targets), sources), stop_requested=True
        ).device
        == META
    )
    with pytest.raises(RuntimeError, match="cpu"):
        source_losses.sums(losses, targets, sources)
