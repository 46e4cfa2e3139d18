"""What a GPU would compute, on fake CUDA tensors: no mix of devices, and no host sync.

The backward pass needs a GPU: see docs/evidence/status.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.version.cuda is None:
    pytest.skip("torch is a build for CPUs: see requirements.txt", allow_module_level=True)

from tests.engines.cuda.fake_cuda import CUDA, HostSync, fake_cuda
from zero2all.model import ModelInputs, Z2all, document_starts
from zero2all.model.kv_cache import KVCache
from zero2all.model.ops import OPS
from zero2all.optim.optimizer import build_optimizers
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.mesh import ParallelDims
from zero2all.recipe import ModelConfig, OptimizerRecipe, ParallelRecipe

ROWS, LENGTH, LAYERS = 4, 256, 2
SHAPE = {
    "vocab_size": 320, "max_position_embeddings": LENGTH, "num_hidden_layers": LAYERS, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "qk_norm": True,
}  # fmt: skip
OPTIONS = {"mtp_weight": 0.1, "z_loss": 1e-4, "final_logit_softcapping": 30.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
# Triton compiles for a GPU: Liger's kernels are tested by test_liger.py.
TRACEABLE = {"norm": "torch", "rope": "torch", "swiglu": "torch", "cross_entropy": "chunked", "attention": "sdpa"}
DOCUMENTS = 4


@pytest.fixture(autouse=True)
def _ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks the driver what the GPU can do."""
    for module in ("attention", "varlen"):
        monkeypatch.setattr(
            f"zero2all.model.ops.{module}.has_flash_kernel", lambda device, dtype, size: dtype.itemsize == 2
        )


def config(ops: dict[str, str] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **changes, "ops": {**TRACEABLE, **(ops or {})}})


def forward(model_config: ModelConfig, packed: bool = False) -> list[HostSync]:
    """The host syncs of one training pass, to the loss of each token and what the loss computes for its gradient."""
    with fake_cuda() as syncs, torch.autocast("cuda", torch.bfloat16):
        model = Z2all(model_config).train()
        tokens_BS = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        assert not syncs.found, "nothing is to be waited for while the model is built"
        inputs = ModelInputs(tokens_BS, tokens_BS)
        if packed:
            cu_seqlens_1N = torch.zeros(1, DOCUMENTS + 1, dtype=torch.int32)  # the loader finds them, on the CPU
            inputs = ModelInputs(tokens_BS, tokens_BS, document_starts(tokens_BS == 0), cu_seqlens_1N)
        losses_BS = model(inputs)
    assert losses_BS.device == CUDA
    assert losses_BS.dtype == torch.float32
    return syncs.found


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has no build for this machine: its functions return what they would, for their shape."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_func = lambda q, k, v, **options: torch.empty_like(q)  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = lambda q, *rest, **options: torch.empty_like(q)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("window", [None, 64], ids=["full", "window"])
@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
@pytest.mark.parametrize("kernel", OPS["attention"])
def test_attention(kernel: str, packed: bool, window: int | None) -> None:
    assert OPS["attention"][kernel].unavailable_reason(CUDA, config()) is None
    found = forward(config({"attention": kernel}, sliding_window=window), packed)
    assert found == []


@pytest.mark.parametrize("kernel", ["chunked", "torch", "reference"])
def test_loss(kernel: str) -> None:
    assert forward(config({"cross_entropy": kernel})) == []


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_reference_kernels_and_model_options(packed: bool) -> None:
    assert forward(config(dict.fromkeys(TRACEABLE, "reference"), **OPTIONS), packed) == []


@pytest.mark.parametrize("balancing", ["bias", "aux"])
def test_experts(balancing: str) -> None:
    """Grouped products take the sizes of their groups from the GPU."""
    assert forward(config(moe={**MOE, "load_balancing": balancing}), packed=True) == []


def test_generation() -> None:
    with fake_cuda() as syncs, torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model, cache = Z2all(config()).eval(), KVCache(ROWS, 32, CUDA)
        syncs.found.clear()  # the cache asks for its longest row when its rows are selected
        for count in (8, 1):
            logits = model(torch.zeros(ROWS, count, dtype=torch.int64), cache=cache)
            cache.advance(count)
    assert logits.device == CUDA
    assert syncs.found == []


@pytest.mark.parametrize(
    ("optimizer", "moe"),
    [("adamw", None), ("muon", None), ("adamw", {**MOE, "load_balancing": "bias"})],
    ids=["adamw", "muon", "experts"],
)
def test_step_around_the_backward_pass(
    optimizer: str, moe: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of the CPU, forward, clipping, optimizer: nothing waits, from the second step on."""
    monkeypatch.setattr(Tensor, "backward", lambda loss: None)
    with fake_cuda() as syncs:
        mesh = ParallelMesh(ParallelDims(), CUDA)
        model = ParallelModel(config(moe=moe), ParallelRecipe(), mesh, seed=0, dtype=torch.bfloat16)
        recipe = OptimizerRecipe(name=optimizer, lr=1e-3)
        optimizers = build_optimizers(model.model, recipe, model.param_groups)
        tokens_BS = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="cpu")
        for _ in range(2):
            syncs.found.clear()
            losses = model.forward_backward(
                ModelInputs(tokens_BS, tokens_BS), divisor=ROWS * LENGTH, micro_batch_size=2
            )
            for parameter in model.model.parameters():
                parameter.grad = torch.empty_like(parameter)
            norm = model.clip_grad_norm_(1.0)
            for one in optimizers:
                one.step()
            model.update_expert_bias()
    assert losses.device == norm.device == CUDA
    assert syncs.found == []


SYNCS: dict[str, Callable[[Tensor], Any]] = {
    "_local_scalar_dense": lambda x: x.sum().item(),
    "nonzero": lambda x: x[x > 0],
    "bincount": lambda x: x.long().bincount(minlength=3),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "_to_copy": lambda x: x.cpu(),
    "copy_": lambda x: x.copy_(torch.ones(LENGTH, device="cpu")),
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64, device="cpu")],
}


@pytest.mark.parametrize("op", SYNCS)
def test_a_host_sync_is_found(op: str) -> None:
    with fake_cuda() as syncs:
        SYNCS[op](torch.ones(LENGTH))
    assert [sync.op for sync in syncs.found] == [op]


def test_what_does_not_wait_is_not_found() -> None:
    with fake_cuda() as syncs:
        x = torch.ones(LENGTH)
        x.add_(torch.tensor(1.0, device="cpu")).to("cpu", non_blocking=True)
        x.repeat_interleave(torch.ones(LENGTH, dtype=torch.int64), output_size=LENGTH)
        x.to(torch.bfloat16).float().where(x > 0, 0.0)
    assert syncs.found == []


def test_mixed_devices_raise() -> None:
    with fake_cuda(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(LENGTH) + torch.ones(LENGTH, device="cpu")
