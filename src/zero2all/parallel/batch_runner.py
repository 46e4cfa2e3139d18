"""One batch through a model in any parallel layout: micro-batches, a pipeline, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from zero2all.base.errors import UsageError
from zero2all.model import ModelInputs, Z2all
from zero2all.model.moe import MoE
from zero2all.model.ops.varlen import document_cu_seqlens
from zero2all.model.z2all import derive_seed
from zero2all.parallel.context_parallel import ContextParallel
from zero2all.parallel.gradient_sync import fsdp_gradient_bytes, gradient_itemsize, sent_bytes, set_gradient_sync
from zero2all.parallel.mesh import ParallelMesh, even_micro_batch_size
from zero2all.parallel.parallelize import free_gathered_weights
from zero2all.parallel.pipeline_parallel import Pipeline, SequenceObjective
from zero2all.parallel.tensor_parallel import norms_in_parts, reduce_norm_gradients
from zero2all.recipe import ParallelRecipe


@dataclass(frozen=True)
class ParallelParts:
    """What a rank runs a batch with."""

    model: Z2all
    model_parts: list[Z2all]
    recipe: ParallelRecipe
    mesh: ParallelMesh
    dtype: torch.dtype
    weight_dtype: torch.dtype
    uses_fsdp: bool
    pipeline: Pipeline | None
    context_parallel: ContextParallel | None
    ddp: DistributedDataParallel | None


def replicate(
    model: Z2all, recipe: ParallelRecipe, mesh: ParallelMesh, *, is_compiled: bool
) -> DistributedDataParallel:
    """DDP: every rank has the full model, and their gradients are averaged."""
    # Buffers need no broadcast: rotary tables and expert biases come out the same on every rank. Weights do, once: the
    # random numbers of different GPUs may differ.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    if recipe.gradient_dtype == "bf16":
        # By its own name torch refuses this hook where there is no NCCL.
        ddp.register_comm_hook(dist.group.WORLD, lambda group, bucket: bf16_compress_hook(group, bucket))
    if mesh.dims.world_size > 2 and not is_compiled:
        _rebuild_buckets(ddp, model, mesh)
    return ddp


def _rebuild_buckets(ddp: DistributedDataParallel, model: Z2all, mesh: ParallelMesh) -> None:
    """DDP rebuilds its buckets after the first backward pass, and an all-reduce over more than two ranks rounds by
    the place in a bucket. After a dummy pass, a resumed run adds up as one that never stopped."""
    dummy = torch.zeros(1, 2, dtype=torch.int64, device=mesh.device)
    ddp(ModelInputs(dummy, dummy)).sum().backward()
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if isinstance(module, MoE):
            module.load.zero_()


class BatchRunner:
    """
    >>> losses_BS = runner.run(inputs, size=4, divisor=targets_in_the_global_batch)
    """

    def __init__(self, parts: ParallelParts) -> None:
        self._parts = parts
        self._recipe, self._mesh, self._pipeline, self._ddp = parts.recipe, parts.mesh, parts.pipeline, parts.ddp
        self.ran_without_backward = False
        """Whether a forward pass without a backward one has left weights gathered."""
        self._gradient_bytes_by_count: dict[int, int] = {}
        self.sync_bytes = 0
        """What this rank sent to synchronize the gradient of the last batch."""

    def micro_batch_rows(self, samples: int, micro_batch_size: int | None) -> int:
        """The samples of one forward pass of a rank's ``samples``."""
        if micro_batch_size is not None or self._pipeline is None:
            return micro_batch_size or samples
        return even_micro_batch_size(samples, 2 * self._pipeline.num_stages)

    def dropout_seeds(self, seed: int, micro_batches: int) -> Tensor:
        """One for each micro-batch, in main memory: ranks that hold other tokens draw other masks, and tp ranks that
        all hold the residual stream draw the same."""
        mesh = self._mesh
        place = (mesh.dp_rank, mesh.coordinate("cp"), mesh.coordinate("tp") if self._recipe.sp else 0)
        return torch.tensor([derive_seed(seed, number, *place) for number in range(micro_batches)])

    def run(
        self, inputs: ModelInputs, size: int, divisor: float | None, objective: SequenceObjective | None = None
    ) -> Tensor:
        """Forward, and with a divisor backward, of this rank's positions of its samples, ``size`` at a time."""
        samples, length = inputs.tokens_BS.shape
        if inputs.doc_starts_BS is not None and inputs.cu_seqlens_MN is None and self._mesh.device.type == "cuda":
            inputs = replace(inputs, cu_seqlens_MN=document_cu_seqlens(inputs.doc_starts_BS, size))
        device = self._mesh.device  # contiguous, because pipeline stages check strides
        inputs = inputs.map(lambda tensor: to_device(tensor.contiguous(), device))
        if self._parts.context_parallel is not None:
            positions = self._parts.context_parallel.local_positions(length, device)
            assert inputs.targets_BS is not None
            own = inputs.tokens_BS[:, positions], inputs.targets_BS[:, positions]
            inputs = replace(inputs, tokens_BS=own[0], targets_BS=own[1])
        with self.autocast():
            if self._pipeline is not None:
                losses = self._run_pipeline(self._pipeline, inputs, divisor, size, objective)
            else:
                losses = self._run_micro_batches(inputs, divisor, size, objective)
        if divisor is not None:
            count = -(-samples // size)
            if count not in self._gradient_bytes_by_count:  # once: a model has many modules
                self._gradient_bytes_by_count[count] = self._gradient_bytes(count)
            self.sync_bytes = self._gradient_bytes_by_count[count]
        if self._parts.context_parallel is None:
            return losses
        return losses.new_zeros(len(losses), length).index_copy(1, positions, losses)

    def _gradient_bytes(self, micro_batches: int) -> int:
        if self._parts.uses_fsdp:
            roots = self._pipeline.stages if self._pipeline is not None else self._parts.model_parts
            return round(fsdp_gradient_bytes(roots, self._recipe, micro_batches))
        trained = [parameter for parameter in self._parts.model.parameters() if parameter.requires_grad]
        itemsize = min(gradient_itemsize(self._recipe), self._parts.weight_dtype.itemsize)
        size = itemsize * sum(parameter.numel() for parameter in trained)
        return round(sent_bytes("all-reduce", size, self._mesh.dims.dp_replicate))

    def autocast(self) -> torch.autocast:
        # Weights are stored in it, or sharded ones are gathered in it.
        enabled = self._parts.dtype != self._parts.weight_dtype and not self._parts.uses_fsdp
        return torch.autocast(self._mesh.device.type, self._parts.dtype, enabled=enabled)

    def _run_micro_batches(
        self, inputs: ModelInputs, divisor: float | None, size: int, objective: SequenceObjective | None
    ) -> Tensor:
        """Gradient accumulation: one micro-batch of ``size`` samples after another."""
        samples = len(inputs.tokens_BS)
        run: nn.Module = self._ddp or self._parts.model
        # DDP averages gradients over ranks; here they are summed.
        scale = (self._mesh.dims.dp if self._ddp is not None else 1) / (divisor or 1)
        all_losses: list[Tensor] = []
        for first in range(0, samples, size):
            with self._ddp_sync(last=first + size >= samples):
                losses = run(inputs.micro_batch(first, size))
                if divisor is not None:
                    self._set_fsdp_sync(last=first + size >= samples)
                    value = losses if objective is None else objective(losses, slice(first, first + size))
                    (value.sum() * scale).backward()
            all_losses.append(losses.detach())
        return torch.cat(all_losses)

    def _run_pipeline(
        self,
        pipeline: Pipeline,
        inputs: ModelInputs,
        divisor: float | None,
        size: int,
        objective: SequenceObjective | None,
    ) -> Tensor:
        samples, length = inputs.tokens_BS.shape
        if samples % size:
            raise UsageError(
                f"a rank's {samples} samples do not divide into micro-batches of {size}: "
                "change train.micro_batch_tokens"
            )
        losses = pipeline.run(inputs, samples // size, divisor, self.stage_stream(size, length), objective)
        return torch.zeros(samples, length, device=self._mesh.device) if losses is None else losses.detach()

    def stage_stream(self, samples: int, length: int) -> Tensor:
        """What passes between pipeline stages, on the meta device."""
        dtype = torch.float32 if self._parts.model.config.residual_fp32 else self._parts.dtype
        shape = (
            samples,
            length // (self._mesh.dims.tp if self._recipe.sp else 1),
            self._parts.model.config.hidden_size,
        )
        return torch.empty(shape, dtype=dtype, device="meta")

    def _ddp_sync(self, *, last: bool) -> AbstractContextManager[None]:
        """Under DDP the last micro-batch reduces the gradient of all."""
        return self._ddp.no_sync() if self._ddp is not None and not last else nullcontext()

    def _set_fsdp_sync(self, *, last: bool) -> None:
        """Before a backward pass: whether it reduces its gradient and frees the gathered weights."""
        if isinstance(self._parts.model, FSDPModule):
            set_gradient_sync(self._parts.model, self._recipe, self._mesh.dims.dp_replicate, is_last=last)
            # Before the update in any case: what is gathered would keep its old values.
            self._parts.model.set_reshard_after_backward(last or self._recipe.zero == 3)

    def free_gathered_weights(self) -> None:
        """Free the last block and the head, which a forward pass without a backward one keeps gathered."""
        if self.ran_without_backward:
            self.ran_without_backward = False
            for root in self._pipeline.stages if self._pipeline is not None else self._parts.model_parts:
                free_gathered_weights(root)

    @contextmanager
    def gradients_like_parameters(self) -> Iterator[None]:
        """Around the backward passes of a batch: tensor parallelism leaves partial sums in the gradients of norms."""
        if self._mesh.dims.tp == 1:
            yield
            return
        # Gradients of earlier batches are whole already.
        weights = norms_in_parts(self._parts.model, self._recipe)
        earlier = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        yield
        reduce_norm_gradients(norms_in_parts(self._parts.model, self._recipe), earlier, self._mesh.get_mesh("tp"))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    # Not to the GPU of a Mac: torch would copy memory that is freed meanwhile (pytorch/pytorch#189690).
    return tensor.to(device, non_blocking=device.type == "cuda")
