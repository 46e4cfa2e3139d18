"""A step with the model off the CPU. CI has no GPU; the meta device refuses to mix with CPU tensors as well."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parallel.helpers import small_config
from zero2all.model import ModelInputs, document_starts, z2all
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ParallelRecipe
from zero2all.train.objectives.step import SourceLosses

META = torch.device("meta")
TOKENS, SOURCES = torch.zeros(4, 17, dtype=torch.int64), ["en", "zh", "en", ""]
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]  # as a loader gives them, on the CPU


@pytest.fixture
def parallel_model(monkeypatch: pytest.MonkeyPatch) -> ParallelModel:
    # The meta device has neither random numbers nor autocast.
    monkeypatch.setattr(z2all, "_init_normal", lambda values, std, name: values.zero_())
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    return ParallelModel(small_config(), ParallelRecipe(), ParallelMesh(ParallelDims(), META), seed=1)


def test_a_step_leaves_nothing_on_the_cpu(parallel_model: ParallelModel) -> None:
    source_losses = SourceLosses(["en", "zh"], token_byte_lengths=[1] * 64, device=META)
    losses = parallel_model.forward_backward(
        ModelInputs(INPUTS, TARGETS, doc_starts_BS=document_starts(INPUTS == 0)), divisor=48, micro_batch_size=2
    )
    assert parallel_model.clip_grad_norm_(1.0).device == META
    sums = source_losses.sums(losses, parallel_model.local_targets(TARGETS), SOURCES)
    assert parallel_model.all_reduce_sum(sums, stop_requested=True).device == META
    with pytest.raises(RuntimeError, match="cpu"):
        source_losses.sums(losses, TARGETS, SOURCES)


class NoFp64(TorchDispatchMode):
    """The meta device as the GPU of a Mac: it has no fp64, and what is copied from it has values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.dtype == torch.float64:
                raise TypeError(f"{func} gives fp64")
        return out


def test_the_gpu_of_a_mac_needs_no_fp64(parallel_model: ParallelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.base.machine.devices.MPS", META.type)
    with NoFp64():
        source_losses = SourceLosses(["en", "zh"], token_byte_lengths=[1] * 64, device=META)
        losses = parallel_model.forward_backward(ModelInputs(INPUTS, TARGETS), divisor=48)
        assert parallel_model.clip_grad_norm_(1.0).item() == 0.0
        assert parallel_model.gradient_norms.by_layer.tolist() == [0.0, 0.0]
        sums = source_losses.sums(losses, parallel_model.local_targets(TARGETS), SOURCES)
        assert parallel_model.all_reduce_sum(sums).tolist() == [[0.0, 32.0] * 2, [0.0, 16.0] * 2, [0.0] * 4]
    with NoFp64(), pytest.raises(TypeError, match="fp64"):
        losses.double()
