"""A model over ranks, with one interface for every parallel layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zero2all.errors import UsageError
from zero2all.hardware import fp64_device
from zero2all.model import IGNORE_INDEX, KVCache, Z2all
from zero2all.model.blocks import ScoredTargets
from zero2all.model.kv_cache import Branches
from zero2all.model.moe import MoE
from zero2all.model.ops.cross_entropy import SoftTargets
from zero2all.model.ops.varlen import document_cu_seqlens
from zero2all.model.weights import WeightReader, load_weights
from zero2all.model.z2all import derive_seed
from zero2all.parallel.context_parallel import ContextParallel
from zero2all.parallel.gradient_sync import fsdp_gradient_bytes, gradient_itemsize, sent_bytes, set_gradient_sync
from zero2all.parallel.loss_scale import DynamicLossScaler
from zero2all.parallel.mesh import ParallelMesh, even_micro_batch_size
from zero2all.parallel.parallelize import free_gathered_weights, parallelize
from zero2all.parallel.pipeline_parallel import Pipeline, SequenceObjective, merge_stages, stage_indices_of_rank
from zero2all.parallel.sharded_init import ShardedInitMode, local_part, to_local
from zero2all.parallel.tensor_parallel import apply_tp_ops, enable_async_tp, norms_in_parts, reduce_norm_gradients
from zero2all.recipe import ModelConfig, ParallelRecipe, RopeScaling
from zero2all.recipe.training import Float8Scaling
from zero2all.torch_private import foreach_mul_, foreach_norm


class ParallelModel:
    """The model of this rank under any combination of DDP, FSDP, tensor, pipeline, context and expert parallelism.

    >>> mesh = ParallelMesh.init_distributed(recipe.parallel, torch.device("cpu"))
    >>> model = ParallelModel(config, recipe.parallel, mesh, seed=0)
    >>> optimizer = torch.optim.AdamW(model.param_groups(model.model.parameters()))
    >>> losses = model.forward_backward(tokens, targets, divisor=targets_in_the_global_batch)  # this rank's samples
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

        ``dtype`` is that of computation, ``weight_dtype`` (fp32 or ``dtype``) that of stored weights and gradients.
        """
        if config.padded_vocab_size % mesh.dims.tp:  # a recipe need not know: the tokenizer does
            raise UsageError(
                f"parallel.tp ({mesh.dims.tp}) must divide the {config.padded_vocab_size} rows of the vocabulary: "
                "choose another parallel.tp"
            )
        self.config, self.recipe, self.mesh, self.dtype = config, recipe, mesh, dtype
        self._shard_device = torch.device("cpu") if recipe.offload != "none" else mesh.device
        self.loss_scaler = DynamicLossScaler() if dtype == torch.float16 else None
        if recipe.async_tp:
            enable_async_tp(mesh.get_mesh("tp"), mesh.device, compile)
        self._context_parallel = ContextParallel(mesh.get_mesh("cp"), recipe) if mesh.dims.cp > 1 else None
        self.float8, self.weight_dtype = float8, weight_dtype
        local_model = parallelize(config, recipe, mesh, dtype, float8, weight_dtype)
        self.model_parts = local_model.model_parts
        """What a step calls: the model, or this rank's stages of a pipeline."""
        for part in local_model.model_parts:
            self._init_part(part, seed)
        with torch.device("meta"):
            self.model = merge_stages(config, local_model.model_parts)
        self.is_compiled = compile
        if compile:
            for block in self.model.layers.children():
                block.compile()
        self._pipeline = (
            Pipeline(local_model.stages, local_model.stage_indices, recipe, mesh) if local_model.stages else None
        )
        self._uses_fsdp = local_model.uses_fsdp
        self._ran_without_backward = False
        self._replica_counts: dict[tuple[int, ...], Tensor] = {}
        self._layer_numbers: dict[tuple[int, ...], Tensor] = {}
        self.layer_grad_norms = torch.zeros(0)  # of each decoder layer over all ranks, before clipping
        self._ddp: DistributedDataParallel | None = None
        self._sync_bytes: dict[int, int] = {}  # by number of micro-batches
        self.sync_bytes = 0
        """What this rank sent to synchronize the gradient of the last batch."""
        if mesh.dims.world_size > 1 and mesh.dims.dp_replicate == mesh.dims.world_size:
            self._init_replicas()

    def _init_replicas(self) -> None:
        """Every rank has the full model, and their gradients are averaged."""
        # Buffers need no broadcast: rotary tables and expert biases come out the same on every rank. Weights do,
        # once: the random numbers of different GPUs may differ.
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True, forward_sync_buffers=False)
        if self.recipe.gradient_dtype == "bf16":
            # By its own name torch refuses this hook where there is no NCCL.
            self._ddp.register_comm_hook(dist.group.WORLD, lambda group, bucket: bf16_compress_hook(group, bucket))
        if self.mesh.dims.world_size > 2 and not self.is_compiled:
            self._rebuild_ddp_buckets(self._ddp)

    def load_weights(self, reader: WeightReader) -> None:
        """Replace the weights. Each rank reads its own shards; nothing is sent between ranks."""
        weights: dict[str, Any] = get_model_state_dict(self.model)
        load_weights(weights, reader, local_part)

    def forward_backward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        divisor: float,
        doc_starts_BS: Tensor | None = None,
        micro_batch_size: int | None = None,
        objective: SequenceObjective | None = None,
        soft: SoftTargets | None = None,
        cu_seqlens_MN: Tensor | None = None,
        dropout_seed: int = 0,
    ) -> Tensor:
        """Add the gradient of ``losses.sum() / divisor``, summed over all ranks, from this rank's samples.

        ``divisor`` is the number of targets in the global batch; ``doc_starts_BS`` (``document_starts``) keeps
        attention inside documents, with ``cu_seqlens_MN`` (``document_cu_seqlens`` of its micro-batches) without a host
        sync where documents are given on a GPU. ``micro_batch_size`` is the samples of one forward pass: all of this
        rank's by default, in a pipeline as many as give two micro-batches a stage. With ``objective`` the gradient is
        that of what it makes of the losses of each micro-batch, in place of the losses; with ``soft`` also that of the
        distance to a teacher. Dropout masks are a function of ``dropout_seed``, the micro-batch and the rank: there is
        no state of a random number generator to save.

        Returns this rank's losses [B, S], zero where another rank has them (a later pipeline stage, another part of
        the sequence): see ``all_reduce_sum``.
        """
        divisor /= self._loss_scale_factor
        self._free_gathered_weights()
        with self._gradients_like_parameters():
            return self._run_batch(
                tokens_BS,
                targets_BS,
                doc_starts_BS,
                divisor,
                micro_batch_size,
                objective,
                soft,
                cu_seqlens_MN,
                dropout_seed,
            )

    @torch.no_grad()
    def eval_losses(self, tokens_BS: Tensor, targets_BS: Tensor, doc_starts_BS: Tensor | None = None) -> Tensor:
        """The losses [B, S] of this rank's samples without a gradient, zero where another rank has them, as in
        ``forward_backward``: see ``all_reduce_sum``. Every rank calls it as often as the others."""
        samples = len(tokens_BS)
        # A pipeline needs a multiple of its micro-batches; the rows that pad the batch are dropped.
        multiple = 2 * self._pipeline.num_stages if self._pipeline is not None else 1
        rows = torch.arange(-(-samples // multiple) * multiple).clamp(max=samples - 1)
        self._ran_without_backward = True
        with self.eval_mode():
            doc_starts_BS = None if doc_starts_BS is None else doc_starts_BS[rows]
            return self._run_batch(tokens_BS[rows], targets_BS[rows], doc_starts_BS, divisor=None)[:samples]

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
        inputs = {"tokens_BS": tokens_BS, "cache": cache, "counts_B": counts_B, "scored": scored}
        self._ran_without_backward = True
        with self._autocast(), self.eager_blocks():
            if self._pipeline is None:
                logits: Tensor = self.model(**inputs)
                return logits
            return self._pipeline.generate_logits(inputs, self._stage_stream(batch, length + padding))

    def eager_blocks(self) -> AbstractContextManager[None]:
        """For calls with a KV cache: each of its lengths would be compiled again."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()

    @property
    def sequence_multiple(self) -> int:
        """What a sequence's length must be a multiple of: with ``sp``, tp ranks have equal parts of it."""
        return self.mesh.dims.tp if self.recipe.sp else 1

    def broadcast_from_head(self, message: Tensor) -> None:
        """Among the ranks that read the same samples: what the first one with the last pipeline stage has.

        One dimension of the mesh after the other: a group over several of them would be one more.
        """
        stages = self.recipe.pp * self.recipe.stages_per_rank
        has_last = [stages - 1 in stage_indices_of_rank(self.recipe, rank) for rank in range(self.recipe.pp)]
        for dimension, source in (("pp", has_last.index(True)), ("cp", 0), ("tp", 0)):
            if getattr(self.mesh.dims, dimension) > 1:
                dist.broadcast(message, group=self.mesh.get_mesh(dimension).get_group(), group_src=source)

    @property
    def ddp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same plain tensors; None without DDP."""
        return None if self._ddp is None else dist.group.WORLD

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full model: one process, or DDP."""
        return self.mesh.dims.world_size == self.mesh.dims.dp_replicate and not self._uses_fsdp

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

    def _run_batch(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        doc_starts_BS: Tensor | None,
        divisor: float | None,
        micro_batch_size: int | None = None,
        objective: SequenceObjective | None = None,
        soft: SoftTargets | None = None,
        cu_seqlens_MN: Tensor | None = None,
        dropout_seed: int = 0,
    ) -> Tensor:
        """Forward, and with a divisor backward, of this rank's positions of its samples."""
        inputs = {"tokens_BS": tokens_BS, "targets_BS": targets_BS}
        samples, length = tokens_BS.shape
        size = self.micro_batch_rows(samples, micro_batch_size)
        if doc_starts_BS is not None:
            inputs["doc_starts_BS"] = doc_starts_BS
            if cu_seqlens_MN is None and self.mesh.device.type == "cuda":
                cu_seqlens_MN = document_cu_seqlens(doc_starts_BS, size)
            if cu_seqlens_MN is not None:
                inputs["cu_seqlens_1N"] = cu_seqlens_MN
        if soft is not None:
            inputs |= {"soft_ids_BSK": soft.ids_BSK, "soft_logps_BSK": soft.logps_BSK}
        device = self.mesh.device  # contiguous, because pipeline stages check strides
        inputs = {name: _to_device(tensor.contiguous(), device) for name, tensor in inputs.items()}
        if self._context_parallel is not None:
            positions = self._context_parallel.local_positions(length, self.mesh.device)
            inputs |= {name: inputs[name][:, positions] for name in ("tokens_BS", "targets_BS")}
        if self.config.has_dropout and divisor is not None:
            inputs["dropout_seed_1"] = self._dropout_seeds(dropout_seed, -(-samples // size))
        with self._autocast():
            if self._pipeline is not None:
                losses = self._run_pipeline(self._pipeline, inputs, divisor, size, objective)
            else:
                weight = 0.0 if soft is None else soft.weight
                losses = self._run_micro_batches(inputs, divisor, size, objective, weight)
        if divisor is not None:
            count = -(-samples // size)
            if count not in self._sync_bytes:  # once: a model has many modules
                self._sync_bytes[count] = self._gradient_bytes(count)
            self.sync_bytes = self._sync_bytes[count]
        if self._context_parallel is None:
            return losses
        return losses.new_zeros(len(losses), length).index_copy(1, positions, losses)

    def _gradient_bytes(self, micro_batches: int) -> int:
        if self._uses_fsdp:
            roots = self._pipeline.stages if self._pipeline is not None else self.model_parts
            return round(fsdp_gradient_bytes(roots, self.recipe, micro_batches))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        itemsize = min(gradient_itemsize(self.recipe), self.weight_dtype.itemsize)
        size = itemsize * sum(parameter.numel() for parameter in trained)
        return round(sent_bytes("all-reduce", size, self.mesh.dims.dp_replicate))

    def _autocast(self) -> torch.autocast:
        # Weights are stored in it, or sharded ones are gathered in it.
        enabled = self.dtype != self.weight_dtype and not self._uses_fsdp
        return torch.autocast(self.mesh.device.type, self.dtype, enabled=enabled)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient so that its norm over the parameters of all ranks is at most ``max_norm``; the old norm.

        A shard that several ranks hold counts once. One all-reduce, whatever the parallel layout. ``layer_grad_norms``
        are then those of this gradient.
        """
        own_squares = self._local_square_norms()
        squares = torch.cat([own_squares.sum()[None], self._sum_by_layer(own_squares)])
        if self.mesh.dims.world_size > 1:
            dist.all_reduce(squares)
        self.layer_grad_norms = squares[1:].sqrt() / self._loss_scale_factor
        norm = squares[0].sqrt().float() / self._loss_scale_factor
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / self._loss_scale_factor
        gradients = [to_local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        foreach_mul_(gradients, factor.to(self._shard_device))
        return norm

    def _sum_by_layer(self, own_squares: Tensor) -> Tensor:
        """Of the decoder layers; embeddings and head are in none."""
        count = self.config.num_hidden_layers
        names = [name for name, parameter in self.model.named_parameters() if parameter.grad is not None]
        layers = tuple(int(name.split(".")[1]) if name.startswith("layers.") else count for name in names)
        if layers not in self._layer_numbers:  # once: a copy to the device is a host sync
            self._layer_numbers[layers] = torch.tensor(layers, device=own_squares.device)
        squares = own_squares.new_zeros(count + 1)
        return squares.index_add_(0, self._layer_numbers[layers], own_squares)[:-1]

    def _local_square_norms(self) -> Tensor:
        """Squared norm of this rank's gradient of each parameter that has one, divided by the ranks that hold it."""
        gradients = [
            (parameter, to_local(parameter.grad)) for parameter in self.model.parameters() if parameter.grad is not None
        ]
        norms = foreach_norm([gradient for _, gradient in gradients])
        device = fp64_device(self.mesh.device)
        counts = tuple(self.replica_count(parameter) for parameter, _ in gradients)
        if counts not in self._replica_counts:  # once: a copy to the device is a host sync
            self._replica_counts[counts] = torch.tensor(counts, device=device)
        return torch.stack(norms).to(device).double().square() / self._replica_counts[counts]

    @property
    def _loss_scale_factor(self) -> float:
        """How many times too large gradients are between ``forward_backward`` and ``clip_grad_norm_``."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.value

    def local_targets(self, targets_BS: Tensor) -> Tensor:
        """The targets whose losses this rank computes, on its device; IGNORE_INDEX at the positions of other ranks."""
        targets_BS = _to_device(targets_BS, self.mesh.device)
        if self._context_parallel is None:
            return targets_BS
        positions = self._context_parallel.local_positions(targets_BS.shape[1], self.mesh.device)
        return torch.full_like(targets_BS, IGNORE_INDEX).index_copy(1, positions, targets_BS[:, positions])

    def all_reduce_sum(self, local: Tensor, stop_requested: bool = False) -> Tensor:
        """The sum over ranks of something computed from this rank's losses, so that each token counts once.

        ``stop_requested`` is sent in the last row, which must be zero: every rank's counts, even if its losses do not.
        """
        local = local.clone() if self._is_loss_rank else torch.zeros_like(local)
        if stop_requested:
            local[-1] = 1.0
        if self.mesh.dims.world_size > 1:
            dist.all_reduce(local)
        return local

    def sum_over_ranks(self, own: Tensor) -> Tensor:
        """The sum, on the CPU, of what each rank counted for itself."""
        if self.mesh.dims.world_size > 1:
            own = own.to(self.mesh.device, copy=True)
            dist.all_reduce(own)
        return own.cpu()

    def update_expert_bias(self) -> None:
        """Once a step, after the optimizer: move the biases of experts by their load over all ranks."""
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

    def _rebuild_ddp_buckets(self, ddp: DistributedDataParallel) -> None:
        """DDP rebuilds its buckets after the first backward pass, and an all-reduce over more than two ranks rounds by
        the place in a bucket. After a dummy pass, a resumed run adds up as one that never stopped."""
        dummy = torch.zeros(1, 2, dtype=torch.int64, device=self.mesh.device)
        ddp(tokens_BS=dummy, targets_BS=dummy).sum().backward()
        self.model.zero_grad(set_to_none=True)
        for module in self.model.modules():
            if isinstance(module, MoE):
                module.load.zero_()

    def _init_part(self, part: Z2all, seed: int) -> None:
        part.to_empty(device=self._shard_device)
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.mesh.device))
        with ShardedInitMode(self.mesh.device):
            part.init_weights(seed, self.mesh.device)
        if self.mesh.dims.tp > 1:
            apply_tp_ops(part, self.mesh.get_mesh("tp"))
        if self._context_parallel is not None:
            self._context_parallel.apply(part)

    def micro_batch_rows(self, samples: int, micro_batch_size: int | None) -> int:
        """The samples of one forward pass of a rank's ``samples``."""
        if micro_batch_size is not None or self._pipeline is None:
            return micro_batch_size or samples
        return even_micro_batch_size(samples, 2 * self._pipeline.num_stages)

    def _dropout_seeds(self, seed: int, micro_batches: int) -> Tensor:
        """One for each micro-batch, in main memory: ranks that hold other tokens draw other masks, and tp ranks that
        all hold the residual stream draw the same."""
        mesh = self.mesh
        place = (mesh.dp_rank, mesh.coordinate("cp"), mesh.coordinate("tp") if self.recipe.sp else 0)
        return torch.tensor([derive_seed(seed, number, *place) for number in range(micro_batches)])

    def _run_micro_batches(
        self,
        inputs: dict[str, Tensor],
        divisor: float | None,
        size: int,
        objective: SequenceObjective | None,
        soft_weight: float,
    ) -> Tensor:
        """Gradient accumulation: one micro-batch of ``size`` samples after another."""
        samples = len(inputs["tokens_BS"])
        run: nn.Module = self._ddp or self.model
        # DDP averages gradients over ranks; here they are summed.
        scale = (self.mesh.dims.dp if self._ddp is not None else 1) / (divisor or 1)
        all_losses: list[Tensor] = []
        for first in range(0, samples, size):
            micro_batch = {name: tensor[first : first + size] for name, tensor in inputs.items()}
            for name in {"cu_seqlens_1N", "dropout_seed_1"} & inputs.keys():  # one row for each micro-batch
                micro_batch[name] = inputs[name][first // size, None]
            with self._ddp_sync(first + size >= samples):
                losses = run(**micro_batch, **({"soft_weight": soft_weight} if soft_weight else {}))
                if divisor is not None:
                    self._set_fsdp_sync(first + size >= samples)
                    value = losses if objective is None else objective(losses, slice(first, first + size))
                    (value.sum() * scale).backward()
            all_losses.append(losses.detach())
        return torch.cat(all_losses)

    def _run_pipeline(
        self,
        pipeline: Pipeline,
        inputs: dict[str, Tensor],
        divisor: float | None,
        size: int,
        objective: SequenceObjective | None,
    ) -> Tensor:
        samples, length = inputs["tokens_BS"].shape
        if samples % size:
            raise UsageError(
                f"a rank's {samples} samples do not divide into micro-batches of {size}: "
                "change train.micro_batch_tokens"
            )
        losses = pipeline.run(inputs, samples // size, divisor, self._stage_stream(size, length), objective)
        return torch.zeros(samples, length, device=self.mesh.device) if losses is None else losses.detach()

    def _stage_stream(self, samples: int, length: int) -> Tensor:
        """What passes between pipeline stages, on the meta device."""
        dtype = torch.float32 if self.config.residual_fp32 else self.dtype
        shape = (samples, length // self.sequence_multiple, self.config.hidden_size)
        return torch.empty(shape, dtype=dtype, device="meta")

    def _ddp_sync(self, last: bool) -> AbstractContextManager[None]:
        """Under DDP the last micro-batch reduces the gradient of all."""
        return self._ddp.no_sync() if self._ddp is not None and not last else nullcontext()

    def _set_fsdp_sync(self, last: bool) -> None:
        """Before a backward pass: whether it reduces its gradient and frees the gathered weights."""
        if isinstance(self.model, FSDPModule):
            set_gradient_sync(self.model, self.recipe, self.mesh.dims.dp_replicate, last)
            # Before the update in any case: what is gathered would keep its old values.
            self.model.set_reshard_after_backward(last or self.recipe.zero == 3)

    def _free_gathered_weights(self) -> None:
        """Of the last block and the head, which stay gathered after a forward pass without a backward one."""
        if self._ran_without_backward:
            self._ran_without_backward = False
            for root in self._pipeline.stages if self._pipeline is not None else self.model_parts:
                free_gathered_weights(root)

    @contextmanager
    def _gradients_like_parameters(self) -> Iterator[None]:
        """Around the backward passes of a batch: tensor parallelism leaves partial sums in the gradients of norms."""
        if self.mesh.dims.tp == 1:
            yield
            return
        # Those of earlier batches are whole already.
        weights = norms_in_parts(self.model, self.recipe)
        earlier = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        yield
        reduce_norm_gradients(norms_in_parts(self.model, self.recipe), earlier, self.mesh.get_mesh("tp"))

    @property
    def _is_loss_rank(self) -> bool:
        """Whether this rank's losses count: tp ranks repeat them, and early stages have none."""
        return self.mesh.coordinate("tp") == 0 and (self._pipeline is None or self._pipeline.has_last_stage)

    def replica_count(self, parameter: Tensor) -> int:
        """How many ranks hold the same shard of a parameter."""
        ranks = self.mesh.dims.world_size // self.mesh.dims.pp
        if not isinstance(parameter, DTensor):
            return ranks
        shards = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        return ranks // math.prod(size for size, placement in shards if not placement.is_replicate())


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    # Not to the GPU of a Mac: torch would copy memory that is freed meanwhile (pytorch/pytorch#189690).
    return tensor.to(device, non_blocking=device.type == "cuda")
