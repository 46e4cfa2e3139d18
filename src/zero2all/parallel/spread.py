"""A model laid over ranks, behind a face that is the same for every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zero2all.errors import UsageError
from zero2all.model import IGNORE, Z2all
from zero2all.model.moe import MoE
from zero2all.parallel.accumulation import sync_gradients
from zero2all.parallel.context import Context
from zero2all.parallel.initialize import WholeFill
from zero2all.parallel.laid import Laid
from zero2all.parallel.layout import Layout
from zero2all.parallel.loss_scale import LossScale
from zero2all.parallel.pipeline import Pipeline, joined
from zero2all.parallel.tensor import compute_on_shards
from zero2all.recipe import ModelConfig, ParallelRecipe, RopeScaling


class Spread:
    """
    >>> layout = Layout.start(recipe.parallel, torch.device("cpu"))
    >>> spread = Spread(config, recipe.parallel, layout, seed=0)
    >>> optimizer = torch.optim.AdamW(spread.groups(spread.model.parameters()))
    >>> losses = spread.backward(tokens, targets, divisor=targets_in_the_whole_batch)  # of this rank's samples
    >>> norm = spread.clip(1.0)
    >>> optimizer.step(); optimizer.zero_grad(); spread.even_load()
    >>> loss = spread.total(losses.sum()) / targets_in_the_whole_batch
    """

    model: Z2all
    """What this rank holds, under the names of the whole model: for optimizers and for DCP's ``get_state_dict``."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: ParallelRecipe,
        layout: Layout,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        micro_samples: int | None = None,
    ) -> None:
        """Build on the meta device, lay over the ranks, fill with the weights that the whole model would have.

        ``micro_samples`` is how many samples a rank takes in one forward pass: all of its own if not given, or in a
        pipeline as many as make two rounds of it.
        """
        if config.vocab_rows % layout.sizes.tp:  # a recipe need not know: the tokenizer does
            raise UsageError(
                f"parallel.tp ({layout.sizes.tp}) must divide the {config.vocab_rows} rows of the vocabulary: "
                "choose another parallel.tp"
            )
        self.config, self.recipe, self.layout, self.dtype = config, recipe, layout, dtype
        self.scale = LossScale() if dtype == torch.float16 else None
        self.micro_samples = micro_samples
        self._context = Context(layout.mesh("cp"), recipe) if layout.sizes.cp > 1 else None
        laid = Laid(config, recipe, layout, dtype)
        self._parts = laid.parts
        for part in laid.parts:
            self._fill(part, seed)
        with torch.device("meta"):
            self.model = joined(config, laid.parts)
        if compile:
            for block in self.model.layers.children():
                block.compile()
        self._pipeline = Pipeline(laid.stages, laid.numbers, recipe, layout) if laid.stages else None
        self._sharded = laid.sharded
        self._ddp: DistributedDataParallel | None = None
        if layout.sizes.world > 1 and layout.sizes.dp_replicate == layout.sizes.world:
            # Buffers need no sending: rotary tables and expert biases come out the same on every rank.
            self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True, forward_sync_buffers=False)
            if layout.sizes.world > 2 and not compile:
                self._order_buckets(self._ddp)

    def backward(
        self, tokens_BS: Tensor, targets_BS: Tensor, divisor: float, starts_BS: Tensor | None = None
    ) -> Tensor:
        """Add the gradient of ``losses.sum() / divisor``, summed over all ranks, from this rank's samples.

        ``divisor`` is the number of targets in the whole batch; ``starts_BS`` (``document_starts``) keeps attention
        inside documents. Returns this rank's losses [B, S], zero where another rank has them (a later pipeline stage,
        another part of the sequence): see ``total``.
        """
        losses = self._run(tokens_BS, targets_BS, starts_BS, divisor / self._scaled_by)
        self._finish_gradients()
        return losses

    @torch.no_grad()
    def losses(self, tokens_BS: Tensor, targets_BS: Tensor, starts_BS: Tensor | None = None) -> Tensor:
        """The losses [B, S] of samples that every rank gives alike, whole on every rank. No gradient."""
        samples, micro_samples = len(tokens_BS), self.micro_samples
        # A pipeline wants its micro-batches in whole rounds; the rows that fill them up are thrown away.
        rounds = 2 * self._pipeline.count if self._pipeline is not None else 1
        rows = torch.arange(-(-samples // rounds) * rounds).clamp(max=samples - 1)
        self._train(False)
        self.micro_samples = None
        try:
            starts_BS = None if starts_BS is None else starts_BS[rows]
            losses = self._run(tokens_BS[rows], targets_BS[rows], starts_BS, divisor=None)[:samples]
        finally:
            self._train(True)
            self.micro_samples = micro_samples
        return self.total(losses if self.layout.dp_rank == 0 else torch.zeros_like(losses))

    def set_rope(self, theta: float, scaling: RopeScaling | None) -> None:
        """Turn positions by other angles from here on."""
        for part in dict.fromkeys([self.model, *self._parts]):
            part.set_rope(theta, scaling)

    def _train(self, mode: bool) -> None:
        for part in self._parts:
            part.train(mode)

    def _run(self, tokens_BS: Tensor, targets_BS: Tensor, starts_BS: Tensor | None, divisor: float | None) -> Tensor:
        """Forward, and with a divisor backward, of this rank's part of some samples."""
        inputs = {"tokens_BS": tokens_BS, "targets_BS": targets_BS}
        if starts_BS is not None:
            inputs["starts_BS"] = starts_BS
        device = self.layout.device  # contiguous, because pipeline stages check strides
        inputs = {name: tensor.contiguous().to(device, non_blocking=True) for name, tensor in inputs.items()}
        length = tokens_BS.shape[1]
        if self._context is not None:
            own = self._context.own(length, self.layout.device)
            inputs |= {name: inputs[name][:, own] for name in ("tokens_BS", "targets_BS")}
        casts = self.dtype != torch.float32 and not self._sharded  # sharded weights are gathered in it
        with torch.autocast(self.layout.device.type, self.dtype, enabled=casts):
            if self._pipeline is not None:
                losses = self._in_pipeline(self._pipeline, inputs, divisor)
            else:
                losses = self._in_turn(inputs, divisor)
        if self._context is None:
            return losses
        return losses.new_zeros(len(losses), length).index_copy(1, own, losses)

    def clip(self, longest: float) -> Tensor:
        """Scale the gradient so that its norm over all parameters of all ranks is at most ``longest``; the norm before.

        A shard that several ranks hold counts once. One collective, whatever the layout.
        """
        found = [
            (parameter, _local(parameter.grad)) for parameter in self.model.parameters() if parameter.grad is not None
        ]
        norms = torch._foreach_norm([gradient for _, gradient in found])
        holders = torch.tensor([self._holders(parameter) for parameter, _ in found], device=self.layout.device)
        square = (torch.stack(norms).double().square() / holders).sum()
        if self.layout.sizes.world > 1:
            dist.all_reduce(square)
        norm = square.sqrt().float() / self._scaled_by
        factor = torch.clamp(longest / (norm + 1e-6), max=1.0) / self._scaled_by
        torch._foreach_mul_([gradient for _, gradient in found], factor)
        return norm

    @property
    def _scaled_by(self) -> float:
        """How many times too large gradients are between ``backward`` and ``clip``."""
        return 1.0 if self.scale is None else self.scale.value

    def own(self, targets_BS: Tensor) -> Tensor:
        """The targets whose losses this rank computes, on its device; IGNORE where another part of the sequence is."""
        targets_BS = targets_BS.to(self.layout.device, non_blocking=True)
        if self._context is None:
            return targets_BS
        own = self._context.own(targets_BS.shape[1], self.layout.device)
        return torch.full_like(targets_BS, IGNORE).index_copy(1, own, targets_BS[:, own])

    def total(self, known: Tensor, wish: bool = False) -> Tensor:
        """The sum over ranks of something computed from this rank's losses, so that each token counts once.

        ``wish`` is told in the last row, which must be empty: every rank is heard, also one whose losses do not count.
        """
        known = known.clone() if self._speaks else torch.zeros_like(known)
        if wish:
            known[-1] = 1.0
        if self.layout.sizes.world > 1:
            dist.all_reduce(known)
        return known

    def even_load(self) -> None:
        """Once a step, after the optimizer: move the biases of experts by their load over all ranks."""
        mixtures = [module for module in self.model.modules() if isinstance(module, MoE)]
        if mixtures and self.layout.sizes.dp * self.layout.sizes.cp > 1:
            loads = torch.stack([mixture.load for mixture in mixtures])
            for dimension in ("dp_replicate", "dp_shard", "cp"):
                if getattr(self.layout.sizes, dimension) > 1:
                    dist.all_reduce(loads, group=self.layout.mesh(dimension).get_group())
            for mixture, load in zip(mixtures, loads, strict=True):
                mixture.load.copy_(load)
        self.model.even_load()

    def groups(self, parameters: Iterable[Tensor], **settings: Any) -> list[dict[str, Any]]:
        """Optimizer groups with the same settings, one for each mesh: experts have one of their own under ep."""
        by_mesh: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return [{"params": members, **settings} for members in by_mesh.values()]

    def close(self) -> None:
        self.layout.close()

    def _order_buckets(self, ddp: DistributedDataParallel) -> None:
        """DDP sorts gradients into other buckets after its first pass, and a sum over more than two ranks rounds by the
        place in one. After a pass for nothing, a run that is resumed adds up as one that never stopped."""
        nothing = torch.zeros(1, 2, dtype=torch.int64, device=self.layout.device)
        ddp(tokens_BS=nothing, targets_BS=nothing).sum().backward()
        self.model.zero_grad(set_to_none=True)
        for mixture in self.model.modules():
            if isinstance(mixture, MoE):
                mixture.load.zero_()

    def _fill(self, part: Z2all, seed: int) -> None:
        part.to_empty(device=self.layout.device)
        with WholeFill():
            part.init_weights(seed)
        if self.layout.sizes.tp > 1:
            compute_on_shards(part, self.layout.mesh("tp"), self.recipe)
        if self._context is not None:
            self._context.apply(part)

    def _in_turn(self, inputs: dict[str, Tensor], divisor: float | None) -> Tensor:
        """Micro-batches one after another."""
        samples = len(inputs["tokens_BS"])
        size = self.micro_samples or samples
        run: nn.Module = self._ddp or self.model
        # DDP takes the mean over ranks of what is meant to be added up.
        scale = (self.layout.sizes.dp if self._ddp is not None else 1) / (divisor or 1)
        found: list[Tensor] = []
        for first in range(0, samples, size):
            piece = {name: tensor[first : first + size] for name, tensor in inputs.items()}
            with self._synchronised(first + size >= samples):
                losses = run(**piece)
                if divisor is not None:
                    (losses.sum() * scale).backward()
            found.append(losses.detach())
        return torch.cat(found)

    def _in_pipeline(self, pipeline: Pipeline, inputs: dict[str, Tensor], divisor: float | None) -> Tensor:
        samples, length = inputs["tokens_BS"].shape
        size = self.micro_samples or _even_size(samples, 2 * pipeline.count)
        if samples % size:
            raise UsageError(
                f"a rank's {samples} samples do not divide into micro-batches of {size}: "
                "change train.micro_batch_tokens"
            )
        cuts = self.layout.sizes.tp if self.recipe.sp else 1
        dtype = torch.float32 if self.config.residual_fp32 else self.dtype
        stream = torch.empty(size, length // cuts, self.config.hidden_size, dtype=dtype, device="meta")
        losses = pipeline.run(inputs, samples // size, divisor, stream)
        return torch.zeros(samples, length, device=self.layout.device) if losses is None else losses.detach()

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """Which micro-batches reduce their gradient: under DDP the last one."""
        if self._ddp is not None and not last:
            return self._ddp.no_sync()
        if isinstance(self.model, FSDPModule):
            sync_gradients(self.model, self.recipe, last)
        return nullcontext()

    def _finish_gradients(self) -> None:
        """Gradients that tensor parallelism left as partial sums become whole."""
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]

    @property
    def _speaks(self) -> bool:
        """Whether this rank's losses count: tp ranks repeat them, and early stages have none."""
        return self.layout.at("tp") == 0 and (self._pipeline is None or self._pipeline.has_last)

    def _holders(self, parameter: Tensor) -> int:
        """How many ranks hold the same shard of a parameter."""
        ranks = self.layout.sizes.world // self.layout.sizes.pp
        if not isinstance(parameter, DTensor):
            return ranks
        shards = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        return ranks // math.prod(size for size, placement in shards if not placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _even_size(samples: int, wanted: int) -> int:
    """Samples in a micro-batch, so that there are ``wanted`` of them, or the next fewer that come out even."""
    return next(samples // count for count in range(min(wanted, samples), 0, -1) if samples % count == 0)
