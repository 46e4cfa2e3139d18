"""A model over ranks, with one interface for every parallel layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from zero2all.base.errors import UsageError
from zero2all.model import IGNORE_INDEX, KVCache, ModelInputs, Z2all
from zero2all.model.blocks import ScoredTargets
from zero2all.model.kv_cache import Branches
from zero2all.model.moe import MoE
from zero2all.model.weights import WeightReader, load_weights
from zero2all.parallel.batch_runner import BatchRunner, ParallelParts, replicate, to_device
from zero2all.parallel.context_parallel import ContextParallel
from zero2all.parallel.gradient_norms import GradientNorms
from zero2all.parallel.loss_scale import DynamicLossScaler
from zero2all.parallel.mesh import ParallelMesh
from zero2all.parallel.parallelize import parallelize
from zero2all.parallel.pipeline_parallel import Pipeline, SequenceObjective, merge_stages
from zero2all.parallel.sharded_init import ShardedInitMode, local_part
from zero2all.parallel.tensor_parallel import apply_tp_ops, enable_async_tp
from zero2all.recipe import ModelConfig, ParallelRecipe, RopeScaling
from zero2all.recipe.training import Float8Scaling


class ParallelModel:
    """The model of this rank under any combination of DDP, FSDP, tensor, pipeline, context and expert parallelism.

    >>> mesh = ParallelMesh.init_distributed(recipe.parallel, torch.device("cpu"))
    >>> model = ParallelModel(config, recipe.parallel, mesh, seed=0)
    >>> optimizer = torch.optim.AdamW(model.param_groups(model.model.parameters()))
    >>> losses = model.forward_backward(ModelInputs(tokens, targets), divisor=targets_in_the_global_batch)
    >>> norm = model.clip_grad_norm_(1.0)
    >>> optimizer.step(); optimizer.zero_grad(); model.update_expert_bias()
    >>> loss = model.all_reduce_sum(losses.sum()) / targets_in_the_global_batch
    """

    model: Z2all
    """What this rank holds, under the names of the full model: for optimizers and for DCP's ``get_state_dict``."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: ParallelRecipe,
        mesh: ParallelMesh,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        float8: Float8Scaling | None = None,
        weight_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build on the meta device, parallelize, initialize with the weights that the full model would have.

        The model computes in ``dtype``; weights and gradients are stored in ``weight_dtype`` (fp32 or ``dtype``).
        """
        if config.padded_vocab_size % mesh.dims.tp:  # a recipe need not know: the tokenizer does
            raise UsageError(
                f"parallel.tp ({mesh.dims.tp}) must divide the {config.padded_vocab_size} rows of the vocabulary: "
                "choose another parallel.tp"
            )
        self.config, self.recipe, self.mesh, self.dtype = config, recipe, mesh, dtype
        self.loss_scaler = DynamicLossScaler() if dtype == torch.float16 else None
        if recipe.async_tp:
            enable_async_tp(mesh.get_mesh("tp"), mesh.device, compile=compile)
        context_parallel = ContextParallel(mesh.get_mesh("cp"), recipe) if mesh.dims.cp > 1 else None
        self.float8, self.weight_dtype = float8, weight_dtype
        local_model = parallelize(config, recipe, mesh, dtype, float8, weight_dtype)
        self.model_parts = local_model.model_parts
        """What a step calls: the model, or this rank's stages of a pipeline."""
        for part in local_model.model_parts:
            _init_weights(part, seed, mesh, recipe, context_parallel)
        with torch.device("meta"):
            self.model = merge_stages(config, local_model.model_parts)
        self.is_compiled = compile
        if compile:
            for block in self.model.layers.children():
                block.compile()
        pipeline = Pipeline(local_model.stages, local_model.stage_indices, recipe, mesh) if local_model.stages else None
        is_replicated = mesh.dims.world_size > 1 and mesh.dims.dp_replicate == mesh.dims.world_size
        self._parts = ParallelParts(
            self.model,
            self.model_parts,
            recipe,
            mesh,
            dtype,
            weight_dtype,
            local_model.uses_fsdp,
            pipeline,
            context_parallel,
            replicate(self.model, recipe, mesh, is_compiled=compile) if is_replicated else None,
        )
        self.runner, self.gradient_norms = BatchRunner(self._parts), GradientNorms(self.model, mesh)

    def load_weights(self, reader: WeightReader) -> None:
        """Replace the weights. Each rank reads its own shards; nothing is sent between ranks."""
        weights: dict[str, Any] = get_model_state_dict(self.model)
        load_weights(weights, reader, local_part)

    def forward_backward(
        self,
        inputs: ModelInputs,
        divisor: float,
        micro_batch_size: int | None = None,
        objective: SequenceObjective | None = None,
        dropout_seed: int = 0,
    ) -> Tensor:
        """Add the gradient of ``losses.sum() / divisor``, summed over all ranks, from this rank's samples.

        ``divisor`` is the number of targets in the global batch. ``micro_batch_size`` is the samples of one forward
        pass: all of this rank's by default, in a pipeline as many as give two micro-batches a stage. With ``objective``
        the gradient is of the value that it makes of the losses of each micro-batch. Dropout masks
        are a function of ``dropout_seed``, the micro-batch and the rank.

        Returns this rank's losses [B, S], zero where another rank has them (a later pipeline stage, another part of
        the sequence): see ``all_reduce_sum``.
        """
        divisor /= self._loss_scale_factor
        size = self.runner.micro_batch_rows(len(inputs.tokens_BS), micro_batch_size)
        if self.config.has_dropout:
            inputs = replace(
                inputs, dropout_seeds_M=self.runner.dropout_seeds(dropout_seed, -(-len(inputs.tokens_BS) // size))
            )
        self.runner.free_gathered_weights()
        with self.runner.gradients_like_parameters():
            return self.runner.run(inputs, size, divisor, objective)

    @torch.no_grad()
    def eval_losses(self, tokens_BS: Tensor, targets_BS: Tensor, doc_starts_BS: Tensor | None = None) -> Tensor:
        """The losses [B, S] of this rank's samples without a gradient, zero where another rank has them, as in
        ``forward_backward``: see ``all_reduce_sum``. Every rank calls it as often as the others."""
        samples = len(tokens_BS)
        # A pipeline needs a multiple of its micro-batches; the rows that pad the batch are dropped.
        multiple = 2 * self._parts.pipeline.num_stages if self._parts.pipeline is not None else 1
        rows = torch.arange(-(-samples // multiple) * multiple).clamp(max=samples - 1)
        self.runner.ran_without_backward = True
        with self.eval_mode():
            inputs = ModelInputs(tokens_BS, targets_BS, doc_starts_BS).map(lambda tensor: tensor[rows])
            return self.runner.run(inputs, self.runner.micro_batch_rows(len(rows), None), divisor=None)[:samples]

    @torch.no_grad()
    def generate_logits(
        self,
        tokens_BS: Tensor,
        cache: KVCache | Branches,
        counts_B: Tensor | None = None,
        scored: ScoredTargets | None = None,
    ) -> Tensor | None:
        """The forward pass of ``Z2all`` with a KV cache; ranks that read the same samples give the same tokens.

        Returns the logits of the last token of each row [B, 1, V], None on ranks without the last pipeline stage. Row
        b has ``counts_B[b]`` tokens, by default all. The cache needs room for ``sequence_multiple`` - 1 more positions.
        With ``scored`` the losses of its targets instead, as in ``Z2all``.
        """
        batch, length = tokens_BS.shape
        padding = -length % self.sequence_multiple
        if counts_B is None:
            counts_B = torch.full((batch,), length, device=self.mesh.device)
        tokens_BS = torch.nn.functional.pad(tokens_BS, (0, padding))
        inputs = ModelInputs(tokens_BS, cache=cache, counts_B=counts_B, scored=scored)
        self.runner.ran_without_backward = True
        with self.runner.autocast(), self.eager_blocks():
            if self._parts.pipeline is None:
                logits: Tensor = self.model(inputs)
                return logits
            return self._parts.pipeline.generate_logits(inputs, self.runner.stage_stream(batch, length + padding))

    def eager_blocks(self) -> AbstractContextManager[None]:
        """For calls with a KV cache: each of its lengths would be compiled again."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()

    @property
    def sequence_multiple(self) -> int:
        """What a sequence's length must be a multiple of: with ``sp``, tp ranks have equal parts of it."""
        return self.mesh.dims.tp if self.recipe.sp else 1

    @property
    def ddp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same plain tensors; None without DDP."""
        return None if self._parts.ddp is None else dist.group.WORLD

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full model: one process, or DDP."""
        return self.mesh.dims.world_size == self.mesh.dims.dp_replicate and not self._parts.uses_fsdp

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        for part in self.model_parts:
            part.eval()
        try:
            yield
        finally:
            for part in self.model_parts:
                part.train()

    def disable_auxiliary_losses(self) -> None:
        """Compute the loss of each token alone: no balance loss of experts, no z-loss."""
        for part in dict.fromkeys([self.model, *self.model_parts]):
            part.has_auxiliary_losses = False

    def set_rope(self, theta: float, scaling: RopeScaling | None) -> None:
        """Use another RoPE base and scaling from here on."""
        for part in dict.fromkeys([self.model, *self.model_parts]):
            part.set_rope(theta, scaling)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient so that its norm over the parameters of all ranks is at most ``max_norm``; the old norm.
        ``gradient_norms.by_layer`` are then the norms of its layers."""
        return self.gradient_norms.clip_(max_norm, self._loss_scale_factor)

    @property
    def _loss_scale_factor(self) -> float:
        """How many times too large gradients are between ``forward_backward`` and ``clip_grad_norm_``."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.value

    def local_targets(self, targets_BS: Tensor) -> Tensor:
        """The targets whose losses this rank computes, on its device; IGNORE_INDEX at the positions of other ranks."""
        targets_BS = to_device(targets_BS, self.mesh.device)
        if self._parts.context_parallel is None:
            return targets_BS
        positions = self._parts.context_parallel.local_positions(targets_BS.shape[1], self.mesh.device)
        return torch.full_like(targets_BS, IGNORE_INDEX).index_copy(1, positions, targets_BS[:, positions])

    def all_reduce_sum(self, local: Tensor, *, stop_requested: bool = False) -> Tensor:
        """The sum over ranks of something computed from this rank's losses, so that each token counts once.

        ``stop_requested`` is sent in the last row, which must be zero: every rank's counts, even if its losses do not.
        """
        local = local.clone() if self._is_loss_rank else torch.zeros_like(local)
        if stop_requested:
            local[-1] = 1.0
        if self.mesh.dims.world_size > 1:
            dist.all_reduce(local)
        return local

    def update_expert_bias(self) -> None:
        """Once per step, after the optimizer: move the biases of experts by their load over all ranks."""
        moe_layers = [module for module in self.model.modules() if isinstance(module, MoE)]
        if moe_layers and self.mesh.dims.dp * self.mesh.dims.cp > 1:
            loads = torch.stack([layer.load for layer in moe_layers])
            for dimension in ("dp_replicate", "dp_shard", "cp"):
                if getattr(self.mesh.dims, dimension) > 1:
                    dist.all_reduce(loads, group=self.mesh.get_mesh(dimension).get_group())
            for layer, load in zip(moe_layers, loads, strict=True):
                layer.load.copy_(load)
        self.model.update_expert_bias()

    def param_groups(self, parameters: Iterable[Tensor], **settings: Any) -> list[dict[str, Any]]:
        """Optimizer groups with the same settings, one for each mesh: experts have one of their own under ep."""
        by_mesh: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return [{"params": members, **settings} for members in by_mesh.values()]

    @property
    def _is_loss_rank(self) -> bool:
        """Whether this rank's losses count: tp ranks repeat them, and early stages have none."""
        return self.mesh.coordinate("tp") == 0 and (self._parts.pipeline is None or self._parts.pipeline.has_last_stage)


def _init_weights(
    part: Z2all, seed: int, mesh: ParallelMesh, recipe: ParallelRecipe, context_parallel: ContextParallel | None
) -> None:
    """The weights that the full model would have."""
    shard_device = torch.device("cpu") if recipe.offload != "none" else mesh.device
    part.to_empty(device=shard_device)
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))
    with ShardedInitMode(mesh.device):
        part.init_weights(seed, mesh.device)
    if mesh.dims.tp > 1:
        apply_tp_ops(part, mesh.get_mesh("tp"))
    if context_parallel is not None:
        context_parallel.apply(part)
