"""Small models on one rank or several, what is compared of them, and the memory that they hold."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zero2all.model import ModelInputs, document_starts
from zero2all.model.cost.activations import KEEP_ALL, ONE_RANK, ActivationPolicy, ActivationShards, activation_bytes
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": 64,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 5.0}
BIAS_MOE = {**MOE, "load_balancing": "bias"}


def small_config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **changes})


def make_model(sizes: dict[str, Any], config: ModelConfig, seed: int = 0, **options: Any) -> ParallelModel:
    """On all ranks, in the layout of these keys of ``parallel``."""
    recipe = ParallelRecipe.model_validate(sizes)
    return ParallelModel(config, recipe, ParallelMesh.init_distributed(recipe, CPU), seed=seed, **options)


def build_model(
    mode: str, moe: dict[str, Any] | None, sizes: dict[str, Any] | None = None, **changes: Any
) -> ParallelModel:
    """Of three layers, with a mode of activation checkpointing."""
    sizes = {"activation_checkpointing": mode, **(sizes or {})}
    return make_model(sizes, small_config(**{"num_hidden_layers": 3, "moe": moe, **changes}))


def step(parallel_model: ParallelModel, masked: bool = True) -> Tensor:
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    first, last = parallel_model.mesh.sample_range(4)
    inputs, targets = tokens[first:last, :-1], tokens[first:last, 1:]
    starts = document_starts(inputs == 7) if masked else None
    return parallel_model.forward_backward(ModelInputs(inputs, targets, doc_starts_BS=starts), divisor=128)


def full(tensor: Tensor) -> Tensor:
    """Of all ranks, as a copy."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(parallel_model: ParallelModel) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in parallel_model.model.named_parameters() if p.grad is not None}


class Storages(TorchDispatchMode):
    """All memory that operations allocated, also what only the autograd graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):  # its local tensor is counted
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self, model: torch.nn.Module) -> int:
        """Bytes that are still allocated, but for weights, buffers and gradients of a model."""
        gc.collect()
        but = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in but]
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in local}
        return sum(size for storage, size in self.made.items() if storage not in known and not storage.expired())


WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 64, "ops": {"cross_entropy": "reference"},
}  # fmt: skip
TOKENS = 256


def forward(parallel_model: ParallelModel) -> tuple[Tensor, int]:
    """The losses of a model of ``WIDE``, and the bytes that are allocated between forward and backward."""
    batch = torch.randint(0, 512, (TOKENS // 64, 65), generator=torch.Generator().manual_seed(0))
    with Storages() as storages:
        losses = parallel_model.model(batch[:, :-1].contiguous(), targets_BS=batch[:, 1:].contiguous())
    return losses, storages.alive(parallel_model.model)


def estimated_bytes(
    layers: int, policy: ActivationPolicy = KEEP_ALL, shards: ActivationShards = ONE_RANK, **changes: Any
) -> int:
    """What the formula says of that."""
    config = ModelConfig.model_validate({**WIDE, "num_hidden_layers": layers, **changes})
    return activation_bytes(config, TOKENS, half=False, policy=policy, shards=shards)
